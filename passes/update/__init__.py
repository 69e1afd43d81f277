"""On Dynamo's graph of an optimizer's update: write FP8 weights and moments, skip what is not finite.

May import: `common`, and `fp8pass.runtime` for what an update is compiled for.
Does not live here: matmuls.
"""
