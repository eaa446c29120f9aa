"""semantic-router's layout: out and back, read as its page says, made by others, refused by field, and hostile."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from bundle_factory import RECIPE, SOLVE, evaluation, rewrite_sums
from made_mappers import Pairs, cache_of, content, random_pairs, same
from router_folders import COMMITS, FOREIGN_SETS, SETS, THETAS, edit, foreign, make, pair, plain, side

from kvfit.bundle.bundle import Bundle, add_files
from kvfit.bundle.records import to_json
from kvfit.cli import main as cli
from kvfit.errors import BundleError, GateError, MismatchError
from kvfit.fit.capture.models import Options
from kvfit.interop.export_bundle import export_bundle
from kvfit.interop.import_bundle import import_bundle
from kvfit.runtime.mapper import Mapper
from kvfit.spec import KINDS, LayerMap, RopeSpec

ID = f"small-large-full_head-fp32-tp1-h2-s{COMMITS[0]}-t{COMMITS[1]}-b1"
CPU = Options(device="cpu")


def with_verdict(folder: Path, verdict: str) -> Path:
    """The bundle, evaluated."""
    add_files(folder, {"evaluation.json": json.dumps(evaluation(Bundle.open(folder), verdict)).encode()})
    return folder


def turn(keys: torch.Tensor, theta: float, direction: int) -> torch.Tensor:
    """Keys (B, H, T, D) turned, or turned back, as the router's connector does; in float64, on the complex plane."""
    half = keys.shape[-1] // 2
    angles = torch.arange(keys.shape[-2], dtype=torch.float64)[:, None] * theta ** (-torch.arange(half) / half).double()
    numbers = torch.complex(keys[..., :half].double(), keys[..., half:].double()) * torch.exp(1j * direction * angles)
    return torch.cat((numbers.real, numbers.imag), dim=-1)


def as_the_page_says(folder: Path, pairs: Pairs, thetas: tuple[float, float] = THETAS) -> list[torch.Tensor]:
    """What a program that knows only the layout's public rules makes of a source cache."""
    manifest = json.loads((folder / "manifest.json").read_text())
    tensors = safetensors.torch.load_file(folder / "weights.safetensors")
    heads, head_dim = (manifest["compatibility"][name] for name in ("num_kv_heads", "head_dim"))
    made = []
    for layer_index in range(len(manifest["source_layers_per_target"]["k"])):
        for place, letter in enumerate("kv"):
            chosen = manifest["source_layers_per_target"][letter][str(layer_index)]
            read = [pairs[number][place].double() for number in chosen]
            if letter == "k" and manifest["rope_stripped_on_keys"]:
                read = [turn(keys, thetas[0], -1) for keys in read]
            rows = torch.cat([half.transpose(1, 2).flatten(2) for half in read], dim=-1)  # (B, T, topk * H * D)
            name = f"target.{layer_index}.{letter}"
            out = rows @ tensors[f"{name}.W"].double() + tensors[f"{name}.b"].double()
            out = out.unflatten(2, (heads, head_dim)).transpose(1, 2)
            made.append(turn(out, thetas[1], 1) if letter == "k" and manifest["rope_stripped_on_keys"] else out)
    return made


