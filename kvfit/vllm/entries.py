"""The format of a store's entries: one tensor in safetensors' format behind a checksum.

    8 bytes   KVFIT001
    4 bytes   CRC-32 of the rest, little endian
    the rest  a safetensors file with one tensor, whose metadata says whose it is and when it was written

The checksum detects torn and flipped bytes. It does not protect against someone who can write to the store: they can make the
target read anything, so only the engines may write to it.
"""

from __future__ import annotations

import json
import time
import zlib
from dataclasses import dataclass

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

_MAGIC = b"KVFIT001"
_HEAD = len(_MAGIC) + 4


class EntryError(Exception):
    """An entry cannot be used; `reason` is the name under which it is counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Entry:
    """An entry of a store.

    Attributes:
        states: in a block, keys and values of all layers, (L, 2, H, T, D); in a guide, one weight for each token, (T,).
        content: the digest of the source model's weights, `kvfit.vllm.addresses.SourceIdentity.content`.
        address: the address under which it was stored; it depends on the source model's configuration and a sample of its
            weights.
        written: when it was written, in seconds since 1970.
    """

    states: Tensor
    content: str
    address: str
    written: float


def pack(states: Tensor, content: str, address: str) -> bytes:
    """The bytes of an entry that is written now."""
    facts = {"content": content, "address": address, "written": repr(time.time())}
    body = save({"states": states.contiguous()}, metadata=facts)
    head: bytes = _MAGIC + zlib.crc32(body).to_bytes(4, "little")
    return head + bytes(body)


def unpack(data: bytes) -> Entry:
    """The entry that `pack` wrote.

    Raises:
        EntryError: it is torn, altered or of another format (``corrupt``).
    """
    body = data[_HEAD:]
    if data[: len(_MAGIC)] != _MAGIC or zlib.crc32(body) != int.from_bytes(data[len(_MAGIC) : _HEAD], "little"):
        raise EntryError("corrupt", f"found {len(data)} bytes with another checksum, needed an entry as it was written")
    try:
        facts = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])["__metadata__"]
        return Entry(load(body)["states"], facts["content"], facts["address"], float(facts["written"]))
    except (SafetensorError, KeyError, ValueError) as error:
        raise EntryError(
            "corrupt", f"found no keys and values ({type(error).__name__}), needed an entry of this format"
        ) from None
