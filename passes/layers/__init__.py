"""Passes over Dynamo's graph that find its equal layers, and outline them, so that each is compiled once.

May import: `common`.
Does not live here: compiling the outlined graphs: see `fp8pass.lowering.bodies`.
"""
