"""load_mapper: refs, the gate of the verdict, and what it imports."""

import struct
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch
from bundle_factory import evaluated_bundle, make_bundle, mapper_spec, weights

from kvfit import load_mapper
from kvfit.bundle import manifest
from kvfit.bundle.bundle import Bundle
from kvfit.errors import BundleError, GateError, MismatchError, RefError
from kvfit.hub.load import resolve
from kvfit.hub.refs import is_repository, is_tag, is_version, next_version, split_ref, version_key


def test_a_folder_that_passed_is_silent(tmp_path):
    folder = evaluated_bundle(tmp_path / "b")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for ref in (folder, str(folder)):
            mapper = load_mapper(ref)
    assert (mapper.spec, mapper.verdict) == (mapper_spec(), "pass")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
def test_dtype(tmp_path, dtype):
    mapper = load_mapper(evaluated_bundle(tmp_path / "b"), dtype=dtype, device="cpu")
    size = sum(weight.numel() + bias.numel() for _, _, weight, bias in weights(mapper_spec()))
    assert mapper.nbytes == size * (dtype or torch.float32).itemsize


def test_a_failed_verdict_is_refused_unless_asked_for(tmp_path):
    folder = evaluated_bundle(tmp_path / "b", "fail")
    with pytest.raises(GateError, match=r"its evaluation failed .*require='any'"):
        load_mapper(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_mapper(folder, require="any").verdict == "fail"
    with pytest.raises(MismatchError, match="needed 'pass' or 'any'"):
        load_mapper(folder, require="none")


def test_unknown_warns_once_per_bundle_and_works(tmp_path):
    first, second = make_bundle(tmp_path / "a"), make_bundle(tmp_path / "b", seed=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for folder in (first, first, second, first):
            load_mapper(folder)
    messages = [str(item.message) for item in caught]
    assert len(messages) == 2, messages
    assert all("was not evaluated" in message for message in messages)
    assert all(item.filename == __file__ for item in caught)


@pytest.mark.parametrize("ref", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "../nowhere@v1"])
def test_a_path_that_is_not_there_is_never_asked_of_the_hub(ref):
    with pytest.raises(RefError, match="no such folder"):
        resolve(ref)


@pytest.mark.parametrize(
    "ref", ["name", "a/b/c", "org/na me", "org/name@", "org//name", "https://example.org/x", "org/..", "org/a--b"]
)
def test_what_is_no_ref(ref):
    with pytest.raises(RefError, match=r"needed|found no revision"):
        resolve(ref)


def test_a_revision_twice(tmp_path):
    with pytest.raises(RefError, match="needed one of the two"):
        resolve("org/name@v1", "v2")
    folder = make_bundle(tmp_path / "b")
    with pytest.raises(RefError, match="is one bundle, so it has no revision 'v1'"):
        resolve(folder, "v1")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RefError, match=r"no mapper\.json and no published versions"):
        resolve(tmp_path / "empty")


@pytest.mark.parametrize("ref", ["", " ", 3, [], object()])
def test_an_empty_ref_is_not_the_working_folder(tmp_path, monkeypatch, ref):
    make_bundle(tmp_path / "v1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RefError, match=r"ref: found .*, needed a folder, or org/name"):
        load_mapper(ref)


def test_experiments_are_no_versions(tmp_path, monkeypatch):
    for number, name in enumerate(("baseline", "top-8", "zz_last")):
        make_bundle(tmp_path / name, seed=number)
    monkeypatch.chdir(tmp_path)
    for ref in (tmp_path, str(tmp_path), "."):
        with pytest.raises(RefError, match=r"names are not versions \(baseline, top-8, zz_last\).*revision='baseline'"):
            resolve(ref)
    assert resolve(tmp_path, "top-8") == resolve(f"{tmp_path}@top-8") == tmp_path / "top-8"
    # As soon as something was published there, that is what the folder means.
    make_bundle(tmp_path / "1.2")
    make_bundle(tmp_path / "1.10")
    assert resolve(tmp_path) == tmp_path / "1.10"
    make_bundle(tmp_path / "v2")
    assert resolve(tmp_path) == tmp_path / "v2"


def test_a_device_that_is_not_here(tmp_path):
    folder = evaluated_bundle(tmp_path / "b")
    with pytest.raises(MismatchError, match="device: found 'foo'"):
        load_mapper(folder, device="foo")
    with pytest.raises(MismatchError, match="dtype: found 'half'"):
        load_mapper(folder, dtype="half")


def test_a_torn_bundle_is_a_bundle_error(tmp_path):
    folder = make_bundle(tmp_path / "b")
    (folder / "solve.json").unlink()
    with pytest.raises(BundleError, match=r"solve\.json"):
        load_mapper(folder)


SHARD = "mapper-00001-of-00001.safetensors"


def one_bit_off(folder):
    """Change a weight a little: all of the file but its digest is as it should be."""
    data = bytearray((folder / SHARD).read_bytes())
    data[-1] ^= 1
    (folder / SHARD).write_bytes(data)


def test_altered_weights_are_refused_unless_only_sizes_are_asked_for(tmp_path):
    folder = evaluated_bundle(tmp_path / "b")
    one_bit_off(folder)
    with pytest.raises(BundleError, match=rf"bundle .*: file {SHARD}: digest"):
        load_mapper(folder)
    assert load_mapper(folder, verify="size").verdict == "pass"
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-4])
    with pytest.raises(BundleError, match="its header describes"):
        load_mapper(folder, verify="size")
    with pytest.raises(MismatchError, match="verify: found 'no', needed 'digest' or 'size'"):
        load_mapper(folder, verify="no")


