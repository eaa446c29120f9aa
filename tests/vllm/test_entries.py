"""An entry comes back as it was, or is refused."""

import random

import pytest
import torch

from kvfit.vllm.entries import EntryError, pack, unpack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_entry_comes_back(dtype):
    states = torch.randn(2, 2, 3, 8, 4).to(dtype).transpose(3, 4)
    entry = unpack(pack(states, "model", "where"))
    assert torch.equal(entry.states, states)
    assert (entry.states.dtype, entry.content, entry.address) == (dtype, "model", "where")


def test_every_changed_byte_and_every_cut_is_seen():
    data = pack(torch.randn(2, 2, 1, 4, 2), "model", "where")
    chance = random.Random(0)
    for place in [*range(20), *chance.sample(range(len(data)), 200)]:
        torn = bytearray(data)
        torn[place] ^= 1 << chance.randrange(8)
        with pytest.raises(EntryError) as found:
            unpack(bytes(torn))
        assert found.value.reason == "corrupt"
    for length in [0, 1, 11, 12, 20, len(data) - 1]:
        with pytest.raises(EntryError):
            unpack(data[:length])


def test_bytes_with_a_right_checksum_that_are_no_entry_are_refused():
    import zlib

    for body in (b"", b"\x02" + bytes(7) + b"{}", bytes(40), b"\xff" * 16):
        with pytest.raises(EntryError, match="no keys and values"):
            unpack(b"KVFIT001" + zlib.crc32(body).to_bytes(4, "little") + body)
