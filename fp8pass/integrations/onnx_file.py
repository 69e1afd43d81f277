"""`fp8pass.export_onnx`: write a model with static scales as ONNX, with QuantizeLinear and DequantizeLinear in FP8."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass.base.errors import Fp8Error
from fp8pass.base.module_tensors import unwrapped
from fp8pass.base.scaling import E4M3
from fp8pass.integrations.export import PATTERNS, Exported
from fp8pass.integrations.export_selection import select
from fp8pass.integrations.export_weights import Fp8Matrix, Scales, quantized
from fp8pass.recipes import StaticScaling

OPSET = 21
"""The first version of ONNX's operators whose QuantizeLinear and DequantizeLinear take both FP8 and scalar scales."""


class _Quantized(nn.Module):
    """A linear layer that quantizes its input by `input_scale` f32[], and multiplies a weight in FP8 [N, K]."""

    def __init__(self, matrix: Fp8Matrix, bias: Tensor | None) -> None:
        super().__init__()
        assert matrix.input_scale_inv is not None
        self.register_buffer("weight", matrix.x_q)
        self.register_buffer("weight_scale", matrix.scale_inv)
        self.register_buffer("input_scale", matrix.input_scale_inv)
        self.register_buffer("zero_point", torch.zeros((), dtype=E4M3))
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Multiply `x` [..., K], in float32; only `torch.onnx.export` can run this."""
        x_q = self._call("QuantizeLinear", x, self.input_scale, E4M3)
        x = self._call("DequantizeLinear", x_q, self.input_scale, torch.float32)
        weight = self._call("DequantizeLinear", self.weight, self.weight_scale, torch.float32)
        return nn.functional.linear(x, weight, self.bias)

    def _call(self, op: str, x: Any, scale: Any, dtype: torch.dtype) -> Tensor:
        inputs = (x, scale, self.zero_point)
        return torch.onnx.ops.symbolic(op, inputs, dtype=dtype, shape=x.shape, version=OPSET)  # type: ignore[arg-type]


def export_onnx(
    model: Any,
    file: str | os.PathLike[str],
    args: Sequence[Any],
    *,
    recipe: Any = None,
    leave_out: Sequence[str] | str = (),
    dynamic_shapes: Any = None,
) -> Exported:
    """Write a model in float32 with static scales as ONNX: layers in FP8 between QuantizeLinear and DequantizeLinear.

    Needs the packages onnx and onnxscript. Scales are multiplied as ONNX defines it, by dividing; fp8pass multiplies by
    the reciprocal, so that a value next to the middle of two FP8 numbers may be rounded to the other.

    Args:
        model: A module, compiled or not.
        file: The path to write, such as "model.onnx".
        args: Example inputs of the model.
        recipe: `StaticScaling(fp8pass.calibrate(model, batches))`. None: the one that the model was run with.
        leave_out: Patterns of paths of layers that stay in high precision.
        dynamic_shapes: As for `torch.onnx.export`.

    Returns:
        An `Exported`: the layers in FP8, and why the others are not.

    Raises:
        Fp8Error: If no layer has static scales, some have other ones, or a weight is not in float32.
        TypeError: If `model` is not a module.
        ValueError: If `recipe` or `leave_out` is not valid.
    """
    module = unwrapped(model)
    if not isinstance(module, nn.Module):
        raise TypeError(f"export_onnx() takes a module or a compiled module, not {type(module).__name__}")
    selection = select(module, recipe, PATTERNS.take("leave_out", leave_out), ())
    not_static = [path for path, layer in selection.layers.items() if not isinstance(layer.recipe, StaticScaling)]
    if not_static or not selection.layers:
        what = f"{not_static[0]} has other scales" if not_static else "no layer has any"
        raise Fp8Error(
            f"ONNX quantizes by static scales, and {what}: pass "
            "recipe=fp8pass.recipes.StaticScaling(fp8pass.calibrate(model, batches))"
        )
    quantizing = copy.deepcopy(module)
    for path, layer in selection.layers.items():
        linear: Any = quantizing.get_submodule(path)
        if layer.weight.dtype is not torch.float32:
            raise Fp8Error(
                f"the weight of {path} is {layer.weight.dtype}: export model.float(), as ONNX runs in float32"
            )
        matrix = quantized([path], [layer.weight.detach()], 0, layer.recipe, Scales({}))
        quantizing.set_submodule(path, _Quantized(matrix, linear.bias))
    program: Any = torch.onnx.export(
        quantizing, tuple(args), dynamo=True, opset_version=OPSET, dynamic_shapes=dynamic_shapes, verbose=False
    )
    program.save(Path(file))
    return Exported(Path(file), dict.fromkeys(selection.layers, "static"), selection.kept)
