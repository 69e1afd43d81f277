"""Read and check the user's options: `Config`, environment variables, name patterns, and the overrides of bisect.

May import: recipes, hardware and files below them.
Does not live here: the effect of an option, which is decided where a graph is annotated.
"""
