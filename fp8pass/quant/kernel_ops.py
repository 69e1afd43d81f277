"""Custom ops that kernel passes insert. Each is one node for what takes many in ATen: Inductor takes time per node.

Each op has a formula in plain torch, which defines it and runs op by op, and a lowering, from which Inductor generates
the same computation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8pass.base._torch import (
    ConcatKernel,
    CustomOpDef,
    ExternKernel,
    MutationLayoutSHOULDREMOVE,
    Pointwise,
    TensorBox,
    Virtualized,
    inductor_lowering,
    inductor_ops,
)
from fp8pass.base.errors import faults_of
from fp8pass.base.node_meta import MADE_BY
from fp8pass.base.scaling import fp8_max, overflow_from, quantize

# Inductor reads this tag when it lowers what such an op reads (`is_pointwise_use`); passes do, too (`patterns.py`).
_POINTWISE = (torch.Tag.pointwise,)


ALIGNED_STRIDE = 4
"""The stride of a vector f32[n] whose elements begin at multiples of 16 bytes."""

FORMULAS: dict[Any, Callable[..., Any]] = {}
"""{op: its formula}. Code that runs op by op calls the formula, since calling a custom op takes longer."""


def _op(name: str, mutates_args: Sequence[str] = (), **tags: Any) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Return a decorator that registers a formula as the custom op `fp8pass::name`."""

    def made(formula: Callable[..., Any]) -> CustomOpDef:
        op = torch.library.custom_op(f"fp8pass::{name}", mutates_args=mutates_args, **tags)(formula)
        FORMULAS[getattr(torch.ops.fp8pass, name).default] = formula
        return op

    return made


@_op("quantize", tags=_POINTWISE)
def _quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `scaling.quantize`. x: any shape; scale: f32[...] that broadcasts to it."""
    return quantize(x, scale, dtype)


@_quantize.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


@_op("saturated", tags=_POINTWISE)
def _saturated(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 1 where `x * scale` is too large for the FP8 `dtype`, by more than rounding, and 0 elsewhere: f32[...]."""
    return ((x.float() * scale).abs() > overflow_from(dtype)).float()


@_saturated.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=torch.float32)


@_op("rows", tags=_POINTWISE)
def _rows(parts: Sequence[Tensor]) -> Tensor:
    """Return f32[n, elements of the longest part]: each row holds the elements of one part, followed by zeros."""
    longest = max(p.numel() for p in parts)
    return torch.stack([F.pad(p.reshape(-1).float(), (0, longest - p.numel())) for p in parts])


@_rows.register_fake
def _(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].new_empty(len(parts), max(p.numel() for p in parts), dtype=torch.float32)


@_op("joined", tags=_POINTWISE)
def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the elements of all parts, of one dtype, one after the other: [elements]. Elementwise, unlike `cat`."""
    return torch.cat([p.reshape(-1) for p in parts])


@_joined.register_fake
def _(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].new_empty(sum(p.numel() for p in parts))


@_op("concatenated")
def _concatenated(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Compute `torch.cat`; the kernel that computes a part writes it directly into the result."""
    return torch.cat(list(parts), dim)


@_concatenated.register_fake
def _(parts: Sequence[Tensor], dim: int) -> Tensor:
    shape = list(parts[0].shape)
    shape[dim] = sum(p.shape[dim] for p in parts)
    return parts[0].new_empty(shape)


@_op("rounded", tags=_POINTWISE)
def _rounded(x: Tensor) -> Tensor:
    """Return `x` rounded to its dtype, as it is in memory.

    Inductor's kernels compute in float32 and go on with values that they have not rounded to the dtype that they store.
    They would quantize these values, so a weight's FP8 copy would not be a copy of the stored weight.
    """
    return x.clone()  # a custom op may not return its input


