"""Helpers that several passes share: patterns of nodes, views, signatures of matmuls, state as inputs."""
