"""The bundle format: what is written reads back, byte for byte the same each time, whole or not at all."""

import hashlib
import json
import math
import os
import pickle
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bundle_factory import RECIPE, SOLVE, basis, evaluated_bundle, evaluation, lexical_spec, make_bundle, mapper_spec, weights
from safetensors import safe_open
from safetensors.torch import load_file

from kvfit.bundle.bundle import Bundle, add_files, write_bundle
from kvfit.errors import BundleError

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("support", ["full", "head"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_written_reads_back(tmp_path, dtype, support):
    spec = mapper_spec(dtype=dtype, support=support)
    bundle = Bundle.open(make_bundle(tmp_path / "b", spec))
    assert bundle.spec == spec
    assert (bundle.recipe, bundle.solve, bundle.evaluation, bundle.verdict) == (RECIPE, SOLVE, None, "unknown")
    for kind, layer_index, weight, bias in weights(spec):
        found = bundle.layer(kind, layer_index)
        assert found[0].dtype == found[1].dtype == getattr(torch, dtype)
        assert torch.equal(found[0], weight)
        assert torch.equal(found[1].float(), bias)
        wide = bundle.layer(kind, layer_index, dtype=torch.float64, bias_dtype=torch.float32)
        assert wide[0].dtype == torch.float64
        assert torch.equal(wide[1], bias)


def test_safetensors_itself_reads_the_weight_files(tmp_path):
    """The files are written by hand here: the library is the judge of whether they are right."""
    spec = mapper_spec(dtype="bfloat16")
    folder = make_bundle(tmp_path / "b", spec, shard_bytes=900)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    found = {}
    for path in shards:
        assert path.stat().st_size <= 900
        part = load_file(path)
        assert not set(part) & set(found)
        found |= part
    for kind, layer_index, weight, bias in weights(spec):
        assert torch.equal(found.pop(f"layers.{layer_index}.{kind}.weight"), weight)
        assert torch.equal(found.pop(f"layers.{layer_index}.{kind}.bias"), bias)
    for role, model in (("source", spec.source), ("target", spec.target)):
        values = found.pop(f"{role}.rope.0.inverse_frequencies")
        assert tuple(values.tolist()) == model.rope.tables[0].inverse_frequencies
    assert not found


def test_data_are_aligned_and_a_layer_lies_in_one_file(tmp_path):
    folder = make_bundle(tmp_path / "b", mapper_spec(dtype="float16"), shard_bytes=1)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) == 2 + 6  # two rotary tables, then a group per kind and layer
    for path in shards:
        length = struct.unpack("<Q", path.read_bytes()[:8])[0]
        assert (8 + length) % 8 == 0
    with safe_open(shards[2], framework="pt") as stream:
        assert sorted(stream.keys()) == ["layers.0.keys.bias", "layers.0.keys.weight"]


def test_same_inputs_give_the_same_bytes_in_any_order_of_keys(tmp_path):
    spec = mapper_spec()
    turned = dict(reversed(RECIPE.items()))
    write_bundle(tmp_path / "a", spec, weights(spec), recipe=RECIPE, solve=SOLVE, card="text\n")
    write_bundle(tmp_path / "b", spec, weights(spec), recipe=turned, solve=SOLVE, card="text\n")
    assert _content(tmp_path / "a") == _content(tmp_path / "b")
    write_bundle(tmp_path / "c", spec, weights(spec, seed=1), recipe=RECIPE, solve=SOLVE, card="text\n")
    different = {name for name, data in _content(tmp_path / "c").items() if data != _content(tmp_path / "a")[name]}
    assert different == {"mapper-00001-of-00001.safetensors", "SHA256SUMS"}


def test_the_frozen_bundle_of_version_1_reads_for_ever():
    bundle = Bundle.open(DATA / "bundle-v1")
    spec = replace(mapper_spec(dtype="bfloat16"), kvfit_version=bundle.spec.kvfit_version, format_version=1)
    assert bundle.spec == spec
    assert bundle.verdict == "pass"
    for kind, layer_index, weight, bias in weights(spec):
        found = bundle.layer(kind, layer_index, bias_dtype=torch.float32)
        assert torch.equal(found[0], weight)
        assert torch.equal(found[1], bias)


def test_the_frozen_bundle_of_version_2_reads_for_ever():
    bundle = Bundle.open(DATA / "bundle-v2")
    spec = replace(lexical_spec(dtype="bfloat16"), kvfit_version=bundle.spec.kvfit_version, format_version=2)
    assert bundle.spec == spec
    assert bundle.verdict == "pass"
    assert torch.equal(bundle.basis(), basis(spec))
    for kind, layer_index, weight, bias in weights(spec):
        found = bundle.layer(kind, layer_index, bias_dtype=torch.float32)
        assert torch.equal(found[0], weight)
        assert torch.equal(found[1], bias)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("lags", "rank"), [((0, 2), None), ((), 3), ((0,), 32), ((0, 1), 1)])
