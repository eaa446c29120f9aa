"""Fitting: statistics, solving and evaluation. Heavy; runs once per pair. Needs the extra ``fit``."""
