"""Predict how long a compiled kernel takes on a GPU: from its bytes, its machine code and its launch grid.

Three times are computed, each as if the other two did not matter. Of `Code`, a program is one block of warps:

memory   all bytes, at the bandwidth of the data sheet
issue    the cycles of all warps on the multiprocessor with the most programs, over its four schedulers
chain    what one program does one after the other: it waits for loads, it waits at barriers, and its instructions
         depend on each other; times the rounds in which the programs run, as many at once as fit

They overlap, and not wholly: the prediction is their p-norm, plus a launch. Four constants are fitted to kernels that
an H200 measured, by `bench/kernel_times.py`; errors: docs/roofline.md. Where Inductor would time several
configurations, `fastest` picks the one with the shortest prediction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fp8pass.hardware import Target, sizes

WARP = 32


@dataclass(frozen=True)
class Work:
    """Counts what one warp executes in one stretch of code.

    instructions: how many it issues. cycles: for which the busiest unit of its scheduler works for it. waits: how often
    it waits for loads from global memory for their full latency; loads that are under way together are waited for once.
    barriers: how often the warps of a program wait for each other. loaded, stored: bytes of global memory per thread.
    ahead: bytes per thread that are copied to shared memory while the warp goes on. shared: bytes of shared memory per
    thread, both ways. All are averages over iterations.
    """

    instructions: float = 0
    cycles: float = 0
    waits: float = 0.0
    barriers: float = 0
    loaded: float = 0
    stored: float = 0
    ahead: float = 0
    shared: float = 0


@dataclass(frozen=True)
class Code:
    """A kernel compiled in one configuration, and how it is launched.

    config: in words. warps: of one program. registers: per thread. shared: bytes per program. programs: in the grid.
    iterations: of the program's loops. once, loop: the work outside of loops, and in one iteration of all loops.
    in_vain: bytes that memory moves without need, for sectors of which a warp reads or writes only a part.
    """

    config: str
    warps: int
    registers: int
    shared: int
    programs: int
    iterations: int
    once: Work
    loop: Work
    in_vain: int = 0


@dataclass(frozen=True)
class Constants:
    """The constants of the model.

    latency: seconds from a load to its value, without load on the memory. issue: the share of a scheduler's cycles that
    large kernels use. dependent: cycles from an instruction of a warp to the next one, on average, if nothing else
    delays it. barrier: cycles that a barrier costs. norm: the p of the p-norm.
    """

    latency: float
    issue: float
    dependent: float
    barrier: float
    norm: float


FITTED = Constants(250e-9, 0.75, 5.8, 130.0, 2.9)
"""Fitted to an H200, except for the latency: 480 to 500 cycles at 1.98 GHz, https://arxiv.org/abs/2402.13499."""


def resident(target: Target, code: Code) -> int:
    """Return how many programs one multiprocessor runs at once: as registers, shared memory and warps allow."""
    gpu = sizes(target)
    registers = math.ceil(code.registers * WARP / 256) * 256 * code.warps  # given out in units of 256 to each warp
    limits = (
        gpu.registers // max(registers, 1),
        gpu.shared // (code.shared + 1024),  # CUDA reserves 1 KiB for each program
        gpu.threads // (code.warps * WARP),
        gpu.programs,
    )
    return max(1, min(limits))


def parts(target: Target, bytes_moved: float, code: Code, c: Constants = FITTED) -> tuple[float, float, float]:
    """Return the times in seconds of memory, of issue and of the chain: see above."""
    gpu = sizes(target)
    once, loop, n = code.once, code.loop, code.iterations
    cycles = once.cycles + n * loop.cycles
    instructions = once.instructions + n * loop.instructions
    stops = (once.barriers + n * loop.barriers) * c.barrier + instructions * c.dependent
    most = math.ceil(code.programs / gpu.multiprocessors)
    rounds = math.ceil(code.programs / (gpu.multiprocessors * resident(target, code)))
    return (
        (bytes_moved + code.in_vain) / target.bandwidth,
        most * code.warps * cycles / (gpu.schedulers * gpu.clock * c.issue),
        rounds * ((once.waits + n * loop.waits) * c.latency + stops / gpu.clock),
    )


def kernel_seconds(target: Target, bytes_moved: float, code: Code, constants: Constants = FITTED) -> float:
    """Predict the time of one launch that moves these bytes, as the compiler counts them: each tensor once."""
    times = parts(target, bytes_moved, code, constants)
    return float(target.launch + sum(t**constants.norm for t in times) ** (1 / constants.norm))


def fastest(target: Target, bytes_moved: float, codes: Sequence[Code], constants: Constants = FITTED) -> int:
    """Return the position of the configuration that the autotuner would pick by these predictions."""
    return min(range(len(codes)), key=lambda i: kernel_seconds(target, bytes_moved, codes[i], constants))
