"""Ops that several captures know, and what one can say of a node without knowing what it is for."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from fp8pass.graph import is_tensor, source_of, val
from fp8pass.scaling import FP8_DTYPES

aten, prims = torch.ops.aten, torch.ops.prims

ADDING_MATMULS = (
    aten.addmm.default,
    aten.baddbmm.default,
    aten.addmm.dtype,
    aten.baddbmm.dtype,
)
MATMULS = (aten.mm.default, aten.bmm.default, aten.mm.dtype, aten.bmm.dtype, *ADDING_MATMULS)

CASTS = {prims.convert_element_type.default, aten._to_copy.default}
WIDE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Ops that Inductor's decompositions leave of all those that shape and cut. Reshapes keep the order of the elements.
RESHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
COPIES = {aten.clone.default, aten.alias.default}
VIEWS = {
    *RESHAPES,
    aten.permute.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.diagonal.default,
    aten.unfold.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    operator.getitem,
}


def first(node: fx.Node) -> fx.Node:
    """The first argument, where that is a tensor."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def at(node: fx.Node) -> str:
    """A node as reasons name it: with the user's line, where torch knows it."""
    return f"{node.name} ({source_of(node)})" if source_of(node) else node.name


def is_wide_cast(node: fx.Node) -> bool:
    """A cast from one high-precision type to another, on the same device."""
    if node.target not in CASTS:
        return False
    old, new = val(first(node)), val(node)
    return old.dtype in WIDE and new.dtype in WIDE and old.device == new.device


def constant(x: Any) -> float | None:
    """The number that `x` holds in every element, if the graph says so; None if it does not."""
    if isinstance(x, (int, float)):
        return float(x)
    if not is_tensor(x):
        return None
    if x.target is aten.full.default:
        value: Any = x.args[1]
    elif x.target is aten.scalar_tensor.default:
        value = x.args[0]
    elif x.target in CASTS or x.target in VIEWS or x.target in COPIES:
        value = constant(x.args[0])
    else:
        return None
    if not isinstance(value, (int, float)) or not val(x).dtype.is_floating_point:
        return float(value) if isinstance(value, (int, float)) else None
    return float(torch.tensor(value, dtype=val(x).dtype))


def one_number(x: Any) -> Any:
    """What `x` is one and the same value of, in every element: a number or a one-element tensor; None if it is not."""
    known = constant(x)
    if known is not None:
        return known
    while is_tensor(x) and val(x).numel() != 1 and x.target is aten.expand.default:
        x = x.args[0]
    return x if is_tensor(x) and _has_one_element(val(x)) else None


def _has_one_element(x: torch.Tensor) -> bool:
    return all(isinstance(size, int) and size == 1 for size in x.shape)


def same_value(x: Any, depth: int = 8) -> Hashable:
    """Equal for arguments that certainly hold the same value: the same elementwise ops on the same nodes."""
    if not isinstance(x, fx.Node):
        return str(x)
    if not depth or not rearranges_or_maps(x) or torch.Tag.nondeterministic_seeded in getattr(x.target, "tags", ()):
        return x
    arguments = tuple(same_value(a, depth - 1) for a in x.args)
    return x.target, arguments, str(x.kwargs), val(x).dtype if is_tensor(x) else None


def fp8_behind(node: fx.Node) -> fx.Node | None:
    """An FP8 tensor that `node` is computed from by elementwise ops, casts and views, or by one op of another kind."""
    seen, todo = {node}, [node]
    while todo:
        node = todo.pop()
        if _is_fp8(node):
            return node
        new = [n for n in node.all_input_nodes if n not in seen and (rearranges_or_maps(node) or _is_fp8(n))]
        if node.target not in _PRODUCTS:
            seen.update(new)
            todo += new
    return None


_PRODUCTS = {*MATMULS, aten._scaled_mm.default}


def _is_fp8(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in FP8_DTYPES


def rearranges_or_maps(node: fx.Node) -> bool:
    """Whether the op computes its elements from single elements of its inputs."""
    if node.target in {*CASTS, *VIEWS, *COPIES, aten.cat.default, aten.constant_pad_nd.default}:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
