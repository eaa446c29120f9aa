"""Rotate keys and undo the rotation, given a `RopeTable`. `rope_probe` finds out which table a model's layers use.

A rotary embedding turns feature pairs (planes) of a key by an angle that grows with the token's position. With a_i the
angle of plane i and s the table's attention scaling, a pair (x, y) becomes

    x' = s (x cos a_i - y sin a_i)        y' = s (y cos a_i + x sin a_i)

so the inverse rotates by -a_i and divides by s. Only the leading `rotated_width` features rotate; the others keep their exact
bits. The table's `pairing` says which features form a pair.

Source: Su et al. 2021, "RoFormer"; the scaling is YaRN's (Peng et al. 2023).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfit.errors import MismatchError
from kvfit.spec import RopeTable


def frequencies_of(table: RopeTable, device: torch.device) -> Tensor:
    """A table's inverse frequencies as a tensor, (R/2,) float32. On a GPU this waits for the device, so keep the result."""
    return torch.tensor(table.inverse_frequencies, dtype=torch.float32, device=device)


def angles(table: RopeTable, positions: Tensor, *, frequencies: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every plane's angle, without the table's attention scaling.

    The angle is the float32 product ``position * inverse_frequency``, as models compute it; a float64 product would differ
    from theirs by up to 1e-4 radians at position 1,000.

    Args:
        table: the rotary table.
        positions: (T,) or (B, T) token positions, whole numbers.
        frequencies: the result of `frequencies_of` for this table and the device of `positions`; None to compute it here.

    Returns:
        Cosines and sines, float32, (T, R/2) or (B, T, R/2), on the device of `positions`.

    Raises:
        MismatchError: `positions` has another number of dimensions.
    """
    if positions.dim() not in (1, 2):
        raise MismatchError(f"positions: found shape {tuple(positions.shape)}, needed (T,) or (B, T)")
    frequencies = frequencies_of(table, positions.device) if frequencies is None else frequencies
    turned = positions.to(torch.float32).unsqueeze(-1) * frequencies
    return turned.cos(), turned.sin()


def rotate(
    keys: Tensor, table: RopeTable | None, cos_sin: tuple[Tensor, Tensor], *, dtype: torch.dtype | None = None
) -> Tensor:
    """Rotate keys: from what the model's projections give to what the model caches.

    Args:
        keys: (B, H, T, D) un-rotated keys.
        table: the layer's table; None for a layer that does not rotate, whose keys are returned unchanged.
        cos_sin: the result of `angles` for these T tokens.
        dtype: dtype of the result; None for that of `keys`. The arithmetic is in float32 (float64 for float64 keys).

    Returns:
        (B, H, T, D) rotated keys.

    Raises:
        MismatchError: `cos_sin` or the head size does not fit the keys.
    """
    return _turn(keys, table, cos_sin, dtype, inverse=False)


def unrotate(
    keys: Tensor, table: RopeTable | None, cos_sin: tuple[Tensor, Tensor], *, dtype: torch.dtype | None = None
) -> Tensor:
    """Undo `rotate`: from what the model caches to what its projections gave.

    Args:
        keys: (B, H, T, D) rotated keys.
        table: the layer's table; None for a layer that does not rotate, whose keys are returned unchanged.
        cos_sin: the result of `angles` for these T tokens.
        dtype: dtype of the result; None for that of `keys`. With ``torch.float32``, bfloat16 keys are not rounded again.

    Returns:
        (B, H, T, D) un-rotated keys.

    Raises:
        MismatchError: `cos_sin` or the head size does not fit the keys.
    """
    return _turn(keys, table, cos_sin, dtype, inverse=True)


def turn_into(out: Tensor, keys: Tensor, table: RopeTable, cos_sin: tuple[Tensor, Tensor], *, inverse: bool = False) -> Tensor:
    """Rotate keys, or with `inverse` undo their rotation, into the caller's memory and in as few passes as possible.

    Args:
        out: (B, H, T, D), float32 or float64, any strides; must not share memory with `keys`.
        keys: (B, H, T, D) of the same dtype and device.
        table: the layer's table.
        cos_sin: the result of `angles` for these T tokens, its cosines spread by `per_feature`.
        inverse: undo the rotation.

    Returns:
        `out`.

    Raises:
        MismatchError: `cos_sin`, the head size, a shape or a dtype does not fit.
    """
    if keys.dtype not in (torch.float32, torch.float64) or (out.shape, out.dtype) != (keys.shape, keys.dtype):
        raise MismatchError(
            f"keys, out: found {tuple(keys.shape)} {keys.dtype} and {tuple(out.shape)} {out.dtype}, "
            "needed one shape, float32 or float64"
        )
    width = table.rotated_width
    cos, sin = (_fitted(part, keys, table, keys.dtype, n) for part, n in zip(cos_sin, (width, width // 2), strict=True))
    if table.attention_scaling != 1.0:
        scaling = 1 / table.attention_scaling if inverse else table.attention_scaling
        cos, sin = cos * scaling, sin * scaling
    sign = 1 if inverse else -1
    first, second = _planes(table, width)
    # The first pass brings both into the processor's cache. It reads whole heads, because halves of them are slow to stream.
    torch.mul(keys[..., :width], cos, out=out[..., :width])
    out[..., first].addcmul_(keys[..., second], sin, value=sign)
    out[..., second].addcmul_(keys[..., first], sin, value=-sign)
    if width < keys.shape[3]:
        out[..., width:] = keys[..., width:]
    return out


def per_feature(cos: Tensor, table: RopeTable) -> Tensor:
    """The cosines (..., R/2) of a table's planes as one for each rotated feature, (..., R)."""
    return torch.cat((cos, cos), -1) if table.pairing == "half" else cos.repeat_interleave(2, -1)


def _turn(
    keys: Tensor, table: RopeTable | None, cos_sin: tuple[Tensor, Tensor], dtype: torch.dtype | None, *, inverse: bool
) -> Tensor:
    dtype = keys.dtype if dtype is None else dtype
    if table is None:
        return keys.to(dtype)
    wide = torch.promote_types(keys.dtype, torch.float32)
    cos, sin = (_fitted(part, keys, table, wide, table.rotated_width // 2) for part in cos_sin)
    if inverse:
        cos, sin = cos / table.attention_scaling, -sin / table.attention_scaling
    elif table.attention_scaling != 1.0:
        cos, sin = cos * table.attention_scaling, sin * table.attention_scaling
    width = table.rotated_width
    first, second = _planes(table, width)
    out = keys.to(dtype, copy=True)  # the features beyond the rotated width stay unchanged
    x, y = keys[..., first].to(wide), keys[..., second].to(wide)  # (B, H, T, R/2)
    out[..., first] = (x * cos - y * sin).to(dtype)
    out[..., second] = (y * cos + x * sin).to(dtype)
    return out


def _planes(table: RopeTable, width: int) -> tuple[slice, slice]:
    """Slices that select the first and the second feature of every plane."""
    if table.pairing == "half":
        return slice(0, width // 2), slice(width // 2, width)
    return slice(0, width, 2), slice(1, width, 2)


def _fitted(part: Tensor, keys: Tensor, table: RopeTable, dtype: torch.dtype, size: int) -> Tensor:
    """Cosines or sines as (1, 1, T, size) or (B, 1, T, size). Plain broadcasting would accept one position for all tokens."""
    if keys.dim() != 4 or keys.shape[3] < table.rotated_width:
        raise MismatchError(
            f"keys: found shape {tuple(keys.shape)}, needed (B, H, T, D), D at least the {table.rotated_width} that rotate"
        )
    batch, _, n_tokens, _ = keys.shape
    if tuple(part.shape) not in {(n_tokens, size), (batch, n_tokens, size), (1, n_tokens, size)}:
        raise MismatchError(
            f"cos_sin: found shape {tuple(part.shape)}, needed ({n_tokens}, {size}) "
            f"or ({batch}, {n_tokens}, {size}) as the keys have"
        )
    part = part.to(device=keys.device, dtype=dtype)
    return part[None, None] if part.dim() == 2 else part[:, None]
