"""Passes over Dynamo's graph: they write products as matmuls, find equal layers, and annotate."""
