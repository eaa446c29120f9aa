"""Ids that stand for an image, a sound or a video. What they mean is not in the ids, so ids alone cannot be run."""

from __future__ import annotations

import re
from typing import Any

_MEDIUM = re.compile(r"(^|_)(image|img|video|audio|speech|sound|vision|visual|media)(_|$)")
_TOKEN = re.compile(r"_token(s)?_(id|ids|index)$")
# Tokens around the placeholders are ordinary tokens with an embedding of their own.
_DELIMITER = re.compile(r"_(start|end|begin|bos|eos)(_|$)")


def placeholder_ids(config: Any) -> frozenset[int]:
    """The token ids that a configuration names as placeholders for pixels or sound; empty for a text model.

    A model replaces the embeddings of these positions by what its vision or audio part made. Run as words they give keys and
    values that have nothing to do with what the conversation's first model saw.

    Args:
        config: of a transformers model, the outer configuration of a multimodal one.
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
