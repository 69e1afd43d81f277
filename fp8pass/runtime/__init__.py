"""What Dynamo calls in place of a graph: at each call it brings scales, FP8 weights and moments along.

May import: `graph`, `states`, faults and what is below them.
Does not live here: compiling: nothing here reads or changes nodes.
"""
