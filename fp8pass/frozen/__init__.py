"""Keep frozen weights in FP8 alone: 1 byte per element. Adapters such as LoRA's train beside them.

Not here: static scales of inference, whose FP8 weights are beside the parameters: see `runtime/frozen_weights.py`.
"""
