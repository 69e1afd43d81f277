"""Quantize and dequantize, as torch functions and custom ops: the numerics of everything that runs in FP8.

May import: scaling, recipes and files below them.
Does not live here: graphs, and state that outlives a call.
"""
