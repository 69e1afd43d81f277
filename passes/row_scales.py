"""Scales that differ between the rows of an operand, which `_scaled_mm` takes as f32[M, 1] and f32[1, N].

    before   x: bf16[B, S, K] = x_q: f8[B, S, K] * scale_inv: f32[B, S, 1];  mm(view(x, [B*S, K]), ...)
    after    rows: f32[B*S] = select(view(expand(scale_inv, [B, S, K]), [B*S, K]), dim=1, index=0)

The scale goes the way of the tensor: expanded to its shape, it takes all the movement that follows. It can be taken out
of the sum if it does not change along it, which strides prove: only views keep the 0 of an expanded dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass._torch import FakeTensorMode
from fp8pass.graph import compute, is_tensor, val
from fp8pass.passes import movement
from fp8pass.passes.movement import Emit
from fp8pass.passes.patterns import DIVIDING, MULTIPLYING, at, aten, first, fp8_behind, one_number, prims
from fp8pass.rewrite import Reject


@dataclass(frozen=True)
class RowScale:
    """A multiplication or division, `node`, of a tensor by `factor`; moves: the movement behind it, innermost first."""

    node: fx.Node
    factor: fx.Node
    moves: tuple[fx.Node, ...]

    def check(self, dim: int, mode: FakeTensorMode) -> None:
        """Raise Reject if the scale may change along the dimension `dim`, over which the matmul sums."""
        rows = self._without(dim, mode)
        shape = f"{at(self.node)} scales by a tensor of shape {list(val(self.factor).shape)}"
        if rows is None:
            raise Reject("scale shape", f"{shape}, which may change along the sum")
        if len(_known(rows)) < rows.dim() - 1 or not (self._is_whole(rows) or _is_static(val(self.node))):
            raise Reject("scale shape", f"{shape}, of a symbolic size")

    def moved(self, dim: int, mode: FakeTensorMode, emit: Emit) -> Any:
        """The scale of an operand without its dimension `dim`, over which the matmul sums: f32[M] or f32[B, M]."""
        rows = self._without(dim, mode)
        assert rows is not None, self
        if self._is_whole(rows):  # nothing but sizes of 1 came and went
            shape = [size if isinstance(size, int) else -1 for size in rows.shape]
            return emit(aten.reshape.default, self._factor(emit), shape)
        return emit(aten.select.int, self._spread(emit), dim, 0)

    def _without(self, dim: int, mode: FakeTensorMode) -> torch.Tensor | None:
        """`moved`, on fake tensors; None if it can't be shown to be one number along `dim`."""
        spread = self._spread(lambda target, *args, **kwargs: compute(mode, target, args, kwargs))
        return spread.select(dim, 0) if statically_known_true(spread.stride(dim) == 0) else None

    def _is_whole(self, rows: torch.Tensor) -> bool:
        """Whether `rows` are the elements of the factor, in their order."""
        same = rows.is_contiguous() and statically_known_true(rows.numel() == val(self.factor).numel())
        return same and statically_known_true(rows.storage_offset() == 0)

    def _spread(self, emit: Emit) -> Any:
        """The scale in the operand's shape."""
        scale = emit(aten.expand.default, self._factor(emit), list(val(self.node).shape))
        for node in self.moves:
            scale = movement.move(node, scale, torch.float32, emit)
        return scale

    def _factor(self, emit: Emit) -> Any:
        scale = emit(prims.convert_element_type.default, self.factor, torch.float32)
        return emit(aten.reciprocal.default, scale) if self.node.target in DIVIDING else scale


def _known(x: torch.Tensor) -> list[int]:
    return [size for size in x.shape if isinstance(size, int)]


def _is_static(x: torch.Tensor) -> bool:
    return len(_known(x)) == x.dim()


def scaled_rows(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The FP8 side of a multiplication or division, and a scale that only some of its dimensions have; or None."""
    x, y = node.args
    if node.target in MULTIPLYING and is_tensor(x) and fp8_behind(x) is None:
        x, y = y, x
    if not (is_tensor(x) and is_tensor(y)) or fp8_behind(y) is not None:
        return None
    while y.target is aten.expand.default:
        y = first(y)
    if one_number(y) is not None:
        return None
    floating = val(y).dtype.is_floating_point and val(y).device == val(x).device
    broadcasts = val(y).dim() < val(x).dim() or any(isinstance(size, int) and size == 1 for size in val(y).shape)
    return (x, y) if floating and broadcasts and val(x).shape == val(node).shape else None
