"""Rewrite forward and backward in one graph: compute matmuls in FP8, and choose what is saved."""
