"""Predict how long matmuls take in high precision and in FP8, and how long quantizing takes.

A roofline model: a matmul takes a fixed time plus the longer of the times for its arithmetic and its bytes; any other
kernel takes the longer of the time for its bytes and a launch. Assumptions, and how far measurements are from them:
docs/roofline.md. Sources of constants: there, here and in hardware.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import sympy
import torch

from fp8pass.base.scaling import E4M3, FP8_DTYPES
from fp8pass.gpu.machine_file import load_machine as load_machine
from fp8pass.hardware import Target, scales_rows, why_no_block_kernel
from fp8pass.recipes import (
    FACTORS,
    KINDS,
    BlockwiseScaling,
    Calibration,
    DynamicScaling,
    Kind,
    MXFP8Scaling,
    Recipe,
    Role,
    RowwiseScaling,
    StaticScaling,
)

# Speed of a large matmul kernel by its scales, relative to one with a single scale for the tensor.
KERNEL_SHARE = {
    "tensorwise": 1.0,
    # Most shapes within 90-100% of tensorwise: https://github.com/pytorch/pytorch/issues/147971, of CUTLASS's kernels;
    # cuBLAS's are about as fast: https://github.com/pytorch/pytorch/pull/157905.
    "rowwise": 0.9,
    # 1.75 times as fast as BF16 where large, of 2 at best: https://developer.nvidia.com/blog/
    # boosting-matrix-multiplication-speed-and-flexibility-with-nvidia-cublas-12-9.
    "blockwise": 0.875,
    # 6.812 against 7.161 ms on a B300: TransformerEngine's docs/examples/gemm_profiling/gemm_profiling.rst.
    "mxfp8": 0.95,
}


Size = Any
"""A size in elements: an int, or a sympy expression of sizes that vary from call to call."""
Seconds = Any
"""A time: a float, or what the sizes are."""


def _longer(one: Seconds, other: Seconds) -> Seconds:
    if isinstance(one, sympy.Basic) or isinstance(other, sympy.Basic):
        return sympy.Max(one, other)
    return max(one, other)


def memory_seconds(target: Target, bytes_moved: Size, share: str = "memory_share") -> Seconds:
    """Predict the time of a kernel that moves this many bytes, from that alone; `kernel_time.py` reads machine code.

    share: the field of `Target` that says which share of the bandwidth such a kernel reaches.
    """
    return _longer(bytes_moved / (target.bandwidth * getattr(target, share)), target.launch)


def gemm_seconds(
    target: Target,
    m: Size,
    k: Size,
    n: Size,
    operand_dtype: torch.dtype,
    out_itemsize: int,
    scaling: str = "tensorwise",
    fast_accum: bool = True,
) -> Seconds:
    """Predict the time of one [M, K] by [K, N] product. scaling, fast_accum: for FP8 operands; see `KERNEL_SHARE`.

    float32 counts at the rate of TF32, half of BF16's; torch's default for float32 is slower still.
    """
    rate = target.bf16_rate
    if operand_dtype in FP8_DTYPES:
        rate = (target.mxfp8_rate if scaling == "mxfp8" else target.fp8_rate) * KERNEL_SHARE[scaling]
        if not fast_accum and target.capability < (10, 0):
            rate *= target.slow_accum_share
    elif operand_dtype == torch.float32:
        rate /= 2
    moved = operand_dtype.itemsize * (m * k + k * n) + out_itemsize * m * n
    return target.gemm_start + _longer(2 * m * k * n / rate, moved / target.copy_rate)


def scaling_of(recipe: Recipe) -> str:
    """Return the key in `KERNEL_SHARE` of the recipe's kernels."""
    kinds = {RowwiseScaling: "rowwise", BlockwiseScaling: "blockwise", MXFP8Scaling: "mxfp8"}
    return next((key for kind, key in kinds.items() if isinstance(recipe, kind)), "tensorwise")


def has_kernel(recipe: Recipe, target: Target) -> bool:
    """Return whether a GPU of this kind has a matmul kernel for the recipe's scales."""
    scaling, cuda = scaling_of(recipe), torch.device("cuda")
    if scaling in ("blockwise", "mxfp8"):
        return not why_no_block_kernel(scaling, cuda, target)
    return scaling == "tensorwise" or scales_rows(cuda, target)


