"""Capture, solve, transfer and handoff on cards that are not the current one: the bits of the CPU, and no other card used.

The machine has three pretend cards. The first stays current, whoever selects another; the source is on the second, the target
on the third. So whatever takes the current card in place of a tensor's own shows: as an error, as other numbers, or as a use of
the first card. Not covered: gradients (`kvfit.fit.refine`), streams of one's own, copies to a card that have not arrived yet.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_cards import pretend_cards

from kvfit.bundle.bundle import Bundle
from kvfit.errors import MismatchError
from kvfit.fit.capture import models
from kvfit.fit.capture.capture import Options, capture
from kvfit.fit.capture.inspect import inspect_model
from kvfit.fit.capture.text import TextOptions
from kvfit.fit.solve.options import Options as SolveOptions
from kvfit.fit.solve.solve import solve
from kvfit.fit.stats import updater
from kvfit.model import cache as caches
from kvfit.runtime import features
from kvfit.runtime.handoff import handoff
from kvfit.runtime.mapper import Mapper

CAPTURE = Options(num_sequences=4, seq_len=48, holdout=0.25)
IN_MEMORY, ON_DISK = 64 << 20, 2_000_000  # bytes
PLACES = ("cuda:1", "cuda:2")


def captured(pair: tuple[Path, Path], out: Path, devices: tuple[str, str], budget: int = IN_MEMORY, **options: Any) -> Path:
    """A store of both models on some devices."""
    loading = [models.Options(dtype="float32", device=device, attn_implementation="eager") for device in devices]
    capture(
        *map(str, pair), out, text=TextOptions("demo:text"), options=CAPTURE, loading=(loading[0], loading[1]), batch_size=2,
        memory_budget=budget, progress=False, **options,
    )  # fmt: skip
    return out


def numbers(store: Path) -> dict[str, str]:
    """A digest of every chunk of a store."""
    return {str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(store.rglob("c.*"))}


def weights(bundle: Path) -> list[torch.Tensor]:
    opened = Bundle.open(bundle)
    return [part for layer in opened.spec.layers for part in opened.layer(layer.kind, layer.layer_index)]


@dataclass(frozen=True)
class Plain:
    """What the CPU gives."""

    pair: tuple[Path, Path]
    store: Path
    bundle: Path


@pytest.fixture(scope="module")
def plain(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Plain:
    folder = tmp_path_factory.mktemp("plain")
    store = captured(tiny_pair, folder / "pair.zarr", ("cpu", "cpu"))
    solve(store, folder / "bundle", options=SolveOptions(top_k=2), progress=False)
    return Plain(tiny_pair, store, folder / "bundle")


@pytest.fixture(scope="module")
def on_disk(plain: Plain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of the CPU whose blocks never were in memory together; its buffer is smaller, so its roundings are others."""
    return captured(plain.pair, tmp_path_factory.mktemp("disk") / "pair.zarr", ("cpu", "cpu"), ON_DISK)


@pytest.mark.parametrize(("budget", "stats_device"), [(IN_MEMORY, None), (IN_MEMORY, "cpu"), (ON_DISK, "cuda:2")])
def test_a_capture_gives_the_bits_of_the_cpu(
    plain: Plain, on_disk: Path, tmp_path: Path, budget: int, stats_device: str | None
) -> None:
    with pretend_cards(3) as cards:
        store = captured(plain.pair, tmp_path / "s.zarr", PLACES, budget, stats_device=stats_device)
    assert numbers(store) == numbers(on_disk if budget == ON_DISK else plain.store)
    assert len(numbers(store)) > 20
    assert cards.used("tensor", "arrives", "event", "record", "pin") == set(PLACES)
    summed_on = stats_device or "cuda:1"
    assert cards.used("select") == {summed_on} - {"cpu"}
    assert cards.used("event", "record", "pin") == ({summed_on} if budget == ON_DISK else set())


@pytest.mark.parametrize(
    ("options", "precision"),
    [(SolveOptions(top_k=2), "float64"), (SolveOptions(top_k=2), "mixed"), (SolveOptions(rank=8), "float64")],
)
def test_a_solve_gives_the_bits_of_the_cpu(plain: Plain, tmp_path: Path, options: SolveOptions, precision: Any) -> None:
    solve(plain.store, tmp_path / "plain", options=options, precision=precision, progress=False)
    with pretend_cards(3) as cards:
        solve(plain.store, tmp_path / "bundle", options=options, precision=precision, device="cuda:1", progress=False)
    for found, needed in zip(weights(tmp_path / "bundle"), weights(tmp_path / "plain"), strict=True):
        assert torch.equal(found, needed)
    assert {card for _, card in cards.log} == {"cuda:1"}


