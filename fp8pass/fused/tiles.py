"""Choose the tile of a fused matmul: the first of a list that suits its epilogue and fits into shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tile:
    """The sizes of a tile, of its steps along the summed dimension, and Triton's warps and stages for it.

    parts: the epilogue takes the tile's columns in this many parts, one after the other, which needs fewer registers.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    parts: int = 1

    @property
    def width(self) -> int:
        """The columns of one part."""
        return self.columns // self.parts


ANY = Tile(16, 16, 16, 4, 2)
"""A tile for plans whose tile is not chosen yet."""


@dataclass(frozen=True)
class _Choice:
    """A tile, the most bytes per element that its epilogue may move, and the least K. See `choose`."""

    tile: Tile
    most_bytes: int = 64
    least_k: int = 0


# Timed on an H100: bench/results/fused_matmuls_h100.txt. A wider tile is faster the longer the sum is. Tiles in parts
# are those that do not spill registers where a tile as a whole does: 304 bytes per thread in the backward of SwiGLU.
_TMA = {
    1: (
        _Choice(Tile(128, 256, 128, 8, 3), most_bytes=2),
        _Choice(Tile(128, 256, 128, 8, 3, parts=2), most_bytes=4, least_k=4096),
        _Choice(Tile(128, 128, 128, 8, 4), most_bytes=4),
        _Choice(Tile(128, 128, 128, 8, 4, parts=2)),
        _Choice(Tile(128, 128, 64, 8, 3, parts=2)),
    ),
    2: (_Choice(Tile(128, 128, 128, 8, 3)), _Choice(Tile(128, 128, 64, 8, 3, parts=2))),
}
# Ada has 100 KB of shared memory, and no TMA; nothing was timed.
_POINTERS = {
    1: (_Choice(Tile(128, 128, 64, 8, 3)), _Choice(Tile(64, 64, 64, 4, 2))),
    2: (_Choice(Tile(128, 64, 64, 8, 3)), _Choice(Tile(64, 64, 64, 4, 2))),
}


def shared_bytes(tile: Tile, products: int, element_bytes: int) -> int:
    """Estimate the shared memory of a kernel with TMA: its operands in all stages, and what it reads and writes.

    products: how many the kernel computes of each element. element_bytes: bytes of each element that the epilogue reads
    and writes, through shared memory.
    """
    operands = tile.stages * (tile.rows + products * tile.columns) * tile.depth
    return operands + tile.rows * tile.width * element_bytes


def choose(m: int, n: int, k: int, products: int, element_bytes: int, shared_memory: int, tma: bool) -> Tile | None:
    """Return the tile for a result [M, N], cut to sizes that are smaller; None if none fits.

    products, element_bytes: see `shared_bytes`. shared_memory: bytes that one block of the GPU may use.
    """
    for choice in (_TMA if tma else _POINTERS)[products]:
        tile = choice.tile
        rows, columns, depth = _cut(m, tile.rows, 64), _cut(n, tile.columns, 16 * tile.parts), _cut(k, tile.depth, 32)
        fitted = replace(tile, rows=rows, columns=columns, depth=depth)
        suits = element_bytes <= choice.most_bytes and k >= choice.least_k
        if suits and shared_bytes(fitted, products, element_bytes) <= shared_memory:
            return fitted
    return None


def _cut(size: int, most: int, least: int) -> int:
    """Return the smallest power of two that covers a size, within two bounds."""
    return max(least, min(most, 1 << (size - 1).bit_length()))
