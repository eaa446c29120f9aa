"""Text and two models in, statistics out: loading, tokenizing, running both models, and the proof on the first batch."""
