"""Passes over a graph of ATen ops that the user has traced: they insert quantize-dequantize around its matmuls."""
