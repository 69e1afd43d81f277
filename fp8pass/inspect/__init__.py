"""`fp8pass inspect`: compile for a GPU that this machine lacks, and list the kernels, bytes and predicted times.

May import: backend and the layers below it.
Does not live here: anything that the compiler itself needs; no layer below imports this package.
"""
