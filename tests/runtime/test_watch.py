"""`attention` gives what torch's fused attention gives, and the weights that a plain softmax gives."""

import pytest
import torch
import torch.nn.functional as F

from kvfit.runtime.watch import attention

LOWEST = torch.finfo(torch.float32).min


def masks(kind, rows, total):
    hidden = torch.rand(2, 1, rows, total, generator=torch.Generator().manual_seed(3)) < 0.4
    hidden[..., 0] = False
    if kind == "padding":
        hidden[0, :, 0] = True  # a query on padding sees nothing
    return {"none": None, "causal": None, "additive": torch.where(hidden, LOWEST, 0.0)}.get(kind, ~hidden)


@pytest.mark.parametrize("kind", ["none", "boolean", "padding", "additive", "causal"])
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("rows", [1, 5])
def test_the_result_is_that_of_the_fused_kernel(kind, heads, rows):
    total = rows if kind == "causal" else 11
    query, key, value = (torch.randn(2, n, t, 8) for n, t in ((heads, rows), (2, total), (2, total)))
    arguments = {"attn_mask": masks(kind, rows, total), "is_causal": kind == "causal", "scale": 0.3}
    weights, attended = attention(rows, query, key, value, **arguments, enable_gqa=True)
    wanted = F.scaled_dot_product_attention(query, key, value, **arguments, enable_gqa=True)
    torch.testing.assert_close(attended, wanted, rtol=1e-5, atol=1e-6)
    # Applied to one-hot values, the fused kernel shows its weights.
    shown = F.scaled_dot_product_attention(query, key, torch.eye(total).expand(2, 2, -1, -1), **arguments, enable_gqa=True)
    torch.testing.assert_close(weights, shown, rtol=1e-5, atol=1e-6)


def test_one_token_packed_by_groups():
    query, key, value = (torch.randn(2, n, t, 8) for n, t in ((2, 3), (2, 11), (2, 11)))
    weights, attended = attention(1, query, key, value)
    assert weights.shape == (2, 6, 1, 11)
    torch.testing.assert_close(attended, F.scaled_dot_product_attention(query, key, value), rtol=1e-5, atol=1e-6)


def test_16_bit_values_give_a_result_of_their_dtype():
    query, key, value = (torch.randn(1, n, t, 8).bfloat16() for n, t in ((4, 3), (2, 11), (2, 11)))
    weights, attended = attention(3, query, key, value, enable_gqa=True)
    assert (weights.dtype, attended.dtype) == (torch.float32, torch.bfloat16)
    wanted = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), enable_gqa=True)
    torch.testing.assert_close(attended.float(), wanted, rtol=0.03, atol=0.03)
