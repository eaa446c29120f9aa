"""Transfers between models whose heads differ by layer, against the definition written out token by token."""

from dataclasses import replace

import pytest
import torch
from made_mappers import cache_of, mapper_spec, model_spec, random_mapper, random_pairs, reference_transfer

from kvfit.errors import MismatchError
from kvfit.model import cache as caches

# Heads in other numbers and sizes, values of another size than keys, layers of one width but other heads.
SOURCE = model_spec(3, 2, 4, geometry=((2, 4, 4), (1, 8, 6), (2, 6, 6)))
TARGET = model_spec(4, 1, 8, model_spec(4, 1, 4).rope, geometry=((1, 8, 4), (2, 4, 4), (3, 4, 6), (1, 6, 6)))
ALIKE = model_spec(3, 2, 4)
CASES = {
    "maps": (SOURCE, TARGET, {}),
    "both": (SOURCE, TARGET, {"inputs": "both"}),
    "lexical": (SOURCE, TARGET, {"inputs": "both", "lexical_lags": (0, 2)}),
    "basis": (SOURCE, TARGET, {"inputs": "both", "rank": 7}),
    "lexical basis": (SOURCE, TARGET, {"inputs": "both", "rank": 7, "lexical_lags": (0, 1)}),
    "rotated": (SOURCE, TARGET, {"keys_rotated": True}),
    "from uneven to even": (SOURCE, ALIKE, {"inputs": "both"}),
    "from even to uneven": (ALIKE, TARGET, {"inputs": "both", "lexical_lags": (1,)}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunk_tokens", [None, 3])
def test_every_token_is_what_the_definition_says(case: str, chunk_tokens: int | None) -> None:
    source, target, options = CASES[case]
    every = list(range(source.n_layers))
    sets = [every] * target.n_layers if options.get("rank") else [every, [1], [0, 2], [2]][: target.n_layers]
    mapper = random_mapper(mapper_spec(source, target, sets, **options))
    pairs = random_pairs(source, 2, 5, seed=1)
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])  # the second sequence is padded on the left
    first = random_pairs(target, 2, 5, seed=2)[0] if options.get("lexical_lags") else None
    moved = mapper.transfer(cache_of(pairs), positions=positions, first_layer=first, chunk_tokens=chunk_tokens)
    wanted = reference_transfer(mapper, pairs, positions, first)
    found = caches.read_cache(moved)
    assert [[half.shape[1:4:2] for half in pair] for pair in found] == [
        [torch.Size(target.shape(kind, i)) for kind in ("keys", "values")] for i in range(target.n_layers)
    ]
    for mine, theirs in zip(found, wanted, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
    streamed = list(mapper.stream_layers(pairs, positions=positions, first_layer=first, chunk_tokens=chunk_tokens))
    for mine, theirs in zip(streamed, found, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def test_what_does_not_fit_is_refused_by_layer_and_kind() -> None:
    mapper = random_mapper(mapper_spec(SOURCE, TARGET, [[0], [1], [2], [0]]))
    pairs = random_pairs(SOURCE, 1, 3)
    wrong = [*pairs[:1], (pairs[1][0], pairs[1][0]), *pairs[2:]]
    with pytest.raises(MismatchError, match=r"values of layer 1: found shape \(1, 1, 3, 8\), needed \(1, 1, 3, 6\)"):
        mapper.transfer_layers(wrong)
    into = cache_of(random_pairs(ALIKE, 1, 2) + random_pairs(ALIKE, 1, 2)[:1])
    with pytest.raises(MismatchError, match=r"into, layer 0: found batch, heads and head size \(1, 2, 4\), needed \(1, 1, 8\)"):
        mapper.transfer(cache_of(pairs), into=into)
    lexical = random_mapper(mapper_spec(SOURCE, TARGET, [[0]] * 4, lexical_lags=(0,)))
    keys, values = random_pairs(TARGET, 1, 3)[0]
    with pytest.raises(MismatchError, match=r"first_layer, values: found shape \(1, 1, 3, 8\).*needed \(1, 1, 3, 4\)"):
        lexical.transfer_layers(pairs, first_layer=(keys, keys))
    assert len(lexical.transfer_layers(pairs, first_layer=(keys, values))) == 4


def test_a_turn_is_appended_layer_by_layer() -> None:
    mapper = random_mapper(mapper_spec(SOURCE, TARGET, [[0, 1, 2]] * 4))
    pairs = random_pairs(SOURCE, 1, 6)
    whole = caches.read_cache(mapper.transfer(cache_of(pairs)))
    grown = mapper.transfer([(keys[:, :, :4], values[:, :, :4]) for keys, values in pairs])
    mapper.transfer(cache_of(pairs), into=grown)
    for mine, theirs in zip(caches.read_cache(grown), whole, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other)


def test_weights_of_other_shapes_are_refused() -> None:
    mapper = random_mapper(mapper_spec(SOURCE, TARGET, [[0]] * 4))
    other = replace(mapper.spec, target=replace(TARGET, geometry=((1, 8, 4), (2, 4, 4), (3, 4, 4), (1, 6, 6))))
    with pytest.raises(MismatchError, match="values of target layer 2: found weight and bias"):
        type(mapper)(other, mapper.maps.weights)
