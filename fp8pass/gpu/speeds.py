"""Time the GPU that is there: one BF16 matmul, one FP8 matmul, one copy."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fp8pass.gpu.target import Target

SIDE = 4096
"""M, K and N of the matmuls."""
COPIED = 2**28
"""Bytes that the copy reads, more than L2 caches hold; it writes as many."""
STEP = 1.1
"""Rates are rounded to steps of this factor, so that a noisy measurement changes no decision."""


@dataclass(frozen=True)
class Speeds:
    """Holds what was measured. bf16, fp8: operations per second; copy: bytes read and written per second."""

    bf16: float
    fp8: float
    copy: float


Timer = Callable[[Callable[[], object], float], float]
"""Calls a function for so many seconds, and returns the seconds of one call on the GPU."""


def measure(device: torch.device, seconds: float, timer: Timer | None = None) -> Speeds:
    """Time the three on a GPU, for so many seconds in all. Takes 0.6 GB of its memory, for as long.

    Raises RuntimeError where the GPU can't, for example for lack of memory.
    """
    timer = timer or _on_gpu(device)
    operations, part = 2 * SIDE**3, seconds / 3
    with torch.cuda.device(device), torch.no_grad():
        bf16, fp8 = (operations / timer(call, part) for call in _matmuls(device))
        return Speeds(bf16, fp8, 2 * COPIED / timer(_copy(device), part))


def _matmuls(device: torch.device) -> Sequence[Callable[[], object]]:
    """Return the two matmuls to time. Their numbers are random, since a GPU draws less power for zeros."""
    numbers = torch.Generator(device).manual_seed(0)  # not the user's generator, whose numbers would change
    wide = torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16, generator=numbers)
    narrow, scale, out = wide.to(torch.float8_e4m3fn), torch.ones((), device=device), torch.empty_like(wide)
    return lambda: torch.mm(wide, wide, out=out), lambda: _scaled_mm(narrow, scale)


def _copy(device: torch.device) -> Callable[[], object]:
    source = torch.empty(COPIED, device=device, dtype=torch.uint8)
    return functools.partial(torch.empty_like(source).copy_, source)


def _scaled_mm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch._scaled_mm(x, x.t(), scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)


def _on_gpu(device: torch.device) -> Timer:
    def timer(call: Callable[[], object], seconds: float) -> float:
        """Return the median time of a call; the first third of the time only warms up: clocks rise under load."""
        call()
        torch.cuda.synchronize(device)  # the first call loads its kernel
        times: list[float] = []
        begun, group = time.perf_counter(), 4
        while (passed := time.perf_counter() - begun) < seconds or not times:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            # several calls between two events, so that the events themselves count for less
            start.record()
            for _ in range(group):
                call()
            end.record()
            end.synchronize()
            if passed >= seconds / 3:
                times.append(start.elapsed_time(end) / 1e3 / group)
        return statistics.median(times)

    return timer


def expected(target: Target) -> Speeds:
    """Return what would be measured on a GPU with these figures."""
    operations = 2 * SIDE**3
    bf16, fp8 = (operations / (target.gemm_start + operations / rate) for rate in (target.bf16_rate, target.fp8_rate))
    return Speeds(bf16, fp8, target.copy_rate)


def with_speeds(target: Target, speeds: Speeds, rounded: bool = True) -> Target:
    """Return a target whose peaks and bandwidth are changed as much as what was measured differs, in whole steps.

    A GPU as published keeps its figures exactly; shares of peaks stay as they are. rounded: False for no steps.
    """
    usual = expected(target)

    def times(measured: float, wanted: float) -> float:
        exactly = math.log(measured / wanted, STEP)
        return float(STEP ** (round(exactly) if rounded else exactly))

    return target.times(
        bf16=times(speeds.bf16, usual.bf16), fp8=times(speeds.fp8, usual.fp8), bandwidth=times(speeds.copy, usual.copy)
    )
