"""Lower an annotated graph to code that runs: through AOTAutograd with fp8pass's passes, then Inductor or op by op.

May import: `passes`, `inductor`, faults and what is below them.
Does not live here: state, which is an input of each call: see `runtime`.
"""
