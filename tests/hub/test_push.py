"""Push and load against a Hub on the loopback, driven by the real client; and the same to a folder."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from bundle_factory import evaluated_bundle, evaluation, make_bundle, mapper_spec
from hub_server import Fault, File, Hub, running_hub

from kvfit import Mapper, load_mapper
from kvfit.bundle.bundle import Bundle, add_files
from kvfit.errors import BundleError, GateError, MismatchError, RefError
from kvfit.hub.card import MARK
from kvfit.hub.load import resolve
from kvfit.hub.push import push
from kvfit.hub.registry import list_mappers, read_entry
from kvfit.hub.verify import verify

NAME = "org/mapper"
SHARD = "mapper-00001-of-00001.safetensors"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that the client in this process talks to, with a cache of its own."""
    from huggingface_hub import constants

    with running_hub() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", "writer")
        yield running


@pytest.fixture
def bundle(tmp_path) -> Path:
    return evaluated_bundle(tmp_path / "bundle")


def writes(hub: Hub) -> list[str]:
    """What changed anything on the hub."""
    return [line for line in hub.requests if re.match(r"(PUT|POST /api/repos|POST /api/models/[^ ]+/(commit|tag)/)", line)]


# -- the Hub ---------------------------------------------------------------------------------------------------


def test_push_then_tag_then_load(hub, bundle):
    before = {path.name: path.read_bytes() for path in bundle.iterdir() if not path.name.startswith(".")}
    result = push(bundle, NAME, tag="v1")
    repository = hub.repositories[NAME]
    assert (result.status, result.tag, result.commit, result.next_version) == (
        "pushed",
        "v1",
        repository.branches["main"],
        "v2",
    )
    assert repository.tags == {"v1": result.commit}
    assert len(repository.commits) == 2
    assert {name for name in repository.tree if name != ".gitattributes"} == set(before) | {"README.md"}
    assert repository.tree[SHARD].large
    assert {path.name: path.read_bytes() for path in bundle.iterdir() if not path.name.startswith(".")} == before
    # order: the card is validated before anything is made or sent, and the tag comes last
    order = [
        next(i for i, line in enumerate(hub.requests) if part in line)
        for part in ("validate-yaml", "repos/create", "PUT", "/commit/", "/tag/")
    ]
    assert order == sorted(order)
    found = Bundle.open(resolve(NAME, "v1"))
    assert found.weights_digest == Bundle.open(bundle).weights_digest == result.weights_digest
    assert found.folder == resolve(f"{NAME}@v1") == resolve(NAME, result.commit)
    assert str(result) == f"pushed {NAME}@v1 (6 files, 0.0 MB)" or str(result).startswith(f"pushed {NAME}@v1 (")
    assert json.loads(json.dumps(result.to_json()))["commit"] == result.commit
    check = verify(f"{NAME}@v1")
    assert (check.verdict, check.files) == ("pass", 6)
    assert "sound" in str(check)


def test_from_pretrained_is_load_mapper(hub, bundle, tmp_path):
    push(bundle, NAME, tag="v1")
    failed = evaluated_bundle(tmp_path / "failed", verdict="fail")
    push(failed, NAME, tag="v2", require="any")
    assert set(hub.repositories[NAME].tags) == {"v1", "v2"}
    first = Mapper.from_pretrained(NAME, revision="v1", dtype=torch.float64)
    expected = load_mapper(f"{NAME}@v1", dtype=torch.float64)
    assert (first.spec, first.verdict) == (expected.spec, "pass")
    assert first.maps.weights.keys() == expected.maps.weights.keys()
    for key, (weight, bias) in first.maps.weights.items():
        assert weight.dtype == torch.float64
        assert torch.equal(weight, expected.maps.weights[key][0])
        assert torch.equal(bias, expected.maps.weights[key][1])
    with pytest.raises(GateError):
        Mapper.from_pretrained(NAME)
    assert Mapper.from_pretrained(NAME, require="any").verdict == "fail"
    assert Mapper.from_pretrained(bundle).verdict == "pass"
    with pytest.raises(RefError, match="missing"):
        Mapper.from_pretrained("org/absent")


