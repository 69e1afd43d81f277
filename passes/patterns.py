"""Captures that passes share: a dequantized operand, and the views between it and its matmul.

A capture walks from the matmul towards the FP8 tensor instead of enumerating chains of ops: users, decompositions and
other passes put views and casts wherever they like.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass.graph import is_tensor, val
from fp8pass.rewrite import Reject
from fp8pass.scaling import FNUZ_DTYPES, FP8_DTYPES

aten, prims = torch.ops.aten, torch.ops.prims

MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)

# One input, and the same elements of it: they mean the same on the FP8 tensor, and move a byte per element there.
MOVEMENT = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.expand.default,
    aten.clone.default,
    aten.alias.default,
    aten.contiguous.default,
}
CASTS = {prims.convert_element_type.default, aten._to_copy.default}
WIDE = (torch.float32, torch.bfloat16, torch.float16)


def is_wide_cast(node: fx.Node) -> bool:
    """A cast from one high-precision type to another."""
    return node.target in CASTS and val(node).dtype in WIDE and val(node.args[0]).dtype in WIDE


@dataclass(frozen=True)
class Dequantize:
    """An operand that is an FP8 tensor times a scale, through any number of views and wide casts.

    x_q: the FP8 tensor. views: the movement ops between it and the matmul, innermost first. factor: what it is
    multiplied with, or divided by if `divided`: a one-element tensor, a number, or None.
    """

    x_q: fx.Node
    views: tuple[fx.Node, ...]
    factor: Any
    divided: bool


def dequantize(operand: fx.Node) -> Dequantize:
    """Capture `operand`. Raises Reject, saying which condition failed, if it is not a dequantized FP8 tensor."""
    node, factor, divided, scaled_by = operand, None, False, None
    views: list[fx.Node] = []
    while True:
        if node.target in MOVEMENT:
            views.insert(0, node)
            node = _source(node)
        elif is_wide_cast(node):
            node = _source(node)
        elif node.target in CASTS and val(_source(node)).dtype in FP8_DTYPES:
            return Dequantize(_source(node), tuple(views), factor, divided)
        elif node.target in (aten.mul.Tensor, aten.div.Tensor):
            if scaled_by is not None:
                raise Reject(f"{operand.name} is scaled twice, by {scaled_by.name} and {node.name}")
            scaled_by, divided = node, node.target is aten.div.Tensor
            node, factor = _split_scale(node)
        else:
            raise Reject(_why_not(operand, node))


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _split_scale(node: fx.Node) -> tuple[fx.Node, Any]:
    """The tensor and the one-element factor of a multiplication or division."""
    x, factor = node.args
    both = node.target is aten.mul.Tensor and is_tensor(x) and is_tensor(factor)
    if both and val(x).numel() == 1 and val(factor).numel() != 1:
        x, factor = factor, x
    if not is_tensor(x):
        raise Reject(f"{node.name} divides a number by a tensor")
    if isinstance(factor, fx.Node) and not is_tensor(factor):
        raise Reject(f"{node.name} scales by a symbolic size")
    if not is_tensor(factor) and factor == 0:
        raise Reject(f"{node.name} scales by 0")
    if is_tensor(factor) and val(factor).device != val(x).device:
        raise Reject(
            f"{node.name} scales a tensor on {val(x).device} by one on {val(factor).device}; move the scale there"
        )
    if is_tensor(factor) and (val(factor).numel() != 1 or val(factor).dim() > val(x).dim()):
        raise Reject(
            f"{node.name} scales by a tensor of shape {list(val(factor).shape)}; only one scale per tensor is known"
        )
    return x, factor


def _why_not(operand: fx.Node, node: fx.Node) -> str:
    through = "" if node is operand else f" (reached through {operand.name})"
    value = node.meta.get("val")
    dtype = str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else "no tensor"
    if node.target in CASTS and isinstance(value, torch.Tensor):
        inner = val(_source(node)).dtype
        if inner in FNUZ_DTYPES:
            return f"{node.name} casts from {str(inner).removeprefix('torch.')}, which no NVIDIA GPU multiplies"
    return f"operand {node.name}: {dtype} is not dequantized from float8{through}"
