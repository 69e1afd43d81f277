"""Ops that move elements without changing their values, between a dequantize and its matmul.

A scale that is one number commutes with all of them. So they are done on the FP8 tensor, whose elements are one byte.

    before   x: bf16 = op(x_q: f8 * scale_inv)
    after    x_q' : f8 = op(x_q),  x = x_q' * scale_inv

Padding must be with 0, which stays 0 under every finite scale. Under an infinite or NaN scale the whole product is NaN,
because `_scaled_mm` has one scale for the whole operand; in eager mode rows of padding stay 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fp8pass.base._torch import FORCE_STRIDE_ORDER
from fp8pass.graph.builder import val
from fp8pass.graph.refusal import Reject
from fp8pass.passes.common.patterns import COPIES, JOINS, MOVEMENT, at, aten, constant, first, prims

LIMITS = {
    "detected": {
        "data-dependent": ("an index that the graph computes selects elements", "gather before the quantization"),
    },
}
"""Lines of docs/limits.md: see `Reject`."""

Emit = Callable[..., Any]
"""A function `emit(target, *args, **kwargs)` that returns a new node of the graph, or the fake tensor of one."""

# Not implemented for FP8 everywhere (Inductor's C++ of torch 2.11 has no masked load of it, which a pad is): done in
# float32, which is exact, and stays in registers once the ops are fused.
_IN_FLOAT32 = {aten.constant_pad_nd.default, prims.rev.default}


def moved_input(node: fx.Node) -> fx.Node | None:
    """Return the tensor whose elements `node` moves; None if `node` is not movement.

    Raises Reject if the movement cannot be done on FP8.
    """
    if node.target not in MOVEMENT - JOINS:
        return None
    if node.meta.get("unbacked_bindings"):  # run again on the FP8 tensor, the op would make new symbols
        index = "an index or to a size that depends on data; give its bounds with torch._check, or index with a tensor"
        raise Reject("data-dependent", f"{at(node)} takes elements by {index}")
    if node.target is aten.constant_pad_nd.default:
        fill = node.args[2] if len(node.args) > 2 else 0
        if constant(fill) != 0:
            raise Reject("fill value", f"{at(node)} pads with {fill}; only 0 is the same under every finite scale")
    return first(node)


def move(node: fx.Node, x: Any, dtype: torch.dtype, emit: Emit) -> Any:
    """Apply the movement that `node` does to the FP8 tensor `x` of `dtype`."""
    if node.target in COPIES:
        return x  # operand_layout.py decides later, once, which layout the kernel needs
    if node.target in (aten.view.default, aten.reshape.default):
        return reshape(x, node.args[1], emit)
    if node.target in (aten.mul.Tensor, aten.div.Tensor):  # the scale broadcasts the tensor to more dimensions
        return emit(aten.expand.default, x, list(val(node).shape))
    if node.target in _IN_FLOAT32:
        return _in_float32(emit, dtype, node.target, x, *node.args[1:], **node.kwargs)
    return emit(node.target, x, *node.args[1:], **node.kwargs)


def reshape(x: Any, shape: Any, emit: Emit) -> Any:
    """Emit a view of `x`, or of a contiguous copy if `x` has no such view.

    The copy is explicit because one that Inductor makes by itself may have another layout than the graph says.
    """
    value = val(x) if isinstance(x, fx.Node) else x
    if not is_view(value, fx.map_arg(shape, lambda n: n.meta["val"])):
        x = emit(aten.clone.default, x, memory_format=torch.contiguous_format)
    return emit(aten.view.default, x, shape)


def is_view(x: torch.Tensor, shape: Any) -> bool:
    """Return whether `x.view(shape)` exists. Drops sizes of 1 first, for which fake tensors allow too many views."""
    try:
        x.squeeze().view(shape)
    except (RuntimeError, ValueError):
        return False
    return True


def join(node: fx.Node, parts: dict[fx.Node, Any], dtype: torch.dtype, emit: Emit) -> Any:
    """Apply the join that `node` does to the FP8 counterparts of its inputs. parts: the counterpart of each input."""
    if node.target is aten.where.self:
        condition, x, y = node.args
        assert isinstance(x, fx.Node) and isinstance(y, fx.Node)
        # Inductor's lowering of `where` promotes its inputs, and torch has no promotion for FP8
        x, y = (emit(prims.convert_element_type.default, parts[n], torch.float32) for n in (x, y))
        return emit(prims.convert_element_type.default, emit(aten.where.self, condition, x, y), dtype)
    return emit(node.target, [parts[n] for n in joined(node)], *node.args[1:], **node.kwargs)


def joined(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that `node` joins."""
    tensors: Any = node.args[1:] if node.target is aten.where.self else node.args[0]
    return list(tensors)


def pinned(x: fx.Node, emit: Emit) -> Any:
    """Return `x` with its strides forced: Inductor may lay out in rows a tensor that the graph has in columns."""
    strides = list(val(x).stride())
    if x.op != "call_function" or val(x).is_contiguous() or not all(isinstance(s, int) for s in strides):
        return x
    return emit(FORCE_STRIDE_ORDER, x, strides)


def negate(x: Any, dtype: torch.dtype, emit: Emit) -> Any:
    """Return `-x` of an FP8 tensor, by way of float32: CPUs have no `neg` for FP8."""
    return _in_float32(emit, dtype, aten.neg.default, x)


def pad(x: Any, padding: list[Any], dtype: torch.dtype, emit: Emit) -> Any:
    """Pad `x` with zeros; `padding` is as in `torch.nn.functional.pad`."""
    return _in_float32(emit, dtype, aten.constant_pad_nd.default, x, padding, 0)


def _in_float32(emit: Emit, dtype: torch.dtype, target: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    wide = emit(prims.convert_element_type.default, x, torch.float32)
    return emit(prims.convert_element_type.default, emit(target, wide, *args, **kwargs), dtype)
