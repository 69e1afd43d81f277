"""Tell Inductor what it can't know of FP8: what is saved for the backward, how kernels are cut and grouped.

May import: node_meta and files below it.
Does not live here: passes: they note in `node.meta` what is read here.
"""
