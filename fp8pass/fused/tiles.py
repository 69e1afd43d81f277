"""Choose the tile of a fused matmul: the first of a list that fits into the GPU's shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """The sizes of a tile, of its steps along the summed dimension, and Triton's warps and stages for it."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    @property
    def elements(self) -> int:
        """The number of elements of the result in one tile."""
        return self.rows * self.columns


ANY = Tile(16, 16, 16, 4, 2)
"""A tile for plans whose tile is not chosen yet."""
# On an H100 (bench/results/fused_matmuls_h100.txt) the first is the fastest for one product; the second where the
# first's shared memory does not suffice.
_TMA = (Tile(128, 256, 128, 8, 3), Tile(128, 128, 128, 8, 4), Tile(128, 128, 128, 8, 3), Tile(128, 128, 64, 8, 3))
# Ada has 100 KB of shared memory, and no TMA; nothing was timed.
_POINTERS = (Tile(128, 128, 64, 8, 3), Tile(128, 64, 64, 4, 3), Tile(64, 64, 64, 4, 2))


def shared_bytes(tile: Tile, element_bytes: int) -> int:
    """Estimate the shared memory of a kernel with TMA: its operands in all stages, and what it reads and writes.

    element_bytes: bytes of each element of the tile that the epilogue reads and writes, through shared memory.
    """
    operands = tile.stages * (tile.rows + tile.columns) * tile.depth
    return operands + tile.elements * element_bytes


def smaller(size: int, most: int) -> int:
    """Return the least power of two that covers a size, from 16 up to `most`."""
    return max(16, min(most, 1 << max(0, math.ceil(math.log2(max(size, 1))))))


def choose(m: int, n: int, k: int, element_bytes: int, shared_memory: int, tma: bool) -> Tile | None:
    """Return the tile for a result [M, N], cut to sizes that are smaller; None if none fits.

    element_bytes: see `shared_bytes`. shared_memory: bytes that one block of the GPU may use.
    """
    for tile in _TMA if tma else _POINTERS:
        rows, columns, depth = smaller(m, tile.rows), smaller(n, tile.columns), smaller(k, tile.depth)
        fitted = Tile(max(rows, 64) if tma else rows, columns, max(depth, 32), tile.warps, tile.stages)
        if shared_bytes(fitted, element_bytes) <= shared_memory:
            return fitted
    return None
