"""Capture scales that differ between the rows of an operand: `_scaled_mm` takes them as f32[M, 1] and f32[1, N].

    before   x: bf16[B, S, K] = x_q: f8[B, S, K] * scale_inv: f32[B, S, 1];  mm(view(x, [B*S, K]), ...)
    after    rows: f32[B*S] = select(view(expand(scale_inv, [B, S, K]), [B*S, K]), dim=1, index=0)

The scale is expanded to the tensor's shape, and then moved by the same ops as the tensor. It can be taken out of the
matmul's sum if it is constant along the summed dimension. A stride of 0 there proves that: only views keep the stride 0
of an expanded dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.base._torch import FakeTensorMode
from fp8pass.graph.builder import compute, is_tensor, val
from fp8pass.graph.refusal import Reject
from fp8pass.passes.common import view_ops
from fp8pass.passes.common.patterns import DIVIDING, MULTIPLYING, at, aten, first, fp8_source, one_number, prims
from fp8pass.passes.common.view_ops import Emit

LIMITS = {
    "detected": {
        "scale shape": (
            "the scale is neither one number nor one for each row; or it may change along the summed dimension",
            "one scale for each row of A and column of B, or blocks by a recipe",
        ),
    },
}
"""Lines of docs/limits.md: see `Reject`."""


@dataclass(frozen=True)
class RowScale:
    """A multiplication or division, `node`, of a tensor by `factor`. moves: the movement after it, innermost first."""

    node: fx.Node
    factor: fx.Node
    moves: tuple[fx.Node, ...]

    def check(self, dim: int, mode: FakeTensorMode) -> None:
        """Raise Reject if the scale may change along the dimension `dim`, over which the matmul sums."""
        applied = self._without(dim, mode)
        if applied is None:
            raise Reject("scale shape", f"{self._name()}, which may change along the sum")
        rows, whole = applied
        # `apply_views` can leave one symbolic size to the reshape, as -1
        if len(_known(rows)) < rows.dim() - 1 or not (whole or _is_static(val(self.node))):
            raise Reject("scale shape", f"{self._name()}, of a symbolic size")

    def apply_views(self, dim: int, mode: FakeTensorMode, emit: Emit) -> Any:
        """Return the scale of an operand, moved like the operand, without its dimension `dim`: f32[M] or f32[B, M].

        dim: the dimension that the matmul sums over.
        """
        applied = self._without(dim, mode)
        assert applied is not None, self
        rows, whole = applied
        if whole:  # only dims of size 1 were added or removed
            shape = [size if isinstance(size, int) else -1 for size in rows.shape]
            return emit(aten.reshape.default, self._factor(emit), shape)
        return emit(aten.select.int, self._spread(self._factor(emit), emit), dim, 0)

    def _without(self, dim: int, mode: FakeTensorMode) -> tuple[torch.Tensor, bool] | None:
        """Compute `apply_views` on fake tensors, and whether its elements are those of the factor, in the same order.

        None if it cannot be shown that the scale is constant along `dim`.
        """

        def on_fakes(target: Any, *args: Any, **kwargs: Any) -> Any:
            return compute(mode, target, args, kwargs)

        factor = self._factor(on_fakes)
        spread = self._spread(factor, on_fakes)
        if not statically_known_true(spread.stride(dim) == 0):
            return None
        rows = spread.select(dim, 0)
        same = rows.is_contiguous() and statically_known_true(rows.numel() == factor.numel())
        # fake tensors have no data pointers; views share the storage object
        view = rows.untyped_storage()._cdata == factor.untyped_storage()._cdata
        return rows, view and same and factor.is_contiguous() and statically_known_true(rows.storage_offset() == 0)

    def _factor(self, emit: Emit) -> Any:
        """Return the factor to multiply with, in f32, or in f64 if it is f64: the reciprocal for a division.

        A factor in f64 stays so until it has been multiplied with the scale of the whole tensor.
        """
        dtype = torch.float64 if val(self.factor).dtype == torch.float64 else torch.float32
        scale = emit(prims.convert_element_type.default, self.factor, dtype)
        return emit(aten.reciprocal.default, scale) if self.node.target in DIVIDING else scale

    def _spread(self, factor: Any, emit: Emit) -> Any:
        """Expand the scale to the tensor's shape, and apply the movement: the result has the operand's shape."""
        scale = emit(aten.expand.default, factor, list(val(self.node).shape))
        for node in self.moves:
            if node.target in (aten.view.default, aten.reshape.default):
                scale = self._viewable(scale, node.args[1], emit)
            scale = view_ops.move(node, scale, torch.float32, emit)
        return scale

    def _viewable(self, scale: Any, shape: Any, emit: Emit) -> Any:
        """Copy `scale` so that a view of this shape exists, with as many expanded dimensions (stride 0) as possible."""
        value = val(scale) if isinstance(scale, fx.Node) else scale
        if view_ops.is_view(value, fx.map_arg(shape, lambda n: n.meta["val"])):
            return scale
        if not _is_static(value):
            raise Reject("scale shape", f"{self._name()}, of a symbolic size, and is rearranged")
        repeated = [d for d, stride in enumerate(value.stride()) if stride == 0 and value.shape[d] != 1]
        for keep in (repeated, *([r for r in repeated if r != d] for d in repeated)):  # all, then all but one
            small = [1 if d in keep else size for d, size in enumerate(value.shape)]
            if view_ops.is_view(torch.empty(small, device="meta").expand(value.shape), shape):  # meta: no memory
                for d in keep:
                    scale = emit(aten.slice.Tensor, scale, d, 0, 1)
                scale = emit(aten.clone.default, scale, memory_format=torch.contiguous_format)
                return emit(aten.expand.default, scale, list(value.shape))
        return scale

    def _name(self) -> str:
        return f"{at(self.node)} scales by a tensor of shape {list(val(self.factor).shape)}"


def _known(x: torch.Tensor) -> list[int]:
    return [size for size in x.shape if isinstance(size, int)]


def _is_static(x: torch.Tensor) -> bool:
    return len(_known(x)) == x.dim()


def scaled_rows(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the FP8 side of a multiplication or division, and a scale that broadcasts to it; None if it has none."""
    x, y = node.args
    if node.target in MULTIPLYING and is_tensor(x) and fp8_source(x) is None:
        x, y = y, x
    if not (is_tensor(x) and is_tensor(y)) or fp8_source(y) is not None:
        return None
    while y.target is aten.expand.default:
        y = first(y)
    if one_number(y) is not None:
        return None
    real = not val(y).dtype.is_complex and val(y).device == val(x).device
    broadcasts = val(y).dim() < val(x).dim() or any(isinstance(size, int) and size == 1 for size in val(y).shape)
    return (x, y) if real and broadcasts and val(x).shape == val(node).shape else None
