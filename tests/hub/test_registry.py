"""The registry: its schema, what is found in it, and that the entries shipped with kvfit are right."""

import json
import os
from pathlib import Path

import pytest
from bundle_factory import evaluated_bundle, mapper_spec
from hypothesis import given
from hypothesis import strategies as st

from kvfit.bundle.bundle import Bundle, add_files
from kvfit.errors import BundleError, RefError
from kvfit.hub.card import render_card
from kvfit.hub.load import load_mapper, resolve
from kvfit.hub.push import push
from kvfit.hub.registry import (
    MapperEntry,
    ModelPin,
    entry_file,
    find_mapper,
    list_mappers,
    read_entry,
    registry_folder,
    render_entry,
    scores,
)

ENTRY = """schema = 1
repo = "org/mapper"
revision = "v1"
commit = "0123456789012345678901234567890123456789"
format_version = 1
weights_digest = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
nbytes = 1234
license = "apache-2.0"
verdict = "pass"

[source]
ref = "org/small"
revision = "1111111111111111111111111111111111111111"
family = "llama"

[target]
ref = "org/large"
revision = "2222222222222222222222222222222222222222"
family = "llama"

[scores]
share_of_gap = 0.5
kl = 0.25
"""


def write(folder: Path, name: str = "a.toml", **changes: str) -> Path:
    text = ENTRY
    for old, new in changes.values():
        assert old in text
        text = text.replace(old, new)
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def test_an_entry_reads_and_is_written_the_same(tmp_path):
    entry = read_entry(write(tmp_path))
    assert (entry.location, entry.pin, entry.name) == ("org/mapper", "0123456789" * 4, "org/mapper@v1")
    assert dict(entry.scores) == {"share_of_gap": 0.5, "kl": 0.25}
    assert render_entry(entry) == ENTRY
    assert entry_file(entry) == "org--mapper.toml"
    assert str(entry).startswith("org/mapper@v1  org/small -> org/large  pass  0.0 MB  share_of_gap=0.5")
    assert entry.to_json()["source"] == {"ref": "org/small", "revision": "1" * 40, "family": "llama"}


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("schema = 1", "schema = 2", "schema"),
        ('repo = "org/mapper"\n', "", "repo"),
        ('repo = "org/mapper"', 'repo = "org/mapper"\nfolder = "x"', "repo"),
        ('repo = "org/mapper"', 'repo = "../mapper"', "repo"),
        ('commit = "0123456789012345678901234567890123456789"\n', "", "commit"),
        ('commit = "0123', 'commit = "0123g', "commit"),
        ('revision = "v1"', 'revision = "v1/../.."', "revision"),
        ("format_version = 1", "format_version = 99", "format_version"),
        ("sha256:0000", "0000", "weights_digest"),
        ("nbytes = 1234", 'nbytes = "1234"', "nbytes"),
        ("nbytes = 1234", "nbytes = true", "nbytes"),
        ('verdict = "pass"', 'verdict = "good"', "verdict"),
        ('verdict = "pass"\n', 'verdict = "pass"\nstars = 5\n', "stars"),
        ('family = "llama"\n\n[target]', "\n[target]", "source.family"),
        ("share_of_gap = 0.5", "share_of_gap = nan", "the number nan, needed a finite one"),
        ("share_of_gap = 0.5", 'share_of_gap = "much"', "scores"),
        ("[scores]", "[scores", "TOML"),
        ("schema = 1", "schema = 1\nschema = 1", "TOML"),
        ("schema = 1", "schema = 1\nhome = '/'", "home"),
        ("share_of_gap = 0.5", "share_of_gap = " + "9" * 400, "beyond 64 bits"),
        ("nbytes = 1234", "nbytes = " + "9" * 400, "beyond 64 bits"),
        ('family = "llama"', 'family = "lla\\u001b[2Jma"', "source.family: found .*needed printable"),
        ('license = "apache-2.0"', 'license = "mit\\u202e"', "license: found .*needed printable"),
        ("nbytes = 1234", "nbytes = 1979-05-27", "a date"),
        ("schema = 1", "deep = " + "[" * 20000 + "\nschema = 1", "nested deeper"),
        ("schema = 1", "long = '" + "x" * (64 << 10) + "'\nschema = 1", "more than 65536 bytes"),
    ],
)
def test_an_entry_that_is_not_as_the_schema_says(tmp_path, caplog, old, new, field):
    path = write(tmp_path, change=(old, new))
    with pytest.raises(RefError, match=rf"registry file 'a\.toml'.*{field}") as caught:
        read_entry(path)
    assert "\n" not in str(caught.value)
    # The others are found all the same, and the log says which was left out.
    write(tmp_path, "b.toml", repo=("org/mapper", "org/other"))
    assert [entry.repo for entry in list_mappers(folder=tmp_path)] == ["org/other"]
    assert find_mapper("org/small", "org/large", folder=tmp_path).repo == "org/other"
    assert f"{caught.value}; left out" in caplog.messages


