"""Evaluate a bundle on held-out text: likelihood, recall and time of each way of moving a context, and a verdict."""