def conversation(plain: Plain, devices: tuple[str, str]) -> dict[str, Any]:
    """Every way of moving a left-padded batch of two and then its next turn; tensors on the host."""
    source, target = (
        models.load(str(folder), options=models.Options(dtype="float32", device=device, attn_implementation="eager")).model
        for folder, device in zip(plain.pair, devices, strict=True)
    )
    mapper = Mapper.from_bundle(Bundle.open(plain.bundle)).bind(source, target)
    ids = torch.randint(3, 400, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    caches_of_source = []
    for length in (28, 39):
        caches_of_source.append(caches.new_cache(source))
        caches.forward(
            source, ids[:, :length].to(devices[0]), caches_of_source[-1], attention_mask=mask[:, :length].to(devices[0])
        )
    first = handoff(mapper, target, ids[:, :29], caches_of_source[0], attention_mask=mask[:, :29], exact_head=1, exact_tail=4)
    guided = handoff(mapper, target, ids, caches_of_source[1], attention_mask=mask, exact_tail=2, recompute=0.25, guide=source)
    next_turn = handoff(
        mapper, target, ids, caches_of_source[1], attention_mask=mask, target_cache=first.cache, target_ids=ids[:, :28]
    )
    fallback = handoff(mapper, target, ids, None, attention_mask=mask, on_error="prefill")
    said = {f"{name} said": moved.generate(max_new_tokens=4) for name, moved in (("guided", guided), ("next", next_turn))}
    found = {"guided": guided, "next": next_turn, "fallback": fallback}
    status = {name: (moved.status, moved.n_mapped, moved.n_exact, moved.n_reused) for name, moved in found.items()}
    pairs = {
        f"{name} {layer_index} {kind}": half
        for name, moved in found.items()
        for layer_index, pair in enumerate(caches.read_cache(moved.cache))
        for kind, half in zip(("keys", "values"), pair, strict=True)
    }
    return {**status, **{name: tensor.cpu() for name, tensor in {**pairs, **said}.items()}}


@pytest.fixture(scope="module")
def said(plain: Plain) -> dict[str, Any]:
    return conversation(plain, ("cpu", "cpu"))


@pytest.mark.parametrize("places", [PLACES, ("cuda:1", "cpu"), ("cpu", "cuda:2")])
def test_a_conversation_moves_as_on_the_cpu(plain: Plain, said: dict[str, Any], places: tuple[str, str]) -> None:
    with pretend_cards(3) as cards:
        found = conversation(plain, places)
    assert found.keys() == said.keys()
    assert [said[name][0] for name in ("guided", "next", "fallback")] == ["applied", "applied", "fallback_prefill"]
    for name, needed in said.items():
        if isinstance(needed, torch.Tensor):
            torch.testing.assert_close(found[name], needed, atol=2e-5, rtol=0, msg=name)  # other chunks, so other roundings
        else:
            assert found[name] == needed
    assert cards.used("tensor") == {place for place in places if place != "cpu"}
    assert "cuda:0" not in {card for _, card in cards.log}


def test_an_inspection_uses_the_card_that_was_named(plain: Plain) -> None:
    with pretend_cards(3) as cards:
        found = inspect_model(str(plain.pair[0]), options=models.Options(device="cuda:1"))
    assert found.supported
    assert {card for _, card in cards.log} == {"cuda:1"}


def test_a_copy_that_another_card_vouches_for_is_found(
    plain: Plain, on_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault that the updater once had: an event of the current card's stream says nothing of another card's copy."""
    monkeypatch.setattr(updater.CopyDone, "record", lambda self: self._event.record())
    with pretend_cards(3) as cards:
        store = captured(plain.pair, tmp_path / "s.zarr", PLACES, ON_DISK)
    assert cards.used("record") == {"cuda:0"}
    assert numbers(store) != numbers(on_disk)
    with pretend_cards(3, current=1):  # as long as one card is used, nothing shows it
        store = captured(plain.pair, tmp_path / "one.zarr", ("cuda:1", "cuda:1"), ON_DISK)
    assert numbers(store) == numbers(on_disk)


@pytest.mark.parametrize(
    ("places", "moved", "found"),
    [
        (PLACES, lambda tensor, _device, dtype=None: tensor.to("cuda", dtype), "cuda"),
        (PLACES, lambda tensor, _device, dtype=None: tensor.to(dtype), "same device, but found"),
        (("cuda:1", "cpu"), lambda tensor, device, dtype=None: tensor.to(device, dtype, non_blocking=True), "NaN"),
    ],
    ids=["current card", "not moved", "not waited for"],
)
def test_a_tensor_in_the_wrong_place_is_found(
    plain: Plain, monkeypatch: pytest.MonkeyPatch, places: tuple[str, str], moved: Any, found: str
) -> None:
    monkeypatch.setattr(features, "moved_to", moved)
    with pretend_cards(3), pytest.raises((RuntimeError, MismatchError), match=found):
        conversation(plain, places)
