"""Refine a bundle: train its maps through the frozen target for a few hundred steps, starting from the closed-form map."""
