"""From an annotated graph to code that runs: AOTAutograd with our passes, and then Inductor, or op by op.

May import: pipeline, `inductor`, faults and what is below them.
Does not live here: state, which a call brings along: see `runtime`.
"""
