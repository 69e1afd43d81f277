"""A matmul, batched or not, as 2-D products, which is all that `_scaled_mm` has.

[M, K] by [K, N]                      one product
[B, M, K] by one matrix [K, N]        one product, [B*M, K] by [K, N]
one matrix [M, K] by [B, K, N]        one product, [M, K] by [K, B*N], and the result laid out anew
[B, M, K] by [B, K, N]                B products
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.graph import val
from fp8pass.passes import movement
from fp8pass.passes.layout import Layout
from fp8pass.passes.patterns import aten


class Product(NamedTuple):
    """FP8 rows [M, K] and [N, K], padded, and how many columns N there are without the padding: an int or a node."""

    a: fx.Node
    b: fx.Node
    n: Any


class Batches:
    """`a` and `b` are always the FP8 operands as the matmul has them, with or without a batch dimension."""

    def __init__(self, emit: Callable[..., fx.Node], target: str | None) -> None:
        self.emit = emit
        self.layout = Layout(emit, target)

    def products(self, a: fx.Node, b: fx.Node) -> list[Product]:
        """The operands of each product, laid out."""
        if is_one_matrix(val(b)):
            a, b = self._flat(a), self.emit(aten.select.int, b, 0, 0)
        elif is_one_matrix(val(a)):
            columns = self._flat(self.layout.transposed(b))
            a, b = self.emit(aten.select.int, a, 0, 0), self.emit(aten.permute.default, columns, [1, 0])
        rows_a, rows_b, n = self.layout.rows_of_a(a), self.layout.rows_of_b(b), self.layout.size(b, -1)
        if val(rows_a).dim() == 2:
            return [Product(rows_a, rows_b, n)]
        select = functools.partial(self.emit, aten.select.int)
        return [Product(select(rows_a, 0, i), select(rows_b, 0, i), n) for i in range(int(val(a).shape[0]))]

    def _flat(self, x: fx.Node) -> fx.Node:
        """f8[B, R, C] as f8[B*R, C]."""
        batches, rows, columns = (self.layout.size(x, d) for d in range(3))
        symbolic = isinstance(batches, fx.Node) or isinstance(rows, fx.Node)
        count = self.emit(operator.mul, batches, rows) if symbolic else batches * rows
        flat: fx.Node = movement.reshape(x, [count, columns], self.emit)
        return flat

    def call(self, product: Product, *arguments: Any) -> fx.Node:
        """One product without its padding, contiguous: users count on the strides that the matmul's result had."""
        y = self.emit(aten._scaled_mm.default, product.a, self.layout.transposed(product.b), *arguments)
        n = product.n.meta["val"] if isinstance(product.n, fx.Node) else product.n
        if statically_known_true(val(y).shape[1] == n):
            return y
        y = self.emit(aten.slice.Tensor, y, 1, 0, product.n)
        return self.emit(aten.clone.default, y, memory_format=torch.contiguous_format)

    def assembled(self, products: list[fx.Node], a: fx.Node, b: fx.Node) -> fx.Node:
        """The results of all products as the matmul's."""
        y, size = products[0], self.layout.size
        if val(a).dim() == 2:
            return y
        if is_one_matrix(val(b)):
            return self.emit(aten.view.default, y, [size(a, 0), size(a, 1), size(b, 2)])
        if is_one_matrix(val(a)):
            y = self.emit(aten.view.default, y, [size(a, 1), size(b, 0), size(b, 2)])
            y = self.emit(aten.permute.default, y, [1, 0, 2])
            return self.emit(aten.clone.default, y, memory_format=torch.contiguous_format)
        entries = [self.emit(aten.unsqueeze.default, y, 0) for y in products]
        return entries[0] if len(entries) == 1 else self.emit(aten.cat.default, entries)

    def bias(self, bias: fx.Node, a: fx.Node, b: fx.Node) -> fx.Node:
        """A bias [N] or [1, ..., N] over all columns that the kernel computes."""
        if val(bias).dim() > 1:
            bias = self.emit(aten.view.default, bias, [self.layout.size(bias, -1)])
        if is_one_matrix(val(a)) and not is_one_matrix(val(b)):
            bias = self.emit(aten.repeat.default, bias, [self.layout.size(b, 0)])
        return self.layout.pad(bias, (-1,))


def is_one_matrix(x: torch.Tensor) -> bool:
    """Whether a batched operand is the same matrix for every entry of the batch."""
    return x.dim() == 3 and statically_known_true(x.stride(0) == 0) and not statically_known_true(x.shape[0] == 1)
