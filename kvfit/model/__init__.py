"""One loaded transformers model: its layers, its caches, its rotary embedding, who it is.

A family that is read wrongly is mended in `rope_probe`, which finds out what the model does; `rope` only does the arithmetic.

The only package that knows the API of transformers. It knows nothing of mappers, bundles or statistics, and imports
transformers only inside functions, because a serving process may load a mapper before it loads a model.
"""
