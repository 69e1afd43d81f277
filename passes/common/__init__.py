"""What several passes know of nodes: patterns, views, spellings of a matmul, state as inputs.

May import: `fp8pass.graph` and what is below it.
Does not live here: anything that changes a graph in the name of one pass.
"""
