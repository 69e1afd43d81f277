"""List the tiles for a fused matmul that suit its epilogue, and may fit into shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fp8pass.passes.kernels.fused_plan import Plan, Tile
from fp8pass.passes.kernels.triton_epilogue import calls_functions


@dataclass(frozen=True)
class _Choice:
    """A tile, the most bytes per element that its epilogue may move, the least K, and whether only for fast sums.

    arithmetic: only for epilogues without functions such as tanh, whose steps take registers.
    """

    tile: Tile
    most_bytes: int = 64
    least_k: int = 0
    fast: bool = False
    arithmetic: bool = False


# Timed on an H100: bench/results/fused_matmuls_h100.txt. A wider tile is faster the longer the sum is. Tiles in parts
# are those that do not spill registers where a tile as a whole does: 304 bytes per thread in the backward of SwiGLU,
# and with Triton 3.6 424 in GELU that writes two FP8 tensors, 1032 in its backward.
_WIDE = (
    _Choice(Tile(128, 256, 128, 8, 3), most_bytes=2, arithmetic=True),
    _Choice(Tile(128, 256, 128, 8, 3, parts=2), most_bytes=2),
    _Choice(Tile(128, 256, 128, 8, 3, parts=2), most_bytes=4, least_k=4096, fast=True),
    _Choice(Tile(128, 128, 128, 8, 4), most_bytes=4, arithmetic=True),
)
_HALVES, _SHALLOW = _Choice(Tile(128, 128, 128, 8, 4, parts=2)), _Choice(Tile(128, 128, 64, 8, 3, parts=2))
_TWO_PRODUCTS = _Choice(Tile(128, 128, 128, 8, 3)), _SHALLOW
_HOPPER = {1: (*_WIDE, _HALVES, _SHALLOW), 2: _TWO_PRODUCTS}
# Not timed. With more than 8 bytes, tiles in halves spill 32 bytes per thread there.
_BLACKWELL = {1: (*_WIDE, replace(_HALVES, most_bytes=8), _Choice(Tile(128, 64, 128, 8, 4))), 2: _TWO_PRODUCTS}
# sm_89 and sm_120 have 99 KB of shared memory for a block, and multiply by instructions of one warp; not timed.
_NARROW = _Choice(Tile(128, 64, 64, 8, 3)), _Choice(Tile(64, 64, 64, 4, 2))
_SMALL = {1: (_Choice(Tile(128, 128, 64, 8, 3), most_bytes=2), *_NARROW), 2: _NARROW}
_LARGE = 160 << 10
"""Bytes of shared memory for a block that GPUs of data centres have, with room for wide tiles in several stages."""


def candidates(plan: Plan, shared_memory: int) -> Iterator[Tile]:
    """Yield tiles for a plan, the best first, cut to sizes of the result that are smaller.

    shared_memory: bytes that one block of the GPU may use.
    """
    m, moved, calls = plan.matmul, plan.bytes_per_element, calls_functions(plan.epilogue)
    tiles = _SMALL if shared_memory < _LARGE else _BLACKWELL if plan.capability >= 100 else _HOPPER
    for choice in tiles[m.products]:
        tile = choice.tile
        rows, columns = _cut(m.m, tile.rows, 64), _cut(m.n, tile.columns, 16 * tile.parts)
        fitted = replace(tile, rows=rows, columns=columns, depth=_cut(m.k, tile.depth, 32))
        suits = moved <= choice.most_bytes and m.k >= choice.least_k and (m.fast or not choice.fast)
        if suits and not (calls and choice.arithmetic) and _least_shared(fitted, plan) <= shared_memory:
            yield fitted


def _least_shared(tile: Tile, plan: Plan) -> int:
    """Estimate the shared memory of a kernel: its operands in all stages, and with TMA what its epilogue moves."""
    operands = tile.stages * (tile.rows + plan.matmul.products * tile.columns) * tile.depth
    return operands + (tile.rows * tile.width * plan.bytes_per_element if plan.tma else 0)


def _cut(size: int, most: int, least: int) -> int:
    """Return the smallest power of two that covers a size, within two bounds."""
    return max(least, min(most, 1 << (size - 1).bit_length()))