def transferred(bundle: Path, pairs: Pairs) -> list[torch.Tensor]:
    """What kvfit makes of it."""
    return content(Mapper.from_bundle(Bundle.open(bundle), dtype=torch.float32).transfer(cache_of(pairs)))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command line in this process: (exit code, stdout, stderr)."""

    def call(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvfit", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    return call


# -- out and back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("keys_rotated", [False, True])
def test_a_bundle_comes_back_the_same(tmp_path: Path, dtype: str, keys_rotated: bool) -> None:
    spec = pair(dtype=dtype, keys_rotated=keys_rotated)
    bundle = with_verdict(make(tmp_path / "bundle", spec), "pass")
    exported = export_bundle(bundle, tmp_path / "router")
    imported = import_bundle(tmp_path / "router", tmp_path / "back")
    first, second = Bundle.open(bundle), Bundle.open(tmp_path / "back")
    assert exported.mapper_id == imported.mapper_id == ID
    assert (exported.verdict, imported.verdict, first.verdict, second.verdict) == ("pass", "unknown", "pass", "unknown")
    assert to_json(second.spec) == to_json(spec)
    assert (second.recipe, second.solve) == (RECIPE, SOLVE)
    for layer in spec.layers:
        halves = [bundle.layer(layer.kind, layer.layer_index) for bundle in (first, second)]
        for ours, theirs in zip(*halves, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert first.weights_digest == second.weights_digest == imported.weights_digest
    pairs = random_pairs(spec.source, 2, 7)
    assert same(transferred(bundle, pairs), transferred(tmp_path / "back", pairs))
    # Nothing of it depends on where or when it was written.
    export_bundle(tmp_path / "back", tmp_path / "again")
    assert all((tmp_path / "again" / path.name).read_bytes() == path.read_bytes() for path in (tmp_path / "router").iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "back", "bundle", "router"]


def test_a_bundle_of_version_1_comes_back_as_version_2(tmp_path: Path) -> None:
    spec = pair()
    bundle = make(tmp_path / "bundle", spec)
    document = json.loads((bundle / "mapper.json").read_text())
    del document["lexical_lags"], document["rank"]
    (bundle / "mapper.json").write_text(json.dumps(document | {"format_version": 1}))
    rewrite_sums(bundle)
    assert Bundle.open(bundle).spec.format_version == 1
    export_bundle(bundle, tmp_path / "router")
    import_bundle(tmp_path / "router", tmp_path / "back")
    assert Bundle.open(tmp_path / "back").spec == spec
    # A folder that an older kvfit exported holds a spec of version 1.
    edit(tmp_path / "router", lambda manifest: manifest["kvfit"].update(mapper=to_json(spec) | {"format_version": 1}))
    edit(tmp_path / "router", lambda manifest: [manifest["kvfit"]["mapper"].pop(name) for name in ("lexical_lags", "rank")])
    rewrite_sums(tmp_path / "router")
    import_bundle(tmp_path / "router", tmp_path / "older")
    assert Bundle.open(tmp_path / "older").spec == spec


def test_the_folder_is_what_the_page_says(tmp_path: Path) -> None:
    spec = pair()
    folder = tmp_path / "router"
    export_bundle(make(tmp_path / "bundle", spec), folder, bundle_version=3)
    assert sorted(path.name for path in folder.iterdir()) == ["SHA256SUMS", "manifest.json", "weights.safetensors"]
    names = ("manifest.json", "weights.safetensors")
    sums = "".join(f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    assert (folder / "SHA256SUMS").read_text() == sums
    manifest = json.loads((folder / "manifest.json").read_text())
    lists = {str(index): list(chosen) for index, chosen in enumerate(SETS)}
    own = manifest.pop("kvfit")
    assert manifest == {
        "mapper_id": ID[:-1] + "3",
        "compatibility": {
            "source_model": "org/small", "source_revision": COMMITS[0], "target_model": "org/Large",
            "target_revision": COMMITS[1], "variant": "full_head", "precision": "fp32", "source_tp": 1, "target_tp": 1,
            "head_order": "contiguous", "num_kv_heads": 2, "head_dim": 4,
        },
        "topk": 2,
        "ridge_alpha": 0.08,
        "centered_inputs": True,
        "rope_stripped_on_keys": True,
        "source_layers_per_target": {"k": lists, "v": lists},
        "calibration": RECIPE,
        "evaluation_report": None,
        "schema_version": 1,
    }  # fmt: skip
    assert own == {"mapper": to_json(spec), "solve": SOLVE}
    tensors = safetensors.torch.load_file(folder / "weights.safetensors")
    shapes = {
        f"target.{t}.{letter}.{part}": shape
        for t in range(4)
        for letter in "kv"
        for part, shape in (("W", (16, 8)), ("b", (8,)))
    }
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


@pytest.mark.parametrize("keys_rotated", [False, True])
def test_a_program_that_knows_only_the_layout_transfers_alike(tmp_path: Path, keys_rotated: bool) -> None:
    spec = pair(keys_rotated=keys_rotated)
    bundle = make(tmp_path / "bundle", spec)
    export_bundle(bundle, tmp_path / "router")
    pairs = random_pairs(spec.source, 2, 9)
    made, needed = transferred(bundle, pairs), as_the_page_says(tmp_path / "router", pairs)
    for ours, theirs in zip(made, needed, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
    # The comparison sees another order of layers, and keys that are taken for rotated ones.
    edit(tmp_path / "router", lambda m: m["source_layers_per_target"]["v"].update({"0": [2, 0]}))
    edit(tmp_path / "router", lambda m: m.update(rope_stripped_on_keys=keys_rotated))
    needed = as_the_page_says(tmp_path / "router", pairs)
    assert not torch.allclose(made[0].double(), needed[0], atol=0.1)
    assert not torch.allclose(made[1].double(), needed[1], atol=0.1)


# -- what the layout cannot say --------------------------------------------------------------------------------

APART = tuple(
    LayerMap(kind, t, (0, 1) if kind == "keys" or t < 2 else (1, 2), 0.0, 0.0, 0.0) for t in range(4) for kind in KINDS
)
NOT_EXPRESSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "maps per head": ({"support": "head"}, r"support: found head, needed full"),
    "keys from values": ({"inputs": "both"}, r"inputs: found both, needed same"),
    "a shared basis": (
        {"sets": [[0, 1]] * 4, "inputs": "both", "rank": 3},
        r"rank: found 3, needed none: the layout has no place for a shared basis",
    ),
    "lexical inputs": (
        {
            "layers": tuple(LayerMap(kind, t, (0, 1), 0.0, 0.0, 0.0) for t in range(1, 4) for kind in KINDS),
            "lexical_lags": (0,),
        },
        r"lexical_lags: found \[0\], needed none: the layout maps every target layer from the source alone",
    ),
    "kinds apart": (
        {"layers": APART},
        r"layers\[5\]\.source_layers: found \[1, 2\], needed \[0, 1\] as for the keys.*--shared-layers",
    ),
    "fewer layers": (
        {"sets": [[0, 1], [0], [0, 1], [0, 1]]},
        r"layers\[2\]\.source_layers: found 1 layers, needed 2 as in layer 0.*--top-k",
    ),
    "heads": ({"target": side(1, n_heads=3)}, r"target\.n_heads: found 3, needed 2 as in the source"),
    "head size": ({"target": side(1, head_dim=8)}, r"target\.head_dim: found 8, needed 4 as in the source"),
    "heads that differ by layer": (
        {"source": side(0, geometry=((2, 4, 4), (2, 4, 4), (1, 8, 8)))},
        r"source\.geometry: found heads that differ by layer, needed the same in all",
    ),
    "dtypes": ({"target": side(1, dtype="bfloat16")}, r"target\.dtype: found bfloat16, needed float32 as in the source"),
    "another dtype": (
        {"source": side(0, dtype="float64"), "target": side(1, dtype="float64")},
        r"source\.dtype: found float64, needed one of float32, bfloat16, float16",
    ),
    "a folder's name": ({"source": side(0, ref="small")}, r"source\.ref: found 'small', needed org/name"),
    "no commit": ({"target": side(1, revision=None)}, r"target\.revision: found None, needed a commit hash"),
    "a branch": ({"source": side(0, revision="main")}, r"source\.revision: found main, needed a commit hash"),
    "quantised": ({"target": side(1, quantisation="awq")}, r"target\.quantisation: found awq, needed none"),
    "a window": ({"source": side(0, windows=(None, 16, None))}, r"source\.windows\[1\]: found 16, needed full attention"),
    "interleaved": ({"source": side(0, rope=plain(3, 1e4, pairing="interleaved"))}, r"source\.rope: found .*needed one plain"),
    "scaled": ({"target": side(1, rope=plain(4, 1e4, attention_scaling=1.25))}, r"target\.rope"),
    "stretched": ({"target": side(1, rope=plain(4, 1e4, inverse_frequencies=(0.25, 0.001953125)))}, r"target\.rope"),
    "partial": ({"source": side(0, rope=plain(3, 1e4, inverse_frequencies=(1.0,), rotated_width=2))}, r"source\.rope"),
    "a layer unturned": (
        {"source": side(0, rope=dataclasses.replace(plain(3, 1e4), assignment=(0, 0, None)))},
        r"source\.rope",
    ),
    "a model unturned": ({"source": side(0, rope=RopeSpec((), (None,) * 3))}, r"source\.rope"),
    "one frequency changed": (
        {
            "source": side(
                0, head_dim=8, rope=plain(3, 1e4, 8, inverse_frequencies=(1.0, 0.125, 0.0156402587890625, 0.001953125))
            ),
            "target": side(1, head_dim=8),
        },
        r"source\.rope",
    ),
}


@pytest.mark.parametrize("case", NOT_EXPRESSIBLE)
def test_what_the_layout_cannot_say_is_refused_by_field(tmp_path: Path, case: str) -> None:
    changes, message = NOT_EXPRESSIBLE[case]
    bundle = make(tmp_path / "bundle", pair(**changes))
    with pytest.raises(MismatchError, match=f"field {message}") as caught:
        export_bundle(bundle, tmp_path / "router")
    assert "\n" not in str(caught.value)
    assert str(bundle) in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_maps_of_rotated_keys_need_no_plain_table(tmp_path: Path) -> None:
    rope = plain(3, 1e4, pairing="interleaved")
    bundle = make(tmp_path / "bundle", pair(source=side(0, rope=rope), keys_rotated=True))
    export_bundle(bundle, tmp_path / "router")
    assert json.loads((tmp_path / "router" / "manifest.json").read_text())["rope_stripped_on_keys"] is False


@pytest.mark.parametrize("head_dim", [2, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1e6, 1e7])
def test_plain_tables_as_models_compute_them_are_plain(tmp_path: Path, head_dim: int, theta: float) -> None:
    sides = [side(role, n_heads=1, head_dim=head_dim, rope=plain((3, 4)[role], theta, head_dim)) for role in (0, 1)]
    export_bundle(make(tmp_path / "bundle", pair(((0,),) * 4, *sides)), tmp_path / "router")


def test_a_failed_mapper_is_exported_only_when_asked_for(tmp_path: Path, run: Callable[..., Any]) -> None:
    bundle = with_verdict(make(tmp_path / "bundle", pair()), "fail")
    with pytest.raises(GateError, match="its evaluation failed"):
        export_bundle(bundle, tmp_path / "router")
    words = ("export", bundle, "--format", "semantic-router", "--out", tmp_path / "router")
    code, out, err = run(*words)
    assert (code, out) == (3, "")
    assert "its evaluation failed" in err
    assert run(*words, "--any")[0] == 0


@pytest.mark.parametrize("place", ["folder", "file"])
def test_nothing_is_overwritten(tmp_path: Path, place: str) -> None:
    bundle = make(tmp_path / "bundle", pair())
    export_bundle(bundle, tmp_path / "router")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(BundleError, match="already exists"):
        export_bundle(bundle, tmp_path / place)
    with pytest.raises(BundleError, match="already exists"):
        import_bundle(tmp_path / "router", tmp_path / place)
    assert list((tmp_path / "folder").iterdir()) == []
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize(
    ("options", "message"), [({"format": "other"}, "format 'other'"), ({"bundle_version": 0}, "--bundle-version: found 0")]
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        export_bundle(tmp_path, tmp_path / "router", **options)


def test_the_command_line(tmp_path: Path, run: Callable[..., Any]) -> None:
    bundle, router, back = make(tmp_path / "bundle", pair()), tmp_path / "router", tmp_path / "back"
    code, out, err = run("export", bundle, "--format", "semantic-router", "--out", router, "--bundle-version", "2")
    assert (code, err) == (0, "")
    assert out.startswith(f"{router}: {ID[:-1]}2 in semantic-router's layout, ")
    code, out, err = run("import", router, "--out", back, "--json")
    assert code == 0, err
    said = json.loads(out)
    assert (said["verdict"], said["source"], said["target"]) == ("unknown", "org/small", "org/Large")
    assert said["weights_digest"] == Bundle.open(bundle).weights_digest
    assert run("verify", back)[0] == 0
    code, out, err = run("import", router, "--out", back)
    assert (code, out) == (1, "")
    assert "already exists" in err
    code, _, err = run("import", router, "--out", tmp_path / "third", "--source", "demo:source")
    assert code == 2
    assert "needed both or neither" in err
    code, _, err = run("import", router, "--out", tmp_path / "third", "--source", "demo:source", "--target", "demo:target")
    assert code == 1
    assert "describes both models" in err


# -- folders that others made ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rope_stripped_on_keys", [True, False])
def test_a_foreign_folder_becomes_a_bundle_with_its_models(
    tmp_path: Path, tiny_pair: tuple[Path, Path], load: Callable[..., Any], rope_stripped_on_keys: bool
) -> None:
    folder = foreign(tmp_path / "router", rope_stripped_on_keys=rope_stripped_on_keys)
    source, target = map(str, tiny_pair)
    imported = import_bundle(folder, tmp_path / "back", source=source, target=target, options=CPU)
    bundle = Bundle.open(tmp_path / "back")
    spec = bundle.spec
    assert (imported.verdict, bundle.verdict) == ("unknown", "unknown")
    assert (spec.source.ref, spec.source.revision, spec.target.ref) == ("tiny-source", None, "tiny-target")
    assert (spec.gain, spec.support, spec.inputs, spec.dtype) == ("none", "full", "same", "float32")
    assert spec.keys_rotated is not rope_stripped_on_keys
    assert [layer.source_layers for layer in spec.layers[::2]] == [tuple(sorted(chosen)) for chosen in FOREIGN_SETS]
    assert bundle.recipe["imported"]["calibration"] == {"corpus": "some/corpus", "seed": 2}
    assert bundle.solve["imported"] == {
        "format": "semantic-router", "mapper_id": "tiny-b1", "topk": 2, "ridge_alpha": 0.5, "centered_inputs": True,
        "evaluation_report": "report.json",
    }  # fmt: skip
    assert "tiny-source" in (tmp_path / "back" / "README.md").read_text()
    pairs = random_pairs(spec.source, 2, 11)
    for ours, theirs in zip(transferred(tmp_path / "back", pairs), as_the_page_says(folder, pairs, (1e6, 1e6)), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
    mapper = Mapper.from_bundle(bundle)
    mapper.check_models(load(tiny_pair[0]).model, load(tiny_pair[1]).model)
    with pytest.raises(MismatchError):
        mapper.check_models(load(tiny_pair[1]).model)


def test_a_foreign_folder_alone_says_too_little(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"field kvfit: found nothing, .*--source and --target") as caught:
        import_bundle(foreign(tmp_path / "router"), tmp_path / "back")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["router"]


@pytest.mark.parametrize(
    ("changes", "swapped", "message"),
    [
        ({"heads": 1, "head_dim": 32}, False, r"field num_kv_heads: found source model tiny-source with 2, needed 1"),
        ({"heads": 4, "head_dim": 8}, False, r"field num_kv_heads: found source model tiny-source with 2, needed 4"),
        ({"head_dim": 8}, False, r"field head_dim: found source model tiny-source with 16, needed 8"),
        ({}, True, r"field target_model: found layers 3, needed 4 by source_layers_per_target"),
    ],
)
def test_models_of_another_geometry_are_refused(
    tmp_path: Path, tiny_pair: tuple[Path, Path], changes: dict[str, Any], swapped: bool, message: str
) -> None:
    folder = foreign(tmp_path / "router", **changes)
    source, target = map(str, reversed(tiny_pair) if swapped else tiny_pair)
    with pytest.raises(MismatchError, match=message):
        import_bundle(folder, tmp_path / "back", source=source, target=target, options=CPU)
    assert [path.name for path in tmp_path.iterdir()] == ["router"]


def test_a_layer_that_the_source_lacks_is_refused(tmp_path: Path, tiny_pair: tuple[Path, Path]) -> None:
    lists = {str(index): chosen for index, chosen in enumerate([[3, 0], [1, 2], [0, 1], [2, 1]])}
    folder = foreign(tmp_path / "router", source_layers_per_target={"k": lists, "v": lists})
    with pytest.raises(
        MismatchError, match=r"field source_layers_per_target: found layer 3, needed one of the 3 of tiny-source"
    ):
        import_bundle(folder, tmp_path / "back", source=str(tiny_pair[0]), target=str(tiny_pair[1]), options=CPU)


HUB = """
import json, sys
from kvfit.bundle.bundle import Bundle
from kvfit.errors import MismatchError
from kvfit.interop.import_bundle import import_bundle
from kvfit.fit.capture.models import Options

