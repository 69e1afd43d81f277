"""Helpers that several passes share: patterns of nodes, views, signatures of matmuls, state as inputs.

May import: `fp8pass.graph` and the packages below it.
Does not live here: changes of a graph that only one pass makes.
"""