def test_lexical_inputs_and_a_shared_basis_read_back(tmp_path, dtype, lags, rank):
    spec = lexical_spec(dtype=dtype, lags=lags, rank=rank)
    folder = make_bundle(tmp_path / "b", spec, shard_bytes=700)
    bundle = Bundle.open(folder)
    bundle.check_weights()
    assert bundle.spec == spec
    first = 1 if lags else 0
    n_inputs = 2 * 2 * 4 + len(lags) * 2 * 2 * 4  # two source layers of one head of 4, both halves; the target has two heads
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert ("basis.weight" in tensors) == (rank is not None)
    assert ("layers.0.keys.weight" in tensors) == (first == 0)
    if rank is None:
        assert bundle.basis() is None
    else:
        assert bundle.basis().shape == (n_inputs, rank)
        assert bundle.basis().dtype == getattr(torch, dtype)
        assert bundle.basis(dtype=torch.float64).dtype == torch.float64
        assert torch.equal(bundle.basis(), tensors["basis.weight"])
        assert torch.equal(bundle.basis(), basis(spec))
    for kind, layer_index, weight, bias in weights(spec):
        found = bundle.layer(kind, layer_index, bias_dtype=torch.float32)
        assert layer_index >= first
        assert found[0].shape == (rank or n_inputs, 8)
        assert torch.equal(found[0], weight)
        assert torch.equal(found[0], tensors[f"layers.{layer_index}.{kind}.weight"])
        assert torch.equal(found[1], bias)


def test_a_basis_that_changed_on_disk_is_refused(tmp_path):
    folder = make_bundle(tmp_path / "b", lexical_spec())
    bundle = Bundle.open(folder)
    kept = bundle.basis()
    before = kept.clone()
    path = folder / "mapper-00001-of-00001.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(kept, before)
    with pytest.raises(BundleError, match="changed since"):
        bundle.basis()


@pytest.mark.parametrize("fault", ["missing", "unwanted", "shape", "dtype", "nan"])
def test_a_basis_that_is_not_the_specs_leaves_nothing(tmp_path, fault):
    spec = lexical_spec(rank=None if fault == "unwanted" else 5)
    given = basis(lexical_spec())
    if fault == "missing":
        given = None
    if fault == "shape":
        given = given.T.contiguous()
    if fault == "dtype":
        given = given.double()
    if fault == "nan":
        given[1, 2] = math.nan
    with pytest.raises(BundleError, match=r"tensor basis\.weight"):
        write_bundle(tmp_path / "b", spec, weights(spec), recipe=RECIPE, solve=SOLVE, basis=given)
    assert list(tmp_path.iterdir()) == []


def test_version_1_is_not_written_any_more(tmp_path):
    spec = replace(mapper_spec(), format_version=1)
    with pytest.raises(BundleError, match="field format_version: found 1, needed 2"):
        write_bundle(tmp_path / "b", spec, weights(spec), recipe=RECIPE, solve=SOLVE)


def test_weights_digest_is_what_the_format_page_says(tmp_path):
    folder = evaluated_bundle(tmp_path / "b")
    command = r"grep -E '  mapper(\.json|-.*\.safetensors)$' SHA256SUMS | sha256sum"
    shell = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=True).stdout.split()[0]
    bundle = Bundle.open(folder)
    assert bundle.weights_digest == f"sha256:{shell}"
    check = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout
    assert check.stdout.count(": OK") == len(_content(folder)) - 1


def test_verdict_binds_to_the_weights(tmp_path):
    good = evaluated_bundle(tmp_path / "good")
    other = make_bundle(tmp_path / "other", seed=1)
    assert Bundle.open(good).verdict == "pass"
    add_files(other, {"evaluation.json": (good / "evaluation.json").read_bytes()})
    assert Bundle.open(other).verdict == "unknown"
    assert Bundle.open(evaluated_bundle(tmp_path / "bad", "fail")).verdict == "fail"