def test_a_second_push_changes_nothing_and_succeeds(hub, bundle):
    first = push(bundle, NAME, tag="v1")
    hub.requests.clear()
    second = push(bundle, NAME, tag="v1")
    assert (second.status, second.commit) == ("unchanged", first.commit)
    assert push(bundle, NAME).status == "unchanged"
    assert writes(hub) == []


def test_pushing_an_old_version_again_does_not_move_the_branch_back(hub, bundle, tmp_path):
    push(bundle, NAME, tag="v1")
    second = push(make_bundle(tmp_path / "other", seed=1), NAME, tag="v2")
    assert push(bundle, NAME, tag="v1").status == "unchanged"
    assert hub.repositories[NAME].branches["main"] == second.commit


def test_a_version_is_never_overwritten(hub, bundle, tmp_path):
    push(bundle, NAME, tag="v1")
    before = dict(hub.repositories[NAME].tags), hub.repositories[NAME].branches["main"]
    other = make_bundle(tmp_path / "other", seed=1)
    with pytest.raises(MismatchError, match=r"org/mapper: version v1 exists with other content.* use --tag v2"):
        push(other, NAME, tag="v1")
    assert (hub.repositories[NAME].tags, hub.repositories[NAME].branches["main"]) == before
    result = push(other, NAME, tag="v2")
    assert result.next_version == "v3"
    assert "evaluation.json" not in hub.repositories[NAME].tree  # it belonged to the other weights
    assert Bundle.open(resolve(NAME)).verdict == "unknown"
    assert Bundle.open(resolve(NAME, "v1")).verdict == "pass"


def test_without_a_tag_the_next_version_is_suggested(hub, bundle):
    result = push(bundle, NAME)
    assert hub.repositories[NAME].tags == {}
    assert "no version was made, the next is --tag v1" in str(result)
    assert push(bundle, NAME, tag="v1").status == "pushed"  # the tag alone
    assert len(hub.repositories[NAME].commits) == 2


def test_dry_run_changes_nothing(hub, bundle):
    result = push(bundle, NAME, tag="v1", dry_run=True)
    assert (result.status, result.commit, len(result.changed)) == ("checked", None, 7)
    assert hub.repositories == {}
    push(bundle, NAME, tag="v1")
    hub.requests.clear()
    add_files(bundle, {"evaluation.md": b"# more\n"})
    assert push(bundle, NAME, tag="v2", dry_run=True).changed == ("SHA256SUMS", "evaluation.md")
    with pytest.raises(MismatchError, match="version v1 exists"):
        push(bundle, NAME, tag="v1", dry_run=True)
    assert writes(hub) == []


def test_private(hub, bundle, monkeypatch, tmp_path):
    push(bundle, NAME, tag="v1", private=True)
    assert hub.repositories[NAME].private
    for token, what in (("reader", "private and your token may not read it"), (None, "private and you are not logged in")):
        monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / f"cache-{token}"))
        with pytest.raises(RefError, match=f"{NAME}: missing, or {what}"):
            resolve(NAME, "v1")


def test_missing_revision_gated_and_no_mapper_are_told_apart(hub, bundle, monkeypatch):
    push(bundle, NAME, tag="v1")
    with pytest.raises(RefError, match=r"org/nothing: missing, or private"):
        resolve("org/nothing")
    with pytest.raises(RefError, match=r"org/mapper: has no revision 'v9'"):
        resolve(NAME, "v9")
    hub.repositories[NAME].gated = True
    monkeypatch.setenv("HF_TOKEN", "reader")
    with pytest.raises(RefError, match=r"org/mapper: gated; accept its conditions"):
        resolve(NAME, "v1")
    hub.create("org/model").commit({"config.json": File(b"{}", False)}, "main")
    with pytest.raises(RefError, match=r"org/model: found a repository without mapper\.json"):
        resolve("org/model")
    hub.faults.append(Fault("GET", "revision/", status=403, times=9))
    with pytest.raises(RefError, match=r"org/mapper: not authorised \(HTTP 403\)"):
        resolve(NAME, "v1")


