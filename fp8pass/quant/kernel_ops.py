"""Ops that the kernel passes write: one node each, where ATen has many. Inductor takes its time by the node.

Each has its formula, which runs op by op and says what it is, and its lowering, which has Inductor generate the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8pass._torch import (
    ConcatKernel,
    CustomOpDef,
    MutationLayoutSHOULDREMOVE,
    Pointwise,
    TensorBox,
    Virtualized,
    inductor_lowering,
    inductor_ops,
)
from fp8pass.errors import faults_of
from fp8pass.node_meta import MADE_BY
from fp8pass.scaling import fp8_max, quantize

_POINTWISE = (torch.Tag.pointwise,)


FORMULAS: dict[Any, Callable[..., Any]] = {}
"""By op its formula, for code that runs op by op: a call of an op that Python implements takes longer than these do."""


def _op(name: str, mutates_args: Sequence[str] = (), **tags: Any) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Make an op of a formula."""

    def made(formula: Callable[..., Any]) -> CustomOpDef:
        op = torch.library.custom_op(f"fp8pass::{name}", mutates_args=mutates_args, **tags)(formula)
        FORMULAS[getattr(torch.ops.fp8pass, name).default] = formula
        return op

    return made


@_op("quantize", tags=_POINTWISE)
def _quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`scaling.quantize`. x: any shape; scale: f32[...] that broadcasts to it."""
    return quantize(x, scale, dtype)


@_quantize.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


@_op("rows", tags=_POINTWISE)
def _rows(parts: Sequence[Tensor]) -> Tensor:
    """f32[n, elements of the longest part]: in each row the elements of a part, and zeros behind them."""
    longest = max(p.numel() for p in parts)
    return torch.stack([F.pad(p.reshape(-1).float(), (0, longest - p.numel())) for p in parts])


@_rows.register_fake
def _(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].new_empty(len(parts), max(p.numel() for p in parts), dtype=torch.float32)


@_op("joined", tags=_POINTWISE)
def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The elements of all parts, of one dtype, one behind the other: [elements]. `cat` is no elementwise op."""
    return torch.cat([p.reshape(-1) for p in parts])


@_joined.register_fake
def _(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].new_empty(sum(p.numel() for p in parts))


@_op("concatenated")
def _concatenated(parts: Sequence[Tensor], dim: int) -> Tensor:
    """`torch.cat`, of which each part is written where it belongs, by the kernel that makes it."""
    return torch.cat(list(parts), dim)


@_concatenated.register_fake
def _(parts: Sequence[Tensor], dim: int) -> Tensor:
    shape = list(parts[0].shape)
    shape[dim] = sum(p.shape[dim] for p in parts)
    return parts[0].new_empty(shape)


@_op("rounded", tags=_POINTWISE)
def _rounded(x: Tensor) -> Tensor:
    """`x` as it is in memory.

    A kernel goes on computing with more digits than it stores, and would quantize another number than the one that
    anybody reads: a weight's FP8 copy would not be that of the weight.
    """
    return x.clone()


@_rounded.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@_op("write", mutates_args=("into",))
def _write(into: Tensor, x: Tensor) -> None:
    """`into.copy_(x)`, by the kernel that computes `x`, in the order in which it does. Nothing reads `into` later."""
    into.copy_(x)


@_write.register_fake
def _(into: Tensor, x: Tensor) -> None:
    return None


WRITE = torch.ops.fp8pass.write.default
QUANTIZE, ROWS, ROUNDED = (
    torch.ops.fp8pass.quantize.default,
    torch.ops.fp8pass.rows.default,
    torch.ops.fp8pass.rounded.default,
)
JOINED, CONCATENATED = torch.ops.fp8pass.joined.default, torch.ops.fp8pass.concatenated.default


