"""Map a cache and move a conversation: the code that runs in serving.

This package needs torch and the packages `model` and `bundle`, and never imports `fit`. `kvfit` exports its public names.
"""

# How many first tokens the target runs itself unless the caller says otherwise. It stands here because everything that moves,
# judges or serves a conversation reads it, and because importing it loads nothing. Why sixteen: docs/guides/real-pair.md.
EXACT_HEAD = 16
