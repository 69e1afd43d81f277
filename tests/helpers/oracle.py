"""An independent reference in float64 and plain Python. Imports nothing of fp8pass, and no cast to a torch FP8 type.

Formats: e4m3fn has 4 exponent bits (bias 7), 3 mantissa bits, largest value 448; e5m2 has 5 (bias 15), 2, 57344.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MAX = {"e4m3": 448.0, "e5m2": 57344.0}
MANTISSA = {"e4m3": 3, "e5m2": 2}
MIN_EXPONENT = {"e4m3": -6, "e5m2": -14}
FLOAT32_MAX, FLOAT32_TINY = 3.4028234663852886e38, 2.0**-126


def round_to(x: Tensor, fmt: str) -> Tensor:
    """Round f64 to the nearest value of the format, ties to even, saturating; NaN stays NaN."""
    x = x.double()
    magnitude = x.abs().clamp(max=MAX[fmt])
    exponent = torch.floor(torch.log2(magnitude.clamp(min=2.0**-40))).clamp(min=MIN_EXPONENT[fmt])
    quantum = torch.exp2(exponent - MANTISSA[fmt])
    rounded = torch.round(magnitude / quantum) * quantum  # torch.round: half to even
    return torch.where(x.isnan(), x, torch.copysign(rounded.clamp(max=MAX[fmt]), x))


def scale_of(amax: float, fmt: str, keep: float = 1.0, margin: int = 0) -> float:
    """Return fp8_max / amax / 2**margin, at least the smallest normal and at most the largest finite float32.

    Return `keep` for an amax that is 0, NaN or infinite. As in TransformerEngine, the quotient overflows before the
    margin divides it: then the scale is the largest, whatever the margin.
    """
    if not (0 < amax < math.inf):
        return keep
    quotient = MAX[fmt] / amax
    if quotient >= FLOAT32_MAX + 2.0**103:  # half of its last place
        return FLOAT32_MAX
    return min(max(quotient / 2.0**margin, FLOAT32_TINY), FLOAT32_MAX)


def qdq(x: Tensor, scale: float, fmt: str) -> Tensor:
    """Quantize and dequantize in float64. A tensor that holds NaN or inf dequantizes to NaN throughout."""
    if not bool(torch.isfinite(x).all()):
        return torch.full_like(x, math.nan, dtype=torch.float64)
    return round_to(x.double() * scale, fmt) / scale


class Slot:
    """Delayed scaling of one tensor, one step at a time, as api.md words it."""

    def __init__(self, fmt: str, length: int, algo: str = "max", margin: int = 0, on_nonfinite: str = "evict") -> None:
        self.fmt, self.length, self.algo, self.margin, self.on_nonfinite = fmt, length, algo, margin, on_nonfinite
        self.history = [0.0] * length
        self.scale = 0.0  # none yet

    def step(self, uses: Sequence[float]) -> list[float]:
        """Return the scales that quantize the step's uses, given their amaxes; then end the step."""
        scales = [self.scale or self.first(a) for a in uses]
        recorded = [r for r in map(self._record, uses) if r is not None]
        if recorded:
            newest = math.nan if any(map(math.isnan, recorded)) else max(recorded)
            self.history = [newest, *self.history[:-1]]
            self.scale = self.next(self.history[0] if self.algo == "most_recent" else _max(self.history))
        return scales

    def first(self, amax: float) -> float:
        """Return the scale of a tensor with this amax while there is no other one."""
        return scale_of(amax, self.fmt, 1.0, self.margin)

    def next(self, amax: float) -> float:
        """Return the next scale, with this amax of the history."""
        return scale_of(amax, self.fmt, self.scale, self.margin)

    def _record(self, amax: float) -> float | None:
        if math.isfinite(amax) or self.on_nonfinite == "freeze":
            return amax
        return 0.0 if self.on_nonfinite == "evict" else None


def _max(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


def power_of_2(scale: float) -> float:
    """Return the largest power of two that is at most `scale`."""
    return 2.0 ** math.floor(math.log2(scale))


def qdq_rows(x: Tensor, dim: int, fmt: str = "e4m3", pow2: bool = True) -> Tensor:
    """Quantize and dequantize the matrix `x` in float64, with a scale for each slice along `dim`."""
    slices = [_qdq_of_own(s, fmt, pow2) for s in x.double().unbind(1 - dim)]
    return torch.stack(slices, 1 - dim)


def qdq_blocks(x: Tensor, height: int, width: int, pow2: bool = True) -> Tensor:
    """Quantize and dequantize the matrix `x` in float64, with a scale for each block of `height` by `width`."""
    x = x.double().clone()
    for i in range(0, x.shape[0], height):
        for j in range(0, x.shape[1], width):
            x[i : i + height, j : j + width] = _qdq_of_own(x[i : i + height, j : j + width], "e4m3", pow2)
    return x


def _qdq_of_own(x: Tensor, fmt: str, pow2: bool) -> Tensor:
    scale = scale_of(float(x.abs().max()), fmt)
    return qdq(x, power_of_2(scale) if pow2 else scale, fmt)


def e8m0(amax: float, fmt: str = "e4m3") -> int:
    """Return MXFP8's code: the exponent of amax / fp8_max rounded up, plus 127; 255 for a NaN or infinite amax."""
    if not math.isfinite(amax):
        return 255
    if amax == 0:
        return 0
    mantissa, exponent = math.frexp(amax / MAX[fmt])  # in [0.5, 1)
    return max(exponent - (mantissa == 0.5) + 127, 0)


def qdq_mx(x: Tensor, fmt: str = "e4m3") -> Tensor:
    """Quantize and dequantize the matrix `x` by MXFP8: 1x32 blocks along the last dimension."""
    x = x.double().clone()
    for row in x:
        for j in range(0, x.shape[1], 32):
            block = row[j : j + 32]
            code = e8m0(float(block.abs().max()), fmt)
            scale_inv = math.nan if code == 255 else 2.0 ** (code - 127)
            row[j : j + 32] = round_to(block / scale_inv, fmt) * scale_inv
    return x
