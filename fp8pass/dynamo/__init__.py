"""Deal with what Dynamo leaves out: matmuls outside of graphs, frames that it skips, modules called one by one.

May import: `report` and what is below it.
Does not live here: what happens to a graph once Dynamo has made one.
"""
