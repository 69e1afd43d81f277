"""Capture the ops after a matmul that its kernel can do: scaling, bias, cast, clamp.

    y * s, y / s, any number of them         into the scale of the first operand, unless Inductor fuses them for free
    y + bias[N]                              into the kernel's bias, where its type is the output's, bfloat16 or float16
    y.to(narrower)                           the kernel's output type
    clamp(y, -max, max).to(f8)               float8 output; the kernel saturates

Reshapes, copies and wider casts may stand in between. The capture follows only nodes with a single user: another
reader would need the intermediate result. So no scale can depend on the product that it scales. A scale after a bias
or a clamp is never moved before it. Ops that stay outside (ReLU, GELU, matrix biases, amax) Inductor fuses into one
kernel.

`scale_result` of `_scaled_mm` is not used: Inductor drops it, and CPUs divide by it where cuBLASLt multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.base.scaling import E4M3, E5M2, FP8_DTYPES, fp8_max
from fp8pass.graph.builder import is_tensor, val
from fp8pass.graph.refusal import Reject
from fp8pass.hardware import output_saturates
from fp8pass.passes.common.patterns import (
    CASTS,
    COPIES,
    DIVIDING,
    MULTIPLYING,
    RESHAPES,
    at,
    aten,
    constant,
    dtype_name,
    first,
    is_wide_cast,
    readers,
)
from fp8pass.passes.joint.operands import Scale, scaled_input

HALF = (torch.bfloat16, torch.float16)
_LOWER = {aten.clamp_min.default, aten.clamp_min.Tensor, aten.maximum.default}
_UPPER = {aten.clamp_max.default, aten.clamp_max.Tensor, aten.minimum.default}


@dataclass(frozen=True)
class ScaledMMEpilogue:
    """Ops that the kernel does after multiplying: scale, bias, clamp, cast, in this order.

    end: the node that the rewritten matmul replaces. dtype: the dtype of `end`. reshapes: the reshapes between the
    matmul and `end`. scale: the product of all scales of the FP8 product. bias: a vector over N, with any number of
    leading 1s. low, high: the clamp. note: why a cast to float8 that follows stayed outside.
    """

    end: fx.Node
    dtype: torch.dtype
    scale: Scale
    bias: fx.Node | None = None
    low: float | None = None
    high: float | None = None
    reshapes: tuple[fx.Node, ...] = ()
    note: str = ""


def epilogue(
    matmul: fx.Node, scale: Scale, bias: fx.Node | None, operand_dtypes: tuple[torch.dtype, torch.dtype]
) -> ScaledMMEpilogue:
    """Return the longest chain of ops after `matmul` that one `_scaled_mm` can do, and that is worth folding into it.

    scale: the product of both operands' scales. bias: the tensor that `matmul` itself adds; if the result has no bias,
    it has to be added after the kernel. operand_dtypes: the FP8 types of the operands.
    """
    taken = ScaledMMEpilogue(matmul, val(matmul).dtype, scale)
    so_far: ScaledMMEpilogue | None = taken
    if bias is not None:
        so_far = replace(taken, bias=_source_of_cast(bias)) if _is_vector(bias, matmul, matmul) else None
    while so_far is not None:
        if so_far.dtype in FP8_DTYPES and so_far.end is not matmul:  # the cast to FP8 ends the chain either way
            why = _why_no_fp8_output(matmul, so_far, operand_dtypes)
            return replace(taken, note=why) if why else so_far
        if _fits_kernel(matmul, so_far) and (so_far.scale == scale or _is_worth(matmul, so_far)):
            taken = so_far
        so_far = None if so_far.dtype in FP8_DTYPES else _next(matmul, so_far)
    return taken


def _next(matmul: fx.Node, so_far: ScaledMMEpilogue) -> ScaledMMEpilogue | None:
    """Return the chain extended by the next op; None if it ends here."""
    if len(so_far.end.users) != 1:
        return None
    (node,) = so_far.end.users
    clamped = so_far.low is not None or so_far.high is not None
    if node.op != "call_function" or not is_tensor(node):
        return None
    if node.target in RESHAPES:
        return replace(so_far, end=node, reshapes=(*so_far.reshapes, node))
    # the kernel writes row-major: a copy into another layout is not among what it can do
    if node.target in COPIES and val(node).stride() == val(so_far.end).stride():
        return replace(so_far, end=node)
    if is_wide_cast(node) or _is_quantizing_cast(node):
        return replace(so_far, end=node, dtype=val(node).dtype)
    if node.target in _LOWER or node.target in _UPPER:
        return _clamped(so_far, node)
    # the kernel scales, adds the bias, then saturates: a factor after the bias, or an op after a clamp, is not folded
    if (node.target in MULTIPLYING or node.target in DIVIDING) and so_far.bias is None and not clamped:
        return _scaled(so_far, node)
    if node.target is aten.add.Tensor and so_far.bias is None and not clamped:
        return _biased(matmul, so_far, node)
    return None


def _is_quantizing_cast(node: fx.Node) -> bool:
    to_fp8 = node.target in CASTS and val(node).dtype in FP8_DTYPES
    return to_fp8 and val(node).device == val(first(node)).device


def _scaled(so_far: ScaledMMEpilogue, node: fx.Node) -> ScaledMMEpilogue | None:
    try:
        x, factor = scaled_input(node)
    except Reject:
        return None  # an ordinary multiplication, by a gate for example
    # factor is x: in x * x, the product of one number with itself, the scale would depend on the product
    if x is not so_far.end or factor is x or val(x).shape != val(node).shape:
        return None
    scale = so_far.scale.times(factor, divide=node.target in DIVIDING)
    return replace(so_far, end=node, dtype=val(node).dtype, scale=scale) if scale.fits_float32() else None


def _biased(matmul: fx.Node, so_far: ScaledMMEpilogue, node: fx.Node) -> ScaledMMEpilogue | None:
    x, y = node.args
    bias = y if x is so_far.end else x
    if (
        not is_tensor(bias)
        or bias is so_far.end
        or node.kwargs.get("alpha", 1) != 1
        or not _is_vector(bias, matmul, so_far.end)
    ):
        return None
    if val(node).shape != val(so_far.end).shape:
        return None
    return replace(so_far, end=node, dtype=val(node).dtype, bias=_source_of_cast(bias))


def _is_vector(bias: fx.Node, matmul: fx.Node, product: fx.Node) -> bool:
    """Return whether adding `bias` to `product`, a reshape of `matmul`, adds one number to each column of `matmul`."""
    n = val(matmul).shape[-1]
    shape, columns = val(bias).shape, val(product).shape[-1]
    is_row = len(shape) > 0 and all(statically_known_true(size == 1) for size in shape[:-1])
    return is_row and statically_known_true(shape[-1] == n) and statically_known_true(columns == n)


def _source_of_cast(bias: fx.Node) -> fx.Node:
    """Return the bfloat16 or float16 source of a bias cast to float32, or the bias: kernels take no float32 bias."""
    widened = is_wide_cast(bias) and val(first(bias)).dtype in HALF and val(bias).dtype == torch.float32
    return first(bias) if widened else bias


def _clamped(so_far: ScaledMMEpilogue, node: fx.Node) -> ScaledMMEpilogue | None:
    bounds = [constant(a) for a in node.args if a is not so_far.end]
    if len(bounds) != 1 or bounds[0] is None or val(node).shape != val(so_far.end).shape:
        return None
    clamped = replace(so_far, end=node, dtype=val(node).dtype)
    if node.target in _LOWER:
        return replace(clamped, low=bounds[0]) if so_far.low is None else None
    return replace(clamped, high=bounds[0]) if so_far.high is None else None


def _fits_kernel(matmul: fx.Node, e: ScaledMMEpilogue) -> bool:
    """Return whether a kernel can write `e.end` itself, and in no more bytes than the matmul's result."""
    if e.low is not None or e.high is not None or e.dtype.itemsize > val(matmul).dtype.itemsize:
        return False
    if e.end.target in RESHAPES or not val(e.end).is_contiguous():
        return False
    # `_scaled_mm` takes a bias in the type of a bfloat16 or float16 output, and none for float32
    return e.bias is None or (val(e.bias).dtype == e.dtype and e.dtype in HALF and _in_one_piece(e.bias))


