"""Rewrite two dequantizes with a scale for each row, and a matmul of experts, as one scaled grouped matmul.

before   a: bf16[M, K]    = a_q: f8e4m3fn[M, K] * a_scale_inv: f32[M, 1]
         b: bf16[G, K, N] = b_q: f8e4m3fn[G, K, N] * b_scale_inv: f32[G, 1, N]
         y: bf16[M, N]    = _grouped_mm(a, b, offs)
after    y = _scaled_grouped_mm(a_q, b_q laid out along K, view(a_scale_inv), view(b_scale_inv), offs)
or       the same for a bmm, without offs

before   x: bf16[M, K] = dequantize_groups(x_q: f8e4m3fn[M, K], x_scale_inv: f32[G, K], offs)
         g: bf16[M, N] = dequantize_groups(g_q: f8e4m3fn[M, N], g_scale_inv: f32[G, N], offs)
         y: bf16[G, N, K] = _grouped_mm(permute(g), x, offs)                     sums over the rows of each group
after    y = _scaled_grouped_mm(g_t: f8e4m3fn[N, M'], permute(x_t: f8e4m3fn[K, M']), view(g_scale_inv),
                                view(x_scale_inv), ends)
         where g_t, x_t are laid out along the rows, and groups are moved apart so that each begins at a multiple of 16:
         see grouped.py
changes  y by the rounding of a and b to bf16, which no longer happens

A bmm that is not rewritten here is left to `scaled_mm`, which makes one matmul for each batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from fp8pass import hardware
from fp8pass.base._torch import FORCE_STRIDE_ORDER, FakeTensorMode
from fp8pass.base.names import short
from fp8pass.base.scaling import E4M3
from fp8pass.graph.builder import erase_unused, val
from fp8pass.graph.pass_base import JointContext
from fp8pass.graph.refusal import Reject
from fp8pass.graph.verdict import Gemm
from fp8pass.passes.common.grouped_kernels import why_no_kernel
from fp8pass.passes.common.patterns import COPIES, as_node, at, aten, dtype_name, first, is_wide_cast, prims
from fp8pass.passes.joint.list_matmuls import operands
from fp8pass.passes.joint.operand_layout import OperandLayout
from fp8pass.passes.joint.operands import UNSCALED, Dequantize, dequantize
from fp8pass.quant import grouped

GROUPED_MM = aten._grouped_mm.default


@dataclass(frozen=True)
class ByRows:
    """Operands [M, K] in groups, or [G, M, K], and [G, K, N], with a scale for each row of a and column of b."""

    a: Dequantize
    b: Dequantize


@dataclass(frozen=True)
class ByGroups:
    """Operands [C, R] and [R, D], summed over the rows R of each group. a, b: their `dequantize_groups` nodes."""

    a: fx.Node
    b: fx.Node


def match(node: fx.Node, mode: FakeTensorMode) -> ByRows | ByGroups:
    """Capture both operands of the matmul. Raises Reject if they are not float8 with scales that a kernel takes."""
    a, b = operands(node)
    if val(a).dim() == val(b).dim() == 2:
        return ByGroups(_in_groups(a, node, turned=True), _in_groups(b, node, turned=False))
    if val(b).dim() == 2:
        raise Reject("form", f"{at(node)} multiplies {list(val(a).shape)} by {list(val(b).shape)}")
    return ByRows(_by_row(a, -1, mode), _by_row(b, -2, mode))


def _by_row(operand: fx.Node, dim: int, mode: FakeTensorMode) -> Dequantize:
    captured = dequantize(operand)
    if captured.rows is None or captured.scale != UNSCALED:
        raise Reject("grouped scale", f"{at(operand)} does not have just a scale for each row, as kernels need it")
    captured.rows.check(dim, mode)
    if captured.dtype is not E4M3:
        types = dtype_name(captured.dtype)
        raise Reject("grouped type", f"{at(operand)} is {types}; grouped FP8 matmuls take float8_e4m3fn alone")
    return captured


def _in_groups(operand: fx.Node, matmul: fx.Node, turned: bool) -> fx.Node:
    """Return the `dequantize_groups` node that an operand is, or is the transpose of (`turned`).

    Raises Reject if the operand comes from anything else, or has scales for other groups.
    """
    node, is_turned = operand, False
    while node.target is not grouped.DEQUANTIZE_GROUPS:
        if node.target is aten.permute.default:
            is_turned = not is_turned
        elif node.target not in COPIES and not is_wide_cast(node):
            raise Reject("not float8", f"operand {at(operand)} has no scale for each group and column")
        node = first(node)
    if is_turned is not turned or node.args[2] is not matmul.args[2]:
        raise Reject("grouped scale", f"{at(operand)} has scales for other groups than {at(matmul)} sums over")
    return node


def check(node: fx.Node, match: ByRows | ByGroups, target: hardware.Target | None) -> None:
    """Raise Reject if there is no kernel."""
    # the result of ByGroups is the gradient of the experts, [G, N, K]: its sizes are theirs
    experts = val(node) if isinstance(match, ByGroups) else val(operands(node)[1])
    if reject := why_no_kernel(experts, val(node).dtype, target):
        raise reject


class GroupedMM:
    """The pass. Runs before `scaled_mm`, which does not support groups, and sets verdicts in `context.gemms`."""

    name = "grouped_mm"

    def run(self, graph: fx.Graph, context: JointContext) -> int:
        """Rewrite every grouped or batched matmul that `match` and `check` accept; return how many."""
        todo = {n: g for n, g in context.gemms.items() if n.target is GROUPED_MM or _is_batched(n)}
        if not todo:
            return 0
        rewriter, applied = _GroupedRewriter(graph, context), 0
        for node, gemm in todo.items():
            target = hardware.target_of(val(node).device, context.config.target)
            try:
                matched = match(node, rewriter.build.mode)
                check(node, matched, target)
            except Reject as reject:
                if node.target is GROUPED_MM and not gemm.reason:
                    gemm.rule, gemm.reason = reject.rule, str(reject)
            else:
                rewriter.rewrite(node, matched, gemm)
                applied += 1
        erase_unused(graph)
        return applied


def _is_batched(node: fx.Node) -> bool:
    if node.target is not aten.bmm.default:
        return False
    a, b = map(val, operands(node))
    # stride 0: one matrix repeated for all batches, of which `scaled_mm` makes a single product
    return isinstance(b.shape[0], int) and b.shape[0] > 1 and 0 not in (a.stride(0), b.stride(0))


class _GroupedRewriter:
    def __init__(self, graph: fx.Graph, context: JointContext) -> None:
        self.build = context.builder(graph, GroupedMM.name)
        self.layout = OperandLayout(self._emit)
        self.matmul = next(iter(graph.nodes))
        self.moved: dict[fx.Node, Any] = {}
        self.apart: dict[tuple[Any, int], tuple[fx.Node, fx.Node]] = {}

    def rewrite(self, node: fx.Node, match: ByRows | ByGroups, gemm: Gemm) -> None:
        self.matmul, self.build.gemm = node, node.name
        arguments = self._rows(match) if isinstance(match, ByRows) else self._groups(match)
        y = self._product(*arguments, fast_accum=gemm.fast_accum)
        if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE:  # set by a checkpoint policy that saves matmuls
            y.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        self.build.replace(node, y)
        gemm.status, gemm.rule, gemm.reason = "rewritten", "", ""
        gemm.scaling = gemm.scaling or "user"
        gemm.dtypes = short(E4M3), short(E4M3), gemm.dtypes[2]

    def _rows(self, by_rows: ByRows) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node, fx.Node | None]:
        a = self.layout.rows_of_a(by_rows.a.apply_views(self._emit, self.moved))
        b = self.layout.rows_of_b(by_rows.b.apply_views(self._emit, self.moved))
        offs = self.matmul.args[2] if self.matmul.target is GROUPED_MM and len(self.matmul.args) > 2 else None
        assert isinstance(offs, fx.Node | None)
        return a, self.layout.transposed(b), self._scales(by_rows.a, -1), self._scales(by_rows.b, -2), offs

    def _scales(self, dq: Dequantize, dim: int) -> fx.Node:
        """Return the scales of the rows, f32[M] or f32[G, M], contiguous."""
        assert dq.rows is not None
        scales = dq.rows.apply_views(dim, self.build.mode, self._emit)
        if val(scales).dtype != torch.float32:
            scales = self._emit(prims.convert_element_type.default, scales, torch.float32)
        # a buffer, as in `scaled_mm`: of an expression Inductor would make a view with other strides
        scales = self._emit(aten.clone.default, scales, memory_format=torch.contiguous_format)
        return self._emit(FORCE_STRIDE_ORDER, scales, list(val(scales).stride()))

    def _groups(self, match: ByGroups) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node, fx.Node | None]:
        (a_q, a_scale, offs, _), (b_q, b_scale, *_) = match.a.args, match.b.args
        assert all(isinstance(n, fx.Node) for n in (a_q, a_scale, offs, b_q, b_scale))
        key = offs, self.layout.size(as_node(a_q), 0)
        if key not in self.apart:
            row = self._emit(grouped.ROWS_APART, *key)
            self.apart[key] = row, self._inline(grouped.ends_apart, offs)[0]
        row, ends = self.apart[key]
        (a,), (b,) = (self._inline(_by_columns, x_q, row) for x_q in (a_q, b_q))
        scale_a, scale_b = (self._emit(aten.view.default, scale, [-1]) for scale in (a_scale, b_scale))
        return a, self.layout.transposed(b), scale_a, scale_b, ends

    def _product(
        self, a: fx.Node, b: fx.Node, scale_a: fx.Node, scale_b: fx.Node, offs: fx.Node | None, fast_accum: bool
    ) -> fx.Node:
        if (hardware.pretended_device or val(a).device).type == "cpu":  # where torch has no kernel of this op
            return self._emit(grouped.SCALED_GROUPED_MM_ON_CPU, a, b, scale_a, scale_b, offs, torch.bfloat16)
        target = aten._scaled_grouped_mm.default  # its two None are bias and scale_result
        return self._emit(target, a, b, scale_a, scale_b, offs, None, None, torch.bfloat16, fast_accum)

    def _emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.build.emit(self.matmul, target, *args, **kwargs)

    def _inline(self, function: Callable[..., Any], *inputs: Any) -> list[fx.Node]:
        return self.build.inline(self.matmul, function, *inputs)


def _by_columns(x_q: Tensor, row: Tensor) -> Tensor:
    """Gather the rows of `x_q` [R, C] that `row` names, and transpose: [C, R']."""
    # as bytes: `taken` fills in zeros by `where`, which Inductor cannot lower for FP8
    rows = grouped.taken(x_q.view(torch.uint8), row).view(x_q.dtype)
    return rows.t().clone(memory_format=torch.contiguous_format)
