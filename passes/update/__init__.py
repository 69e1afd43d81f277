"""Passes over Dynamo's graph of an optimizer's update: write FP8 weights and moments, skip nonfinite steps.

May import: `common`, and `fp8pass.runtime` for the key of a compiled update.
Does not live here: passes that rewrite matmuls.
"""
