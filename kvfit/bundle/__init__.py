"""A mapper on disk. This package is the only reader and writer of the bundle format (``docs/reference/bundle-format.md``).

`bundle.Bundle` reads a bundle, `write.write_bundle` writes one, `additions.add_files` adds an evaluation, a card or pictures
later, and `records` decodes all JSON and TOML strictly. The package deals with files, digests, tensors and records. It may not
know loaded models or the Hub.
"""
