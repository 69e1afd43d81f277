"""On the joint graph: find dequantize, dequantize, matmul, and make scaled matmuls of them. The detector.

May import: `common`.
Does not live here: choices: whatever is FP8 in the graph is rewritten, or declined with its reason.
"""
