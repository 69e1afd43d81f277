"""Split a matmul, batched or not, into 2-D products: `_scaled_mm` takes no others.

[M, K] by [K, N]                      one product
[B, M, K] by one matrix [K, N]        one product, [B*M, K] by [K, N]
one matrix [M, K] by [B, K, N]        one product, [M, K] by [K, B*N], and a copy of the result in the layout of bmm
[B, M, K] by [B, K, N]                B products
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.graph.builder import val
from fp8pass.passes.common import view_ops
from fp8pass.passes.common.patterns import aten
from fp8pass.passes.joint.operand_layout import OperandLayout


class Fp8Operand(NamedTuple):
    """One FP8 operand of a matmul, in the matmul's shape, and its scales without the summed dimension.

    rows: f32[M] or f32[B, M]; None if the operand has one scale. Both fields are nodes, or both are fake tensors.
    """

    x: Any
    rows: Any = None

    def is_one_matrix(self) -> bool:
        """Return whether a batched operand is one matrix, repeated for every entry of the batch."""
        return all(_is_repeated(_value(t)) for t in self if t is not None) and _value(self.x).dim() == 3


class Product(NamedTuple):
    """Operands of one 2-D product: FP8 rows [M, K] and [N, K], padded.

    n: the number of columns N without the padding, an int or a node. rows_a, rows_b: the scales of the rows, f32[M] and
    f32[N]; None if the operand has one scale.
    """

    a: fx.Node
    b: fx.Node
    n: Any
    rows_a: fx.Node | None = None
    rows_b: fx.Node | None = None


class Batches:
    """Builds the 2-D products of a matmul, and puts their results together.

    In all methods `a` and `b` are the FP8 operands in the matmul's shapes, with or without a batch dimension.
    """

    def __init__(self, emit: Callable[..., fx.Node]) -> None:
        self.emit = emit
        self.layout = OperandLayout(emit)

    def products(self, a: Fp8Operand, b: Fp8Operand) -> list[Product]:
        """Return the operands of each product, laid out and padded for the kernel."""
        (x, rows_x), (y, rows_y) = a, b
        if b.is_one_matrix():
            x, rows_x = self._flat(x), self._flat_rows(rows_x)
            y, rows_y = self._entry(y, 0), self._entry(rows_y, 0)
        elif a.is_one_matrix():
            columns = self._flat(self.layout.transposed(y))  # [B, N, K] as [B * N, K]
            x, rows_x = self._entry(x, 0), self._entry(rows_x, 0)
            y, rows_y = self.emit(aten.permute.default, columns, [1, 0]), self._flat_rows(rows_y)
        rows_a, rows_b, n = self.layout.rows_of_a(x), self.layout.rows_of_b(y), self.layout.size(y, -1)
        if val(rows_a).dim() == 2:
            return [Product(rows_a, rows_b, n, rows_x, rows_y)]
        entries = range(int(val(x).shape[0]))  # a number: `check_batches` has refused symbolic ones
        return [
            Product(self._entry(rows_a, i), self._entry(rows_b, i), n, self._entry(rows_x, i), self._entry(rows_y, i))
            for i in entries
        ]

    def _entry(self, x: Any, i: int) -> Any:
        return None if x is None else self.emit(aten.select.int, x, 0, i)

    def _flat_rows(self, rows: Any) -> Any:
        """Reshape f32[B, R] to f32[B*R]."""
        return None if rows is None else view_ops.reshape(rows, [self._count(rows)], self.emit)

    def _flat(self, x: fx.Node) -> fx.Node:
        """Reshape f8[B, R, C] to f8[B*R, C]."""
        flat: fx.Node = view_ops.reshape(x, [self._count(x), self.layout.size(x, 2)], self.emit)
        return flat

    def _count(self, x: fx.Node) -> Any:
        """Return B*R of a tensor [B, R] or [B, R, C]: an int, or a node if a size is symbolic."""
        batches, rows = (self.layout.size(x, d) for d in range(2))
        symbolic = isinstance(batches, fx.Node) or isinstance(rows, fx.Node)
        return self.emit(operator.mul, batches, rows) if symbolic else batches * rows

    def call(self, product: Product, *arguments: Any) -> fx.Node:
        """Emit one product, sliced to its size without padding, and contiguous.

        Users of the result rely on the strides of the matmul's result.
        """
        y = self.emit(aten._scaled_mm.default, product.a, self.layout.transposed(product.b), *arguments)
        n = product.n.meta["val"] if isinstance(product.n, fx.Node) else product.n
        if statically_known_true(val(y).shape[1] == n):
            return y
        y = self.emit(aten.slice.Tensor, y, 1, 0, product.n)
        return self.emit(aten.clone.default, y, memory_format=torch.contiguous_format)

    def assembled(self, products: list[fx.Node], a: Fp8Operand, b: Fp8Operand) -> fx.Node:
        """Put the results of all products together into the matmul's result."""
        y, size = products[0], self.layout.size
        if val(a.x).dim() == 2:
            return y
        if b.is_one_matrix():
            return self.emit(aten.view.default, y, [size(a.x, 0), size(a.x, 1), size(b.x, 2)])
        if a.is_one_matrix():
            y = self.emit(aten.view.default, y, [size(a.x, 1), size(b.x, 0), size(b.x, 2)])
            y = self.emit(aten.permute.default, y, [1, 0, 2])
            return self.emit(aten.clone.default, y, memory_format=torch.contiguous_format)
        # not aten.stack, which Inductor decomposes before this pass runs, and has no lowering for
        entries = [self.emit(aten.unsqueeze.default, y, 0) for y in products]
        return entries[0] if len(entries) == 1 else self.emit(aten.cat.default, entries)

    def bias(self, bias: fx.Node, a: Fp8Operand, b: Fp8Operand) -> fx.Node:
        """Return a bias [N] or [1, ..., N] repeated and padded to all columns that the kernel computes."""
        if val(bias).dim() > 1:
            bias = self.emit(aten.view.default, bias, [self.layout.size(bias, -1)])
        if a.is_one_matrix() and not b.is_one_matrix():
            bias = self.emit(aten.repeat.default, bias, [self.layout.size(b.x, 0)])
        return self.layout.pad(bias, (-1,))


def _value(x: Any) -> torch.Tensor:
    return val(x) if isinstance(x, fx.Node) else x


def _is_repeated(x: torch.Tensor) -> bool:
    # the stride of a dimension of size 1 says nothing
    return statically_known_true(x.stride(0) == 0) and not statically_known_true(x.shape[0] == 1)