folder, out = sys.argv[1:]
options = Options(device="cpu")
import_bundle(folder, out, source="org/tiny-source", target="org/tiny-target", options=options)
spec = Bundle.open(out).spec
found = [[model.ref, model.revision] for model in (spec.source, spec.target)]
try:
    import_bundle(folder, out + "-other", source="org/tiny-source@main", target="org/tiny-target", options=options)
except MismatchError as error:
    found.append(str(error))
print(json.dumps(found))
"""


def test_models_of_the_hub_are_loaded_at_the_commit_and_held_to_it(tmp_path: Path, tiny_pair: tuple[Path, Path]) -> None:
    later = "c3" * 20  # the branch has moved on since the mapper was fitted
    cache = tmp_path / "hub"
    for name, commit, folder in zip(("tiny-source", "tiny-target"), COMMITS, tiny_pair, strict=True):
        home = cache / f"models--org--{name}"
        shutil.copytree(folder, home / "snapshots" / commit)
        shutil.copytree(folder, home / "snapshots" / later)
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text(later)
    words = [sys.executable, "-c", HUB, foreign(tmp_path / "router"), tmp_path / "back"]
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    source, target, message = json.loads(done.stdout.splitlines()[-1])
    assert [source, target] == [["org/tiny-source", COMMITS[0]], ["org/tiny-target", COMMITS[1]]]
    assert f"field source_revision: found commit {later}, needed {COMMITS[0]} by compatibility" in message
    assert not (tmp_path / "back-other").exists()