def test_adding_files_changes_neither_weights_nor_their_digest(tmp_path):
    folder = make_bundle(tmp_path / "b")
    before = Bundle.open(folder).weights_digest
    add_files(folder, {"README.md": b"one\n", "r2-keys.png": b"\x89PNG", "evaluation.md": b"#\n"})
    add_files(folder, {"README.md": b"two\n"})
    bundle = Bundle.open(folder)
    assert bundle.weights_digest == before
    assert (folder / "README.md").read_bytes() == b"two\n"
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == [".lock"]


@pytest.mark.parametrize(
    "name",
    [
        "mapper.json",
        "recipe.json",
        "SHA256SUMS",
        "x.py",
        "a/b.png",
        "../x.png",
        ".x.png",
        "x\n.png",
        "mapper-00002-of-00002.safetensors",
    ],
)
def test_nothing_else_can_be_added(tmp_path, name):
    folder = make_bundle(tmp_path / "b")
    before = _content(folder)
    with pytest.raises(BundleError, match="cannot be added"):
        add_files(folder, {name: b"x"})
    assert _content(folder) == before


def test_a_bad_evaluation_is_refused_before_anything_changes(tmp_path):
    folder = make_bundle(tmp_path / "b")
    before = _content(folder)
    found = evaluation(Bundle.open(folder))
    for broken in (found | {"verdict": "good"}, {"verdict": "pass"}, []):
        with pytest.raises(BundleError, match=r"evaluation\.json"):
            add_files(folder, {"README.md": b"new", "evaluation.json": json.dumps(broken).encode()})
    assert _content(folder) == before


def test_an_existing_folder_is_refused_and_left_alone(tmp_path):
    folder = tmp_path / "b"
    folder.mkdir()
    with pytest.raises(BundleError, match="already exists"):
        make_bundle(folder)
    assert list(folder.iterdir()) == []
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    "fault", ["interrupt", "order", "shape", "dtype", "nan", "infinite bias", "short", "long", "recipe", "path"]
)
def test_a_write_that_fails_leaves_nothing(tmp_path, fault):
    spec = mapper_spec()
    recipe = dict(RECIPE)

    def faulty():
        for number, (kind, layer_index, weight, bias) in enumerate(weights(spec)):
            if number == 3:
                if fault == "interrupt":
                    raise KeyboardInterrupt
                if fault == "order":
                    kind = "keys"
                if fault == "shape":
                    weight = weight[:-1]
                if fault == "dtype":
                    weight = weight.double()
                if fault == "nan":
                    weight[0, 0] = math.nan
                if fault == "infinite bias":
                    bias[0] = math.inf
                if fault == "short":
                    return
            yield kind, layer_index, weight, bias
        if fault == "long":
            yield "keys", 3, weight, bias

    if fault == "recipe":
        recipe["x"] = math.nan
    if fault == "path":
        spec = replace(spec, source=replace(spec.source, ref="/home/someone/model"))
    with pytest.raises(KeyboardInterrupt if fault == "interrupt" else BundleError) as caught:
        write_bundle(tmp_path / "b", spec, faulty(), recipe=recipe, solve=SOLVE)
    assert list(tmp_path.iterdir()) == []
    assert "\n" not in str(caught.value)


def test_a_folder_made_while_writing_is_left_alone(tmp_path):
    """An empty folder, too, which a rename would silently replace."""
    spec = mapper_spec()

    def stream():
        (tmp_path / "b").mkdir()
        yield from weights(spec)

    with pytest.raises(BundleError, match="already exists"):
        write_bundle(tmp_path / "b", spec, stream(), recipe=RECIPE, solve=SOLVE)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert list((tmp_path / "b").iterdir()) == []


def test_layers_are_read_one_at_a_time_and_own_their_memory(tmp_path):
    folder = make_bundle(tmp_path / "b")
    bundle = Bundle.open(folder)
    weight, bias = bundle.layer("values", 1)
    kept = weight.clone(), bias.clone()
    path = folder / "mapper-00001-of-00001.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)  # in place: a mapped view would change with it
    assert torch.equal(weight, kept[0])
    assert torch.equal(bias, kept[1])
    with pytest.raises(BundleError, match=r"mapper-00001-of-00001\.safetensors: changed since"):
        bundle.layer("values", 1)
    shutil.rmtree(folder)
    with pytest.raises(BundleError, match="cannot be read"):
        bundle.layer("values", 1)


