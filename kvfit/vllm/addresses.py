"""The address under which a block of keys and values lies in a store.

A block's address is a digest of everything that its keys and values depend on: the source model, and the ids of its own
tokens and of all tokens before them. The salt is in it too, so that engines or tenants with different salts share nothing.
Each block's digest is made from the one before it, so prompts that begin alike share the addresses of what they share:

    root = H(source model, block length, salt)        block i = H(block i - 1, ids of block i)
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvfit.spec import ModelSpec

_VERSION = "kvfit-kv-1"


@dataclass(frozen=True)
class SourceIdentity:
    """The model that computed keys and values.

    Attributes:
        sampled: a digest of its configuration, a sample of its weights and its quantisation; part of every address.
        content: a digest of all of its weights, which every entry carries; None for a mapper that was fitted before kvfit
            recorded it.
    """

    sampled: str
    content: str | None

    @classmethod
    def of(cls, spec: ModelSpec) -> SourceIdentity:
        """The identity of the model that a spec describes."""
        sampled = sampled_identity(spec.config_digest, spec.weight_fingerprint, spec.quantisation)
        return cls(sampled, None if spec.content is None else content_identity(spec.content.rounded, spec.content.n_ids))


def sampled_identity(config_digest: str, weight_fingerprint: str, quantisation: str | None) -> str:
    """`SourceIdentity.sampled`, from the fields of a `kvfit.spec.ModelSpec`."""
    return hashlib.sha256(repr((config_digest, weight_fingerprint, quantisation)).encode()).hexdigest()


def content_identity(rounded: tuple[str, ...], n_ids: int) -> str:
    """`SourceIdentity.content`, from the fields of a `kvfit.spec.Content`."""
    return hashlib.sha256(repr((rounded, n_ids)).encode()).hexdigest()


@dataclass(frozen=True)
class AddressBook:
    """The addresses of the blocks of one source model.

    Attributes:
        identity: `SourceIdentity.sampled` of the source model.
        block_tokens: the number of tokens in a stored block.
        salt: the deployment's salt; engines share entries only where they have the same.
    """

    identity: str
    block_tokens: int
    salt: str

    def marker(self) -> str:
        """The address where a source engine records that it uses this store.

        It tells a prompt that has not been read yet from a store that another source uses.
        """
        return self._root("marker", "").hex()

    def blocks(self, token_ids: Sequence[int], tenant: str = "") -> list[str]:
        """The address of every whole block of a prompt.

        Args:
            token_ids: the prompt.
            tenant: the request's own salt.
        """
        digest = self._root("blocks", tenant)
        addresses = []
        for start in range(0, len(token_ids) - self.block_tokens + 1, self.block_tokens):
            digest = _chained(digest, token_ids[start : start + self.block_tokens])
            addresses.append(digest.hex())
        return addresses

    def guide(self, token_ids: Sequence[int], tenant: str = "") -> str:
        """The address of the record of where the source looks after this prompt; it depends on all of the prompt's tokens."""
        return _chained(self._root("guide", tenant), token_ids).hex()

    def _root(self, purpose: str, tenant: str) -> bytes:
        return hashlib.sha256(repr((_VERSION, purpose, self.identity, self.block_tokens, self.salt, tenant)).encode()).digest()


def _chained(digest: bytes, token_ids: Sequence[int]) -> bytes:
    return hashlib.sha256(digest + array("q", token_ids).tobytes()).digest()
