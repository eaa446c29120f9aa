"""One loaded transformers model: its layers, its caches, its rotary embedding, its identity.

If kvfit reads the rotary embedding of a model family wrongly, the fix belongs in `rope_probe`, which finds out what a model
does; `rope` only does the arithmetic. What makes a model count as another one is decided in `identity`.

This is the only package that knows the API of transformers. It knows nothing of mappers, bundles or statistics. It imports
transformers inside functions only, because a serving process may load a mapper before it loads a model.
"""
