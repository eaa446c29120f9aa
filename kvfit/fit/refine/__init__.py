"""Refining a bundle: a few hundred steps through the frozen target, from the closed-form map on."""
