"""`fp8pass.load_frozen`: load an FP8 checkpoint as the frozen weights of a model, without dequantizing it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fp8pass.base.errors import Fp8Error
from fp8pass.base.scaling import E4M3
from fp8pass.frozen.replace import module_of
from fp8pass.frozen.weight import FrozenWeight, parameter
from fp8pass.recipes import BLOCK

log = logging.getLogger(__name__)
SCALES = {"weight_scale_inv": "fp8", "weight_scale": "compressed-tensors"}
"""The names of scales in a checkpoint, which multiply FP8 to high precision, and the `quant_method` that has them."""


def load_frozen(model: Any, directory: str | Path) -> list[str]:
    """Load a checkpoint whose linear layers are in FP8; these become frozen weights, 1 byte per element.

    Takes safetensors with e4m3 weights and scales: `quant_method: fp8` with blocks of 128x128, as DeepSeek and Qwen
    publish, and compressed-tensors with a scale per tensor or row. Names are those of the model's parameters. Other
    tensors are loaded as `load_state_dict` does, into the model's dtype. A weight with incomplete blocks is
    dequantized, with a line in the log. Scales of activations are not used: the recipe scales them.

    Args:
        model: A module, not yet compiled; with transformers, `AutoModelForCausalLM.from_config(config)`.
        directory: A folder with `config.json`, and `model.safetensors` or `model.safetensors.index.json`.

    Returns:
        The names of the layers whose weights are in FP8.

    Raises:
        TypeError: If `model` is not a module.
        FileNotFoundError: If the folder has no such files.
        Fp8Error: If a weight has a shape, format or name that the model does not have, or the checkpoint lacks one.
        ImportError: If the package safetensors is not installed.
    """
    model, directory = module_of(model, "load_frozen"), Path(directory)
    _check_method(directory)
    tensors = dict(_tensors_of(directory))
    frozen = {}
    for layer, _, key in [name.rpartition(".") for name in tensors]:
        if key in SCALES and (weight := _taken(layer, f"{layer}.{key}", tensors, model)) is not None:
            frozen[layer] = weight
    unused = [name for name in tensors if name.rpartition(".")[2] in ("input_scale", "output_scale")]
    if unused:
        log.info("load_frozen: %d scales of activations are not used, such as %s", len(unused), unused[0])
    rest = {name: x for name, x in tensors.items() if name not in unused}
    missing, unexpected = model.load_state_dict(rest, strict=False)
    _check_names(model, frozen, missing, unexpected)
    for name, weight in frozen.items():
        model.get_submodule(name).weight = parameter(weight)
    return list(frozen)


def _check_method(directory: Path) -> None:
    path = directory / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"{path}: a checkpoint in FP8 has a config.json with its quantization_config")
    method = json.loads(path.read_text()).get("quantization_config", {}).get("quant_method")
    if method not in SCALES.values():
        raise Fp8Error(
            f"{path}: quant_method is {method!r}; load_frozen reads {' and '.join(map(repr, SCALES.values()))}. For a "
            "checkpoint in high precision, load it as usual and call fp8pass.freeze(model)"
        )


def _tensors_of(directory: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        from safetensors.torch import load_file  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise ImportError("load_frozen reads safetensors: pip install safetensors") from error
    index = directory / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    for name in names:
        if not (directory / name).exists():
            raise FileNotFoundError(f"{directory / name}: the checkpoint is not complete")
        yield from load_file(directory / name).items()


def _taken(layer: str, name: str, tensors: dict[str, Tensor], model: nn.Module) -> FrozenWeight | None:
    """Take the weight of a layer and its scale out of `tensors`; name: that of the scale.

    A weight with incomplete blocks stays there, dequantized, and the result is None.
    """
    x_q, scale_inv = tensors.pop(f"{layer}.weight", None), tensors.pop(name).float()
    where = f"{layer}.weight"
    if x_q is None or x_q.dtype != E4M3:
        what = "is missing" if x_q is None else f"is {x_q.dtype}"
        raise Fp8Error(f"{where} {what}, and {name} is its scale: load_frozen reads weights in {E4M3}")
    parameter = dict(model.named_parameters()).get(where)
    if parameter is None or parameter.shape != x_q.shape:
        what = "no such parameter" if parameter is None else f"a parameter {list(parameter.shape)}"
        raise Fp8Error(f"{where} is {list(x_q.shape)} in the checkpoint, and the model has {what}")
    scale_inv, whole = _normal(scale_inv, x_q, name)
    if not whole:
        log.info("load_frozen: %s %s has incomplete blocks of %d, and is dequantized", where, list(x_q.shape), BLOCK)
        spread = scale_inv.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        tensors[where] = (x_q.float() * spread[: x_q.shape[0], : x_q.shape[1]]).to(parameter.dtype)
        return None
    device = parameter.device if not parameter.is_meta else x_q.device
    return FrozenWeight(x_q.to(device), scale_inv.to(device), parameter.dtype)


def _normal(scale_inv: Tensor, x_q: Tensor, name: str) -> tuple[Tensor, bool]:
    """Return the scale as `FrozenWeight` has it, and whether its blocks are complete."""
    rows, columns = x_q.shape
    blocks = [-(-rows // BLOCK), -(-columns // BLOCK)]
    # one number may be the scale of a weight that is a single block, too: then the name decides, below
    if scale_inv.numel() == 1 and blocks != [1, 1]:
        return scale_inv.reshape(()), True
    if list(scale_inv.shape) == blocks and name.endswith("_inv"):
        return scale_inv.contiguous(), not (rows % BLOCK or columns % BLOCK)
    if scale_inv.numel() in (1, rows):
        return scale_inv.reshape(() if scale_inv.numel() == 1 else (rows, 1)), True
    raise Fp8Error(
        f"{name} is {list(scale_inv.shape)}: a weight {[rows, columns]} has one scale, {rows} of rows, or {blocks} of "
        f"blocks of {BLOCK}"
    )


def _check_names(model: nn.Module, frozen: Mapping[str, Any], missing: list[str], unexpected: list[str]) -> None:
    given = {f"{name}.weight" for name in frozen}
    # a tied parameter has several names, of which a checkpoint has one
    parameters = dict(model.named_parameters(remove_duplicate=False))
    loaded = {id(p) for name, p in parameters.items() if name in given or name not in missing}
    absent = [name for name in missing if name not in given and id(parameters.get(name)) not in loaded]
    if absent or unexpected:
        raise Fp8Error(
            f"the checkpoint is not one of this model: it lacks {absent[:3]} ({len(absent)}), and has {unexpected[:3]} "
            f"({len(unexpected)}) that the model does not have"
        )
