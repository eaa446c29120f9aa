"""Read and write the keys and values of whole blocks in an engine's paged cache.

Every attention backend packs a block in its own way. In vLLM's tensors the first dimension counts the blocks:

    FlashAttention, FlashInfer, Triton    (blocks, H, N, 2 D): keys in the first D features, values in the last D
    CPU                                   (blocks, H, N, 2 D) in shape only: per head, N * D keys in an order that suits the
                                          processor's instructions (transposed for "vec"), then the values
    vLLM before these views               (2, blocks, N, H, D): keys, then values

So a layout is a table of the place in the block of each of its 2 H N D elements. `watched_layout` finds it by experiment:
it lets the engine's own write operation store the number of each element and looks where the numbers lie afterwards. This
works for every backend that stores plain keys and values, and refuses backends that do not, such as quantised caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfit.errors import UnsupportedModelError

# write(keys, values, cache, slots): keys and values (n, H, D); token i goes to block slots[i] // N, row slots[i] % N
Write = Callable[[Tensor, Tensor, Tensor, Tensor], object]


@dataclass(frozen=True)
class Layout:
    """The places of a block's elements.

    Attributes:
        places: (2, H, N, D) integers: the index of each element in its flattened block.
    """

    places: Tensor

    @property
    def block_tokens(self) -> int:
        """N, the number of tokens in a block."""
        return int(self.places.shape[2])

    def read(self, cache: Tensor, block_ids: Sequence[int]) -> Tensor:
        """A copy of the keys and values of some blocks, (2, H, tokens, D).

        Args:
            cache: one layer's paged cache, whose first dimension counts blocks.
            block_ids: in the order of the tokens.
        """
        index = torch.tensor(block_ids, device=cache.device)
        blocks = cache[index].flatten(1)  # (blocks, elements)
        _, n_heads, n_tokens, head_dim = self.places.shape
        states = blocks[:, self.places.to(cache.device).flatten()].view(-1, 2, n_heads, n_tokens, head_dim)
        return states.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def write(self, cache: Tensor, block_ids: Sequence[int], states: Tensor) -> None:
        """Put keys and values, (2, H, tokens, D), into whole blocks.

        Args:
            cache: one layer's paged cache; changed.
            block_ids: in the order of the tokens.
            states: the keys and values of the tokens of all these blocks.
        """
        index = torch.tensor(block_ids, device=cache.device)
        _, n_heads, _, head_dim = states.shape
        ordered = states.reshape(2, n_heads, -1, self.block_tokens, head_dim).permute(2, 0, 1, 3, 4).flatten(1)
        blocks = torch.empty_like(ordered, dtype=cache.dtype, device=cache.device)
        blocks[:, self.places.to(cache.device).flatten()] = ordered.to(device=cache.device, dtype=cache.dtype)
        cache[index] = blocks.view(-1, *cache.shape[1:])


def watched_layout(write: Write, cache: Tensor, n_heads: int, block_tokens: int, head_dim: int) -> Layout:
    """Find the layout in which an engine's own write operation stores a block.

    The elements are numbered. The write operation stores the numbers one binary digit at a time, so that low precision does no
    harm, and the digits that a place has received say which element lies there.

    Args:
        write: the backend's operation.
        cache: a layer's paged cache, whose first dimension counts blocks; it is not changed.
        n_heads: H, the number of key/value heads.
        block_tokens: N, the number of tokens in a block.
        head_dim: D, the size of a head.

    Returns:
        The layout, on the cache's device.

    Raises:
        UnsupportedModelError: the cache does not store each element exactly once; a quantised cache does not.
    """
    count = 2 * n_heads * block_tokens * head_dim
    numbers = torch.arange(count, device=cache.device).view(2, n_heads, block_tokens, head_dim)
    slots = torch.arange(block_tokens, 2 * block_tokens, device=cache.device)  # of block 1
    scratch = torch.zeros_like(cache[:2])
    found = torch.zeros(scratch[1].numel(), dtype=torch.long, device=cache.device)
    for digit in range(count.bit_length()):
        keys, values = (half.transpose(0, 1).to(cache.dtype).contiguous() for half in numbers >> digit & 1)  # (N, H, D)
        write(keys, values, scratch, slots)
        found += (scratch[1].flatten() != 0).long() << digit
    if found.numel() != count or not torch.equal(found.sort().values, torch.arange(count, device=cache.device)):
        raise UnsupportedModelError(
            f"attention cache: found a block of {tuple(cache.shape[1:])} in {cache.dtype} that does not hold each of its "
            f"{count} keys and values once, needed a cache of plain keys and values: set --kv-cache-dtype auto"
        )
    return Layout(found.argsort().view(2, n_heads, block_tokens, head_dim))
