"""Torn, altered and hostile folders in semantic-router's layout: each is a BundleError that names file and field."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bundle_factory import rewrite_sums
from router_folders import COMMITS, edit, make, pair

from kvfit.bundle.bundle import Bundle, write_bundle
from kvfit.errors import BundleError, KvfitError
from kvfit.interop.export_bundle import export_bundle
from kvfit.interop.import_bundle import import_bundle
from kvfit.interop.router_folder import RouterFolder

HOSTILE: dict[str, tuple[Callable[[Path], None], str, bool]] = {}


def hostile(message: str, *, sums: bool = True) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Register a folder of one fault; `sums` lists the altered files again, as an attacker would."""

    def register(function: Callable[[Path], None]) -> Callable[[Path], None]:
        HOSTILE[function.__name__] = (function, message, sums)
        return function

    return register


def edit_header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "weights.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def value_at(folder: Path, tensor: str, number: float) -> None:
    path = folder / "weights.safetensors"
    data = bytearray(path.read_bytes())
    length = struct.unpack("<Q", data[:8])[0]
    begin = 8 + length + json.loads(data[8 : 8 + length])[tensor]["data_offsets"][0]
    data[begin : begin + 4] = struct.pack("<f", number)
    path.write_bytes(data)


@hostile(r"manifest\.json: digest [0-9a-f]{12}, SHA256SUMS says", sums=False)
def manifest_altered(folder: Path) -> None:
    edit(folder, lambda manifest: manifest.update(mapper_id="another"))


@hostile(r"weights\.safetensors: digest", sums=False)
def weights_altered(folder: Path) -> None:
    value_at(folder, "target.1.k.W", 1.0)


@hostile(r"'model\.py': not listed", sums=False)
def file_unlisted(folder: Path) -> None:
    (folder / "model.py").write_text("raise SystemExit")


@hostile(r"the name 'model\.py' is not allowed")
def code_listed(folder: Path) -> None:
    (folder / "model.py").write_text("raise SystemExit")


@hostile(r"'inside': not listed", sums=False)
def folder_inside(folder: Path) -> None:
    (folder / "inside").mkdir()


@hostile(r"the name '\.\./weights\.safetensors' is not allowed", sums=False)
def path_escape(folder: Path) -> None:
    sums = folder / "SHA256SUMS"
    shutil.copy(folder / "weights.safetensors", folder.parent / "weights.safetensors")
    sums.write_text(sums.read_text().replace("  weights", "  ../weights"))


@hostile(r"weights\.safetensors: a symbolic link")
def link(folder: Path) -> None:
    (folder / "weights.safetensors").rename(folder.parent / "weights.safetensors")
    (folder / "weights.safetensors").symlink_to(folder.parent / "weights.safetensors")


