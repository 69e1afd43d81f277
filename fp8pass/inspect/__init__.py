"""Look at a model: explain, bisect, stats, the kernels of a GPU that is not there; the command and its demo."""
