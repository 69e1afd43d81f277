"""Matmul kernels whose epilogue is generated: the elementwise ops after the product, quantization, amaxes.

May import: `roofline` and files below it.
Does not live here: the pass that finds these ops, `passes/kernels/fuse_matmuls.py`.
"""
