"""Ops that move elements and change none: what stands between a dequantize and its matmul.

A scale that is one number commutes with all of them, so they are done on the FP8 tensor, where an element is one byte.

    before   x: bf16 = op(x_q: f8 * scale_inv)
    after    x_q' : f8 = op(x_q),  x = x_q' * scale_inv

What is filled in must be 0, which is 0 under every finite scale. Under an infinite or NaN scale the whole product is
NaN, where in eager rows of zeros that were filled in stay 0: `_scaled_mm` has one scale for all of an operand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fp8pass._torch import FORCE_STRIDE_ORDER
from fp8pass.graph.builder import val
from fp8pass.graph.refusal import Reject
from fp8pass.passes.common.patterns import COPIES, JOINS, MOVEMENT, at, aten, constant, first, prims

Emit = Callable[..., Any]
"""`emit(target, *args, **kwargs)`: a new node of the graph, or what it would compute."""

# Not everywhere possible on FP8: done on a float32 copy that lives in registers once the three ops are fused. Exact.
_IN_FLOAT32 = {aten.constant_pad_nd.default, prims.rev.default}


def moved_input(node: fx.Node) -> fx.Node | None:
    """The tensor whose elements `node` moves; None if it is no movement. Raises Reject if it can't move them in FP8."""
    if node.target not in MOVEMENT - JOINS:
        return None
    if node.meta.get("unbacked_bindings"):
        index = "an index or to a size that depends on data; give its bounds with torch._check, or index with a tensor"
        raise Reject("data-dependent", f"{at(node)} takes elements by {index}")
    if node.target is aten.constant_pad_nd.default:
        fill = node.args[2] if len(node.args) > 2 else 0
        if constant(fill) != 0:
            raise Reject("fill value", f"{at(node)} pads with {fill}; only 0 is the same under every finite scale")
    return first(node)


def move(node: fx.Node, x: Any, dtype: torch.dtype, emit: Emit) -> Any:
    """What `node` does to its input, done to the FP8 tensor `x` of `dtype`."""
    if node.target in COPIES:
        return x  # which layout a kernel needs is decided later, and once
    if node.target in (aten.view.default, aten.reshape.default):
        return reshape(x, node.args[1], emit)
    if node.target in (aten.mul.Tensor, aten.div.Tensor):  # the scale had more dimensions than the tensor
        return emit(aten.expand.default, x, list(val(node).shape))
    if node.target in _IN_FLOAT32:
        return _in_float32(emit, dtype, node.target, x, *node.args[1:], **node.kwargs)
    return emit(node.target, x, *node.args[1:], **node.kwargs)


def reshape(x: Any, shape: Any, emit: Emit) -> Any:
    """A view of `x`, if need be of a copy: one that Inductor makes by itself may have another layout than it says."""
    value = val(x) if isinstance(x, fx.Node) else x
    if not is_view(value, fx.map_arg(shape, lambda n: n.meta["val"])):
        x = emit(aten.clone.default, x, memory_format=torch.contiguous_format)
    return emit(aten.view.default, x, shape)


def is_view(x: torch.Tensor, shape: Any) -> bool:
    """Return whether `x.view(shape)` exists. Without sizes of 1, for there fake tensors say yes too often."""
    try:
        x.squeeze().view(shape)
    except (RuntimeError, ValueError):
        return False
    return True


def join(node: fx.Node, parts: dict[fx.Node, Any], dtype: torch.dtype, emit: Emit) -> Any:
    """What `node` makes of its inputs, made of their FP8 twins. parts: the twin of each input."""
    if node.target is aten.where.self:
        condition, x, y = node.args
        assert isinstance(x, fx.Node) and isinstance(y, fx.Node)
        x, y = (emit(prims.convert_element_type.default, parts[n], torch.float32) for n in (x, y))
        return emit(prims.convert_element_type.default, emit(aten.where.self, condition, x, y), dtype)
    return emit(node.target, [parts[n] for n in joined(node)], *node.args[1:], **node.kwargs)


def joined(node: fx.Node) -> list[fx.Node]:
    """The tensors that `node` joins."""
    tensors: Any = node.args[1:] if node.target is aten.where.self else node.args[0]
    return list(tensors)


def pinned(x: fx.Node, emit: Emit) -> Any:
    """`x` in the layout that it says it has: what is computed in columns, Inductor may lay out in rows."""
    strides = list(val(x).stride())
    if x.op != "call_function" or val(x).is_contiguous() or not all(isinstance(s, int) for s in strides):
        return x
    return emit(FORCE_STRIDE_ORDER, x, strides)


def negate(x: Any, dtype: torch.dtype, emit: Emit) -> Any:
    """`-x` of an FP8 tensor."""
    return _in_float32(emit, dtype, aten.neg.default, x)


def pad(x: Any, padding: list[Any], dtype: torch.dtype, emit: Emit) -> Any:
    """`x` with zeros around it; `padding` as in `torch.nn.functional.pad`."""
    return _in_float32(emit, dtype, aten.constant_pad_nd.default, x, padding, 0)


def _in_float32(emit: Emit, dtype: torch.dtype, target: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    wide = emit(prims.convert_element_type.default, x, torch.float32)
    return emit(prims.convert_element_type.default, emit(target, wide, *args, **kwargs), dtype)
