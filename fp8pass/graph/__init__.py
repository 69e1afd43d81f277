"""Give passes what they work with: nodes made with their values, the annotated graph, verdicts, refusals, the verifier.

May import: `states` and what is below it.
Does not live here: passes, and anything that knows a single one of them.
"""
