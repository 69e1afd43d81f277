"""Know GPUs: their figures, the speeds of the one that is there, and which matmul kernels it has.

May import: `_torch`, `errors`, `scaling`; nothing else.
Does not live here: what follows for a matmul, which `hardware` and `roofline` say.
"""
