"""Solve for maps: read the statistics of a store and write a bundle, without running a model.

Data flows in one direction: store -> system -> map -> bundle.
"""