class _QuantizeKernel(NamedTuple):
    """A kernel that quantizes: bytes that it moves per element, and its share: see `memory_seconds`."""

    bytes: float
    share: str = "memory_share"


def _is_turned(kind: Kind, role: Role) -> bool:
    """Return whether a matmul sums its operand along another dimension than the first matmul with this operand."""
    return any(role in FACTORS[earlier] for earlier in KINDS[: KINDS.index(kind)])


def _kernels(recipe: Recipe, role: Role, ways: set[bool], size: int, first: int) -> list[_QuantizeKernel]:
    """Return the kernels that quantize one tensor.

    ways: the layouts needed, see `_is_turned`. size: bytes of an element. first: bytes per element of the first read, 0
    if that is fused into the kernel that makes the tensor.

    tensorwise  one kernel reads it, takes the amax, and writes FP8 once for each layout; a dynamic scale needs the amax
                first, so one more kernel reads it
    rowwise     each layout from the original; rows take one kernel; columns need one for their amaxes first
    blockwise   likewise, with a float32 for 128 elements; one kernel reads what is needed in both layouts at a time, as
                gradients are; square blocks of weights serve both
    mxfp8       each layout from the original, with a byte for 32 elements
    """
    if isinstance(recipe, RowwiseScaling):
        rows, columns = (
            [_QuantizeKernel(first + 1, "rows_share")],
            [_QuantizeKernel(size, "rows_share"), _QuantizeKernel(size + 1, "tiles_share")],
        )
        return [kernel for way in sorted(ways) for kernel in (columns if way else rows)]
    tiles = "tiles_share" if True in ways else "memory_share"
    if isinstance(recipe, BlockwiseScaling) and role == "weight":
        return [_QuantizeKernel(first + len(ways), tiles)]
    if isinstance(recipe, (BlockwiseScaling, MXFP8Scaling)):
        is_blockwise = isinstance(recipe, BlockwiseScaling)
        stored, turned = (1 + 4 / 128, "tiles_share") if is_blockwise else (1 + 1 / 32, "transposed_share")
        if is_blockwise and role == "grad_output" and len(ways) == 2:
            return [_QuantizeKernel(first + 2 * stored, turned)]
        apart = {False: _QuantizeKernel(first + stored, "memory_share"), True: _QuantizeKernel(size + stored, turned)}
        return [apart[way] for way in sorted(ways)]
    if isinstance(recipe, DynamicScaling):
        return [*([_QuantizeKernel(first, "rows_share")] if first else []), _QuantizeKernel(size + len(ways), tiles)]
    return [_QuantizeKernel(first + len(ways), tiles)]


def quantize_seconds(
    target: Target, elements: Size, recipe: Recipe, role: Role, element_size: int, both: bool, fused: bool = False
) -> Seconds:
    """Predict the time to quantize one tensor for one matmul, or for both that read it in training.

    fused: the kernel that makes the tensor also quantizes it, so the first read is free.
    """
    return _seconds(target, elements, recipe, role, element_size, {False, True} if both else {False}, fused)


def _seconds(
    target: Target, elements: Size, recipe: Recipe, role: Role, size: int, ways: set[bool], fused: bool
) -> Seconds:
    kernels = _kernels(recipe, role, ways, size, 0 if fused else size)
    return sum(memory_seconds(target, kernel.bytes * elements, kernel.share) for kernel in kernels)


def _fp8_kinds(recipe: Recipe, kinds: Sequence[Kind]) -> list[Kind]:
    """Return those of a call's matmuls that run in FP8."""
    of_output_only = isinstance(recipe, Calibration) or (isinstance(recipe, StaticScaling) and not recipe.trains)
    allowed = KINDS[:1] if of_output_only else KINDS
    return [kind for kind in kinds if kind in allowed and kind not in recipe.high_precision]


