"""On Dynamo's graph: write every matmul as a matmul, and put quantize-dequantize around what the recipe takes.

May import: `common`.
Does not live here: ATen: what is decided here is decided by the user's functions and names.
"""
