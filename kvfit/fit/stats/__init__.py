"""Second moments: their mathematics, how they are summed, and the store that keeps them on disk.

This package takes rows of features and sums their products. It knows nothing of models, text or maps.
"""
