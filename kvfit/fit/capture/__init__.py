"""Capture statistics: load two models, tokenize text, verify both models on the first batch, and run them on all of it."""
