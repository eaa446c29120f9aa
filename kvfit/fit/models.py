"""Loading the two models of a pair, and proving that they read the same tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvfit import refs
from kvfit.demo import MODELS, demo_path
from kvfit.errors import MismatchError, RefError


@dataclass(frozen=True)
class Loaded:
    """A model ready to run.

    Attributes:
        model: the causal language model, in eval mode.
        tokenizer: its tokenizer.
        ref: ``org/name``, ``demo:source``, or the name of a local folder.
        revision: commit hash, None for local folders.
    """

    model: Any
    tokenizer: Any
    ref: str
    revision: str | None


@dataclass(frozen=True)
class Options:
    """How models are loaded.

    Attributes:
        dtype: ``auto`` (as stored), ``float32``, ``bfloat16`` or ``float16``.
        device: where the model runs; None for the first GPU, else the CPU.
        device_map: accelerate's placement for a model larger than one device: ``auto``, ``balanced``..., or a device by module
            name, ``cpu`` and ``disk`` among them.
        attn_implementation: ``sdpa``, ``eager``, ``flash_attention_2``; None for the model's default.
        trust_remote_code: run code that the model's repository carries.
    """

    dtype: str = "auto"
    device: str | None = None
    device_map: str | dict[str, Any] | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False


def split_ref(ref: str, revision: str | None = None) -> tuple[str, str, str | None]:
    """(what to load from, the name to record, the revision) of a ref.

    Raises:
        RefError: an empty ref, an unknown ``demo:`` ref, a revision of a folder, or two different revisions.
    """
    demo = demo_path(ref)
    if demo is not None:
        if ref not in MODELS:
            raise RefError(f"{ref}: found a text, needed a model: {' or '.join(MODELS)}")
        return str(demo), ref, None
    folder = Path(ref)
    if folder.is_dir():
        if revision:
            raise RefError(f"{ref}: found revision {revision} beside a folder, needed none: a folder has no revisions")
        return str(folder), folder.resolve().name, None
    if not ref or ref.startswith((".", "/", "~")) or ref.count("/") != 1:
        raise RefError(f"{ref!r}: found no such folder, needed a folder, org/name[@revision] or {' or '.join(MODELS)}")
    name, pinned = refs.split_ref(ref)
    if pinned and revision and pinned != revision:
        raise RefError(f"{ref}: found revision {pinned} in the ref and {revision} beside it, needed one")
    return name, name, pinned or revision


def load_config(ref: str, revision: str | None = None, *, trust_remote_code: bool = False) -> Any:
    """The configuration alone, without weights."""
    from transformers import AutoConfig

    location, name, revision = split_ref(ref, revision)
    with _told_apart(name):
        return AutoConfig.from_pretrained(location, revision=revision, trust_remote_code=trust_remote_code)


def load_tokenizer(ref: str, revision: str | None = None, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer alone."""
    from transformers import AutoTokenizer

    location, name, revision = split_ref(ref, revision)
    with _told_apart(name):
        return AutoTokenizer.from_pretrained(location, revision=revision, trust_remote_code=trust_remote_code)


def load(ref: str, revision: str | None = None, options: Options | None = None, *, tokenizer: Any = None) -> Loaded:
    """Model and tokenizer of a ref; `tokenizer` is one that was loaded already.

    Raises:
        RefError: not found, or not reachable; names the model.
        MismatchError: an option is not known.
    """
    from transformers import AutoModelForCausalLM

    options = options or Options()
    if options.dtype != "auto" and not isinstance(getattr(torch, options.dtype, None), torch.dtype):
        raise MismatchError(f"--dtype: found {options.dtype!r}, needed auto, float32, bfloat16 or float16")
    location, name, revision = split_ref(ref, revision)
    if not Path(location).is_dir():
        with _told_apart(name):
            revision = _commit(name, revision)
    if tokenizer is None:
        tokenizer = load_tokenizer(location, revision, trust_remote_code=options.trust_remote_code)
    arguments: dict[str, Any] = {"revision": revision, "trust_remote_code": options.trust_remote_code}
    if options.attn_implementation is not None:
        arguments["attn_implementation"] = options.attn_implementation
    if options.device_map is not None:
        arguments["device_map"] = options.device_map
    with _told_apart(name):
        model = AutoModelForCausalLM.from_pretrained(
            location, dtype="auto" if options.dtype == "auto" else getattr(torch, options.dtype), **arguments
        )
    if options.device_map is None:
        model = model.to(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return Loaded(model.eval(), tokenizer, name, revision)


def _commit(name: str, revision: str | None) -> str:
    """The commit that a branch or tag of a repository points at now, asked before the weights so that all comes from one."""
    from huggingface_hub import hf_hub_download

    # In the client's cache, online or not: .../snapshots/COMMIT/config.json.
    return Path(hf_hub_download(name, "config.json", revision=revision)).parent.name


class _told_apart:
    """Turns what transformers and the Hub raise for a ref into one `RefError` that names it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError | ValueError | KeyError | json.JSONDecodeError):
            reason = " ".join(str(error).split())[:300]
            raise RefError(
                f"{self.name}: found no loadable model there ({reason}), needed one that transformers can load"
            ) from error


def check_tokenizers(source: Any, target: Any) -> None:
    """Refuse two tokenizers that do not give the same ids.

    Only the token-to-id maps count: vocabularies that differ in padding rows of the embedding are the same to a tokenizer.

    Raises:
        MismatchError: names the first token that differs.
    """
    ours, theirs = source.get_vocab(), target.get_vocab()
    if ours != theirs:
        differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        token = differing[0]
        raise MismatchError(
            f"tokenizers: found {len(differing)} tokens with different ids, first {token!r} with {ours.get(token)} in the "
            f"source and {theirs.get(token)} in the target, needed the same token-to-id map: choose two models of one family"
        )
    # The same map can still split text differently (other merges or pre-tokenizer): try a text that touches both.
    sample = "Hello, World! It's 2,048 tokens\n\n  of naïve “text” — 東京 🙂\t(x_1 = y**2)"
    if source(sample)["input_ids"] != target(sample)["input_ids"]:
        raise MismatchError(
            "tokenizers: found the same token-to-id map but different splits of a text, needed the same ids for the same text"
        )
