"""Provide what passes work with: the builder of nodes, the annotated graph, verdicts, refusals, the verifier.

May import: `states` and what is below it.
Does not live here: passes, and anything that knows a single one of them.
"""
