"""Rewrite Dynamo's graph: write products as matmuls, find equal layers, and annotate."""
