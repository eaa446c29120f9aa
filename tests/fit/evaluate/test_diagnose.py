"""Measures per layer and head against loops written out, and planted faults that they must point at."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import fit_tiny, heldout, paired
from made_mappers import identity_mapper
from sklearn.metrics import r2_score
from zoo import FAMILIES, VOCABULARY, build

from kvfit.fit.evaluate.arms import Pair, mapped_pairs, source_pairs, target_pairs
from kvfit.fit.evaluate.attention import Reading, watched
from kvfit.fit.evaluate.diagnose import diagnose
from kvfit.model.cache import append, forward, new_cache
from kvfit.model.rope import angles, unrotate
from kvfit.runtime.mapper import Mapper
from kvfit.spec import KINDS, LayerMap

Loader = Callable[[Path | str], Any]
PREFIX, NEW, DOCUMENTS = 30, 8, 3


@pytest.fixture(scope="module")
def pair(tiny_pair: tuple[Path, Path], load: Loader, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    bundle = fit_tiny(tiny_pair, tmp_path_factory.mktemp("diagnose"))
    return paired(bundle, *(load(folder) for folder in tiny_pair))


@pytest.fixture(scope="module")
def ids(tiny_pair: tuple[Path, Path], load: Loader) -> torch.Tensor:
    return heldout(load(tiny_pair[1]).tokenizer, DOCUMENTS, PREFIX + NEW)


def plain(keys: torch.Tensor, table: Any) -> torch.Tensor:
    return unrotate(keys, table, angles(table, torch.arange(keys.shape[2])))


def test_r2_cosine_and_relative_error_equal_scikit_learn_and_a_loop(pair: Pair, ids: torch.Tensor) -> None:
    found = diagnose(pair, ids, PREFIX, batch_size=2)
    for layer_index, layer in enumerate(found.layers):
        for kind in ("keys", "values"):
            rows: list[list[torch.Tensor]] = [[], []]
            for document in ids:
                prefix = document[None, : PREFIX - 1]
                mapped = mapped_pairs(pair, prefix, source_pairs(pair, prefix))[layer_index]
                own = target_pairs(pair, prefix)[layer_index]
                for side, pairs in enumerate((mapped, own)):
                    tensor = pairs[0] if kind == "keys" else pairs[1]
                    if kind == "keys":
                        tensor = plain(tensor, pair.mapper.spec.target.rope.table(layer_index))
                    rows[side].append(tensor[0, :, pair.exact_head :].transpose(0, 1))
            ours, theirs = (torch.cat(side).double() for side in rows)  # (N, H, D)
            assert layer[kind]["r2"] == pytest.approx(
                r2_score(theirs.flatten(1), ours.flatten(1), multioutput="variance_weighted"), abs=1e-4
            )
            for head in range(2):
                own_head, mapped_head = theirs[:, head], ours[:, head]
                found_head = {name: values[head] for name, values in layer[kind]["heads"].items()}
                assert found_head["r2"] == pytest.approx(
                    r2_score(own_head, mapped_head, multioutput="variance_weighted"), abs=1e-4
                )
                error = float((own_head - mapped_head).norm() / own_head.norm())
                assert found_head["relative_error"] == pytest.approx(error, abs=1e-5)
                cosines = [float(a @ b / (a.norm() * b.norm())) for a, b in zip(own_head, mapped_head, strict=True)]
                assert found_head["cosine"] == pytest.approx(sum(cosines) / len(cosines), abs=1e-5)
                variances = own_head.var(0)
                squared = torch.stack(
                    [torch.corrcoef(torch.stack([own_head[:, d], mapped_head[:, d]]))[0, 1] ** 2 for d in range(16)]
                )
                assert found_head["explained"] == pytest.approx(float((variances * squared).sum() / variances.sum()), abs=1e-5)


def mixed_cache(pair: Pair, own: Any, mapped: Any, at: int) -> Any:
    """The target's own cache, with one layer mapped but for its exact tokens."""
    cache, exact = new_cache(pair.target), pair.exact_head
    for layer_index, (keys, values) in enumerate(own):
        if layer_index == at:
            keys, values = (
                torch.cat([a[:, :, :exact], b[:, :, exact:]], 2) for a, b in zip((keys, values), mapped[at], strict=True)
            )
        append(cache, layer_index, keys, values)
    return cache


