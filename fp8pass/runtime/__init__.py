"""Stand for compiled graphs where Dynamo calls them: each call brings scales, FP8 weights and moments along.

May import: `graph`, `states`, dumps and what is below them.
Does not live here: compiling: nothing here reads or changes nodes.
"""
