"""Load a mapper from a ref, and publish a bundle.

This is the only package that talks to the Hugging Face Hub.
"""
