"""Keep frozen weights in FP8 alone: 1 byte per element. Adapters such as LoRA's train beside them."""