def test_what_is_no_regular_file_is_left_out(tmp_path, caplog):
    write(tmp_path, "good.toml")
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "dangling.toml").symlink_to("nowhere")
    (tmp_path / "escape\x1b[2J.toml").write_text("schema = 2")
    (tmp_path / "linked.toml").symlink_to("good.toml")
    assert len(list_mappers(folder=tmp_path)) == 2  # the good one, and the link to it
    assert len(caplog.messages) == 5
    for name in ("pipe", "zero", "folder", "dangling"):
        assert any(f"registry file '{name}.toml': cannot be read" in message for message in caplog.messages)
    assert all(message.isprintable() for message in caplog.messages)


_TEXT = st.text(st.characters(exclude_categories=("Cs",)).filter(str.isprintable), min_size=1, max_size=30)


@given(_TEXT, _TEXT, st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 2**53))
def test_any_printable_text_and_number_survives_toml(tmp_path_factory, license, ref, score, nbytes):
    entry = MapperEntry(
        schema=1, repo=None, folder="demo", revision="v1", commit=None, format_version=1, weights_digest="sha256:" + "0" * 64,
        nbytes=nbytes, license=license, verdict="unknown", source=ModelPin(ref, "", "x"), target=ModelPin("a", "b", ref),
        scores=(("kl", score),),
    )  # fmt: skip
    path = tmp_path_factory.mktemp("entry") / "x.toml"
    path.write_bytes(render_entry(entry).encode())
    assert read_entry(path) == entry


@pytest.fixture
def registry(tmp_path):
    home = tmp_path / "registry"
    write(home, "a.toml")
    write(home, "b.toml", n=("org/mapper", "org/better"), s=("share_of_gap = 0.5", "share_of_gap = 0.75"))
    write(
        home, "c.toml", n=("org/mapper", "org/failed"), s=("share_of_gap = 0.5", "share_of_gap = 0.99"), v=('"pass"', '"fail"')
    )
    write(home, "d.toml", n=("org/mapper", "org/onward"), m=('"org/large"', '"org/huge"'))
    (home / "README.md").write_text("not an entry")
    return home


def test_the_best_of_a_pair_comes_first(registry):
    assert [entry.repo for entry in list_mappers(folder=registry)] == ["org/onward", "org/better", "org/mapper", "org/failed"]
    assert find_mapper("org/small", "org/large", folder=registry).repo == "org/better"


def test_spelling_does_not_rank(registry):
    write(registry, "e.toml", n=("org/mapper", "org/spelled"), m=('"org/large"', '"Org/Large"'))
    assert find_mapper("org/small", "org/large", folder=registry).repo == "org/better"


def test_filters(registry):
    def names(source=None, target=None):
        return [entry.repo for entry in list_mappers(source, target, folder=registry)]

    assert names("org/small", "org/huge") == names(target="org/huge") == ["org/onward"]
    assert len(names("ORG/Small")) == len(names("org/small@" + "1" * 40)) == 4
    assert names("org/small@" + "3" * 40) == names("org/large") == []


