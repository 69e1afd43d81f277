"""Passes over a graph of ATen ops that somebody else has traced: they insert quantize-dequantize around its matmuls."""
