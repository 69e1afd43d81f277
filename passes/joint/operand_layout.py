"""Lay out FP8 operands as `_scaled_mm` takes them: contiguous along K, and padded to multiples of 16.

Where K is not the fastest dimension of an operand, a transposed FP8 copy is made: before sm_100, cuBLASLt has FP8
kernels for operands contiguous along K only (TN). On sm_100 it has kernels for all layouts, but torch, up to 2.15,
still refuses the others at compile time on every GPU: https://github.com/pytorch/pytorch/issues/152150. Rows must begin
at multiples of 16 bytes on all GPUs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.graph.builder import val
from fp8pass.passes.common import view_ops
from fp8pass.passes.common.patterns import aten

ALIGNMENT = 16
"""K and N must be multiples of this number of elements: cuBLASLt requires rows of whole 16 bytes."""


class OperandLayout:
    """Prepares operands: each once per orientation, however many matmuls read it."""

    def __init__(self, emit: Callable[..., fx.Node]) -> None:
        self.emit = emit
        self.rows: dict[tuple[fx.Node, bool], fx.Node] = {}

    def rows_of_a(self, a: fx.Node) -> fx.Node:
        """Lay out f8[..., M, K] as f8[..., M, K'], contiguous along K', which is K padded."""
        return self._once(a, False)

    def rows_of_b(self, b: fx.Node) -> fx.Node:
        """Lay out f8[..., K, N] as f8[..., N', K'], contiguous along K', both padded."""
        return self._once(b, True)

    def _once(self, x: fx.Node, is_b: bool) -> fx.Node:
        if (x, is_b) not in self.rows:
            unpadded = self.transposed(x) if is_b else x
            rows = self.pad(unpadded, (-2, -1) if is_b else (-1,))
            if rows is unpadded and not _is_row_major(val(rows)):
                rows = self.emit(aten.clone.default, rows, memory_format=torch.contiguous_format)
            self.rows[x, is_b] = rows
        return self.rows[x, is_b]

    def transposed(self, x: fx.Node) -> fx.Node:
        """Transpose the last two dimensions; undo an existing transpose instead of adding one."""
        swap = [1, 0] if val(x).dim() == 2 else [0, 2, 1]
        if x.target is aten.permute.default and x.args[1] == swap:
            assert isinstance(x.args[0], fx.Node)
            return x.args[0]
        return self.emit(aten.permute.default, x, swap)

    def pad(self, x: fx.Node, dims: tuple[int, ...]) -> fx.Node:
        """Pad `dims` of `x`, counted from the last, with zeros at the end to multiples of 16.

        A padded result is row-major; if nothing is missing, `x` itself is returned.
        """
        shape = val(x).shape
        missing = {d: self._missing(x, d) for d in dims if not statically_known_true(shape[d] % ALIGNMENT == 0)}
        if not missing:
            return x
        padding = [side for d in range(-1, min(missing) - 1, -1) for side in (0, missing.get(d, 0))]
        padded: fx.Node = view_ops.pad(x, padding, val(x).dtype, self.emit)
        return padded

    def _missing(self, x: fx.Node, dim: int) -> Any:
        """Return how many elements dimension `dim` lacks to a multiple of 16: an int, or a node."""
        size = self.size(x, dim)
        if isinstance(size, fx.Node):
            return self.emit(operator.mod, self.emit(operator.neg, size), ALIGNMENT)
        return -size % ALIGNMENT

    def size(self, x: fx.Node, dim: int) -> Any:
        """Return the size of a dimension: an int, or a node if it is symbolic."""
        size = val(x).shape[dim]
        number = size if isinstance(size, int) else size.node.maybe_as_int()
        return self.emit(aten.sym_size.int, x, dim) if number is None else number


def _is_row_major(x: torch.Tensor) -> bool:
    """Return whether `x` is row-major as cuBLASLt requires it, with each row beginning at a multiple of 16 bytes.

    `is_contiguous` ignores the stride of a dimension of size 1; torch's CUDA checks do not.
    """
    *outer, row, column = x.stride()
    # row >= its length: not one row that is expanded to all, with the stride 0
    aligned = (n % ALIGNMENT == 0 for n in (*outer, row, x.storage_offset()))
    return all(map(statically_known_true, (column == 1, row >= x.shape[-1], *aligned)))