def test_when_there_is_none_the_near_ones_are_named(registry):
    with pytest.raises(RefError) as caught:
        find_mapper("org/small", "org/other", folder=registry)
    message = str(caught.value)
    assert "no mapper from org/small to org/other" in message
    assert "from org/small: org/onward@v1 (org/small -> org/huge)" in message
    assert "to org/other: none" in message
    assert "kvfit capture org/small org/other" in message
    with pytest.raises(RefError, match=r"from org/x: none; to org/huge: org/onward@v1"):
        find_mapper("org/x", "org/huge", folder=registry)


def test_load_through_the_registry(tmp_path, monkeypatch):
    home = tmp_path / "registry"
    home.mkdir()
    bundle = evaluated_bundle(tmp_path / "bundle")
    push(bundle, home / "pair", registry=home)
    monkeypatch.setattr("kvfit.hub.registry.registry_folder", lambda: home)
    mapper = load_mapper(source="org/small", target="org/large")
    assert mapper.spec == mapper_spec()
    assert mapper.verdict == "pass"
    with pytest.raises(RefError, match="no mapper from org/large to org/small"):
        load_mapper(source="org/large", target="org/small")
    # the registry pins content: another mapper under the same name is not what was registered
    (home / "pair" / "v1").rename(home / "pair" / "old")
    push(evaluated_bundle(tmp_path / "other", seed=1), home / "pair", tag="v1")
    with pytest.raises(BundleError, match="the registry says"):
        load_mapper(source="org/small", target="org/large")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({}, "needed a ref, or both"),
        ({"source": "a"}, "needed a ref, or both"),
        ({"ref": "x", "source": "a"}, "needed one of the two"),
    ],
)
def test_a_ref_or_a_pair(arguments, what):
    with pytest.raises(RefError, match=what):
        load_mapper(**arguments)


def test_the_scores_are_those_of_the_way_that_was_judged(tmp_path):
    """Speed and work stand beside the recall of the same way; those of an evaluation of other weights are no one's."""
    folder = evaluated_bundle(tmp_path / "b")
    document = dict(Bundle.open(folder).evaluation)
    row = {
        "way": "handoff",
        "recall": 0.75,
        "kl": 0.25,
        "speed": 3.5,
        "share_of_work": 0.125,
        "milliseconds": 2.0,
        "top1": None,
    }
    document["ways"] = [row | {"way": "transfer", "speed": 20.0, "recall": 0.0}, row]
    add_files(folder, {"evaluation.json": json.dumps(document).encode()})
    found = dict(scores(Bundle.open(folder)))
    assert {name: found[name] for name in ("recall", "kl", "speed", "share_of_work")} == {
        "recall": 0.75, "kl": 0.25, "speed": 3.5, "share_of_work": 0.125
    }  # fmt: skip
    assert "top1" not in found
    add_files(folder, {"evaluation.json": json.dumps(document | {"weights_digest": "sha256:" + "0" * 64}).encode()})
    assert set(dict(scores(Bundle.open(folder)))) == {"r2_keys", "r2_values"}


def test_what_is_shipped_is_right():
    """Every entry that comes with kvfit reads; every local one is there, whole, and as its entry says."""
    home = registry_folder()
    assert home is not None
    files = sorted(home.glob("*.toml"))
    assert list_mappers() == list_mappers(folder=home)
    for path in files:
        entry = read_entry(path)
        assert path.name == entry_file(entry)
        assert path.read_text(encoding="utf-8") == render_entry(entry)
        if entry.folder is not None:
            bundle = Bundle.open(resolve(entry.location, entry.pin))
            bundle.check_weights()
            assert bundle.weights_digest == entry.weights_digest
            assert (bundle.verdict, bundle.nbytes) == (entry.verdict, entry.nbytes)
            assert (bundle.spec.source.ref, bundle.spec.target.ref) == (entry.source.ref, entry.target.ref)
            assert scores(bundle) == entry.scores
            assert (bundle.folder / "README.md").read_text(encoding="utf-8") == render_card(bundle, license=entry.license)
    listed = {entry.folder for entry in list_mappers()} - {None}
    assert {path.name for path in home.iterdir() if path.is_dir()} == listed
