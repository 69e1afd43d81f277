"""Keep frozen weights in FP8 alone: 1 byte per element. Adapters such as LoRA's train beside them.

May import: `fsdp`, `quant`, `options` and what is below them.
Does not live here: FP8 weights of static scales, which are beside the parameters: see `runtime/frozen_weights.py`.
"""
