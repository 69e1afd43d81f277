"""Handle code that Dynamo does not compile: matmuls outside of graphs, skipped frames, modules called one by one.

May import: `report` and what is below it.
Does not live here: code that transforms a graph after Dynamo made it.
"""
