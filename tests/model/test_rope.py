"""Rotation against complex multiplication written out per feature, in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvfit.errors import MismatchError
from kvfit.model.rope import angles, per_feature, rotate, turn_into, unrotate
from kvfit.spec import RopeTable

PAIRINGS = ["half", "interleaved"]


def make_table(pairing: str, width: int = 8, scaling: float = 1.0, theta: float = 1e4) -> RopeTable:
    frequencies = torch.tensor([theta ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float32)
    return RopeTable(tuple(frequencies.tolist()), width, pairing, scaling)


def oracle(key: list[float], table: RopeTable, position: int) -> list[float]:
    """One token's key, feature by feature: a pair is a complex number, multiplied by s exp(i p f)."""
    out = list(key)
    half = table.rotated_width // 2
    for plane, frequency in enumerate(table.inverse_frequencies):
        first, second = (plane, plane + half) if table.pairing == "half" else (2 * plane, 2 * plane + 1)
        turn = complex(math.cos(position * frequency), math.sin(position * frequency)) * table.attention_scaling
        turned = complex(key[first], key[second]) * turn
        out[first], out[second] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize(("width", "scaling"), [(8, 1.0), (12, 1.0), (4, 1.277), (12, 1.1386294)])
def test_rotate_is_complex_multiplication(pairing: str, width: int, scaling: float) -> None:
    table = make_table(pairing, width, scaling)
    positions = torch.tensor([0, 1, 7, 1031])
    keys = torch.randn(2, 3, 4, 12, generator=torch.Generator().manual_seed(1))
    rotated = rotate(keys, table, angles(table, positions))
    for b, h, t in [(0, 0, 0), (1, 2, 1), (0, 1, 2), (1, 0, 3), (1, 2, 3)]:
        wanted = torch.tensor(oracle(keys[b, h, t].tolist(), table, int(positions[t])))
        torch.testing.assert_close(rotated[b, h, t], wanted, rtol=0, atol=3e-4 if t == 3 else 1e-5)
    # The float32 angle at position 1,031 is what costs digits; models have the same one, so the inverse is tight.
    torch.testing.assert_close(unrotate(rotated, table, angles(table, positions)), keys, rtol=0, atol=2e-6)
    # The same into memory of the caller's, as transfers do it.
    for inverse, states, wanted in ((False, keys, rotated), (True, rotated, keys)):
        cos, sin = angles(table, positions)
        turned = turn_into(torch.empty_like(states), states, table, (per_feature(cos, table), sin), inverse=inverse)
        torch.testing.assert_close(turned, wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_features_beyond_the_width_are_bit_identical(pairing: str) -> None:
    table = make_table(pairing, 8, 1.277)
    keys = torch.randn(1, 2, 5, 12).to(torch.bfloat16)
    cos_sin = angles(table, torch.arange(1000, 1005))
    for turn in (rotate, unrotate):
        assert torch.equal(turn(keys, table, cos_sin)[..., 8:], keys[..., 8:])
        assert not torch.equal(turn(keys, table, cos_sin)[..., :8], keys[..., :8])


def test_a_layer_without_a_table_is_bit_identical() -> None:
    keys = torch.randn(1, 2, 5, 12).to(torch.bfloat16)
    cos_sin = angles(make_table("half"), torch.arange(5))
    assert torch.equal(rotate(keys, None, cos_sin), keys)
    assert torch.equal(unrotate(keys, None, cos_sin), keys)
    assert unrotate(keys, None, cos_sin, dtype=torch.float32).dtype == torch.float32


def test_the_inputs_are_never_changed() -> None:
    table, keys = make_table("half"), torch.randn(1, 2, 5, 8)
    before = keys.clone()
    rotate(keys, table, angles(table, torch.arange(5)))
    unrotate(keys, table, angles(table, torch.arange(5)))
    assert torch.equal(keys, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_is_kept_and_arithmetic_is_wide(dtype: torch.dtype) -> None:
    table = make_table("interleaved", 8, 1.277)
    keys = torch.randn(1, 2, 5, 8).to(dtype)
    cos_sin = angles(table, torch.arange(1000, 1005))
    exact = unrotate(keys.double(), table, cos_sin)
    assert unrotate(keys, table, cos_sin).dtype == dtype
    assert torch.equal(unrotate(keys, table, cos_sin), exact.to(dtype)) or dtype == torch.float16
    wide = unrotate(keys, table, cos_sin, dtype=torch.float32)
    torch.testing.assert_close(wide.double(), exact, rtol=0, atol=1e-6)


def test_scaling_is_divided_out_once() -> None:
    """A tool that strips with scaled tables keeps the factor squared: keys 63 % too large at 1.277."""
    table = make_table("half", 8, 1.277)
    keys = torch.randn(1, 1, 6, 8)
    cos_sin = angles(table, torch.arange(6))
    stripped = unrotate(rotate(keys, table, cos_sin), table, cos_sin)
    torch.testing.assert_close(stripped.norm(), keys.norm(), rtol=1e-6, atol=0)
    torch.testing.assert_close(rotate(keys, table, cos_sin).norm(), keys.norm() * 1.277, rtol=1e-6, atol=0)


@given(st.sampled_from(PAIRINGS), st.integers(0, 4000), st.integers(0, 4000), st.integers(0, 500), st.integers(0, 2**31 - 1))
def test_scores_depend_on_distance_only(pairing: str, one: int, other: int, distance: int, seed: int) -> None:
    table = make_table(pairing)
    query, key = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(seed)).double()

    def score(position: int) -> float:
        at_query = rotate(query, table, angles(table, torch.tensor([position + distance])))
        return float((at_query * rotate(key, table, angles(table, torch.tensor([position])))).sum())

    assert score(one) == pytest.approx(score(other), abs=1e-2)


def test_positions_per_sequence() -> None:
    table = make_table("half")
    keys = torch.randn(2, 3, 4, 8)
    positions = torch.tensor([[0, 0, 0, 1], [0, 1, 2, 3]])  # the first row is left-padded
    rotated = rotate(keys, table, angles(table, positions))
    for row in range(2):
        alone = rotate(keys[row : row + 1], table, angles(table, positions[row]))
        assert torch.equal(rotated[row : row + 1], alone)


def test_what_does_not_fit_is_refused() -> None:
    table, keys = make_table("half"), torch.randn(2, 3, 4, 8)
    with pytest.raises(MismatchError, match=r"cos_sin: found shape \(1, 4\), needed \(4, 4\)"):
        rotate(keys, table, angles(table, torch.arange(1)))  # would broadcast one position to all tokens
    with pytest.raises(MismatchError, match="cos_sin"):
        rotate(keys, table, angles(table, torch.arange(12).view(3, 4)))
    with pytest.raises(MismatchError, match="keys: found shape"):
        rotate(keys[..., :6], table, angles(table, torch.arange(4)))
    with pytest.raises(MismatchError, match="positions"):
        angles(table, torch.tensor(3))


def test_importing_costs_no_transformers() -> None:
    import subprocess
    import sys

    code = "import kvfit.model.rope, kvfit.model.cache, kvfit.model.identity, sys; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
