"""The numerics: scales, how a tensor is quantized, and how the amax history becomes the next scale.

Vocabulary, used in every file of this project:

    amax          f32[]      max(abs(x)), taken before scaling
    amax_history  f32[H]     one amax per step, the newest at index 0
    scale         f32[]      multiplies high precision into FP8: x_q = saturate(x * scale)
    scale_inv     f32[]      multiplies FP8 into high precision: x ~ x_q * scale_inv; what `torch._scaled_mm` takes
    fp8_max                  largest finite value of the format: 448 for e4m3, 57344 for e5m2

Everything here is plain torch, so that the same few lines are run eagerly (the reference), traced into the compiled
graph, and called by users.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from fp8pass.base.errors import Fp8Error, first_line

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
FP8_DTYPES = (E4M3, E5M2)
FNUZ_DTYPES = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

NOTHING = -1.0
"""The running amax of a slot that has recorded nothing in the step."""

_F32 = torch.finfo(torch.float32)


def fp8_max(dtype: torch.dtype) -> float:
    """Return the largest finite value of an FP8 format: 448.0 for `float8_e4m3fn`, 57344.0 for `float8_e5m2`."""
    return torch.finfo(dtype).max


def overflow_from(dtype: torch.dtype) -> float:
    """Return the value above which numbers round to more than the format's largest value: that plus half a step.

    464 for e4m3, 61440 for e5m2. With the scale from a tensor's own amax, scaled values exceed the format's largest
    value by rounding alone, and then do not reach this one.
    """
    info = torch.finfo(dtype)
    return info.max + 2.0 ** math.floor(math.log2(info.max)) * info.eps / 2


def is_empty(x: Tensor) -> bool:
    """Return whether `x` has no elements; False where that depends on a symbolic size, without a guard on it."""
    return any(isinstance(size, int) and size == 0 for size in x.shape)


def amax(x: Tensor) -> Tensor:
    """Return `max(abs(x))` as f32[], NaN if `x` holds a NaN. x: floating, any shape of rank 1 or more.

    For a tensor without elements, such as that of an expert without tokens, the result is -1, which records nothing, so
    that its slot keeps scale and history.

    Reduces rows first, then the rest: Inductor fuses the first stage with the quantizing kernel, which it can't do with
    a full reduction.
    """
    if is_empty(x):
        return torch.full((), NOTHING, device=x.device)
    return x.abs().amax(-1).amax().float()


def amax_along(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return `max(abs(x))` over `dims`, which stay with size 1: f32 per row, column or block; -1 if `x` is empty."""
    if is_empty(x):
        return torch.full([1 if d in dims else size for d, size in enumerate(x.shape)], NOTHING, device=x.device)
    return x.abs().amax(dims, keepdim=True).float()


def is_finite(amax: Tensor) -> Tensor:
    """Return `isfinite` of values that are never -inf. One op, where the decomposition of `isfinite` has four."""
    return amax < math.inf


def scale_from_amax(amax: Tensor, fp8_max: Tensor | float, keep: Tensor | float, margin: int = 0) -> Tensor:
    """Return `fp8_max / amax / 2**margin` in float32, elementwise over f32[] or f32[T].

    Where amax is 0, NaN or infinite, the result is `keep`. It is never infinite (the largest finite float32 instead,
    whatever the margin, where `fp8_max / amax` overflows), and never 0 or subnormal, which GPUs flush to 0 (the
    smallest normal float32 instead). The formula is that of `compute_scale` in TransformerEngine and Flax.
    """
    usable = (amax > 0) & is_finite(amax)
    safe = torch.where(usable, amax, 1.0)
    scale = (fp8_max / safe / 2.0**margin).clamp(_F32.tiny, _F32.max)
    return torch.where(usable, scale, keep)


def scale_by(
    formula: Callable[[Tensor], Tensor], amax: Tensor, keep: Tensor | float, what: str = "the formula"
) -> Tensor:
    """Return the scale that a user's formula gives for `amax`, elementwise, with the bounds of `scale_from_amax`.

    Where amax is 0, NaN or infinite, the formula gets 1 instead, and the result is `keep`. It is `keep`, too, where the
    formula gives NaN, or no number above 0. what: the formula's name in errors. Raises Fp8Error if the formula raises.
    """
    usable = (amax > 0) & is_finite(amax)
    scale = _called(formula, torch.where(usable, amax, 1.0), what=what)
    return torch.where(usable & (scale > 0), scale.clamp(_F32.tiny, _F32.max), keep)


def _called(formula: Callable[..., Tensor], *args: Tensor, what: str) -> Tensor:
    try:
        return formula(*args)
    except Fp8Error:
        raise
    except Exception as error:
        raise Fp8Error(f"{what} raised {type(error).__name__}: {first_line(error)}. Fix it") from error