def test_attention_cosine_equals_running_the_target_with_one_layer_mapped(pair: Pair, ids: torch.Tensor) -> None:
    """Up to the mapped layer nothing differs, so that layer's queries are the target's own."""
    found = diagnose(pair, ids, PREFIX)
    prefix, new = ids[:, : PREFIX - 1], ids[:, PREFIX - 1 : -1]
    mapped, own = mapped_pairs(pair, prefix, source_pairs(pair, prefix)), target_pairs(pair, prefix)
    for at, layer in enumerate(found.layers):
        read: list[torch.Tensor] = []
        projection = pair.target.model.layers[at].self_attn.o_proj
        handle = projection.register_forward_pre_hook(lambda _, inputs, read=read: read.append(inputs[0].clone()))
        forward(pair.target, new, mixed_cache(pair, own, mapped, -1))
        forward(pair.target, new, mixed_cache(pair, own, mapped, at))
        handle.remove()
        native, moved = (part.double().view(DOCUMENTS, NEW, 4, 16) for part in read)
        cosine = (native * moved).sum(-1) / (native.norm(dim=-1) * moved.norm(dim=-1))
        assert layer["attention_cosine"] == pytest.approx(float(cosine.mean()), abs=1e-4)
        for head in range(2):  # each read by two query heads
            assert layer["attention_cosine_heads"][head] == pytest.approx(
                float(cosine[:, :, 2 * head : 2 * head + 2].mean()), abs=1e-4
            )


def test_concentrations_equal_their_definitions_written_out(pair: Pair, ids: torch.Tensor) -> None:
    found = diagnose(pair, ids, PREFIX)
    prefix, new = ids[:, : PREFIX - 1], ids[:, PREFIX - 1 : -1]
    mapped, own = mapped_pairs(pair, prefix, source_pairs(pair, prefix)), target_pairs(pair, prefix)
    readings: dict[int, Reading] = {}
    with watched(pair.target, lambda reading: readings.update({reading.layer_index: reading})):
        forward(pair.target, new, mixed_cache(pair, own, mapped, -1))
    pair.target.set_attn_implementation("eager")
    try:
        from kvfit.model.cache import cache_argument

        with torch.no_grad():
            cache = mixed_cache(pair, own, mapped, -1)
            attentions = pair.target(new, output_attentions=True, **{cache_argument(pair.target): cache}).attentions
    finally:
        pair.target.set_attn_implementation("sdpa")
    exact = set(range(len(found.layers))) - set(pair.mapper.spec.mapped_layers)
    assert exact == {0}
    for at, layer in enumerate(found.layers):
        if at in exact:  # there is no error that could be concentrated
            assert not torch.any(mapped[at][0] - own[at][0])
            continue
        for head in range(2):
            queries = readings[at].queries[:, 2 * head : 2 * head + 2].reshape(-1, 16).double()
            _, singular, directions = torch.linalg.svd(queries, full_matrices=False)
            errors = (mapped[at][0] - own[at][0])[:, head, pair.exact_head :].reshape(-1, 16).double()
            weighted = sum(float(s**2 * (errors @ v).square().mean()) for s, v in zip(singular, directions, strict=True))
            expected = weighted / float(singular.square().sum()) / float(errors.square().mean())
            assert layer["keys"]["heads"]["concentration"][head] == pytest.approx(expected, rel=1e-3)
            above = below = 0.0
            squares = (mapped[at][1] - own[at][1])[:, head, pair.exact_head :].double().square().sum(-1)  # (B, n)
            for document in range(DOCUMENTS):
                for query_head in (2 * head, 2 * head + 1):
                    for query in range(NEW):
                        weights = attentions[at][document, query_head, query, pair.exact_head : PREFIX - 1].double()
                        above += float((weights**2 * squares[document]).sum())
                        below += float((weights**2).sum())
            assert layer["values"]["heads"]["concentration"][head] == pytest.approx(
                above / below / float(squares.mean()), rel=1e-3
            )


