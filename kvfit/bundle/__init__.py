"""A mapper on disk: the only reader and writer of the bundle format (``docs/reference/bundle-format.md``).

`bundle.Bundle` reads, `write.write_bundle` writes, `additions.add_files` adds an evaluation, a card or pictures later, and
`records` decodes all JSON and TOML strictly. The package knows files, digests, tensors and records, and may not know loaded
models or the Hub.
"""
