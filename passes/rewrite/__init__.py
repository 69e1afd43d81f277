"""On the joint graph: find two dequantizes and a matmul, and rewrite them as a scaled matmul. The detector.

May import: `common`.
Does not live here: choices of what becomes FP8: each FP8 matmul in the graph is rewritten, or declined with a reason.
"""
