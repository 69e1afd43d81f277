"""Passes over a graph of ATen ops that somebody else has traced: they insert quantize-dequantize around its matmuls.

May import: `annotate`, for checks and quantizers, `rewrite` and `common`.
Does not live here: passes over Dynamo's graph, which has the user's functions, and whose backward is not traced yet.
"""