def power_of_2_from_amax(amax: Tensor, fp8_max: Tensor | float, keep: Tensor | float) -> Tensor:
    """Return the largest power of two, at most 2**127, by which amax becomes at most `fp8_max`: f32[...].

    amax: f32[...]. fp8_max: at least 4. Where amax is 0, NaN or infinite, the result is `keep`. Computed with the bits
    of float32: their difference is that of exponents, less 1 where amax has the larger mantissa. A quotient would have
    to be exact, and GPUs divide with an error of two units in the last place: just below a power of two, half of it
    would be left.
    """
    limit = fp8_max.view(torch.int32) if isinstance(fp8_max, Tensor) else _bits(fp8_max)
    bits = (limit - amax.view(torch.int32)).clamp(max=0x3FFFFFFF) + 0x3F800000
    scale = (bits & 0x7F800000).view(torch.float32)  # the exponent bits of float32
    return torch.where((amax > 0) & is_finite(amax), scale, keep)


def _bits(number: float) -> int:
    bits: int = struct.unpack("i", struct.pack("f", number))[0]
    return bits


def floor_to_power_of_2(scale: Tensor) -> Tensor:
    """Round `scale` down to a power of two by clearing the mantissa bits. scale: f32, positive and normal."""
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32)  # the exponent bits of float32


def channel_scales(x: Tensor) -> Tensor:
    """Return the largest magnitude of each channel of `x`, [..., K], rounded down to a power of two: f32[K].

    No gradient passes. 1 for a channel of zeros, or with an infinity or a NaN, which `x` keeps. Within 2**-60 and
    2**60, or 2**-10 and 2**10 for float16, so that products with weights stay finite.
    """
    rows = tuple(range(x.dim() - 1))
    if is_empty(x) or not rows:
        return torch.ones(x.shape[-1], device=x.device)
    amax = x.detach().abs().amax(rows).float()
    bound = 2.0 ** (10 if x.dtype == torch.float16 else 60)
    usable = (amax > 0) & is_finite(amax)
    return floor_to_power_of_2(torch.where(usable, amax, 1.0).clamp(1 / bound, bound))


def e8m0_from_amax(amax: Tensor, fp8_max: float) -> Tensor:
    """Return the scale_inv of an MXFP8 block as e8m0 code, u8: `2**(code - 127)` is `amax / fp8_max`, rounded up.

    amax: f32, any shape. 0 gives code 0; NaN and infinity give 255, which is NaN. TransformerEngine rounds up too
    (`float_to_e8m0`), so that no element of the block saturates.
    """
    bits = (amax / fp8_max).view(torch.int32)
    # the exponent, and 1 more if any bit of the mantissa is set: rounded up
    code = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return torch.where(is_finite(amax), code, 255).to(torch.uint8)


def float_from_e8m0(code: Tensor) -> Tensor:
    """Return the f32 value of e8m0 codes, u8: `2**(code - 127)`; 0 for code 0, whose blocks are all 0; NaN for 255."""
    value = (code.to(torch.int32) << 23).view(torch.float32)
    return torch.where(code == 255, float("nan"), value)


def check_floating(x: object, name: str = "x") -> None:
    """Raise TypeError unless `x` is a tensor of real floating numbers."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        what = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} is {what}: pass a floating-point tensor, such as float32 or bfloat16")


def check_fp8(dtype: object, valid: tuple[torch.dtype, ...] = (*FP8_DTYPES, *FNUZ_DTYPES)) -> None:
    """Raise ValueError unless `dtype` is an FP8 type to quantize to."""
    if dtype not in valid:
        raise ValueError(f"dtype is {dtype}: choose one of {', '.join(map(str, FP8_DTYPES))}")


def check_scale(scale: object, name: str = "scale") -> None:
    """Raise TypeError unless `scale` is a number or a tensor of real numbers."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float, Tensor)):
        raise TypeError(f"{name} is {scale!r}: pass a number or a float32 tensor")
    if isinstance(scale, Tensor) and not scale.is_floating_point():
        raise TypeError(f"{name} is {scale.dtype}: pass a float32 tensor or a number")


def check_not_zero(scale: object) -> None:
    """Raise ValueError for the number 0, which has no reciprocal. Does not look at tensors."""
    if isinstance(scale, (int, float)) and scale == 0:
        raise ValueError("scale is 0: pass the multiplier for x, such as 448 / x.abs().amax()")


