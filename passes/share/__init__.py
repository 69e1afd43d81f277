"""Passes on the joint graph that save tensors in the forward, so that the backward does not compute them again.

May import: `rewrite` and `common`.
Does not live here: rewrites of matmuls.
"""
