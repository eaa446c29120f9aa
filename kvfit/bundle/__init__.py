"""A mapper on disk: the only reader and writer of the bundle format (``docs/reference/bundle-format.md``).

Knows files, digests, tensors and records, and nothing of models or of the Hub.
"""