@pytest.mark.parametrize("token", ["reader", None])
def test_push_without_rights_says_so_and_sends_nothing(hub, bundle, monkeypatch, token):
    monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(RefError, match=r"org/mapper: not authorised \(HTTP 40[13]\)|not logged in"):
        push(bundle, NAME, tag="v1")
    hub.create(NAME)
    with pytest.raises(RefError, match=r"org/mapper: (not authorised \(HTTP 40[13]\)|missing, or private)"):
        push(bundle, NAME, tag="v1")
    assert [line for line in hub.requests if line.startswith("PUT")] == []
    assert len(hub.repositories[NAME].commits) == 1


def test_a_failed_evaluation_is_not_published_by_accident(hub, tmp_path):
    bad = evaluated_bundle(tmp_path / "bad", "fail")
    with pytest.raises(GateError, match="its evaluation failed"):
        push(bad, NAME)
    assert hub.requests == []
    assert push(bad, NAME, require="any").status == "pushed"


def test_all_is_validated_before_anything_is_sent(hub, bundle):
    card = "---\nlibrary_name: kvfit\nbase_model:\n- {model}\nlicense: {license}\n---\n# mine\n"
    for model, license, what in (
        ("/home/me/model", "mit", "metadata field base_model: found '/home/me/model'"),
        ("../model", "mit", "metadata field base_model"),
        ("C:\\\\model", "mit", "metadata field base_model"),
        ("org/small", "'not a licence'", "the Hub refuses its metadata"),
        ("[", "mit", "metadata: "),
    ):
        add_files(bundle, {"README.md": card.format(model=model, license=license).encode()})
        with pytest.raises(BundleError, match=re.escape(what)):
            push(bundle, NAME, tag="v1")
    shard = bundle / SHARD
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(BundleError, match=f"{SHARD}: "):
        push(bundle, NAME, tag="v1")
    assert writes(hub) == []


def test_an_authors_card_is_kept_and_a_generated_one_made_anew(hub, bundle):
    push(bundle, NAME)
    text = hub.repositories[NAME].tree["README.md"].data.decode()
    assert f'load_mapper("{NAME}")' in text
    mine = text.replace(MARK, "").replace("# ", "# My ", 1)
    add_files(bundle, {"README.md": mine.encode()})
    push(bundle, NAME)
    assert hub.repositories[NAME].tree["README.md"].data.decode() == mine


def test_a_repository_of_something_else_is_left_alone(hub, bundle):
    tree = {"config.json": File(b"{}", False), "model.safetensors": File(b"x", True)}
    hub.create(NAME).commit(tree, "main")
    with pytest.raises(MismatchError, match=r"org/mapper: found config\.json, which does not belong to a bundle"):
        push(bundle, NAME, tag="v1")
    assert hub.repositories[NAME].tree == tree
    assert writes(hub) == []


def test_the_commit_landed_but_the_answer_was_500(hub, bundle):
    hub.create(NAME)
    hub.faults.append(Fault("POST", "/commit/", after=True))
    result = push(bundle, NAME, tag="v1")
    repository = hub.repositories[NAME]
    assert result.status == "pushed"
    assert repository.tags == {"v1": repository.branches["main"]}
    assert len(repository.commits) == 2


def test_the_commit_did_not_land(hub, bundle):
    hub.create(NAME)
    hub.faults.append(Fault("POST", "/commit/", status=503))
    with pytest.raises(RefError, match=r"org/mapper: the Hub cannot be reached or refused .*503.*try again"):
        push(bundle, NAME, tag="v1")
    assert hub.repositories[NAME].tags == {}
    assert push(bundle, NAME, tag="v1").status == "pushed"


