"""`fp8pass.rewrite`: the passes on a graph that somebody else has traced, with its state as inputs and outputs.

May import: `lowering`, and what they may import.
Does not live here: passes; and `torch.compile`, whose graphs come from Dynamo.
"""
