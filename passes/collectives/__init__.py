"""On the joint graph: let collectives send FP8.

May import: `common`.
Does not live here: amaxes that ranks agree on between steps: see `fp8pass.states.amax_reduction`.
"""
