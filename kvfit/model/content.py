"""Digests of everything in a loaded model that its forward pass reads: every weight, every buffer, every constant.

Each tensor's bytes are read as 64-bit words x_i and reduced to ``sum_i c_i x_i mod 2^64`` with odd pseudo-random coefficients
c_i that depend on the position alone. If one word changes by d, the sum changes by c_i d, which is not zero because c_i is odd;
several changes cancel with probability 2^-64. Integer sums do not depend on their order, so every device gives the same number.
Each sum is computed on the tensor's own device, at about the speed of reading the tensor.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvfit.errors import UnsupportedModelError
from kvfit.model.decoder import family, layer_path, loaded_tensor, unwrapped
from kvfit.model.tables import rotary_tables
from kvfit.spec import Content

_ROW = 8192  # words reduced at a time; they fit into a processor's cache
_BLOCK = 1 << 22  # words multiplied at a time on other devices: 32 MiB
_EXPERT = re.compile(r"(?:^|\.)experts\b(?:\.(\d+))?")
_ROUTER = re.compile(r"moe|router|(^|\.)gate\.")
_WRAPPERS = frozenset(("model", "language_model", "transformer", "base_model", "text_model"))
# Constants that have an effect in training only, or none.
_IDLE = re.compile(r"dropout|^p$|aux|jitter|norm_type|initializer|^_")


def content_of(model: Any, n_ids: int) -> Content:
    """The digests of a loaded model; see `Content` for what they cover.

    Args:
        model: a causal language model; `torch.compile`'s wrapper is seen through, and offloaded weights are read.
        n_ids: number of token ids that the tokenizer can produce. Embedding and head rows beyond them are padding.

    Raises:
        UnsupportedModelError: a weight is not in memory, or is stored in a quantised tensor type.
    """
    import transformers

    bits, rounded = (part_digests(model, n_ids, rounding=rounding) for rounding in (False, True))
    return Content(bits, rounded, n_ids, derived_digest(model), transformers.__version__)


def part_digests(model: Any, n_ids: int, *, rounding: bool) -> tuple[str, ...]:
    """Digests of the input embedding, of each decoder layer, and of everything else, 16 hexadecimal digits each.

    Args:
        model: as for `content_of`.
        n_ids: as for `content_of`.
        rounding: digest the values rounded to bfloat16, so that models loaded in different dtypes agree; otherwise the exact
            bits.

    Raises:
        UnsupportedModelError: as for `content_of`.
    """
    groups: dict[int, list[tuple[str, ...]]] = {}
    experts: dict[int, int] = {}
    tied: dict[int, int] = {}  # sums of tensors that several modules share, by the tensor's id
    for group, name, tensor, held in _weights(model, n_ids):
        floating = tensor.is_floating_point()
        found = _EXPERT.search(name)
        if found is not None:
            number = _expert_sum(tensor, rounding, None if found[1] is None else int(found[1]))
            experts[group] = (experts.get(group, 0) + number) % 2**64
            continue
        number = tied[id(held)] if id(held) in tied else _tensor_sum(tensor, rounding)
        if not held.is_meta:
            tied[id(held)] = number
        dtype = "float" if rounding and floating else str(tensor.dtype)
        groups.setdefault(group, []).append((name, str(tuple(tensor.shape)), dtype, f"{number % 2**64:016x}"))
    for group, number in experts.items():
        groups.setdefault(group, []).append(("experts", f"{number:016x}"))
    n_layers = max((group for group in groups if group >= 0), default=-1) + 1
    if n_layers == 0:
        raise UnsupportedModelError(f"{family(model)}: found no decoder layers by name, needed their weights as identity")
    tables = sorted(rotary_tables(model))
    groups.setdefault(n_layers, groups.pop(_REST, [])).append(("rotary tables", _digest(tables)))
    return tuple(_digest(sorted(groups.get(group, [])))[:16] for group in (_EMBEDDING, *range(n_layers + 1)))


def derived_digest(model: Any) -> str:
    """Digest of what a model's modules computed from its configuration when they were created.

    It covers every floating-point buffer that is not in the checkpoint and every float attribute of a module: norm epsilons,
    attention scalings, soft caps, embedding scales. Which of them exist differs between versions of transformers, so two
    digests can be compared only within one version.
    """
    found: list[tuple[str, str, str]] = []
    for path, module in unwrapped(model).named_modules():
        for name, value in vars(module).items():
            if type(value) is float and not _IDLE.search(name):
                found.append((path, name, f"{value:.9g}"))
        for name in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.is_floating_point() and not buffer.is_meta and "inv_freq" not in name:
                found.append((path, name, f"{_tensor_sum(buffer, True) % 2**64:016x}"))
    return _digest(found)


_EMBEDDING, _REST = -1, -2  # groups of tensors outside the decoder layers


def _weights(model: Any, n_ids: int) -> Iterator[tuple[int, str, Tensor, Tensor]]:
    """Group, canonical name, value and stored tensor of every parameter and every buffer that a checkpoint holds.

    The value is what is digested: it leaves out padding rows, and it is read from where accelerate offloaded it. A canonical
    name has no prefixes of wrappers, and is the same for all parts of a mixture of experts, whose layout differs between
    versions of transformers.
    """
    model = unwrapped(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for path, module in model.named_modules():
        persistent = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, held in (*module._parameters.items(), *persistent.items()):
            if held is None or "inv_freq" in name:  # `rotary_tables` covers them
                continue
            tensor = plain(model, loaded_tensor(model, module, name), f"{path}.{name}")
            if module is embedding:
                yield _EMBEDDING, name, tensor[:n_ids], held
            elif module is head:
                yield _REST, f"head.{name}", tensor[:n_ids], held
            else:
                place = layer_path(path)
                group, inner = (_REST, _without_wrappers(path)) if place is None else place
                full = f"{inner}.{name}"
                yield group, f"router.{name}" if _ROUTER.search(full) and not _EXPERT.search(full) else full, tensor, held


def plain(model: Any, tensor: Tensor, name: str) -> Tensor:
    """The tensor, detached, if its memory can be read as numbers.

    Raises:
        UnsupportedModelError: it is of a quantised tensor type, such as torchao's.
    """
    if hasattr(type(tensor), "__tensor_flatten__"):
        raise UnsupportedModelError(
            f"{family(model)}: found {name} quantised as {type(tensor).__name__}, needed plain weights to identify the "
            "model: load it without this quantisation"
        )
    return tensor.detach()


def _without_wrappers(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def _tensor_sum(tensor: Tensor, rounding: bool) -> int:
    """``sum_i c_i x_i mod 2^64`` over a tensor's words."""
    flat = tensor.reshape(-1)
    if rounding and flat.is_floating_point() and flat.dtype != torch.bfloat16:
        # Rounding whole rows piece by piece avoids a second copy of the tensor.
        step = _ROW * 4 * 256
        sums = [(flat[start : start + step].to(torch.bfloat16), start // (_ROW * 4)) for start in range(0, flat.numel(), step)]
        return sum(_words_sum(_words(piece), first) for piece, first in sums)
    return _words_sum(_words(flat), 0)


def _expert_sum(tensor: Tensor, rounding: bool, expert: int | None) -> int:
    """A sum over an expert's rows that does not depend on their order, with a coefficient per expert.

    Some versions of transformers store each expert on its own, others all in one tensor (experts, ..., features). The rows are
    the same.
    """
    if rounding and tensor.is_floating_point():
        tensor = tensor.to(torch.bfloat16)
    by_expert = tensor[None] if expert is not None or tensor.dim() < 2 else tensor  # (E, ..., features)
    rows = by_expert.reshape(by_expert.shape[0], -1, by_expert.shape[-1])
    words = _words(rows.reshape(-1), row=rows.shape[-1])  # (E * rows, words)
    sums = _mixed(_row_sums(words, _coefficients(words.shape[1], words.device))).reshape(rows.shape[0], -1).sum(1)
    first = expert or 0
    numbers = _coefficients(first + len(sums), sums.device)[first:]
    return int((sums * numbers).sum())


def _words(flat: Tensor, row: int | None = None) -> Tensor:
    """The bytes of a flat tensor as 64-bit words (N,), padded with zeros; `row` pads each row of so many elements."""
    octets = flat.contiguous().view(torch.uint8) if flat.dtype != torch.bool else flat.contiguous().to(torch.uint8)
    if row is not None:
        octets = octets.reshape(-1, octets.numel() // max(1, flat.numel()) * row)
    missing = -octets.shape[-1] % 8
    if missing:
        octets = torch.nn.functional.pad(octets, (0, missing))
    elif octets.storage_offset() % 8:
        octets = octets.clone()
    return octets.view(torch.int64)


def _words_sum(words: Tensor, first_row: int) -> int:
    """The sum over words (N,), the first of which begins row `first_row` of the tensor."""
    within = _coefficients(_ROW, words.device)
    n_rows, n_last = divmod(words.numel(), _ROW)
    of_rows = _coefficients(-(-(first_row + n_rows + 1) // 1024) * 1024, words.device)[first_row:]
    total = 0
    if n_rows:
        total += int((_row_sums(words[: n_rows * _ROW].view(n_rows, _ROW), within) * of_rows[:n_rows]).sum())
    if n_last:
        total += int((words[n_rows * _ROW :] * within[:n_last]).sum() * of_rows[n_rows])
    return total


def _row_sums(rows: Tensor, coefficients: Tensor) -> Tensor:
    """``rows @ coefficients`` in integers that wrap around; (R,)."""
    if rows.device.type == "cpu":
        return torch.mv(rows, coefficients)
    return _row_sums_in_blocks(rows, coefficients)


def _row_sums_in_blocks(rows: Tensor, coefficients: Tensor) -> Tensor:
    """The same for devices without an integer matrix product, such as GPUs."""
    step = max(1, _BLOCK // rows.shape[1])
    return torch.cat([(piece * coefficients).sum(1) for piece in torch.split(rows, step)])


@functools.lru_cache(maxsize=16)
def _coefficients(count: int, device: torch.device) -> Tensor:
    """(count,) pseudo-random odd 64-bit numbers."""
    return _mixed(torch.arange(1, count + 1, device=device)) | 1


def _mixed(numbers: Tensor) -> Tensor:
    """A bijection of 64-bit integers that mixes their bits.

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators" (the finaliser of SplitMix64).
    """
    mixed = numbers * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return mixed ^ ((mixed >> 31) & ((1 << 33) - 1))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
