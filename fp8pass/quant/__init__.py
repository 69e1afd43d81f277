"""Quantize and dequantize, as torch functions and custom ops: the numerics of everything that runs in FP8."""