def _in_one_piece(bias: fx.Node) -> bool:
    """Return whether a kernel can read the bias through a bare pointer.

    It must be contiguous, and begin at a multiple of 16 bytes, as tensors do.
    """
    value = val(bias)
    return value.is_contiguous() and statically_known_true(value.storage_offset() * value.itemsize % 16 == 0)


def _is_worth(matmul: fx.Node, e: ScaledMMEpilogue) -> bool:
    """Return whether folding a scale into the kernel saves a pass over the result, or costs nothing.

    Multiplying scales takes a kernel launch. Scaling the result costs nothing where Inductor fuses it with a reader.
    """
    free = len(e.scale.multiplied) <= 1 and not e.scale.divided and (e.scale.number == 1 or not e.scale.multiplied)
    return free or e.dtype.itemsize < val(matmul).dtype.itemsize or not any(map(_is_fused, readers(e.end, _is_layout)))


def _is_layout(node: fx.Node) -> bool:
    return node.target in {*RESHAPES, *COPIES, *CASTS}


def _is_fused(node: fx.Node) -> bool:
    """Return whether Inductor fuses `node` with an elementwise op before it into one kernel."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or torch.Tag.reduction in tags


def _why_no_fp8_output(matmul: fx.Node, e: ScaledMMEpilogue, operand_dtypes: tuple[torch.dtype, torch.dtype]) -> str:
    """Return why the kernel cannot do the cast to float8; "" if it can."""
    dtype, limit = dtype_name(e.dtype), fp8_max(e.dtype)
    outside = f"{at(e.end)} converts to {dtype} after the kernel"
    if e.low is None and e.high is None:
        return f"{outside}: it is not clamped to ±{limit:g}, and a cast may overflow where the kernel saturates"
    if (e.low, e.high) != (-limit, limit):
        return f"{outside}: it is clamped to [{_bound(e.low)}, {_bound(e.high)}], and {dtype} ends at ±{limit:g}"
    if operand_dtypes == (E4M3, E4M3) and e.dtype is E5M2:
        return f"{outside}: no kernel multiplies float8_e4m3fn by float8_e4m3fn into float8_e5m2"
    if not output_saturates(val(matmul).device, e.dtype):
        return f"{outside}: the {val(matmul).device.type} kernel of torch {torch.__version__} does not saturate {dtype}"
    if e.bias is not None and val(e.bias).dtype not in HALF:
        return f"{outside}: its bias is {dtype_name(val(e.bias).dtype)}, and kernels take bfloat16 and float16"
    if e.bias is not None and not _in_one_piece(e.bias):
        return f"{outside}: its bias {e.bias.name} is a part of a tensor that kernels can't point to"
    if not val(e.end).is_contiguous():
        return f"{outside}: it is laid out with strides {list(val(e.end).stride())}"
    return ""


def _bound(x: float | None) -> Any:
    return "-" if x is None else f"{x:g}"
