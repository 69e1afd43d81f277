"""The two formats: which tensors a layer has, and what config.json says of them.

    fp8                  128x128 blocks: DeepSeek's, which vLLM, SGLang and transformers read
    compressed-tensors   one scale for each tensor or row: what llm-compressor writes, read by the same three

Scales are float32, and multiply FP8 into high precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fp8pass.base.errors import Fp8Error
from fp8pass.integrations.export_weights import Fp8Matrix
from fp8pass.recipes import BlockwiseScaling, Recipe, RowwiseScaling, StaticScaling

COMPRESSED_TENSORS = "0.20.0"
"""The version of compressed-tensors whose files these are compared with."""


def is_in_blocks(recipes: Mapping[str, Recipe]) -> bool:
    """Return whether the layers' weights are in blocks. Raises Fp8Error if some are and others are not."""
    in_blocks = [path for path, recipe in recipes.items() if isinstance(recipe, BlockwiseScaling)]
    not_in_blocks = [path for path in recipes if path not in in_blocks]
    if in_blocks and not_in_blocks:
        raise Fp8Error(
            f"{in_blocks[0]} is scaled in blocks and {not_in_blocks[0]} is not: no format has both. Leave one kind out "
            "with leave_out=, or pass one recipe"
        )
    return bool(in_blocks)


def scales_of(layer: Fp8Matrix, in_blocks: bool) -> dict[str, Tensor]:
    """Return the scales of a layer, by the names that they have after the layer's path."""
    if in_blocks:
        return {"weight_scale_inv": layer.scale_inv}
    scale = layer.scale_inv.reshape(1) if layer.scale_inv.dim() == 0 else layer.scale_inv
    scales = {"weight_scale": scale}
    if layer.input_scale_inv is not None:
        scales["input_scale"] = layer.input_scale_inv.reshape(1)
    return scales


def config_in_blocks(kept: Sequence[str]) -> dict[str, Any]:
    """Return `quantization_config` for weights in blocks. kept: names of modules in high precision."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": list(kept),
        "ignored_layers": list(kept),  # the name that vLLM looks for first
    }


def config_compressed(recipes: Mapping[str, Recipe], kept: Sequence[str]) -> dict[str, Any]:
    """Return `quantization_config` for weights with scales by tensor or row. recipes: by names of modules."""
    schemes: dict[tuple[str, str, bool], list[str]] = {}
    for name, recipe in recipes.items():
        schemes.setdefault(_scheme(recipe), []).append(name)
    targets = list(schemes.values()) if len(schemes) > 1 else [["Linear"]]
    groups = [_group(*scheme, layers_of_scheme) for scheme, layers_of_scheme in zip(schemes, targets, strict=True)]
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": list(kept),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": COMPRESSED_TENSORS,
    }


def _scheme(recipe: Recipe) -> tuple[str, str, bool]:
    """Return the strategies of weight and input, and whether the input's scale is computed when a model runs."""
    if isinstance(recipe, RowwiseScaling):
        return "channel", "token", True
    return "tensor", "tensor", not isinstance(recipe, StaticScaling)


def _group(weights: str, inputs: str, dynamic: bool, targets: list[str]) -> dict[str, Any]:
    args = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None}
    return {
        "targets": targets,
        "weights": {**args, "strategy": weights, "dynamic": False},
        "input_activations": {**args, "strategy": inputs, "dynamic": dynamic},
        "output_activations": None,
        "format": "float-quantized",
    }
