"""`fp8pass.export_fp8`: write a model with the FP8 weights that training multiplied, in formats that servers load.

May import: `runtime`, `states`, `quant`, `options` and what is below them; transformers and safetensors when called.
Does not live here: quantizers: weights are quantized by those of `quant`, as in training.
"""