@hostile(r"manifest\.json: neither a regular file", sums=False)
def pipe(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


@hostile(r"weights\.safetensors: listed in SHA256SUMS but missing", sums=False)
def weights_missing(folder: Path) -> None:
    (folder / "weights.safetensors").unlink()


@hostile(r"weights\.safetensors is not listed", sums=False)
def weights_unlisted(folder: Path) -> None:
    sums = folder / "SHA256SUMS"
    sums.write_text(sums.read_text().splitlines(keepends=True)[0])


@hostile(r"manifest\.json is listed twice", sums=False)
def listed_twice(folder: Path) -> None:
    sums = folder / "SHA256SUMS"
    sums.write_text(sums.read_text() + sums.read_text().splitlines(keepends=True)[0])


@hostile(r"SHA256SUMS, line 1: found", sums=False)
def capitals(folder: Path) -> None:
    (folder / "SHA256SUMS").write_text((folder / "SHA256SUMS").read_text().upper())


@hostile(r"SHA256SUMS: missing", sums=False)
def sums_missing(folder: Path) -> None:
    (folder / "SHA256SUMS").unlink()


@hostile(r"manifest\.json: not strict JSON \(duplicate key 'topk'\)")
def key_twice(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text('{"topk": 2, ' + path.read_text().lstrip()[1:])


@hostile(r"manifest\.json: not strict JSON \(the literal NaN\)")
def not_a_number(folder: Path) -> None:
    edit(folder, lambda manifest: manifest.update(ridge_alpha=float("nan")))


@hostile(r"manifest\.json: not strict JSON \(nested deeper")
def nested(folder: Path) -> None:
    (folder / "manifest.json").write_text("[" * 100000 + "]" * 100000)


@hostile(r"manifest\.json: found a list, needed an object")
def no_object(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")


def lists(m: dict[str, Any], letter: str) -> dict[str, Any]:
    """The lists of one kind in a manifest."""
    found: dict[str, Any] = m["source_layers_per_target"][letter]
    return found


def both(value: Any) -> Callable[[dict[str, Any]], object]:
    """Set the list of target layer 0 for keys and for values."""
    return lambda m: [lists(m, letter).update({"0": value}) for letter in "kv"]


def own(m: dict[str, Any], role: str | None = None) -> dict[str, Any]:
    """The spec that kvfit wrote, or its source or target."""
    found: dict[str, Any] = m["kvfit"]["mapper"]
    return found if role is None else found[role]


def compat(**values: Any) -> Callable[[dict[str, Any]], object]:
    """Change field `compatibility`."""
    return lambda m: m["compatibility"].update(values)


LISTS = r"source_layers_per_target"
SAYS = r"as field kvfit\.mapper says"
MANIFESTS: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "unknown key": (r"postscript: found an unknown key", lambda m: m.update(postscript=1)),
    "missing key": (r"topk: found nothing", lambda m: m.pop("topk")),
    "no lists": (rf"{LISTS}: found nothing", lambda m: m.pop(LISTS)),
    "newer schema": (r"schema_version: found 2, needed one of 1", lambda m: m.update(schema_version=2)),
    "a truth for a number": (r"topk: found bool, needed int", lambda m: m.update(topk=True)),
    "no layers": (r"topk: found 0, needed at least 1", lambda m: m.update(topk=0)),
    "not centred": (r"centered_inputs: found False", lambda m: m.update(centered_inputs=False)),
    "a word for a truth": (r"rope_stripped_on_keys: found str", lambda m: m.update(rope_stripped_on_keys="yes")),
    "no name": (r"mapper_id: found ''", lambda m: m.update(mapper_id="")),
    "two lines": (r"mapper_id: found 'a\\nb'", lambda m: m.update(mapper_id="a\nb")),
    "below nothing": (r"ridge_alpha: found -1\.0", lambda m: m.update(ridge_alpha=-1)),
    "a report": (r"evaluation_report: found int", lambda m: m.update(evaluation_report=1)),
    "calibration": (r"calibration: found list, needed an object", lambda m: m.update(calibration=[])),
    "maps per head": (r"compatibility\.variant: found 'per_head', needed one of full_head", compat(variant="per_head")),
    "precision": (r"compatibility\.precision: found 'fp8'", compat(precision="fp8")),
    "split layers": (r"compatibility\.source_tp: found 2, needed one of 1", compat(source_tp=2)),
    "order of heads": (r"compatibility\.head_order: found 'hf', needed one of contiguous", compat(head_order="hf")),
    "a branch": (r"compatibility\.source_revision: found 'main', needed a commit", compat(source_revision="main")),
    "more": (r"compatibility\.rope: found an unknown key", compat(rope=1)),
    "no heads": (r"compatibility\.num_kv_heads: found 0, needed at least 1", compat(num_kv_heads=0)),
    "no compatibility": (r"compatibility: found list, needed an object", lambda m: m.update(compatibility=[])),
    "one kind": (rf"{LISTS}: found keys k, needed an object of k and v", lambda m: m[LISTS].pop("v")),
    "a gap": (rf"{LISTS}\.k: found other keys", lambda m: lists(m, "k").pop("0")),
    "too short": (rf"{LISTS}\.v: found 3 target layers, needed 4 as for k", lambda m: lists(m, "v").pop("3")),
    "apart": (rf"{LISTS}\.v\.0: found \[2, 0\], needed \[0, 2\] as for k", lambda m: lists(m, "v").update({"0": [2, 0]})),
    "twice": (rf"{LISTS}\.k\.0: found \[1, 1\], needed 2 different layers", both([1, 1])),
    "too few": (rf"{LISTS}\.k\.0: found \[1\], needed 2 different layers", both([1])),
    "none": (rf"{LISTS}\.k\.0: found \[\], needed 2 different layers", both([])),
    "below 0": (rf"{LISTS}\.k\.0: found \[-1, 0\]", both([-1, 0])),
    "a fraction": (rf"{LISTS}\[0\]\[0\]: found float, needed int", both([0.5, 1])),
    "a word": (rf"{LISTS}\[0\]: found str, needed an array", both("01")),
    # What kvfit wrote and somebody changed.
    "own list": (r"kvfit: found list, needed an object", lambda m: m.update(kvfit=[])),
    "own, more": (r"kvfit\.extra: found an unknown key", lambda m: m["kvfit"].update(extra=1)),
    "own, less": (r"kvfit\.solve: found NoneType, needed an object", lambda m: m["kvfit"].pop("solve")),
    "own, empty": (r"kvfit\.mapper: found NoneType, needed an object", lambda m: m["kvfit"].update(mapper=None)),
    "own, newer": (
        r"kvfit\.mapper, field format_version: found 3, .* kvfit '9\.9' wrote it and reads it",
        lambda m: own(m).update(format_version=3, kvfit_version="9.9", more=1),
    ),
    "no rotation": (r"kvfit\.mapper, field source\.rope: found nothing", lambda m: own(m, "source").pop("rope")),
    "no fingerprint": (
        r"kvfit\.mapper, field target\.weight_fingerprint: found nothing",
        lambda m: own(m, "target").pop("weight_fingerprint"),
    ),
    "windows": (
        r"kvfit\.mapper, field target\.windows\[0\]: found 8, needed full attention",
        lambda m: own(m, "target").update(windows=[8] * 4),
    ),
    "no float32": (
        r"source\.rope\.tables\[0\]\.inverse_frequencies: a value that is not a float32",
        lambda m: own(m, "source")["rope"]["tables"][0].update(inverse_frequencies=[1.0, 0.0100000001]),
    ),
    "a path": (r"kvfit\.mapper, field source\.ref: found '\.\./x'", lambda m: own(m, "source").update(ref="../x")),
    "another source": (
        rf"compatibility\.source_model: found org/other, needed org/small {SAYS}",
        compat(source_model="org/other"),
    ),
    "another commit": (
        rf"compatibility\.target_revision: found {'c3' * 20}, needed {COMMITS[1]} {SAYS}",
        compat(target_revision="c3" * 20),
    ),
    "another precision": (rf"compatibility\.precision: found bf16, needed fp32 {SAYS}", compat(precision="bf16")),
    "other rotation": (
        rf"rope_stripped_on_keys: found False, needed True {SAYS}",
        lambda m: m.update(rope_stripped_on_keys=False),
    ),
    "another penalty": (rf"ridge_alpha: found 1\.0, needed 0\.08 {SAYS}", lambda m: m.update(ridge_alpha=1)),
    "another order": (rf"{LISTS}: found \(\(2, 0\), .*, needed \(\(0, 2\), .* {SAYS}", both([2, 0])),
}
for name, (message, change) in MANIFESTS.items():
    HOSTILE[name] = (lambda folder, change=change: edit(folder, change), f"field {message}", True)


@hostile(r"weights\.safetensors: \d+ bytes, its header describes \d+")
def weights_truncated(folder: Path) -> None:
    path = folder / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


@hostile(r"tensor target\.1\.v\.b: missing")
def tensor_renamed(folder: Path) -> None:
    edit_header(folder, lambda header: header.update({"target.1.v.bias": header.pop("target.1.v.b")}))


@hostile(r"tensor 'another': not a tensor of this mapper")
def tensor_extra(folder: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        header["another"] = {"dtype": "F32", "shape": [0], "data_offsets": [end, end]}

    edit_header(folder, change)


@hostile(r"tensor target\.0\.k\.W: F32 \(8, 16\), needed F32 \(16, 8\) by manifest\.json")
def weight_transposed(folder: Path) -> None:
    edit_header(folder, lambda header: header["target.0.k.W"].update(shape=[8, 16]))


@hostile(r"tensor target\.0\.k\.W: BF16 \(16, 16\), needed F32 \(16, 8\)")
def weight_of_another_type(folder: Path) -> None:
    edit_header(folder, lambda header: header["target.0.k.W"].update(shape=[16, 16], dtype="BF16"))


@hostile(r"tensor target\.2\.v\.W: holds NaN or infinite values")
def weight_not_finite(folder: Path) -> None:
    value_at(folder, "target.2.v.W", float("nan"))


@hostile(r"tensor target\.3\.k\.b: holds NaN or infinite values")
def bias_not_finite(folder: Path) -> None:
    value_at(folder, "target.3.k.b", float("inf"))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    export_bundle(make(folder / "bundle", pair()), folder / "router")
    return folder / "router"


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_hostile_folder_is_refused_by_file_and_field(tmp_path: Path, sound: Path, fault: str) -> None:
    spoil, message, sums = HOSTILE[fault]
    folder = tmp_path / "router"
    shutil.copytree(sound, folder)
    spoil(folder)
    if sums:
        rewrite_sums(folder)
    with pytest.raises(BundleError, match=message) as caught:
        import_bundle(folder, tmp_path / "back")
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 1200
    assert not (tmp_path / "back").exists()
    assert not list(tmp_path.glob(".*"))


def test_what_may_change_may_change(tmp_path: Path, sound: Path) -> None:
    folder = tmp_path / "router"
    shutil.copytree(sound, folder)
    edit(folder, lambda manifest: manifest.update(mapper_id="renamed", evaluation_report="report.json"))
    edit(folder, lambda manifest: manifest.pop("schema_version"))
    (folder / ".gitattributes").write_text("x")
    rewrite_sums(folder)
    assert import_bundle(folder, tmp_path / "back").mapper_id == "renamed"


@pytest.mark.parametrize("place", ["nowhere", "file"])
def test_what_is_no_folder_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BundleError, match="no such folder"):
        import_bundle(tmp_path / place, tmp_path / "back")


def test_more_digits_than_the_dtype_has_are_refused(tmp_path: Path) -> None:
    export_bundle(make(tmp_path / "bundle", pair(dtype="bfloat16")), tmp_path / "router")
    value_at(tmp_path / "router", "target.0.v.W", 1.0009765625)
    rewrite_sums(tmp_path / "router")
    with pytest.raises(BundleError, match=r"tensor target\.0\.v\.W: holds a value of more digits, needed only bfloat16"):
        import_bundle(tmp_path / "router", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_weights_that_change_while_they_are_read_are_refused(tmp_path: Path, sound: Path) -> None:
    folder = tmp_path / "router"
    shutil.copytree(sound, folder)
    opened = RouterFolder.open(folder)
    spec = opened.own_spec()
    assert spec is not None
    stream = opened.weights(spec)
    next(stream)
    shutil.copy(folder / "weights.safetensors", tmp_path / "other")
    os.replace(tmp_path / "other", folder / "weights.safetensors")
    with pytest.raises(BundleError, match="changed since it was opened"):
        write_bundle(tmp_path / "back", spec, opened.weights(spec), recipe={}, solve={})
    with pytest.raises(BundleError, match="changed since it was opened"):
        list(stream)
    assert not (tmp_path / "back").exists()


def test_random_bytes_never_do_worse_than_a_kvfit_error(tmp_path: Path, sound: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for number in range(120):
        folder = tmp_path / str(number)
        shutil.copytree(sound, folder)
        path = folder / ("manifest.json", "weights.safetensors", "SHA256SUMS")[number % 3]
        data = bytearray(path.read_bytes())
        for at in torch.randint(len(data), (3,), generator=generator).tolist():
            data[at] = int(torch.randint(256, (1,), generator=generator))
        path.write_bytes(data)
        if number % 3 != 2:
            rewrite_sums(folder)
        with contextlib.suppress(KvfitError):
            import_bundle(folder, tmp_path / f"{number}-back")
            Bundle.open(tmp_path / f"{number}-back").check_weights()
