"""Modules with quantize and dequantize ops of other libraries, for the files test_canonicalize.py of several tiers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines torch.ops.quantized_decomposed
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.harness import E4M3, fp8

ops = torch.ops.quantized_decomposed


class Exported(nn.Module):
    """A linear layer with an FP8 weight, as quantization for export leaves it."""

    def __init__(self, overload: str = "default", zero_point: Any = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("weight", fp8(48, 64))
        self.register_buffer("scale", torch.tensor([0.25]))
        self.register_buffer("zero_point", torch.zeros(1, dtype=torch.int64))
        self.overload, self.constant, self.dtype = overload, zero_point, dtype

    def forward(self, x: Tensor) -> Tensor:
        quantize, dequantize = (
            getattr(op, self.overload) for op in (ops.quantize_per_tensor, ops.dequantize_per_tensor)
        )
        zero_point = self.zero_point if self.constant is None else self.constant
        if self.overload == "tensor" and self.constant is not None:
            zero_point = torch.full((1,), self.constant)
        scale = 0.25 if self.overload == "default" else self.scale
        limits = -448, 448, E4M3
        x_q = quantize(x, scale, zero_point, *limits)
        x, weight = (dequantize(q, scale, zero_point, *limits, out_dtype=self.dtype) for q in (x_q, self.weight))
        return F.linear(x, weight)


def export(module: nn.Module, *inputs: Tensor) -> Any:
    return torch.export.export(module, inputs).module()


torchao = pytest.importorskip("torchao.quantization.quant_primitives")


class TorchAO(nn.Module):
    """A linear layer with torchao's affine ops; `general`: with the general dequantize instead of the one for FP8."""

    def __init__(self, general: bool, scale_shape: tuple[int, ...], weight_scale_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("weight", fp8(48, 64))
        self.register_buffer("scale", torch.full(scale_shape, 0.25))
        self.register_buffer("weight_scale", torch.rand(weight_scale_shape) + 0.5)
        self.general = general

    def forward(self, x: Tensor) -> Tensor:
        x_q = torchao._quantize_affine_float8_non_decomposed(x, self.scale)
        if self.general:
            args = None, E4M3, -448, 448
            x = torchao.dequantize_affine(x_q, tuple(x.shape), self.scale, *args)
            return F.linear(x, torchao.dequantize_affine(self.weight, (48, 64), self.weight_scale, *args))
        x = torchao._dequantize_affine_float8_non_decomposed(x_q, self.scale)
        return F.linear(x, torchao._dequantize_affine_float8_non_decomposed(self.weight, self.weight_scale))
