"""Passes on the joint graph that let collectives send FP8.

May import: `common`.
Does not live here: the all-reduce of amaxes between steps: see `fp8pass.states.amax_reduction`.
"""
