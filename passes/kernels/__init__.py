"""Passes on the graphs of forward, backward and update, for fewer kernels, and fewer bytes between them.

May import: `common`.
Does not live here: rewrites that change a number of the model.
"""