@_rounded.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@_op("aligned", tags=_POINTWISE)
def _aligned(x: Tensor) -> Tensor:
    """Copy a scale, or a vector of scales f32[n] so that each element begins at a multiple of 16 bytes.

    cuBLASLt refuses scales at other addresses. A vector gets the stride ALIGNED_STRIDE.
    """
    return torch.empty_strided(x.shape, _apart(x), dtype=x.dtype, device=x.device).copy_(x)


@_aligned.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, _apart(x), dtype=x.dtype, device=x.device)


def _apart(x: Tensor) -> Sequence[int]:
    return (ALIGNED_STRIDE,) if x.dim() == 1 else torch.empty(x.shape, device="meta").stride()


@_op("laid_out")
def _laid_out(x: Tensor, strides: Sequence[int]) -> Tensor:
    """Return `x` with these strides: what an op of another library reads then has them in generated code, too.

    Inductor's own op, `force_stride_order`, keeps the order of strides, and may pad them.
    """
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


@_laid_out.register_fake
def _(x: Tensor, strides: Sequence[int]) -> Tensor:
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)


@_op("repeated", tags=_POINTWISE)
def _repeated(x: Tensor, times: int) -> list[Tensor]:
    """Return `x` once for each of its readers.

    Inductor gives a value a buffer if it has many ops and several readers. Where one kernel computes all the readers,
    it needs none.
    """
    return [x.clone() for _ in range(times)]


@_repeated.register_fake
def _(x: Tensor, times: int) -> list[Tensor]:
    return [torch.empty_like(x) for _ in range(times)]


@_op("write", mutates_args=("into",))
def _write(into: Tensor, x: Tensor) -> None:
    """Compute `into.copy_(x)` in the kernel that computes `x`, in its loop order. Nothing may read `into` later."""
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
SATURATED = torch.ops.fp8pass.saturated.default
JOINED, CONCATENATED = torch.ops.fp8pass.joined.default, torch.ops.fp8pass.concatenated.default
ALIGNED, REPEATED = torch.ops.fp8pass.aligned.default, torch.ops.fp8pass.repeated.default
LAID_OUT = torch.ops.fp8pass.laid_out.default


