"""The sums behind the digests, against plain whole numbers."""

import pytest
import torch
from zoo import FAMILIES, UNLISTED, VOCABULARY, build

from kvfit.model import content
from kvfit.model.content import _expert_sum, _tensor_sum, content_of, part_digests

BY_NAME = {family.name: family for family in FAMILIES + UNLISTED}
MASK = 2**64 - 1


def mixed(number: int) -> int:
    """SplitMix64's finaliser on Python's whole numbers."""
    number = number * 0x9E3779B97F4A7C15 & MASK
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & MASK
    return number ^ number >> 31


def slow_sum(octets: bytes) -> int:
    octets += b"\0" * (-len(octets) % 8)
    words = [int.from_bytes(octets[start : start + 8], "little") for start in range(0, len(octets), 8)]
    within = [mixed(index + 1) | 1 for index in range(8192)]
    return sum((mixed(i // 8192 + 1) | 1) * within[i % 8192] * word for i, word in enumerate(words)) & MASK


SIZES = (1, 3, 4, 8191, 8192 * 4)
DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.bool)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [*((size, dtype) for size in SIZES for dtype in DTYPES), (8192 * 4 * 2 + 5, torch.bfloat16), (100_003, torch.bfloat16)],
)
def test_sums_are_those_of_plain_whole_numbers(size: int, dtype: torch.dtype) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 100
    tensor = values.abs().to(dtype)
    octets = tensor.view(torch.uint8).numpy().tobytes()
    assert _tensor_sum(tensor, False) & MASK == slow_sum(octets)


def test_rounding_in_pieces_is_rounding_at_once() -> None:
    values = torch.randn(8192 * 4 * 256 + 8192 * 4 + 7)
    assert _tensor_sum(values, True) & MASK == _tensor_sum(values.to(torch.bfloat16), False) & MASK


def test_strides_and_offsets_do_not_matter() -> None:
    values = torch.randn(65, 33)
    assert _tensor_sum(values.T.contiguous().T, False) == _tensor_sum(values, False)
    shifted = torch.randn(1001)[1:]
    assert _tensor_sum(shifted, False) == _tensor_sum(shifted.clone(), False)


def test_sums_on_a_device_without_integer_products_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(8192 * 4 * 3 + 5)
    wanted, experts = _tensor_sum(values, False), _expert_sum(values[:96].reshape(4, 3, 8), False, None)
    monkeypatch.setattr(content, "_BLOCK", 8192 * 2)
    monkeypatch.setattr(content, "_row_sums", content._row_sums_in_blocks)
    assert _tensor_sum(values, False) == wanted
    assert _expert_sum(values[:96].reshape(4, 3, 8), False, None) == experts


def test_places_count() -> None:
    values = torch.randn(4, 64)
    assert _tensor_sum(values, False) != _tensor_sum(values.flip(0), False)
    assert _tensor_sum(values, False) != _tensor_sum(values.flip(1), False)


def test_experts_one_by_one_and_fused_are_alike() -> None:
    """As versions 4 and 5 of transformers keep them."""
    gate, up, down = torch.randn(4, 6, 8), torch.randn(4, 6, 8), torch.randn(4, 8, 6)
    fused = _expert_sum(torch.cat([gate, up], 1), False, None) + _expert_sum(down, False, None)
    apart = sum(_expert_sum(part[e], False, e) for part in (gate, up, down) for e in range(4))
    assert fused & MASK == apart & MASK
    changed = gate.clone()
    changed[2, 3, 4] += 1
    assert _expert_sum(torch.cat([changed, up], 1), False, None) + _expert_sum(down, False, None) & MASK != fused & MASK
    swapped = gate[[1, 0, 2, 3]]
    assert _expert_sum(swapped, False, None) & MASK != _expert_sum(gate, False, None) & MASK


PINNED = ("86a236ed2ae3e0c9", "bc742c2dc795cdcc", "ceab86dc833b115d", "b0f9d0b17a204dba")


def test_digests_are_the_same_on_every_version() -> None:
    """Weights that a formula gives, in the names of a checkpoint; written down once."""
    model = build(BY_NAME["qwen3"])
    with torch.no_grad():
        for number, name in enumerate(sorted(model.state_dict())):
            weight = model.state_dict()[name]
            weight.copy_((torch.arange(weight.numel()).reshape(weight.shape) * (number + 1) % 97 - 48) / 64)
    found = part_digests(model, VOCABULARY, rounding=False)
    assert found[:-1] == PINNED  # the last holds the rotary tables, whose last bit is the processor's
    assert content_of(model, VOCABULARY).bits == found