def test_what_altered_weights_lead_to_is_not_what_is_told(tmp_path):
    folder = evaluated_bundle(tmp_path / "b")
    data = (folder / SHARD).read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")  # the library puts layers.0.keys.bias first
    (folder / SHARD).write_bytes(data[:begin] + struct.pack("<f", float("nan")) + data[begin + 4 :])
    with pytest.raises(BundleError, match=r"layers\.0\.keys\.bias: holds NaN"):
        load_mapper(folder, verify="size")
    with pytest.raises(BundleError, match="digest"):
        load_mapper(folder)


def test_other_files_are_checked_whatever_is_asked_for(tmp_path):
    folder = evaluated_bundle(tmp_path / "b")
    (folder / "solve.json").write_text("{}\n")
    with pytest.raises(BundleError, match=r"solve\.json: digest"):
        load_mapper(folder, verify="size")


def test_weights_are_read_while_they_are_hashed(tmp_path, monkeypatch):
    """The digest of the weights comes no sooner than the last of them was read; the other way round it never would."""
    folder = evaluated_bundle(tmp_path / "b")
    read = threading.Event()
    layer, digest = Bundle.layer, manifest.file_digest

    def reading(self, kind, layer_index, **options):
        found = layer(self, kind, layer_index, **options)
        if (kind, layer_index) == ("values", 2):
            read.set()
        return found

    def hashing(path):
        assert path.name != SHARD or read.wait(30)
        return digest(path)

    monkeypatch.setattr(Bundle, "layer", reading)
    monkeypatch.setattr(manifest, "file_digest", hashing)
    assert load_mapper(folder).verdict == "pass"


def test_a_name_that_could_be_a_folder_is_told_at_once(monkeypatch, tmp_path):
    """Nothing answers at the address, which is told within seconds and with both meanings of the name."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    started = time.monotonic()
    with pytest.raises(RefError, match=r"runs/mapper: found no such folder; and on the Hub: .*the Hub cannot be reached"):
        resolve("runs/mapper")
    assert time.monotonic() - started < 20


def test_names():
    assert split_ref("org/name@v1") == ("org/name", "v1")
    assert split_ref("org/name") == ("org/name", None)
    assert next_version([]) == next_version(["main", "vx"]) == "v1"
    assert next_version(["v9", "v10", "v2"]) == "v11"
    assert sorted(["v10", "v2", "beta", "v1"], key=version_key) == ["beta", "v1", "v2", "v10"]
    assert next_version(["1.9", "v1"]) == "v2"
    assert sorted(["1.10", "v2", "1.9", "v1.1", "v1", "beta"], key=version_key) == ["beta", "v1", "v1.1", "1.9", "1.10", "v2"]
    assert all(is_version(name) for name in ("v1", "2", "1.0", "v1.10.2"))
    assert not any(is_version(name) for name in ("beta", "v", "v1-beta", "v1.0-rc_1", "1.", "v1\n", "demo-2"))
    assert is_tag("v1.0-rc_1")
    assert not any(is_tag(tag) for tag in ("", "..", "a..b", "a/b", ".a", "-a", "v1\n", "é"))
    assert is_repository("org/name")
    assert not any(is_repository(name) for name in ("name", "a/b/c", "/a/b", "./a", "a/..", "demo:source", "a/b\n", "-a/b"))


def test_loading_imports_no_more_than_it_needs():
    code = (
        "import sys\nfrom kvfit import load_mapper\n"
        "heavy = ('transformers', 'zarr', 'datasets', 'click', 'huggingface_hub', 'jinja2', 'filelock')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