def test_somebody_else_pushes_other_content_meanwhile(hub, bundle):
    repository = hub.create(NAME)
    theirs = {"README.md": File(b"theirs", False)}
    hub.faults.append(Fault("POST", "/commit/", status=0, action=lambda: repository.commit(theirs, "main")))
    with pytest.raises(MismatchError, match=r"org/mapper: somebody else pushed commit [0-9a-f]{12} meanwhile"):
        push(bundle, NAME, tag="v1")
    assert repository.tree == theirs
    assert repository.tags == {}


def test_two_pushes_of_the_same_bundle_at_once_both_succeed(hub, bundle):
    hub.create(NAME)
    gate = threading.Barrier(2, timeout=20)
    hub.faults += [Fault("POST", "/commit/", status=0, action=gate.wait) for _ in range(2)]
    results, errors = [], []

    def run():
        try:
            results.append(push(bundle, NAME, tag="v1"))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len({result.commit for result in results}) == 1
    assert len(hub.repositories[NAME].commits) == 2
    assert hub.count("POST .*/commit/") == 2  # both did try: one of them met the 412


@pytest.mark.parametrize("same", [True, False])
def test_the_tag_is_made_by_somebody_else_meanwhile(hub, bundle, same):
    repository = hub.create(NAME)

    def action():
        repository.tags["v1"] = repository.branches["main"] if same else repository.log[0]

    hub.faults.append(Fault("POST", "/tag/", status=0, action=action))
    if same:
        assert push(bundle, NAME, tag="v1").commit == repository.tags["v1"]
    else:
        with pytest.raises(MismatchError, match="version v1 exists with other content"):
            push(bundle, NAME, tag="v1")
        assert repository.tags["v1"] == repository.log[0]


def test_the_tag_landed_but_the_answer_was_500(hub, bundle):
    hub.faults.append(Fault("POST", "/tag/", after=True))
    assert push(bundle, NAME, tag="v1").tag == "v1"


def test_a_tag_that_fails_is_made_by_the_next_push(hub, bundle):
    hub.faults.append(Fault("POST", "/tag/", status=500))
    with pytest.raises(RefError, match="org/mapper"):
        push(bundle, NAME, tag="v1")
    assert push(bundle, NAME, tag="v1").status == "pushed"
    assert len(hub.repositories[NAME].commits) == 2


def test_what_did_not_arrive_whole_gets_no_tag(hub, bundle):
    repository = hub.create(NAME)
    commit = repository.commit

    def lose(tree, branch):
        return commit(tree | {SHARD: File(tree[SHARD].data[:-4], True)}, branch)

    repository.commit = lose
    with pytest.raises(BundleError, match=rf"org/mapper, commit [0-9a-f]{{12}}: file {SHARD} did not arrive as it was sent"):
        push(bundle, NAME, tag="v1")
    assert repository.tags == {}


def test_a_pull_request_changes_no_branch_and_makes_no_version(hub, bundle, monkeypatch):
    repository = hub.create(NAME)
    head = repository.branches["main"]
    with pytest.raises(MismatchError, match="needed none of them"):
        push(bundle, NAME, tag="v1", create_pr=True)
    monkeypatch.setenv("HF_TOKEN", "reader")  # who may read may propose
    result = push(bundle, NAME, create_pr=True)
    assert (result.status, result.url) == ("proposed", f"{hub.url}/{NAME}/discussions/1")
    assert repository.branches["main"] == head
    assert SHARD in repository.commits[repository.branches["refs/pr/1"]]


def test_a_truncated_download_is_refused_and_fetched_again(hub, bundle):
    push(bundle, NAME, tag="v1")
    hub.faults.append(Fault("GET", f"resolve/.*{SHARD}", cut=50, times=1))
    # The client asks again for the rest, or gives up; either way nothing torn is ever handed out.
    with contextlib.suppress(RefError):
        Bundle.open(resolve(NAME, "v1")).check_weights()
    assert hub.faults[0].times == 0
    Bundle.open(resolve(NAME, "v1")).check_weights()


