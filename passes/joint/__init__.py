"""Passes over forward and backward in one graph: they rewrite matmuls, and choose what is saved."""