def _lowers(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    register = inductor_lowering.register_lowering(op, type_promotion_kind=None)

    def registered(lowering: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(lowering)
        def lowers(*args: Any) -> Any:
            # weights are rounded on Dynamo's graph of an update, of which AOTAutograd traces another one, without marks
            made_by = Virtualized.graph.current_node.meta.get(MADE_BY, "write_weights")
            with faults_of(made_by):  # without that pass there is no such op
                return lowering(*args)

        return register(lowers)

    return registered


@_lowers(QUANTIZE)
def _(x: Any, scale: Any, dtype: torch.dtype) -> Any:
    wide, shape, limit = inductor_lowering.to_dtype(x, torch.float32), x.get_size(), fp8_max(dtype)
    element, scale_of = wide.make_loader(), inductor_lowering.expand(scale, shape).make_loader()

    def quantized(index: Any) -> Any:
        scaled = inductor_ops.mul(element(index), scale_of(index))
        at_least = inductor_ops.maximum(scaled, inductor_ops.constant(-limit, torch.float32))
        at_most = inductor_ops.minimum(at_least, inductor_ops.constant(limit, torch.float32))
        return inductor_ops.to_dtype(at_most, dtype, src_dtype=torch.float32)

    return _pointwise(x, dtype, quantized, shape)


@_lowers(ROUNDED)
def _(x: Any) -> Any:
    dtype, element = x.get_dtype(), x.make_loader()

    def stored(index: Any) -> Any:
        return inductor_ops.to_dtype(inductor_ops.to_dtype(element(index), dtype, use_compute_types=False), dtype)

    return _pointwise(x, dtype, stored, x.get_size())


@_lowers(WRITE)
def _(into: Any, x: Any) -> None:
    of_its_own = _pointwise(x, x.get_dtype(), x.make_loader(), x.get_size())
    MutationLayoutSHOULDREMOVE.realize_into(of_its_own, into, unsafe_alias=True)


@_lowers(ROWS)
def _(parts: Any) -> Any:
    loads, sizes = zip(*(_flat(inductor_lowering.to_dtype(p, torch.float32)) for p in parts), strict=True)
    longest = max(sizes)

    def element(index: Any) -> Any:
        row, column = index
        value = None
        for i, (load, size) in enumerate(zip(loads, sizes, strict=True)):
            here = _compared("eq", row, i)
            inside = here if size == longest else inductor_ops.and_(here, _compared("lt", column, size))
            # an address that depends on every loop: in groups of kernels, torch 2.11 breaks what is expanded to a mask
            part = inductor_ops.masked(inside, functools.partial(load, [column + (row - i) * size]), 0.0)
            value = part if value is None else inductor_ops.where(here, part, value)
        return value

    if len(parts) == 1:  # there is no loop over rows for an address to depend on
        return inductor_lowering.view(inductor_lowering.to_dtype(parts[0], torch.float32), [1, longest])
    return _pointwise(parts[0], torch.float32, element, [len(parts), longest])


@_lowers(JOINED)
def _(parts: Any) -> Any:
    loads, sizes = zip(*map(_flat, parts), strict=True)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]

    def element(index: Any) -> Any:
        (place,), value = index, None
        for load, size, start in reversed(list(zip(loads, sizes, starts, strict=True))):
            if size == 1:
                part = load([0])
            else:
                inside = inductor_ops.and_(_compared("ge", place, start), _compared("lt", place, start + size))
                part = inductor_ops.masked(inside, functools.partial(load, [place - start]), 0.0)
            value = part if value is None else inductor_ops.where(_compared("lt", place, start + size), part, value)
        return value

    return _pointwise(parts[0], parts[0].get_dtype(), element, [sum(sizes)])


@_lowers(CONCATENATED)
def _(parts: Any, dim: int) -> Any:
    return TensorBox(ConcatKernel.create(parts, dim))


def _flat(part: Any) -> tuple[Callable[..., Any], int]:
    """What loads an element, and how many there are."""
    size = math.prod(map(int, part.get_size()))
    return inductor_lowering.view(part, [size]).make_loader(), size


def _compared(how: str, index: Any, number: int) -> Any:
    """index `how` number: "eq", "lt" or "ge"."""
    compare = getattr(inductor_ops, how)
    return compare(inductor_ops.index_expr(index, torch.int32), inductor_ops.constant(number, torch.int32))


def _pointwise(like: Any, dtype: torch.dtype, element: Callable[..., Any], shape: Any) -> Any:
    return Pointwise.create(device=like.get_device(), dtype=dtype, inner_fn=element, ranges=list(shape))
