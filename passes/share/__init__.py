"""On the joint graph: let the forward hand the backward what it would make again.

May import: `rewrite` and `common`.
Does not live here: rewrites of matmuls.
"""
