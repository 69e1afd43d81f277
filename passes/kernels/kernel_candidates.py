"""Several configurations of one Triton kernel that Inductor writes; its autotuner times them where the kernel runs.

before   @triton_heuristics.fixed_config(
             config={'XBLOCK': 64, 'R0_BLOCK': 64, 'num_warps': 8, 'num_stages': 1}, ...)
         def kernel(..., XBLOCK : tl.constexpr, R0_BLOCK : tl.constexpr):
             for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
after    @triton_heuristics.cached_autotune(
             size_hints={'x': 64, 'r0_': 64}, configs=[triton.Config({...}, num_warps=8, num_stages=1), ...], ...)
         def kernel(..., XBLOCK : tl.constexpr, R0_BLOCK : tl.constexpr, NUM_STAGES : tl.constexpr):
             for r0_offset in tl.range(0, r0_numel, R0_BLOCK, num_stages=NUM_STAGES):

Inductor writes a kernel either with one fixed configuration, or with those that its heuristics list when the kernel is
loaded. The text is changed because processes that compile kernels, or load them from a cache, have not loaded fp8pass:
the text calls only Inductor. The rest is Inductor's own: it compiles the configurations in parallel, times them
at the first call, on copies of what the kernel writes in place, and keeps the choice on disk.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fp8pass.base._torch import FixedTritonConfig, TritonKernel
from fp8pass.base.errors import faults_of


@dataclass(frozen=True)
class CandidateTile:
    """A configuration: a block of X by a block of the reduced dimension, and the warps that compute it.

    stages: tiles that are loaded at a time; with more than one, a loop loads tiles ahead, into shared memory.
    """

    x: int
    r: int
    warps: int
    stages: int = 1

    @property
    def fixed(self) -> dict[str, int]:
        """The only configuration of a kernel, as Inductor writes it; without loads ahead."""
        return {"XBLOCK": self.x, "R0_BLOCK": self.r, "num_warps": self.warps, "num_stages": 1}

    def written(self, loops: bool) -> str:
        """Return the configuration as Triton code. loops: False if the kernel's code itself has the size R."""
        # num_stages of the configuration is for loops that multiply matrices: Triton loads nothing ahead in others
        blocks = {"XBLOCK": self.x}
        if loops:
            blocks |= {"R0_BLOCK": self.r, "NUM_STAGES": self.stages}
        return f"triton.Config({blocks}, num_warps={self.warps}, num_stages=1)"


class TileCandidates(FixedTritonConfig):
    """The configurations of a kernel, for Inductor's `fixed_config`: each block is the largest, as masks need it.

    Inductor leaves a mask out if the block divides the size. Blocks are powers of two, so smaller ones divide it too.
    """

    def __init__(self, tiles: Sequence[CandidateTile]) -> None:
        super().__init__({"XBLOCK": max(t.x for t in tiles), "R0_BLOCK": max(t.r for t in tiles)})
        self.tiles = tuple(tiles)


def fitting(tiles: Sequence[CandidateTile], x: int, r: int) -> list[CandidateTile]:
    """Return the tiles that are not larger than the kernel's sizes, rounded up to powers of two; if none, the first."""
    fit = [t for t in tiles if t.x < 2 * x and t.r < 2 * r]
    return fit or [tiles[0]]


@functools.cache
def write_candidates() -> None:
    """Patch Inductor's writer of Triton kernels, once; it has an effect on kernels with `TileCandidates` only."""
    write = TritonKernel.codegen_kernel

    @functools.wraps(write)
    def written(self: TritonKernel, *args: Any, **kwargs: Any) -> str:
        code: str = write(self, *args, **kwargs)
        fixed = self.fixed_config
        if not isinstance(fixed, TileCandidates):
            return code
        with faults_of("choices"):
            return with_candidates(code, fixed)

    TritonKernel.codegen_kernel = written  # type: ignore[method-assign]


LOOP = "in tl.range(0, r0_numel, R0_BLOCK):"


def with_candidates(code: str, candidates: TileCandidates) -> str:
    """Return the code of a kernel with several configurations instead of one."""
    tiles = candidates.tiles
    if _reads_what_it_writes(code):
        # tiles that differ only in their stages become one
        tiles = tuple(dict.fromkeys(CandidateTile(**{**asdict(t), "stages": 1}) for t in tiles))
    loops = LOOP in code
    # blocks that coordinate descent, as of `max-autotune`, must not exceed: the kernel has no masks for larger ones
    largest = {"x": candidates["XBLOCK"], "r0_": candidates["R0_BLOCK"]}
    decorator = f"""\
@triton_heuristics.cached_autotune(
    size_hints={largest},
    heuristic_type=triton_heuristics.HeuristicType.{"REDUCTION" if loops else "PERSISTENT_REDUCTION"},
    configs=[{", ".join(t.written(loops) for t in tiles)}],"""
    fixed = rf"@triton_heuristics\.fixed_config\(\s*config={re.escape(repr(candidates.config))},"
    code = _replaced(fixed, decorator, code)
    if not loops:
        return code
    code = _replaced(r"'R0_BLOCK': 'constexpr'", "'R0_BLOCK': 'constexpr', 'NUM_STAGES': 'constexpr'", code)
    code = _replaced(r"R0_BLOCK *: *tl\.constexpr\):", "R0_BLOCK : tl.constexpr, NUM_STAGES : tl.constexpr):", code)
    return code.replace(LOOP, f"{LOOP[:-2]}, num_stages=NUM_STAGES):")


def _reads_what_it_writes(code: str) -> bool:
    """Return whether a loop may load what an earlier one stored: loads ahead are not ordered after such stores."""
    stored = set(re.findall(r"tl\.store\((\w+)", code))
    return not stored.isdisjoint(re.findall(r"tl\.load\((\w+)", code))


def _replaced(pattern: str, by: str, code: str) -> str:
    code, times = re.subn(pattern, lambda _: by, code)
    if times != 1:
        raise ValueError(f"{pattern!r} is {times} times in a kernel that Inductor wrote")
    return code
