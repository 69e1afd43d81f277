"""Find matrices that are copies of a tensor in another order, as of attention's heads, to be read where that one is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from fp8pass.fused.tiles_source import Apart
from fp8pass.graph.builder import val
from fp8pass.passes.common.patterns import RESHAPES, aten, first, through


@dataclass(frozen=True)
class Arranged:
    """Says which tensor a matrix copies, and how rows and columns lie there.

    row, column: the strides of neighbours. apart: where these are further away.
    """

    tensor: fx.Node
    row: int
    column: int
    apart: Apart


def arranged(x: fx.Node) -> Arranged | None:
    """Return how a matrix lies in the tensor that it copies; None if it copies none, or in an order of more steps."""
    copy = through(x, RESHAPES)
    if copy.target is not aten.clone.default or first(copy).target is not aten.permute.default or not val(x).dim():
        return None
    moved = val(first(copy))
    known = all(isinstance(size, int) for size in (*moved.shape, *moved.stride(), *val(x).shape))
    dims = [(size, step) for size, step in zip(moved.shape, moved.stride(), strict=True) if size > 1]
    split = _split(dims, val(x).shape[-1]) if known else None
    if split is None:
        return None
    rows, columns = map(_spaced, (dims[:split], dims[split:]))
    if rows is None or columns is None or 0 in (rows[0], columns[0]):
        return None
    return Arranged(first(first(copy)), rows[0], columns[0], Apart(rows[1], rows[2], columns[1], columns[2]))


def _split(dims: Sequence[tuple[int, int]], n: int) -> int | None:
    """Return the position from which on dimensions make up the n columns; None if none does."""
    for i in range(len(dims) - 1, 0, -1):
        n, rest = divmod(n, dims[i][0])
        if rest or not n:
            return None
        if n == 1:
            return i
    return None


def _spaced(dims: Sequence[tuple[int, int]]) -> tuple[int, int, int] | None:
    """Return (stride, how many follow each other by it, what the next one is further away) of flattened dimensions."""
    size, step = dims[-1]
    groups = [(size, step)]
    for outer, far in reversed(dims[:-1]):
        size, step = groups[-1]
        if far == size * step:
            groups[-1] = size * outer, step
        else:
            groups.append((outer, far))
    if len(groups) > 2:
        return None
    size, step = groups[0]
    return step, size, groups[1][1] - size * step if len(groups) == 2 else 0
