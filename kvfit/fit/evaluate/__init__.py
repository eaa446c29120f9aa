"""A bundle and held-out text in, a verdict out: the ways of moving a context, their likelihood, recall and time."""
