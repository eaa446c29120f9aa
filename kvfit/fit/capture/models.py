"""Load the two models of a pair, and check that their tokenizers agree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvfit.errors import MismatchError, OptionError, RefError
from kvfit.fit.capture.locate import Located, locate
from kvfit.model.digests import telling_texts

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True)
class Loaded:
    """A loaded model.

    Attributes:
        model: the causal language model, in eval mode.
        tokenizer: its tokenizer.
        ref: ``org/name``, ``demo:source``, or the name of a local folder.
        revision: commit hash; None for local folders.
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
        device: the device; None for the first GPU, else the CPU.
        device_map: accelerate's placement for a model larger than one device: ``auto``, ``balanced``..., or devices by module
            name, including ``cpu`` and ``disk``.
        attn_implementation: ``sdpa``, ``eager``, ``flash_attention_2``; None for the model's default.
        trust_remote_code: run code from the model's repository.
    """

    dtype: str = "auto"
    device: str | None = None
    device_map: str | dict[str, Any] | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise OptionError(f"--dtype: found {self.dtype!r}, needed {', '.join(DTYPES)}")
        if self.device is not None:
            find_device(self.device)
        if isinstance(self.device_map, str) and self.device_map not in DEVICE_MAPS:
            try:
                find_device(self.device_map)
            except OptionError:
                needed = f"{', '.join(DEVICE_MAPS)} or a device"
                raise OptionError(f"--device-map: found {self.device_map!r}, needed {needed}") from None
        if self.attn_implementation is not None:
            _check_attention(self.attn_implementation)


def find_device(name: torch.device | str | None) -> torch.device:
    """A device of this machine; for None, the first GPU, else the CPU.

    Raises:
        OptionError: this machine has no such device, or it stores no values (``meta``).
    """
    wanted = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.zeros(1, device=wanted).device
        reason = "it stores no values" if place.type == "meta" else None
    except (RuntimeError, AssertionError, TypeError, ImportError) as error:  # depends on the build of torch
        reason = str(error).strip().split("\n")[0].rstrip(".")[:200]
        if reason.startswith("Expected one of"):  # a list of thirty kinds of device follows
            reason = "not a kind of device"
    if reason is not None:
        gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]
        there = ", ".join(["cpu", *gpus])
        raise OptionError(f"device: found {str(wanted)!r} ({reason}), needed one that this machine has: {there}")
    return place


def _check_attention(name: str) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = sorted({"eager", *(one for one in ALL_ATTENTION_FUNCTIONS.valid_keys() if "paged" not in one)})
    if name not in known and "/" not in name:  # org/name is a kernel on the Hub
        raise OptionError(f"--attn-implementation: found {name!r}, needed {', '.join(known)}")


def load_config(ref: str, revision: str | None = None, *, trust_remote_code: bool = False) -> Any:
    """Load only the configuration of a model."""
    from transformers import AutoConfig

    found = locate(ref, revision)
    with _told_apart(found.name, found.folder):
        return AutoConfig.from_pretrained(found.location, trust_remote_code=trust_remote_code, **found.arguments)


def load_tokenizer(ref: str, revision: str | None = None, *, trust_remote_code: bool = False) -> Any:
    """Load only the tokenizer of a model."""
    return _tokenizer(locate(ref, revision), trust_remote_code)


def _tokenizer(found: Located, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    with _told_apart(found.name, found.folder, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(found.location, trust_remote_code=trust_remote_code, **found.arguments)
    # If there are no files, version 5 of transformers makes an empty tokenizer.
    if not tokenizer("text", add_special_tokens=False)["input_ids"]:
        raise RefError(f"{found.name}: found no tokenizer there, needed its files, such as tokenizer.json, beside the weights")
    return tokenizer


def load(ref: str, revision: str | None = None, options: Options | None = None, *, tokenizer: Any = None) -> Loaded:
    """Load the model and the tokenizer of a ref. If `tokenizer` is given, it is used instead.

    Raises:
        RefError: the model is not found, not reachable or damaged, or lacks weights; names the file or the tensors.
        MismatchError: there is too little memory.
    """
    from transformers import AutoModelForCausalLM

    options = options or Options()
    located = locate(ref, revision)
    if tokenizer is None:
        tokenizer = _tokenizer(located, options.trust_remote_code)
    arguments: dict[str, Any] = {**located.arguments, "trust_remote_code": options.trust_remote_code}
    if options.attn_implementation is not None:
        arguments["attn_implementation"] = options.attn_implementation
    if options.device_map is not None:
        arguments["device_map"] = options.device_map
    with _told_apart(located.name, located.folder):
        model, found = AutoModelForCausalLM.from_pretrained(
            located.location,
            dtype="auto" if options.dtype == "auto" else getattr(torch, options.dtype),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that `_check_whole` can name them
            **arguments,
        )
        if options.device_map is None:
            model = model.to(find_device(options.device))
    _check_whole(located.name, found)
    return Loaded(model.eval(), tokenizer, located.name, located.revision)


def _check_whole(name: str, found: Mapping[str, Any]) -> None:
    """Refuse a checkpoint without all weights, because transformers would fill in random numbers and only warn."""
    for what, names in (
        ("no weights", sorted(found["missing_keys"])),
        # These are names before version 5 of transformers, and tuples of names and shapes since.
        ("weights of another shape", sorted(one if isinstance(one, str) else one[0] for one in found["mismatched_keys"])),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise RefError(
                f"{name}: found {what} for {', '.join(names[:3])}{more}, needed every weight of a causal language model: "
                "fetch it again, or choose another"
            )


class _told_apart:
    """Turns errors of transformers and the Hub into one `RefError` that names the ref, and the file that is damaged."""

    def __init__(self, name: str, folder: Path, what: str = "model") -> None:
        self.name, self.folder, self.what = name, folder, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # All errors are handled: none of our code runs inside, and a torn file can cause any error in the libraries.
        if not isinstance(error, Exception):
            return
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise MismatchError(
                f"{self.name}: found too little memory ({reason}), needed room for its weights: choose another device, or "
                "spread it with --device-map auto"
            ) from error
        if isinstance(error, ImportError):
            raise MismatchError(
                f"{self.name}: found a package missing ({reason}), needed that package: install it, or leave "
                "out the option that needs it"
            ) from error
        damaged = next((path.name for path in sorted(self.folder.glob("*.safetensors")) if not _opens(path)), None)
        if damaged is not None:
            raise RefError(f"{self.name}: found {damaged} cut short or damaged, needed all of it: fetch it again") from error
        raise RefError(
            f"{self.name}: found no loadable {self.what} there ({reason}), needed one that transformers can load"
        ) from error


def _opens(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False


def check_tokenizers(source: Any, target: Any) -> None:
    """Refuse two tokenizers that do not give the same ids.

    The token-to-id maps and the encoding of a few texts are compared. The embeddings may be padded differently.

    Raises:
        MismatchError: the tokenizers differ; names the first token that does.
    """
    ours, theirs = source.get_vocab(), target.get_vocab()
    if ours != theirs:
        differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        token = differing[0]
        raise MismatchError(
            f"tokenizers: found {len(differing)} tokens with different ids, first {token!r} with {ours.get(token)} in the "
            f"source and {theirs.get(token)} in the target, needed the same token-to-id map: choose two models of one family"
        )
    check_encodings(source, target, telling_texts(source))


def check_encodings(source: Any, target: Any, texts: Iterable[str]) -> None:
    """Refuse two tokenizers of one token-to-id map that encode one of some texts differently.

    Their merges, normalisation, pre-tokenizers, special tokens or the tokens that they add to a text may differ.

    Raises:
        MismatchError: the ids differ; names the first that do.
    """
    for text in texts:
        ours, theirs = ([int(number) for number in one(text)["input_ids"]] for one in (source, target))
        if ours != theirs:
            same = next(index for index, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b)
            found, other = (one.decode(ids[same : same + 5]) for one, ids in ((source, ours), (target, theirs)))
            raise MismatchError(
                f"tokenizers: found the same token-to-id map but different splits of a text, from token {same} on {found!r} in "
                f"the source and {other!r} in the target, needed the same ids for the same text: choose two models of one "
                "family with the same tokenizer files"
            )
