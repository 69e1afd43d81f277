"""Provide what passes work with: the builder of nodes, the annotated graph, verdicts, refusals, the verifier."""
