"""Fitting: statistics, solving and evaluation. Heavy, runs once per pair of models. Needs the extra ``fit``."""