def test_verify_false_only_skips_the_weight_files_digests(tmp_path):
    folder = make_bundle(tmp_path / "b")
    path = folder / "mapper-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    Bundle.open(folder, verify=False)
    with pytest.raises(BundleError, match="digest"):
        Bundle.open(folder)
    (folder / "recipe.json").write_text("{}\n")
    with pytest.raises(BundleError, match=r"recipe\.json: digest"):
        Bundle.open(folder, verify=False)


def test_dotted_names_are_no_part_of_a_bundle(tmp_path):
    folder = make_bundle(tmp_path / "b")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    (folder / ".git").mkdir()
    assert ".gitattributes" not in Bundle.open(folder).digests


def test_a_hub_snapshot_may_link_into_its_own_blobs_only(tmp_path):
    made = make_bundle(tmp_path / "made")
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for path in made.iterdir():
        blob = repository / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        path.rename(blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    Bundle.open(snapshot).check_weights()
    # The client may keep content that repositories share in one store of the whole cache, behind a second link.
    store = tmp_path / "blobs" / "ab"
    store.mkdir(parents=True)
    blob = Path(os.path.realpath(snapshot / "solve.json"))
    blob.rename(store / "shared")
    blob.symlink_to("../../blobs/ab/shared")
    Bundle.open(snapshot).check_weights()
    outside = tmp_path / "outside.json"
    outside.write_bytes((snapshot / "recipe.json").read_bytes())
    (snapshot / "recipe.json").unlink()
    (snapshot / "recipe.json").symlink_to(outside)
    with pytest.raises(BundleError, match=r"recipe\.json: a symbolic link"):
        Bundle.open(snapshot)


def test_a_bundle_pickles(tmp_path):
    bundle = Bundle.open(make_bundle(tmp_path / "b"))
    again = pickle.loads(pickle.dumps(bundle))
    assert again == bundle
    assert torch.equal(again.layer("keys", 0)[0], bundle.layer("keys", 0)[0])


def test_writing_holds_one_file_in_memory(tmp_path):
    """Of the tensors given none is kept, and of those of a file a copy: what is yielded may be filled again."""
    import weakref

    spec = mapper_spec()
    alive: list[weakref.ref] = []
    most = 0
    shared = torch.empty(256)

    def stream():
        nonlocal most
        for kind, layer_index, weight, bias in weights(spec):
            alive.append(weakref.ref(weight))
            most = max(most, sum(item() is not None for item in alive))
            reused = shared[: weight.numel()].reshape(weight.shape).copy_(weight)
            yield kind, layer_index, reused, bias

    write_bundle(tmp_path / "b", spec, stream(), recipe={}, solve={})
    assert most <= 2
    bundle = Bundle.open(tmp_path / "b")
    for kind, layer_index, weight, _ in weights(spec):
        assert torch.equal(bundle.layer(kind, layer_index)[0], weight)


def test_importing_the_reader_imports_nothing_heavy():
    code = (
        "import sys, kvfit.bundle.bundle, kvfit.hub.load, kvfit.hub.push, kvfit.hub.verify, kvfit.hub.card\n"
        "heavy = ('transformers', 'zarr', 'datasets', 'click', 'huggingface_hub', 'jinja2', 'filelock')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ))
    assert found.stdout.strip() == "[]"


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.mark.parametrize(
    ("options", "share"),
    [({"recompute": 0.1}, 0.1), ({"recompute": "x"}, 0.0), ({"recompute": 7}, 0.0), ({}, 0.0), (None, 0.0)],
)
def test_what_the_verdict_was_found_with(tmp_path, options, share):
    folder = evaluated_bundle(tmp_path / "b")
    text = json.dumps({**Bundle.open(folder).evaluation, "options": options})
    add_files(folder, {"evaluation.json": text.encode()})
    assert Bundle.open(folder).judged_recompute == share
    # Of other weights: no verdict, and nothing that it was found with.
    add_files(folder, {"evaluation.json": json.dumps({**json.loads(text), "weights_digest": "sha256:" + "0" * 64}).encode()})
    assert Bundle.open(folder).judged_recompute == 0