def overhead_seconds(
    target: Target,
    m: Size,
    k: Size,
    n: Size,
    recipe: Recipe,
    element_size: int,
    kinds: Sequence[Kind],
    fused: bool = False,
    ready: bool = False,
) -> Seconds:
    """Predict the time of all quantizing for the matmuls of one call, [M, K] by [K, N].

    element_size: bytes of an element in high precision. kinds: the matmuls that the call computes, with gradients of
    what needs one. ready: the weight is in FP8 already. fused: the kernels that make the input and the output's
    gradient also quantize them. Inductor fuses so after a norm or an activation function, not after a matmul; without
    `fused`, the result is the most that quantizing can cost.
    """
    sizes: dict[Role, Size] = {"input": m * k, "weight": k * n, "grad_output": m * n}
    ways: dict[Role, set[bool]] = {}
    for kind in _fp8_kinds(recipe, kinds):
        for role in FACTORS[kind]:
            ways.setdefault(role, set()).add(_is_turned(kind, role))
    if ready or (isinstance(recipe, StaticScaling) and tuple(kinds) == KINDS[:1]):
        ways.pop("weight", None)  # quantized in advance
    return sum(
        _seconds(target, sizes[role], recipe, role, element_size, ways[role], fused and role != "weight")
        for role in ways
    )


def call_seconds(
    target: Target, m: Size, k: Size, n: Size, recipe: Recipe | None, element_size: int, kinds: Sequence[Kind]
) -> Seconds:
    """Predict the time of these matmuls of one call. recipe: None for high precision."""
    wide = torch.float32 if element_size == 4 else torch.bfloat16
    shapes: dict[Kind, tuple[Size, Size, Size]] = {
        "output": (m, k, n),
        "grad_input": (m, n, k),
        "grad_weight": (k, m, n),
    }
    narrow = _fp8_kinds(recipe, kinds) if recipe is not None else []
    total: Seconds = 0.0
    for kind in kinds:
        if recipe is not None and kind in narrow:
            fast = kind in recipe.fast_accum
            total += gemm_seconds(target, *shapes[kind], E4M3, element_size, scaling_of(recipe), fast)
        else:
            total += gemm_seconds(target, *shapes[kind], wide, element_size)
    return total


def predicted_seconds(
    target: Target,
    m: Size,
    k: Size,
    n: Size,
    recipe: Recipe,
    element_size: int = 2,
    kinds: Sequence[Kind] = KINDS,
    fused: bool = False,
    ready: bool = False,
) -> tuple[Seconds, Seconds] | None:
    """Predict a call's time in high precision, and in FP8 with all quantizing: see `predicted_speedup`."""
    if not has_kernel(recipe, target):
        return None
    fp8 = call_seconds(target, m, k, n, recipe, element_size, kinds)
    overhead = overhead_seconds(target, m, k, n, recipe, element_size, kinds, fused, ready)
    return call_seconds(target, m, k, n, None, element_size, kinds), fp8 + overhead


def predicted_speedup(
    target: Target,
    m: Size,
    k: Size,
    n: Size,
    recipe: Recipe,
    element_size: int = 2,
    kinds: Sequence[Kind] = KINDS,
    fused: bool = False,
    ready: bool = False,
) -> Any:
    """Predict a call's time in high precision divided by its time in FP8 with quantizing; see `overhead_seconds`.

    M, K, N in elements; the call's matmuls, three in training, count together. None if the recipe has no kernel on this
    kind of GPU. A sympy expression if one of the sizes is one.
    """
    seconds = predicted_seconds(target, m, k, n, recipe, element_size, kinds, fused, ready)
    return None if seconds is None else seconds[0] / seconds[1]


ROWS = sympy.Symbol("M", positive=True, integer=True)
"""The number of rows of a call whose prediction is solved for it."""


@functools.lru_cache(maxsize=4096)
def pays_from(
    target: Target,
    m: Size,
    k: Size,
    n: Size,
    recipe: Recipe,
    element_size: int = 2,
    kinds: Sequence[Kind] = KINDS,
    min_speedup: float = 1.0,
    ready: bool = False,
) -> Intervals | None:
    """Solve the prediction for the size that varies: return where a call's predicted speed-up reaches `min_speedup`.

    m, k, n: ints, or polynomials of one symbol, for example `ROWS`: the intervals are of the values of this symbol.
    None if the recipe has no kernel on this kind of GPU, or if one of several sizes falls where another one rises. The
    speed-up need not rise with the size.
    """
    if not has_kernel(recipe, target):
        return None
    sizes = m, k, n
    (x,) = set().union(*(size.free_symbols for size in sizes if isinstance(size, sympy.Basic)))
    if not _fp8_kinds(recipe, kinds):  # the two times are one, which no bisection needs to find out
        return ((1, None),) if min_speedup <= 1 else ()
    polynomials = [[float(c) for c in sympy.Poly(size, x).all_coeffs()] for size in sizes]
    if any(c < 0 for terms in polynomials for c in terms[:-1]):
        return None

    def times(value: int) -> tuple[float, float]:
        # Horner's rule; a size such as 2 * x - 5 is below 0 for small x
        m, k, n = (max(0.0, functools.reduce(lambda total, c: total * value + c, p)) for p in polynomials)
        seconds = predicted_seconds(target, m, k, n, recipe, element_size, kinds, ready=ready)
        assert seconds is not None
        return seconds[0], seconds[1] * min_speedup

    return where(times)


