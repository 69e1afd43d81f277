"""Own scales and amaxes: who has which, when a step rolls them, how ranks agree, how they are saved.

May import: `quant`, `options` and what is below them.
Does not live here: graphs: what is called at each step, and reads them too, is in `runtime`.
"""
