"""Know GPUs: their figures, the speeds of the one that is there, and which matmul kernels it has."""