def test_content_of_the_right_size_but_other_bytes_is_refused(hub, bundle):
    push(bundle, NAME, tag="v1")
    oid = hub.repositories[NAME].tags["v1"]
    tree = hub.repositories[NAME].commits[oid]
    tree[SHARD] = File(tree[SHARD].data[:-1] + b"\x01", True)
    with pytest.raises(BundleError, match=rf"{SHARD}: digest"):
        Bundle.open(resolve(NAME, "v1"))


def test_offline_by_tag_and_by_hash_in_a_fresh_process(hub, bundle, tmp_path):
    """The environment as a user sets it, and no server at the end."""
    commit = push(bundle, NAME, tag="v1").commit
    code = (
        "import sys, warnings\n"
        "from kvfit.hub.load import resolve\nfrom kvfit.bundle.bundle import Bundle\nfrom kvfit.errors import KvfitError\n"
        "for ref in sys.argv[1:]:\n"
        "    try:\n        print(Bundle.open(resolve(ref)).weights_digest)\n"
        "    except KvfitError as error:\n        print(type(error).__name__, error)\n"
    )
    settings = {
        "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "writer",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | settings

    def run(*refs: str, **more: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", code, *refs], capture_output=True, text=True, env=environment | more, check=True
        )
        return done.stdout.splitlines()

    digest = Bundle.open(bundle).weights_digest
    assert run(f"{NAME}@v1") == [digest]
    hub.requests.clear()
    found = run(f"{NAME}@v1", f"{NAME}@{commit}", f"{NAME}@v2", "org/other", HF_HUB_OFFLINE="1")
    assert found[:2] == [digest, digest]
    assert re.match(r"RefError org/mapper@v2: not in the local cache and offline mode is on", found[2])
    assert re.match(r"RefError org/other: found no such folder; and on the Hub: .*offline mode is on", found[3])
    assert hub.requests == []


@pytest.mark.parametrize("name", [SHARD, "recipe.json", "r2-map.png"])
def test_a_damaged_file_of_the_cache_is_named_with_what_to_delete(hub, bundle, name):
    """The client serves what is in its cache whatever it holds; once the file is deleted, it fetches it again."""
    add_files(bundle, {"r2-map.png": b"\x89PNG"})
    push(bundle, NAME, tag="v1")
    blob = Path(os.path.realpath(resolve(NAME, "v1") / name))
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    hub.requests.clear()
    with pytest.raises(BundleError, match=rf"file {name}: .*delete {re.escape(str(blob))} and load it again"):
        load_mapper(NAME, revision="v1")
    with pytest.raises(BundleError, match=rf"file {name}: .*delete {re.escape(str(blob))} and load it again"):
        verify(NAME, revision="v1")
    blob.unlink()
    assert load_mapper(NAME, revision="v1").verdict == "pass"
    blob.write_bytes(blob.read_bytes()[:-1])
    with pytest.raises(BundleError, match=rf"delete {re.escape(str(blob))} and load it again"):
        load_mapper(NAME, revision="v1")


def test_a_wrong_digest_is_refused_by_name_before_anything_is_sent(hub, bundle):
    add_files(bundle, {"r2-map.png": b"\x89PNG", "evaluation.md": b"# x\n", "README.md": b"mine"})
    for name in ("r2-map.png", "evaluation.md", "README.md", SHARD):
        data = (bundle / name).read_bytes()
        (bundle / name).write_bytes(bytes([data[0] ^ 1]) + data[1:])
        with pytest.raises(BundleError, match=f"file {name}: "):
            push(bundle, NAME, tag="v1")
        (bundle / name).write_bytes(data)
    assert hub.requests == []


def test_a_picture_that_arrived_as_another_is_found_though_it_is_a_large_file(hub, bundle):
    """The Hub keeps pictures as large files, whose name in git is that of a pointer: their content is what is compared."""
    add_files(bundle, {"r2-map.png": b"\x89PNG"})
    repository = hub.create(NAME)
    commit = repository.commit

    def lose(tree, branch):
        return commit(tree | {"r2-map.png": File(b"\x88PNG", True)}, branch)

    repository.commit = lose
    with pytest.raises(BundleError, match=r"file r2-map\.png did not arrive as it was sent"):
        push(bundle, NAME, tag="v1")
    assert repository.tags == {}
    repository.commit = commit
    assert push(bundle, NAME, tag="v1").status == "pushed"
    assert repository.tree["r2-map.png"].large
    assert push(bundle, NAME, tag="v1").status == "unchanged"


def test_every_file_that_a_bundle_may_have_is_published_and_fetched(hub, bundle):
    names = ("README.md", "LICENSE", "evaluation.md", "evaluation.html", "fit.yaml", "r2-map.png", "curve.svg")
    add_files(bundle, {name: f"of {name}".encode() for name in names if name != "README.md"})
    push(bundle, NAME, tag="v1")
    found = Bundle.open(resolve(NAME, "v1"))
    assert set(names) < set(found.digests)
    # A file that does not belong to a bundle is not fetched, so it stops nobody.
    repository = hub.repositories[NAME]
    repository.commit(repository.tree | {"evaluation.py": File(b"raise SystemExit", False)}, "main")
    assert Bundle.open(resolve(NAME)).digests == found.digests


def test_local_files_only(hub, bundle):
    push(bundle, NAME, tag="v1")
    with pytest.raises(RefError, match=r"org/mapper@v1: not in the local cache and local_files_only forbids asking the Hub"):
        resolve(NAME, "v1", local_files_only=True)
    folder = resolve(NAME, "v1")
    hub.requests.clear()
    assert resolve(NAME, "v1", local_files_only=True) == folder
    assert hub.requests == []


# -- a folder --------------------------------------------------------------------------------------------------


def test_push_to_a_folder(bundle, tmp_path):
    home = tmp_path / "published"
    first = push(bundle, home)
    assert (first.status, first.tag, first.commit, first.next_version) == ("pushed", "v1", None, "v2")
    assert push(bundle, home).status == push(bundle, home, tag="v1").status == "unchanged"
    other = make_bundle(tmp_path / "other", seed=1)
    with pytest.raises(MismatchError, match=r"version v1 exists in .* with other content.* use --tag v2"):
        push(other, home, tag="v1")
    assert push(other, home, dry_run=True).tag == "v2"
    assert sorted(path.name for path in home.iterdir()) == ["v1"]
    assert push(other, home).tag == "v2"
    for number in range(3, 11):
        push(make_bundle(tmp_path / f"b{number}", seed=number), home, tag=f"v{number}")
    assert resolve(home) == resolve(str(home)) == home / "v10"
    assert resolve(home, "v1") == resolve(f"{home}@v1") == home / "v1"
    assert Bundle.open(home / "v1").weights_digest == first.weights_digest
    with pytest.raises(RefError, match=r"no version 'v77'; there are v1, v2"):
        resolve(home, "v77")
    assert str(home) not in (home / "v1" / "README.md").read_text()


def test_a_copy_that_went_wrong_is_not_published(bundle, tmp_path, monkeypatch):
    copy = shutil.copyfile

    def torn(source, destination):
        copy(source, destination)
        if str(destination).endswith(SHARD):
            os.truncate(destination, os.path.getsize(destination) - 4)

    monkeypatch.setattr(shutil, "copyfile", torn)
    with pytest.raises(BundleError, match=SHARD):
        push(bundle, tmp_path / "published", tag="v1")
    assert list((tmp_path / "published").iterdir()) == []


def test_the_same_version_is_published_by_somebody_else_meanwhile(bundle, tmp_path, monkeypatch):
    home = tmp_path / "published"
    copy = shutil.copyfile

    def race(source, destination):
        monkeypatch.setattr(shutil, "copyfile", copy)
        push(bundle, home, tag="v1")
        copy(source, destination)

    monkeypatch.setattr(shutil, "copyfile", race)
    assert push(bundle, home, tag="v1").tag == "v1"
    assert [path.name for path in home.iterdir()] == ["v1"]


def test_a_bundle_is_no_place_to_publish_to(bundle):
    with pytest.raises(MismatchError, match="is itself a bundle"):
        push(bundle, bundle, tag="v1")


@pytest.mark.parametrize("tag", ["../x", "", ".v1", "a/b", "v1\n"])
def test_a_tag_is_no_path(bundle, tmp_path, tag):
    with pytest.raises(MismatchError, match="--tag: found"):
        push(bundle, tmp_path / "published", tag=tag)
    assert not (tmp_path / "published").exists()


@pytest.mark.parametrize("to", ["name", "a/b/c", "org/na me", "org/name@v1", ""])
def test_a_destination_that_is_neither_repository_nor_folder(bundle, to):
    with pytest.raises(RefError, match="needed org/name or a folder"):
        push(bundle, to)


# -- the registry ----------------------------------------------------------------------------------------------


def test_offline_says_how_to_push_to_a_folder(bundle):
    with pytest.raises(RefError, match=r"org/mapper: found offline mode .* push to a folder: \./org/mapper"):
        push(bundle, "org/mapper")


def test_push_writes_the_entry_to_propose(hub, bundle, tmp_path):
    registry = tmp_path / "registry"
    registry.mkdir()
    with pytest.raises(MismatchError, match="needs a version"):
        push(bundle, NAME, registry=registry)
    (tmp_path / "file").touch()
    with pytest.raises(RefError, match="found a file, needed a folder"):
        push(bundle, NAME, tag="v1", registry=tmp_path / "file")
    with pytest.raises(BundleError, match="cannot be written in"):
        push(bundle, NAME, tag="v1", registry=tmp_path / "file" / "below")
    assert hub.requests == []
    result = push(bundle, NAME, tag="v1", registry=registry, license="apache-2.0")
    assert result.registry == str(registry / "org--mapper.toml")
    entry = read_entry(registry / "org--mapper.toml")
    assert (entry.repo, entry.commit, entry.revision, entry.license) == (NAME, result.commit, "v1", "apache-2.0")
    assert dict(entry.scores)["share_of_gap"] == 0.6
    assert (entry.verdict, entry.weights_digest) == ("pass", result.weights_digest)
    assert list_mappers(folder=registry) == [entry]


def test_a_published_folder_is_registered_next_to_the_entries(bundle, tmp_path):
    registry = tmp_path / "registry"
    registry.mkdir()
    with pytest.raises(MismatchError, match="needed a folder inside the registry"):
        push(bundle, tmp_path / "elsewhere", registry=registry)
    push(bundle, registry / "demo", registry=registry)
    entry = read_entry(registry / "demo.toml")
    assert (entry.repo, entry.folder, entry.commit, entry.pin) == (None, "demo", None, "v1")
    assert resolve(entry.location, entry.pin) == registry / "demo" / "v1"


def published_to(kind, registry):
    return NAME if kind == "hub" else registry / "mapper"


@pytest.mark.parametrize("kind", ["hub", "folder"])
@pytest.mark.parametrize(
    ("tags", "kept"),
    [
        (["v1", "v2", "v1"], "v2"),  # pushed again
        (["v1", "v10", "v9"], "v10"),  # by number, not by spelling
        (["v2", "v1.1"], "v2"),  # an older line
        (["v1", "v2", "v2"], "v2"),
        (["v1", "final", "v1"], "final"),  # a name has no order, so what is held already changes nothing
        (["final", "v1", "final"], "v1"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_a_registry_entry_never_goes_back(tmp_path, caplog, kind, tags, kept):
    registry = tmp_path / "registry"
    bundles = {tag: make_bundle(tmp_path / tag, seed=number) for number, tag in enumerate(dict.fromkeys(tags))}
    for tag in tags:
        result = push(bundles[tag], published_to(kind, registry), tag=tag, registry=registry)
    (entry,) = list_mappers(folder=registry)
    assert entry.revision == kept
    assert entry.weights_digest == Bundle.open(bundles[kept]).weights_digest
    assert (result.registry is None) == (tags[-1] != kept) == ("delete the file and push again" in caplog.text)
    (file,) = registry.glob("*.toml")  # no unfinished file is left
    assert sorted(path.name for path in registry.iterdir() if path.is_file()) == [file.name]
    file.unlink()  # going back on purpose
    assert push(bundles[tags[0]], published_to(kind, registry), tag=tags[0], registry=registry).status == "unchanged"
    assert list_mappers(folder=registry)[0].revision == tags[0]


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("name", ["ü", "a b", ".hidden", "-x", "a" * 65])
def test_a_folder_that_the_registry_cannot_name_is_refused_before_anything_is_written(bundle, tmp_path, name, dry_run):
    registry = tmp_path / "registry"
    with pytest.raises(MismatchError, match=r"found --to .*, needed a folder whose name has only letters, digits"):
        push(bundle, registry / name, registry=registry, dry_run=dry_run)
    assert not registry.exists()
    assert push(bundle, registry / name, dry_run=dry_run).tag == "v1"  # without the registry, any name is fine


@pytest.mark.parametrize("dry_run", [True, False])
def test_an_entry_that_cannot_be_made_is_refused_before_anything_is_written(hub, bundle, tmp_path, monkeypatch, dry_run):
    registry = tmp_path / "registry"
    (registry / "org--mapper.toml").mkdir(parents=True)
    with pytest.raises(RefError, match=r"found org--mapper\.toml, which is not a file"):
        push(bundle, NAME, tag="v1", registry=registry, dry_run=dry_run)
    monkeypatch.setattr("kvfit.hub.registry.FORMAT_VERSION", 1)  # an entry that the registry's own rules refuse
    with pytest.raises(BundleError, match=r"registry entry of .*, field format_version"):
        push(bundle, "org/other", tag="v1", registry=registry, dry_run=dry_run)
    assert hub.requests == []


def test_a_folder_is_found_in_the_registry_however_it_is_written(bundle, tmp_path, monkeypatch):
    home = tmp_path / "registry" / "pair"
    home.mkdir(parents=True)
    monkeypatch.chdir(home)
    push(bundle, ".", tag="v1", registry="..")
    monkeypatch.setenv("HOME", str(tmp_path))
    push(bundle, "~/registry/home", tag="v1", registry=tmp_path / "registry")
    assert {entry.folder for entry in list_mappers(folder=tmp_path / "registry")} == {"pair", "home"}


def test_a_dry_run_says_that_the_real_one_could_not_write(hub, bundle, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(BundleError, match="cannot be written in"):
        push(bundle, tmp_path / "file" / "below", dry_run=True)
    hub.create(NAME)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(RefError, match="not logged in"):
        push(bundle, NAME, tag="v1", dry_run=True)


@pytest.mark.usefixtures("hub")
def test_scores_of_other_weights_are_not_registered(bundle, tmp_path):
    other = make_bundle(tmp_path / "other", mapper_spec(), seed=1)
    add_files(other, {"evaluation.json": json.dumps(evaluation(Bundle.open(bundle))).encode()})
    (tmp_path / "registry").mkdir()
    push(other, NAME, tag="v1", registry=tmp_path / "registry")
    entry = read_entry(tmp_path / "registry" / "org--mapper.toml")
    assert entry.verdict == "unknown"
    assert [name for name, _ in entry.scores] == ["r2_keys", "r2_values"]


@pytest.mark.usefixtures("hub")
def test_a_published_mapper_is_no_model(bundle):
    from kvfit.fit.capture import models

    push(bundle, NAME, tag="v1")
    with pytest.raises(RefError, match=rf"{NAME}: found no config\.json there, needed a model that transformers can load"):
        models.load(NAME)
    with pytest.raises(RefError, match=rf"{NAME}: found no such folder; and on the Hub: {NAME}: has no revision 'v7'"):
        models.load_config(f"{NAME}@v7")
    with pytest.raises(RefError, match="org/nothing: found no such folder; and on the Hub: org/nothing: missing, or private"):
        models.load("org/nothing")
