"""`fp8pass inspect`: compile for a GPU that is not there, and read what its kernels would do.

May import: backend and what is below it.
Does not live here: what the compiler itself needs: nothing below imports this.
"""
