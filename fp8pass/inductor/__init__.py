"""Settings of Inductor for FP8: which tensors are saved for the backward, how kernels are tiled, fused and combined.

May import: node_meta and files below it.
Does not live here: passes, which leave the notes in `node.meta` that are read here.
"""