def test_an_exact_map_has_nothing_to_complain_about(
    tiny_pair: tuple[Path, Path], load: Loader, pair: Pair, ids: torch.Tensor
) -> None:
    """The target mapped to itself by the identity."""
    target = load(tiny_pair[1])
    spec = pair.mapper.spec
    layers = tuple(LayerMap(kind, index, (index,), 0.0, 1.0, 1.0) for index in range(spec.target.n_layers) for kind in KINDS)
    same = replace(spec, source=spec.target, layers=layers, inputs="same", lexical_lags=(), rank=None)
    weights = {(layer.kind, layer.layer_index): (torch.eye(32), torch.zeros(32)) for layer in layers}
    found = diagnose(Pair(target.model, target.model, Mapper(same, weights)), ids, PREFIX)
    for layer in found.layers:
        assert layer["attention_cosine"] == pytest.approx(1, abs=1e-6)
        for kind in ("keys", "values"):
            assert [layer[kind][name] for name in ("r2", "explained", "cosine")] == pytest.approx([1, 1, 1], abs=1e-5)
            assert torch.allclose(found.order[kind].diagonal(), torch.ones(4, dtype=torch.float64), atol=1e-6)  # type: ignore[index]
    swapped = {key: weights[key] for key in weights}
    orders = {(kind, i): (2, 1, 0, 3)[i] for kind, i in weights}
    wrong = replace(
        same, layers=tuple(replace(layer, source_layers=(orders[layer.kind, layer.layer_index],)) for layer in layers)
    )
    found = diagnose(Pair(target.model, target.model, Mapper(wrong, swapped)), ids, PREFIX)
    assert [int(row.argmax()) for row in found.order["values"]] == [2, 1, 0, 3]


@pytest.mark.parametrize("name", ["gemma4-fewer", "gemma4-shared", "mimo-v2-flash"])
def test_layers_of_other_heads_and_layers_without_keys_and_values(name: str) -> None:
    """A model mapped to itself by the identity: each layer is measured by its own heads."""
    model = build(next(family for family in FAMILIES if family.name == name))
    mapper = identity_mapper(model)
    seen = torch.randint(2, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))
    pair = Pair(model, model, mapper)
    found = diagnose(pair, seen, 30)
    assert len(found.layers) == 3
    for layer_index, layer in enumerate(found.layers):
        assert layer["attention_cosine"] == pytest.approx(1, abs=1e-5)
        for kind in ("keys", "values"):
            assert layer[kind]["r2"] == pytest.approx(1, abs=1e-5)
            heads, _ = mapper.spec.target.shape(kind, layer_index)
            assert len(layer[kind]["heads"]["r2"]) == heads
            assert torch.allclose(found.order[kind].diagonal(), torch.ones(3, dtype=torch.float64), atol=1e-6)
    own = [[half[:, :, pair.exact_head : 29] for half in both] for both in target_pairs(pair, seen[:, :29])]
    for kind, half in zip(KINDS, (0, 1), strict=True):
        shapes = [mapper.spec.target.shape(kind, layer_index) for layer_index in range(3)]
        for i, j in itertools.product(range(3), repeat=2):
            if shapes[i] != shapes[j]:  # no map gives another shape
                assert found.order[kind][i, j] == -1
            elif kind == "values":  # keys are compared without their rotation
                one, other = (own[k][half].double() - own[k][half].double().mean((0, 2), keepdim=True) for k in (i, j))
                assert float(found.order[kind][i, j]) == pytest.approx(
                    float((one * other).sum() / (one.norm() * other.norm())), abs=1e-6
                )


def test_watching_changes_nothing_and_leaves_nothing_behind(pair: Pair, ids: torch.Tensor) -> None:
    before = forward(pair.target, ids, new_cache(pair.target))
    seen: list[int] = []
    with watched(pair.target, lambda reading: seen.append(reading.layer_index)):
        during = forward(pair.target, ids, new_cache(pair.target))
    assert torch.equal(before, during)
    assert seen == [0, 1, 2, 3]
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert pair.target.config._attn_implementation == "sdpa"
    assert not [name for name in ALL_ATTENTION_FUNCTIONS if "kvfit" in name]
    with pytest.raises(ZeroDivisionError), watched(pair.target, lambda _: 1 / 0):
        forward(pair.target, ids, new_cache(pair.target))
    assert torch.equal(forward(pair.target, ids, new_cache(pair.target)), before)
