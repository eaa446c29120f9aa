"""Statistics in, a bundle out. No model runs here: store -> system -> map -> bundle, with no way back."""
