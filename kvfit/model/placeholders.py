"""Find token ids that stand for an image, a sound or a video. The ids do not contain it, so a model cannot run them alone."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from kvfit.errors import MismatchError
from kvfit.model.decoder import unwrapped

_MEDIUM = re.compile(r"(^|_)(image|img|video|audio|speech|sound|vision|visual|media)(_|$)")
_TOKEN = re.compile(r"_token(s)?_(id|ids|index)$")
# The tokens before and after the placeholders are ordinary tokens with an embedding of their own.
_DELIMITER = re.compile(r"_(start|end|begin|bos|eos)(_|$)")


def placeholder_ids(config: Any) -> frozenset[int]:
    """The token ids that a configuration names as placeholders for pixels or sound; empty for a text model.

    A model replaces the embeddings at these positions by the output of its vision or audio part. Run as ordinary tokens, they
    would give keys and values that have nothing to do with what the first model of the conversation saw.

    Args:
        config: configuration of a transformers model; the outer one of a multimodal model.
    """
    values = dict(config.to_dict())
    text = config.get_text_config(decoder=True)
    if text is not config:
        values = {**text.to_dict(), **values}
    found: set[int] = set()
    for name, value in values.items():
        if _MEDIUM.search(name) and _TOKEN.search(name) and not _DELIMITER.search(name):
            numbers = value if isinstance(value, (list, tuple)) else [value]
            found.update(number for number in numbers if type(number) is int and number >= 0)
    return frozenset(found)


class Placeholders:
    """The placeholders in the prompt of one conversation.

    Attributes:
        found: (B, S), true at placeholders; None for a text model.
    """

    def __init__(self, model: Any, input_ids: Tensor) -> None:
        """Find the model's placeholders in token ids (B, S)."""
        ids = sorted(placeholder_ids(unwrapped(model).config))
        self._input_ids = input_ids
        self.found = torch.isin(input_ids, torch.tensor(ids, device=input_ids.device)) if ids else None

    def refuse(self, start: int, stop: int, chosen: Tensor | None = None) -> None:
        """Refuse placeholders among the tokens start to stop - 1; with `chosen` (B, S), only among those where it is true.

        Raises:
            MismatchError: there is one; names the first.
        """
        if self.found is None:
            return
        found = self.found[:, start:stop] if chosen is None else self.found[:, start:stop] & chosen[:, start:stop]
        if bool(found.any()):
            row, token = found.nonzero()[0].tolist()
            number = int(self._input_ids[row, start + token])
            raise MismatchError(
                f"input_ids: found the placeholder {number} of an image, a sound or a video at row {row}, token "
                f"{start + token}, needed text where the target runs tokens itself, because ids do not say what was seen: "
                "leave such tokens to the mapped part"
            )