def _lowers(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    # None: by default Inductor promotes the inputs of a lowering to one dtype
    register = inductor_lowering.register_lowering(op, type_promotion_kind=None)

    def registered(lowering: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(lowering)
        def lowers(*args: Any) -> Any:
            # `write_weights` inserts ops into Dynamo's graph; AOTAutograd traces that into a new graph without marks
            made_by = Virtualized.graph.current_node.meta.get(MADE_BY, "write_weights")
            with faults_of(made_by):  # a graph compiled without that pass does not have the op
                return lowering(*args)

        return register(lowers)

    return registered


@_lowers(QUANTIZE)
def _(x: Any, scale: Any, dtype: torch.dtype) -> Any:
    wide, shape, limit = inductor_lowering.to_dtype(x, torch.float32), x.get_size(), fp8_max(dtype)
    element, scale_of = wide.make_loader(), inductor_lowering.expand(scale, shape).make_loader()

    # GPUs with FP8 cast by `cvt.rn.satfinite`, which saturates at the limit and keeps NaN
    cast_saturates = x.get_device().type == "cuda"

    def quantized(index: Any) -> Any:
        scaled = inductor_ops.mul(element(index), scale_of(index))
        if cast_saturates:
            return inductor_ops.to_dtype(scaled, dtype, src_dtype=torch.float32)
        # Inductor's maximum and minimum keep NaN, as `clamp` does
        at_least = inductor_ops.maximum(scaled, inductor_ops.constant(-limit, torch.float32))
        at_most = inductor_ops.minimum(at_least, inductor_ops.constant(limit, torch.float32))
        return inductor_ops.to_dtype(at_most, dtype, src_dtype=torch.float32)

    return _pointwise(x, dtype, quantized, shape)


@_lowers(SATURATED)
def _(x: Any, scale: Any, dtype: torch.dtype) -> Any:
    wide, shape, limit = inductor_lowering.to_dtype(x, torch.float32), x.get_size(), overflow_from(dtype)
    element, scale_of = wide.make_loader(), inductor_lowering.expand(scale, shape).make_loader()

    def saturated(index: Any) -> Any:
        size = inductor_ops.abs(inductor_ops.mul(element(index), scale_of(index)))
        above = inductor_ops.gt(size, inductor_ops.constant(limit, torch.float32))
        return inductor_ops.to_dtype(above, torch.float32, src_dtype=torch.bool)

    return _pointwise(x, torch.float32, saturated, shape)


@_lowers(ROUNDED)
def _(x: Any) -> Any:
    dtype, element = x.get_dtype(), x.make_loader()

    # use_compute_types=False: by default Inductor casts to the compute dtype, which is float32 for bfloat16 and
    # float16. The outer cast returns to it.
    def stored(index: Any) -> Any:
        return inductor_ops.to_dtype(inductor_ops.to_dtype(element(index), dtype, use_compute_types=False), dtype)

    return _pointwise(x, dtype, stored, x.get_size())


@_lowers(ALIGNED)
def _(x: Any) -> Any:
    copy, is_vector = _pointwise(x, x.get_dtype(), x.make_loader(), x.get_size()), len(x.get_size()) == 1
    copy = ExternKernel.require_exact_strides(copy, [ALIGNED_STRIDE]) if is_vector else copy
    copy.realize()
    # where the copy is one number, Inductor would write it into the memory of one that it reads, which may be unaligned
    Virtualized.graph.never_reuse_buffers.update(copy.get_read_names())
    return copy


@_lowers(LAID_OUT)
def _(x: Any, strides: Any) -> Any:
    return ExternKernel.require_exact_strides(x, strides)


@_lowers(REPEATED)
def _(x: Any, times: int) -> Any:
    return [_pointwise(x, x.get_dtype(), x.make_loader(), x.get_size()) for _ in range(times)]


@_lowers(WRITE)
def _(into: Any, x: Any) -> None:
    # a copy in x's loop order; unsafe_alias keeps `realize_into` from adding another one in the order of `into`
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
            # the address depends on every loop: in combo kernels, torch 2.11 breaks values that are expanded to a mask
            part = inductor_ops.masked(inside, functools.partial(load, [column + (row - i) * size]), 0.0)
            value = part if value is None else inductor_ops.where(here, part, value)
        return value

    if len(parts) == 1:  # there is no loop over rows that the address could depend on
        return inductor_lowering.view(inductor_lowering.to_dtype(parts[0], torch.float32), [1, longest])
    return _pointwise(parts[0], torch.float32, element, [len(parts), longest])


@_lowers(JOINED)
def _(parts: Any) -> Any:
    loads, sizes = zip(*map(_flat, parts), strict=True)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]

    def element(index: Any) -> Any:
        (place,), value = index, None
        # from last to first: each part comes before those after it, so the comparison with its own end selects it
        for load, size, start in reversed(list(zip(loads, sizes, starts, strict=True))):
            # address 0 of a part with one element is always valid, so it needs no mask
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
    """Return (function that loads an element of the flattened part, number of elements)."""
    size = math.prod(map(int, part.get_size()))
    return inductor_lowering.view(part, [size]).make_loader(), size


def _compared(how: str, index: Any, number: int) -> Any:
    """Compare `index` with `number`. how: "eq", "lt" or "ge"."""
    compare = getattr(inductor_ops, how)
    return compare(inductor_ops.index_expr(index, torch.int32), inductor_ops.constant(number, torch.int32))


def _pointwise(like: Any, dtype: torch.dtype, element: Callable[..., Any], shape: Any) -> Any:
    return Pointwise.create(device=like.get_device(), dtype=dtype, inner_fn=element, ranges=list(shape))