Intervals = tuple[tuple[int, int | None], ...]
"""Integers from 1 on, as (first, last) of each interval, in ascending order; last is None if there is no last one."""
LARGEST = 1 << 32
"""The integer from which on nothing changes: no tensor has as many rows."""
ROUNDING = 1e-12
"""Times whose quotient differs from 1 by less are equal: each is a sum of rounded numbers."""


def where(times: Callable[[int], tuple[float, float]]) -> Intervals:
    """Return the integers from 1 on at which the first of two times is not shorter than the second one.

    times: the two for an integer. Both must be convex, as sums of the longer ones of times that rise evenly are.
    """
    at = functools.cache(times)
    ranges: list[tuple[int, int]] = []
    open_ = [(1, LARGEST)]
    while open_:
        low, high = open_.pop()
        holds = _holds_throughout(at, low, high)
        if holds is None:
            middle = _middle(low, high)
            open_ += [(middle, high), (low, middle - 1)]  # the lower half is popped first: in ascending order
        elif holds:
            low = ranges.pop()[0] if ranges and ranges[-1][1] == low - 1 else low
            ranges.append((low, high))
    return tuple((low, None if high == LARGEST else high) for low, high in ranges)


def _middle(low: int, high: int) -> int:
    return max(low + 1, math.isqrt(low * high))  # the geometric mean: sizes span 32 powers of two


def _holds_throughout(at: Callable[[int], tuple[float, float]], low: int, high: int) -> bool | None:
    """Return whether the first time is not shorter anywhere from `low` to `high`; None if that is not known.

    Between two integers, a convex time is not above the straight line from one to the other, and it is below by at most
    what it is below at a middle, times the quotient of the distance to the farther end and that of both.
    """
    ends = at(low), at(high)
    holds, other = (first >= second * (1 - ROUNDING) for first, second in ends)
    if holds != other:
        return None
    if high - low < 2:
        return holds
    middle = _middle(low, high)
    share = (middle - low) / (high - low)
    which = 0 if holds else 1  # the time that would have to be shorter in between
    start, inside, end = ends[0][which], at(middle)[which], ends[1][which]
    below = start + (end - start) * share - inside - ROUNDING * end
    nearest = min(abs(first - second) for first, second in ends)
    return holds if below / min(share, 1 - share) <= nearest else None


def merged_seconds(
    target: Target,
    m: Size,
    k: int,
    widths: Sequence[int],
    recipe: Recipe,
    element_size: int,
    kinds: Sequence[Kind] = KINDS,
) -> tuple[Seconds, Seconds]:
    """Predict two times of calls that read one input: merging them saves the first minus the second.

    The calls are [M, K] by [K, N] for each width N. Each separate call runs in high precision or FP8, whichever is
    faster, and their input is quantized once. They give one gradient of the input each, which a kernel adds up.
    """
    of_input = quantize_seconds(target, m * k, recipe, "input", element_size, both="grad_weight" in kinds)

    def seconds(n: int, chosen: Recipe | None) -> Seconds:
        around: Seconds = 0.0
        if chosen is not None:
            around = overhead_seconds(target, m, k, n, chosen, element_size, kinds) - of_input
        return call_seconds(target, m, k, n, chosen, element_size, kinds) + around

    each = [(seconds(n, recipe), seconds(n, None)) for n in widths]
    added = (len(widths) - 1) * m * k * element_size / target.copy_rate if "grad_input" in kinds else 0.0
    # the shorter of two times is their sum without the longer one: both results are convex in M, for `where`
    longer = sum(_longer(fp8, high_precision) for fp8, high_precision in each)
    return sum(map(sum, each)) + added, longer + seconds(sum(widths), recipe)
