"""Second moments: the mathematics, the statistics on disk, and adding them up.

Knows nothing of models, text or maps: rows of features come in, sums of products come out.
"""
