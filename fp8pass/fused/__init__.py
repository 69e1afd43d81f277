"""Matmul kernels whose epilogue is generated: the elementwise ops after the product, quantization, amaxes.

May import: `_torch`, `hardware` and files below them.
Does not live here: the pass that finds these ops, `passes/kernels/fuse_matmuls.py`.
"""
