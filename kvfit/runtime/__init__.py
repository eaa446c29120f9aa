"""Map a cache and move a conversation: the code that runs in serving.

This package needs torch and the packages `model` and `bundle`, and never imports `fit`. `kvfit` exports its public names.
"""
