"""Find the FP8 matmul whose product a sum adds, through casts, and views that change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass import hardware
from fp8pass.base._torch import FORCE_STRIDE_ORDER
from fp8pass.graph.builder import Builder, laid_out_alike, val
from fp8pass.passes.common.patterns import RESHAPES, aten, dtype_name, first, is_wide_cast

_UNCHANGED = {*RESHAPES, FORCE_STRIDE_ORDER}
"""Ops that pass a tensor on, if the layout stays."""


@dataclass(frozen=True)
class SummedProduct:
    """The term of a sum in float32: rows of the product of an FP8 matmul.

    nodes: from the matmul to the term. start, end: the rows.
    """

    nodes: tuple[fx.Node, ...]
    start: int
    end: int

    @property
    def matmul(self) -> fx.Node:
        """The matmul."""
        return self.nodes[0]

    @property
    def arguments(self) -> list[Any]:
        """All eight arguments of the matmul; None for those that are left out."""
        return [*self.matmul.args, *[None] * 8][:8]

    def operands(self, build: Builder) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node, bool]:
        """Return a, of these rows, b, scale_a, scale_b and fast_accum."""
        a, b, scale_a, scale_b, _, _, _, fast_accum = self.arguments
        if self.end - self.start < val(a).shape[0]:
            a = build.emit(self.matmul, aten.slice.Tensor, a, 0, self.start, self.end)
        return a, b, scale_a, scale_b, bool(fast_accum)


def summed_product(term: fx.Node) -> SummedProduct | None:
    """Return the product of an FP8 matmul that a term of a sum is; None if it is something else.

    None, too, if no matmul adds on the device.
    """
    nodes, turned, start, end = [term], False, 0, val(term).shape[0] if val(term).dim() == 2 else 0
    while (node := nodes[0]).target is not aten._scaled_mm.default:
        if node.target is aten.permute.default and node.args[1] == [1, 0]:
            turned = not turned
        elif node.target is aten.slice.Tensor and not turned and (rows := _rows(node)) is not None:
            start, end = start + rows, end + rows
        elif not (is_wide_cast(node) or (node.target in _UNCHANGED and laid_out_alike(val(node), val(first(node))))):
            return None
        nodes.insert(0, first(node))
    adds = not turned and hardware.adds_products(val(node).device)
    return SummedProduct(tuple(nodes), start, end) if adds else None


def check(products: Sequence[SummedProduct], reader: fx.Node, dtype: torch.dtype) -> str:
    """Return the reason why no matmul adds these rows of its product to sums; "" if one does.

    reader: the only node that may read them. dtype: that of the sums.
    """
    matmul = products[0].matmul
    _, _, scale_a, scale_b, bias, scale_result, *_ = products[0].arguments
    if dtype is not torch.float32:
        return f"the sum is in {dtype_name(dtype)}, and only one in float32 loses nothing"
    if val(scale_a).numel() != 1 or val(scale_b).numel() != 1:
        return "only matmuls with one scale for each operand add to float32"
    if bias is not None or scale_result is not None or not isinstance(val(matmul).shape[0], int):
        return "the matmul adds a bias, scales its result, or has a number of rows that varies"
    nodes = {node for product in products for node in product.nodes}
    return "something else reads the product" if {u for n in nodes for u in n.users} - nodes != {reader} else ""


def _rows(node: fx.Node) -> int | None:
    """Return the first row of a slice that takes rows next to each other; None for another slice."""
    dim, start, _, step = given = [*node.args, *[None] * 4][1:5]
    known = all(isinstance(x, int | None) for x in given) and not dim and step in (None, 1)
    return start or 0 if known and (start or 0) >= 0 else None  # type: ignore[return-value,operator]


def is_row_major(x: torch.Tensor) -> bool:
    """Return whether a matrix is stored row by row, without gaps."""
    return x.dim() == 2 and all(map(statically_known_true, (x.stride(1) == 1, x.stride(0) == x.shape[1])))
