"""Fitting: statistics, solving and evaluation. It is expensive, runs once per pair of models, and needs the extra ``fit``."""
