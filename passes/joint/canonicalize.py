"""Replace FP8 quantize and dequantize ops of other libraries by the ATen ops that they stand for.

before   x_q: f8e4m3fn = quantize_per_tensor(x: f32, 0.5, 0, -448, 448, f8e4m3fn)
         y: f32 = dequantize_per_tensor(x_q, 0.5, 0, -448, 448, f8e4m3fn)
after    x_q = to(clamp(round(x * 2.0), -448, 448), f8e4m3fn)
         y = to(x_q, f32) * 0.5
changes  nothing: the libraries run the same formulas. Inductor has no FP8 formula for some of these ops and calls
         others one by one; after this pass, detection needs to know only one spelling

Covers `torch.ops.quantized_decomposed` and torchao ops in graphs that `torch.export` made. torchao's other affine ops
are already decomposed when passes run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass.base.scaling import FP8_DTYPES, fp8_max
from fp8pass.graph.builder import Builder, val
from fp8pass.graph.pass_base import JointContext


def _quantize_per_tensor(x: Tensor, scale: Any, zero_point: Any, low: Any, high: Any, dtype: torch.dtype) -> Tensor:
    # the op rounds to integers, for FP8 types as well, and multiplies by the reciprocal
    rounded: Tensor = torch.round(x.float() * (1.0 / _scalar(scale))) + _scalar(zero_point)
    return rounded.clamp(low, high).to(dtype)


def _dequantize_per_tensor(
    x_q: Tensor, scale: Any, zero_point: Any, *_: Any, out_dtype: torch.dtype | None = None
) -> Tensor:
    wide = x_q.to(out_dtype or torch.float32)
    shifted = wide if _is_zero(zero_point) else wide - _scalar(zero_point)
    return shifted * _scalar(scale)  # type: ignore[no-any-return]


def _quantize_affine_float8(x: Tensor, scale: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    limit = fp8_max(dtype)
    return (x.float() / _spread(scale, x)).clamp(-limit, limit).to(dtype)


def _dequantize_affine_float8(x_q: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return (x_q.float() * _spread(scale, x_q)).to(dtype)


def _scalar(x: Any) -> Any:
    """Reshape a one-element tensor to 0 dimensions, so that type promotion does not widen the tensor that it scales."""
    return x.reshape(()) if isinstance(x, Tensor) else x


def _is_zero(x: Any) -> bool:
    return isinstance(x, int) and x == 0


def _spread(scale: Tensor, x: Tensor) -> Tensor:
    """Repeat scales of blocks for each element of their block; return any other scale as it is, for it broadcasts."""
    if scale.dim() == x.dim():
        for dim, (size, blocks) in enumerate(zip(x.shape, scale.shape, strict=True)):
            if blocks not in (1, size):
                scale = scale.repeat_interleave(size // blocks, dim)
    return scale


# Keys are names: the ops exist only after the library that defines them is imported.
_FORMULAS: dict[str, Callable[..., Tensor]] = {
    "quantized_decomposed.quantize_per_tensor.default": _quantize_per_tensor,
    "quantized_decomposed.quantize_per_tensor.tensor": _quantize_per_tensor,
    "quantized_decomposed.quantize_per_tensor.tensor2": _quantize_per_tensor,
    "quantized_decomposed.dequantize_per_tensor.default": _dequantize_per_tensor,
    "quantized_decomposed.dequantize_per_tensor.tensor": _dequantize_per_tensor,
    "quantized_decomposed.dequantize_per_tensor.tensor2": _dequantize_per_tensor,
    "torchao.quantize_affine_float8_non_decomposed.default": _quantize_affine_float8,
    "torchao.dequantize_affine_float8_non_decomposed.default": _dequantize_affine_float8,
}


class Canonicalize:
    """The pass. Replaces each op independently of the others."""

    name = "canonicalize"

    def run(self, graph: fx.Graph, context: JointContext) -> int:
        """Replace every such op that reads or returns FP8; return how many there were."""
        nodes = [n for n in graph.nodes if str(n.target) in _FORMULAS and _touches_fp8(n)]
        for node in nodes:
            _expand(graph, node)
        return len(nodes)


def _touches_fp8(node: fx.Node) -> bool:
    read = node.args[0]
    return isinstance(read, fx.Node) and (val(node).dtype in FP8_DTYPES or val(read).dtype in FP8_DTYPES)


def _expand(graph: fx.Graph, node: fx.Node) -> None:
    formula, inputs = _FORMULAS[str(node.target)], node.all_input_nodes

    def call(*tensors: Tensor) -> Tensor:
        replacements = dict(zip(inputs, tensors, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), replacements.__getitem__)
        return formula(*args, **kwargs)

    (result,) = Builder(graph, Canonicalize.name).inline(node, call, *inputs)
    was, now = val(node), val(result)
    assert (was.dtype, was.shape, was.stride()) == (now.dtype, now.shape, now.stride()), (node, was, now)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
