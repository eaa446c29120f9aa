"""Refinement repairs a damaged map, ships nothing that is not better, and folds its corrections away exactly."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfit.bundle.bundle import Bundle, write_bundle
from kvfit.errors import BundleError, MismatchError, OptionError, TextError
from kvfit.fit.capture import models
from kvfit.fit.capture.text import TextOptions
from kvfit.fit.refine.correction import Correction, whitener
from kvfit.fit.refine.examples import Example, examples, with_rest
from kvfit.fit.refine.refine import Options, Schedule, refine
from kvfit.fit.refine.training import Continuation, holdout_divergence
from kvfit.fit.stats import digests
from kvfit.model import cache as caches
from kvfit.model.digests import tokenizer_fingerprint
from kvfit.runtime.handoff import handoff
from kvfit.runtime.mapper import Mapper
from kvfit.spec import MapperSpec
from tests.support import made_mappers

FLOAT32 = (models.Options(dtype="float32", device="cpu"),) * 2
TEXT = (TextOptions("demo:text"),)
SCHEDULE = Schedule(steps=20, batch_size=3, learning_rate=0.06, continuation=16, prefix_least=16, check_every=10)
OPTIONS = Options(num_sequences=12, seq_len=64, rank=32, schedule=SCHEDULE)


@pytest.fixture(scope="module")
def loaded(tiny_pair: tuple[Path, Path], load: Callable[[Path | str], Any]) -> Any:
    return load(tiny_pair[1])


@pytest.fixture(scope="module")
def identity(loaded: Any) -> Mapper:
    """The tiny target to itself; the true map is known."""
    mapper = made_mappers.identity_mapper(loaded.model)
    side = replace(mapper.spec.source, tokenizer_fingerprint=tokenizer_fingerprint(loaded.tokenizer))
    return Mapper(replace(mapper.spec, source=side, target=side), mapper.maps.weights)


RECIPE = {digests.FIELD: "AAAAAAAA"}


def written(folder: Path, mapper: Mapper, *, damage: float = 0.0, seed: int = 0, recipe: dict[str, str] | None = None) -> Path:
    """A bundle of the mapper with noise of a given size added to every weight."""
    generator = torch.Generator().manual_seed(seed)
    weights = [
        (kind, i, weight + damage * torch.randn(weight.shape, generator=generator) / len(weight) ** 0.5, bias)
        for (kind, i), (weight, bias) in mapper.maps.weights.items()
    ]
    write_bundle(
        folder, mapper.spec, weights, recipe=RECIPE if recipe is None else recipe, solve={"kept": 1}, basis=mapper.maps.basis
    )
    return folder


def refined(
    bundle: Path, folder: Path, tiny_pair: tuple[Path, Path], options: Options = OPTIONS, texts: tuple[TextOptions, ...] = TEXT
) -> Any:
    ref = str(tiny_pair[1])
    return refine(bundle, folder, texts=texts, source=ref, target=ref, options=options, loading=FLOAT32, progress=False)


def test_a_damaged_identity_is_repaired(tmp_path: Path, identity: Mapper, tiny_pair: tuple[Path, Path]) -> None:
    bundle = written(tmp_path / "damaged", identity, damage=0.3)
    found = refined(bundle, tmp_path / "refined", tiny_pair)
    assert found.kl_after < 0.8 * found.kl_before
    opened, damaged = Bundle.open(tmp_path / "refined"), Bundle.open(bundle)
    assert opened.spec == damaged.spec
    assert opened.nbytes == damaged.nbytes
    assert opened.solve["kept"] == 1
    assert opened.solve["refine"]["kl_after"] == found.kl_after


def test_the_documents_are_named_so_that_no_evaluation_takes_them(
    tmp_path: Path, identity: Mapper, tiny_pair: tuple[Path, Path]
) -> None:
    few = replace(OPTIONS, num_sequences=6, holdout=0.4, schedule=replace(SCHEDULE, steps=10))
    found = refined(written(tmp_path / "damaged", identity, damage=0.3), tmp_path / "refined", tiny_pair, few)
    assert found.bundle is not None
    named = digests.of_recipe(Bundle.open(found.bundle).recipe)
    assert named is not None
    assert "AAAAAAAA" in named
    assert len(named) == 7
    # A bundle that does not say what it was fitted on does not name refine's documents as all of them.
    silent = refined(written(tmp_path / "silent", identity, damage=0.3, recipe={}), tmp_path / "more", tiny_pair, few)
    assert silent.bundle is not None
    assert digests.of_recipe(Bundle.open(silent.bundle).recipe) is None


def test_what_is_no_better_is_not_written(tmp_path: Path, identity: Mapper, tiny_pair: tuple[Path, Path]) -> None:
    wild = replace(
        OPTIONS, num_sequences=6, holdout=0.4, schedule=replace(SCHEDULE, steps=4, learning_rate=50.0, check_every=2)
    )
    found = refined(written(tmp_path / "exact", identity), tmp_path / "refined", tiny_pair, wild)
    assert found.bundle is None
    assert "nothing was written" in str(found)
    assert not (tmp_path / "refined").exists()
    assert max(look["kl"] for look in found.looks) > 10 * max(found.kl_after, 1e-6)


def test_a_rate_that_is_too_high_is_lowered(tmp_path: Path, identity: Mapper, tiny_pair: tuple[Path, Path]) -> None:
    """The first look is far worse than the start; from there training goes back and gets better after all."""
    fast = replace(OPTIONS, schedule=replace(SCHEDULE, steps=60, learning_rate=3.0, check_every=5, patience=12))
    found = refined(written(tmp_path / "damaged", identity, damage=0.3), tmp_path / "refined", tiny_pair, fast)
    start, first, *later = (look["kl"] for look in found.looks)
    assert first > 1.5 * start
    assert min(later) < 0.95 * start
    assert found.bundle is not None


def test_training_and_use_see_the_same_maps(loaded: Any, identity: Mapper) -> None:
    """The training's own cache against the one that `handoff` makes, for a mapper with lexical inputs and a basis."""
    side = identity.spec.source
    spec = made_mappers.mapper_spec(side, side, [range(4)] * 4, inputs="both", lexical_lags=(0, 2), rank=40)
    mapper = made_mappers.random_mapper(spec)
    found = example_of(spec, loaded, mapper.maps.basis)
    correction = Correction(spec, mapper.maps.weights, [found.inputs], 8)
    made = Continuation(spec, loaded.model).cache(correction.outputs(found.inputs[None, :40]), [found], 40)
    cache = caches.full_cache()
    caches.forward(loaded.model, found.ids[None, :40], cache, base=True)
    moved = handoff(mapper, loaded.model, found.ids[None, :41], cache)
    for ours, theirs in zip(caches.read_cache(made), caches.read_cache(moved.cache), strict=True):
        for half in (0, 1):
            torch.testing.assert_close(ours[half].detach(), theirs[half], atol=2e-3, rtol=1e-3)


