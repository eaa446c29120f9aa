"""From a ref to a mapper, and from a bundle to a published version.

The only package that talks to the Hugging Face Hub.
"""
