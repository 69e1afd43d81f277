"""Read and check what a user chooses: `Config`, environment variables, name patterns, what bisect overrides.

May import: recipes, hardware and files below them.
Does not live here: what a choice leads to: that is decided where a graph is annotated.
"""
