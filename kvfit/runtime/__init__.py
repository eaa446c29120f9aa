"""A cache mapped and a conversation moved: what runs in serving.

Needs torch and the packages `model` and `bundle`; never imports `fit`. The public names are exported by `kvfit` itself.
"""