def quantize(x: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return `x * scale`, computed in float32, clamped to the finite range, rounded to nearest even. NaN stays NaN.

    x: floating, any shape; scale: f32[] or anything that broadcasts; dtype: an FP8 type. Returns `dtype`, shape of x.
    The clamp is explicit because the cast alone saturates on some torch versions and overflows on others.
    Raises TypeError for an `x` or `scale` that is not floating, ValueError for a dtype that is not FP8.
    """
    check_floating(x)
    check_scale(scale)
    check_fp8(dtype)
    limit = fp8_max(dtype)
    return (x.float() * scale).clamp(-limit, limit).to(dtype)


def dequantize(x_q: Tensor, scale_inv: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return `x_q * scale_inv`, computed in float32, rounded once to `dtype`.

    x_q: FP8, any shape; scale_inv: f32[] or broadcastable.

    Raises TypeError for an `x_q` that is not FP8, ValueError for a dtype that is FP8 or not floating.
    """
    if not isinstance(x_q, Tensor) or x_q.dtype not in (*FP8_DTYPES, *FNUZ_DTYPES):
        what = x_q.dtype if isinstance(x_q, Tensor) else type(x_q).__name__
        raise TypeError(f"x_q is {what}: pass what fp8pass.quantize(x, scale, dtype) returned, a tensor in FP8")
    check_scale(scale_inv, "scale_inv")
    if dtype not in HIGH_PRECISION:
        raise ValueError(f"dtype is {dtype}: choose one of {', '.join(map(str, HIGH_PRECISION))}")
    x = x_q.float() * scale_inv
    # no cast to the same dtype: in Dynamo of torch 2.11, an autograd Function that returns one has gradients of 0
    return x if x.dtype == dtype else x.to(dtype)


def cast_to_representable(x: Tensor, scale: Tensor | float = 1.0, dtype: torch.dtype = E4M3) -> Tensor:
    """Round `x` to the nearest value that `dtype` represents at `scale`: `x_q * (1 / scale)`, in x's dtype.

    x: float32, bfloat16 or float16, any shape. scale: f32[] or broadcastable. Values beyond the largest one,
    `448 / scale` for e4m3, saturate; NaN stays NaN. If the scale is a power of two, FP8 represents the result exactly
    at that scale, and quantizing it again changes nothing: any difference left between FP8 and high precision comes
    from how sums are accumulated. TransformerEngine's FP8 primer uses a function of this name in the same way, to tell
    rounding from accumulation. Raises as `quantize` does, and ValueError for a scale of 0.
    """
    check_fp8(dtype, FP8_DTYPES)
    check_not_zero(scale)
    return dequantize(quantize(x, scale, dtype), 1 / scale, x.dtype)


def inverse_unless_nonfinite(scale: Tensor, amax: Tensor, power_of_2: bool = False) -> Tensor:
    """Return `1 / scale`, or NaN where the tensor with this `amax` holds a NaN or inf.

    Saturation would turn an infinite gradient into a large finite one. Training code relies on seeing the infinity, so
    the whole dequantized tensor becomes NaN. power_of_2: True if all scales are powers of two, which need no division.
    """
    return torch.where(
        is_finite(amax), _inverse_of_power_of_2(scale) if power_of_2 else scale.reciprocal(), float("nan")
    )


def _inverse_of_power_of_2(scale: Tensor) -> Tensor:
    # exponents are subtracted from twice that of 1; the smallest result, 2**-127, is subnormal
    return (0x7F000000 - scale.view(torch.int32)).clamp(min=0x400000).view(torch.float32)


def merge_amax(amax: Tensor, new: Tensor, on_nonfinite: str) -> Tensor:
    """Merge the running amax of a step with that of one more use, elementwise over f32[...]; -1 stands for none.

    on_nonfinite: "evict" records 0 instead of NaN or inf, "skip" records nothing, "freeze" records the value as it is.
    """
    if on_nonfinite != "freeze":
        new = torch.where(is_finite(new), new, 0.0 if on_nonfinite == "evict" else NOTHING)
    # `maximum` keeps NaN, which is only there under "freeze"
    return torch.maximum(amax, new)


def amax_of_history(history: Tensor, algo: str | Callable[[Tensor], Tensor]) -> Tensor:
    """Return one amax per slot, f32[T], of `history` f32[H, T]. algo: "max", "most_recent", or a callable of f32[H]."""
    if algo == "max":
        return history.amax(0)
    if algo == "most_recent":
        return history[0]
    assert callable(algo)
    try:
        return torch.vmap(algo, in_dims=1)(history)
    except Fp8Error:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        raise Fp8Error(f"amax_compute_algo raised {what}. It takes the history of one slot, f32[H]: fix it") from error


def resized_history(history: Tensor, length: int) -> Tensor:
    """Return the newest `length` amaxes of `history` f32[H], followed by zeros if it has fewer."""
    return torch.cat([history[:length], history.new_zeros(max(0, length - len(history)))])


def roll_history(
    scale: Tensor,
    history: Tensor,
    amax: Tensor,
    fp8_max: Tensor,
    next_scale: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """End a step: push its amax onto the history of each slot that was used, and compute that slot's next scale.

    scale, amax, fp8_max: f32[T]; history: f32[H, T]. next_scale: called with (history, scale, fp8_max), returns f32[T]:
    `recipes.next_scale_of` of a recipe. Returns the new (scale, history). A slot whose amax is -1 was not used, and
    keeps both.
    """
    unused = amax < 0
    history = torch.where(unused, history, torch.cat([amax.unsqueeze(0), history[:-1]]))
    new_scale = next_scale(history, scale, fp8_max)
    return torch.where(unused, scale, new_scale), history
