"""Passes over Dynamo's graph that write products as matmuls and annotate them with quantize-dequantize by the recipe.

May import: `common`.
Does not live here: passes over ATen graphs; these passes decide by the functions and module names of the user.
"""
