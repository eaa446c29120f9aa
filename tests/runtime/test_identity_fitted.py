"""A map fitted from a model to itself, with a penalty near zero, must go on exactly as the model would have."""

from pathlib import Path
from typing import Any

import pytest
import torch
from random_pair import scratch
from zoo import FAMILIES, UNLISTED, VOCABULARY, Family, Tokenizer, build

from kvfit.bundle.bundle import Bundle
from kvfit.fit.capture.activations import Activations
from kvfit.fit.solve.solve import Options, solve
from kvfit.fit.stats.layout import Layout
from kvfit.fit.stats.store import Accumulator
from kvfit.model import cache as caches
from kvfit.model.generate import generate
from kvfit.model.identity import describe_model
from kvfit.runtime.mapper import Mapper


def fitted_on_itself(model: Any, folder: Path, penalty: float = 1e-10) -> Mapper:
    """Captured from random tokens and solved like any pair, reading all layers."""
    spec = describe_model(model, Tokenizer(), ref="org/name", revision=None)
    ids = torch.randint(2, VOCABULARY, (20, 64), generator=torch.Generator().manual_seed(2))
    features = Activations(model, spec, range(64))
    layout = Layout(spec, spec, stats_dtype="float64")
    with Accumulator.create(folder / "self.zarr", layout, recipe={"seed": 0}) as accumulator:
        for split, chosen in (("fit", ids[:16]), ("holdout", ids[16:])):
            rows = {kind: [layer.flatten(0, 1) for layer in layers] for kind, layers in features(chosen).items()}
            accumulator.add(split, rows, rows, None)
        accumulator.finish(None)
    solve(folder / "self.zarr", folder / "bundle", options=Options(penalty=penalty), progress=False)
    return Mapper.from_bundle(Bundle.open(folder / "bundle"))


@pytest.mark.parametrize("family", FAMILIES + UNLISTED, ids=lambda family: family.name)
def test_64_greedy_steps_through_a_fitted_map(family: Family) -> None:
    """The whole way: un-rotated keys captured, least squares, a bundle, and the rotation put back."""
    model = build(family)
    ids = torch.randint(2, VOCABULARY, (2, 70), generator=torch.Generator().manual_seed(11))
    options = {"max_new_tokens": 64, "do_sample": False}
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    source = caches.full_cache()
    caches.forward(model, ids[:, :-1], source, base=True)
    with scratch() as folder:
        mapper = fitted_on_itself(model, folder)
    assert min(layer.r2_holdout for layer in mapper.spec.layers) > 1 - 1e-6
    mapped = mapper.transfer(source, target_model=model)
    assert torch.equal(generate(model, ids, mapped, **options), wanted)


def test_a_large_penalty_would_be_seen() -> None:
    """The control: a map that is not near the identity says something else."""
    model = build(next(family for family in FAMILIES if family.name == "qwen3"))
    ids = torch.randint(2, VOCABULARY, (2, 70), generator=torch.Generator().manual_seed(11))
    options = {"max_new_tokens": 64, "do_sample": False}
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    source = caches.full_cache()
    caches.forward(model, ids[:, :-1], source, base=True)
    with scratch() as folder:
        mapper = fitted_on_itself(model, folder, penalty=1.0)
    mapped = mapper.transfer(source, target_model=model)
    assert not torch.equal(generate(model, ids, mapped, **options), wanted)