def example_of(spec: MapperSpec, loaded: Any, basis: Tensor | None = None) -> Example:
    ids = torch.arange(3, 3 + 7 * 64, 7) % 1900
    return examples(spec, loaded.model, loaded.model, [ids], basis)[0]


def test_folding_a_correction_changes_nothing(loaded: Any, identity: Mapper) -> None:
    found = example_of(identity.spec, loaded)
    correction = Correction(identity.spec, identity.maps.weights, [found.inputs], 16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for matrix in correction.matrices.values():
            matrix.normal_(generator=generator)
    corrected = correction.outputs(found.inputs[None])
    folded = Correction(identity.spec, correction.folded(), [found.inputs], 16).outputs(found.inputs[None])
    for key, output in corrected.items():
        assert not torch.allclose(output, found.inputs[None] @ torch.zeros(found.inputs.shape[1], 1), atol=1e-3)
        torch.testing.assert_close(folded[key], output, atol=1e-3, rtol=1e-3)


def test_gradients_reach_every_correction_and_no_model(loaded: Any, identity: Mapper) -> None:
    loaded.model.requires_grad_(False)
    found = example_of(identity.spec, loaded)
    spoiled = {key: (weight * 0.7, bias) for key, (weight, bias) in identity.maps.weights.items()}
    correction = Correction(identity.spec, spoiled, [found.inputs], 16)
    continuation = Continuation(identity.spec, loaded.model)
    cache = continuation.cache(correction.outputs(found.inputs[None, :32]), [found], 32)
    continuation.divergence(cache, [found], 32, 16).backward()
    assert all(matrix.grad is not None and float(matrix.grad.norm()) > 0 for matrix in correction.matrices.values())
    assert all(parameter.grad is None for parameter in loaded.model.parameters())


def test_the_divergence_of_the_exact_map_is_zero_and_of_a_spoiled_one_is_not(loaded: Any, identity: Mapper) -> None:
    found = example_of(identity.spec, loaded)
    continuation = Continuation(identity.spec, loaded.model)

    def kl(factor: float) -> float:
        weights = {key: (weight * factor, bias) for key, (weight, bias) in identity.maps.weights.items()}
        return holdout_divergence(Correction(identity.spec, weights, [found.inputs], 4), continuation, [found], SCHEDULE)

    assert abs(kl(1.0)) < 1e-4
    assert kl(0.5) > 0.01


def test_a_divergence_over_the_likeliest_tokens_is_the_whole_one_where_few_are_likely() -> None:
    ours, theirs = (torch.randn(5, 40, generator=torch.Generator().manual_seed(seed)).log_softmax(-1) for seed in (0, 1))
    whole = (ours.exp() * (ours - theirs)).sum(-1)

    def over(count: int) -> Tensor:
        kept, ids = ours.topk(count)
        one, other = with_rest(kept), with_rest(theirs.gather(-1, ids))
        return (one.exp() * (one - other)).sum(-1)

    torch.testing.assert_close(over(39), whole, atol=1e-4, rtol=1e-4)
    assert bool((over(8) <= whole + 1e-6).all())
    assert float(over(8).sum()) > 0.3 * float(whole.sum())


@pytest.mark.parametrize("rank", [6, 3])
def test_whitened_inputs_have_covariance_one(rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 12, generator=generator) @ torch.diag(torch.logspace(3, -1, 12)) + 100
    mean, projection = whitener(inputs, rank)
    seen = (inputs - mean) @ projection
    torch.testing.assert_close(seen.T @ seen / 400, torch.eye(rank), atol=1e-2, rtol=0)


def test_one_direction_only_is_no_trouble() -> None:
    _, projection = whitener(torch.arange(10.0)[:, None] * torch.ones(1, 6), 4)
    assert projection.shape == (6, 1)
    assert bool(torch.isfinite(projection).all())


def test_refusals(tmp_path: Path, identity: Mapper, tiny_pair: tuple[Path, Path]) -> None:
    bundle = written(tmp_path / "bundle", identity)
    with pytest.raises(BundleError, match="bundle"):
        refined(bundle, bundle, tiny_pair)
    ref = str(tiny_pair[0])
    with pytest.raises(MismatchError):
        refine(bundle, tmp_path / "out", texts=TEXT, source=ref, target=ref, options=OPTIONS, loading=FLOAT32, progress=False)
    little = tmp_path / "little.jsonl"
    little.write_text("".join(json.dumps({"text": f"{number} and so on " * 50}) + "\n" for number in range(3)))
    with pytest.raises(TextError, match="found 3 sequences of 64 tokens, needed 12"):
        refined(bundle, tmp_path / "out", tiny_pair, texts=(TextOptions(str(little)),))
    with pytest.raises(OptionError, match="--holdout"):
        Options(num_sequences=4, holdout=0.1)
    with pytest.raises(OptionError, match="--rank"):
        Options(rank=0)
    with pytest.raises(OptionError, match="--seq-len"):
        Options(seq_len=100)
    assert not (tmp_path / "out").exists()
