"""Rewrite two dequantizes, a matmul and its epilogue as one scaled matmul.

before   a: bf16[M, K] = a_q: f8e4m3fn[M, K] * a_scale_inv: f32[]       (movement may stand anywhere in between)
         b: bf16[K, N] = permute(b_q: f8e4m3fn[N, K] * b_scale_inv: f32[])
         y: bf16[M, N] = mm(a, b) * s + bias
after    y: bf16[M, N] = _scaled_mm(a_q, permute(b_q), a_scale_inv * s, b_scale_inv, bias, out_dtype=bf16)
or       with scales a_scale_inv: f32[M, 1] and b_scale_inv: f32[1, N], where each row has a scale
changes  y by the rounding of a, b and intermediate results to bf16, which no longer happens; a and b stay if anything
         else reads them

1. Movement is done on the FP8 tensor, once for all matmuls that read the same tensor (operands.py, view_ops.py).
2. Operands are laid out along K and padded (operand_layout.py); the result is sliced back.
3. Ops that follow go into the kernel where possible (epilogue.py); a bias that cannot is added after the kernel.
4. Batches are flattened if one operand is the same for all of them; otherwise each batch gets a call (batches.py).
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils.checkpoint import CheckpointPolicy

from fp8pass.base._torch import FORCE_STRIDE_ORDER, FakeTensorMode
from fp8pass.base.names import short
from fp8pass.base.scaling import E4M3, E5M2, FP8_DTYPES
from fp8pass.graph.builder import compute, erase_unused, val
from fp8pass.graph.pass_base import JointContext
from fp8pass.graph.refusal import MAX_BATCHES, Reject
from fp8pass.graph.verdict import Gemm
from fp8pass.hardware import Target, scales_rows, target_of, why_no_fp8
from fp8pass.passes.common import view_ops
from fp8pass.passes.common.patterns import MATMULS, at, aten, dtype_name, prims
from fp8pass.passes.common.view_ops import Emit
from fp8pass.passes.joint.batches import Batches, Fp8Operand
from fp8pass.passes.joint.epilogue import ScaledMMEpilogue, epilogue
from fp8pass.passes.joint.list_matmuls import added, operands
from fp8pass.passes.joint.operands import UNSCALED, Dequantize, Scale, dequantize

LIMITS = {
    "declined": {
        "batches": (
            "one `bmm` has more than 16 products: `_scaled_mm` has no batch dimension, and a launch for each costs "
            "more than FP8 gains. On sm_90 they are [one grouped matmul](recipes.md#experts) if M, K and N are "
            "multiples of 16, the result is bfloat16, and the recipe may be by rows",
            "nothing; write one matmul if the second operand is shared; pad the sizes",
        ),
    },
    "detected": {
        "e5m2 x e5m2": ("no kernel multiplies the two", "one operand in e4m3"),
        "float64": ("the result is float64", "float32"),
        "alpha": ("alpha is a symbolic size", "a number"),
    },
}
"""Lines of docs/limits.md: see `Reject`."""


@dataclass(frozen=True)
class MatmulMatch:
    """A matmul whose operands are both dequantized from FP8.

    a, b: the FP8 operands with all movement done, as fake tensors. bias: the tensor that addmm or baddbmm adds; beta,
    alpha: their factors. after: the ops that go into the kernel. by_row: "" if each operand has one scale; otherwise
    where the scales of rows are applied, in the "kernel" or "after" it.
    """

    node: fx.Node
    dq_a: Dequantize
    dq_b: Dequantize
    a: Fp8Operand
    b: Fp8Operand
    bias: fx.Node | None
    beta: Any
    alpha: Any
    after: ScaledMMEpilogue
    by_row: str = ""


def match(
    node: fx.Node,
    dq_a: Dequantize,
    dq_b: Dequantize,
    mode: FakeTensorMode,
    fakes: dict[fx.Node, Any],
    target: str | Target | None = None,
) -> MatmulMatch:
    """Match a matmul of two captured operands: its bias, epilogue, and how scales of rows are applied.

    fakes: fake results of movement, by op; new ones are added.
    """

    def on_fakes(op: Any, *args: Any, **kwargs: Any) -> Any:
        return compute(mode, op, args, kwargs)

    a, b = _fp8_operands(dq_a, dq_b, mode, on_fakes, fakes)
    a, b = (Fp8Operand(*(val(t) if isinstance(t, fx.Node) else t for t in f)) for f in (a, b))
    beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
    bias = None if beta == 0 else added(node)  # torch: with beta 0 the bias is ignored, NaN included
    scale = (dq_a.scale * dq_b.scale).times(alpha)
    after = plain = ScaledMMEpilogue(node, val(node).dtype, scale)
    if bias is None or beta == 1:  # kernels add a bias without a factor
        after = epilogue(node, scale, bias, (a.x.dtype, b.x.dtype))
    m = MatmulMatch(node, dq_a, dq_b, a, b, bias, beta, alpha, after)
    if a.rows is None and b.rows is None:
        return m
    if _has_row_kernel(m, target):
        return replace(m, by_row="kernel")
    note = f"{at(after.end)} converts to {dtype_name(after.dtype)} after the kernel: none with scales for rows does it"
    return replace(m, by_row="after", after=replace(plain, note=note if after.dtype in FP8_DTYPES else ""))


def _has_row_kernel(m: MatmulMatch, target: str | Target | None) -> bool:
    """Return whether a kernel with scales for rows can compute the match on this device.

    Such kernels write bfloat16, and take e4m3 as the second operand; other types do not work on all GPUs.
    """
    written = m.after.dtype is torch.bfloat16 and m.b.x.dtype is E4M3
    return written and scales_rows(m.a.x.device, target_of(m.a.x.device, target))


def _fp8_operands(
    dq_a: Dequantize, dq_b: Dequantize, mode: FakeTensorMode, emit: Emit, emitted: dict[fx.Node, Any]
) -> tuple[Fp8Operand, Fp8Operand]:
    """Return the operands with all movement done by `emit`, and their scales without the summed dimension."""
    a, b = (
        Fp8Operand(dq.apply_views(emit, emitted), None if dq.rows is None else dq.rows.apply_views(dim, mode, emit))
        for dq, dim in ((dq_a, -1), (dq_b, -2))
    )
    return a, b


def _try_dequantize(operand: fx.Node, dim: int, mode: FakeTensorMode) -> Dequantize | Reject:
    """Capture `operand`; return the Reject, instead of raising it, if that fails.

    dim: the dimension that the matmul sums over, along which a scale must not change.
    """
    try:
        captured = dequantize(operand)
        if captured.rows is not None:
            captured.rows.check(dim, mode)
    except Reject as reject:
        return reject
    return captured


def check_matmul(node: fx.Node, target: str | Target | None = None) -> list[Reject]:
    """Return a Reject for each condition that fails independently of where the operands come from."""
    a, b = map(val, operands(node))
    failed = []
    if reason := why_no_fp8(a.device, target_of(a.device, target)):
        failed.append(Reject("device", reason))
    if val(node).dtype == torch.float64:
        failed.append(Reject("float64", "the result is float64, and `_scaled_mm` accumulates in float32"))
    if not isinstance(node.kwargs.get("alpha", 1), (int, float)):
        failed.append(Reject("alpha", "alpha is a symbolic size, and not known when the graph is compiled"))
    if any(statically_known_true(size == 0) for size in (*a.shape, *b.shape)):
        failed.append(Reject("empty", f"the matmul of {list(a.shape)} by {list(b.shape)} is empty"))
    return failed


def check_types(types: Sequence[torch.dtype | None]) -> list[Reject]:
    """Return a Reject, in a list, if no kernel takes two operands of these types.

    types: None for an operand that is not float8.
    """
    if types[0] is types[1] is E5M2:  # cuBLASLt does not list the pair, and torch checks for it
        kernels = "both operands are float8_e5m2, for which no GPU has a kernel; store one as float8_e4m3fn"
        return [Reject("e5m2 x e5m2", kernels)]
    return []


def check_batches(a: Fp8Operand, b: Fp8Operand) -> list[Reject]:
    """Return a Reject, in a list, if more than MAX_BATCHES calls, or a symbolic number of calls, would be needed."""
    if a.x.dim() == 2 or a.is_one_matrix() or b.is_one_matrix():
        return []
    batches, m, k = a.x.shape
    if isinstance(batches, int) and batches <= MAX_BATCHES:
        return []
    products = f"{batches} products of [{m}, {k}] by [{k}, {b.x.shape[-1]}]"
    launches = f"more than {MAX_BATCHES} launches would cost more than FP8 gains"
    return [Reject("batches", f"{products}: `_scaled_mm` has no batch dimension, and {launches}")]


def check_scale(m: MatmulMatch) -> list[Reject]:
    """Return a Reject, in a list, if the product of the scales and alpha is not a normal float32."""
    # with alpha 1 the kernel gets the two scales as they are; their product need not be a float32
    if m.alpha == 1 or m.after.scale.fits_float32():
        return []
    return [Reject("scale", f"scales and alpha multiply to {m.after.scale.number:g}, which is not a normal float32")]


class ScaledMM:
    """The pass. Detects and rewrites, and sets verdicts in `context.gemms`."""

    name = "scaled_mm"

    def run(self, graph: fx.Graph, context: JointContext) -> int:
        """Rewrite every matmul that passes all checks; decline the others with reasons. Return the number rewritten."""
        if not context.gemms:
            return 0
        target = context.config.target
        rewriter, applied = _MatmulRewriter(graph, context), 0
        mode = rewriter.build.mode
        fakes: dict[fx.Node, Any] = {}
        for node, gemm in context.gemms.items():
            if gemm.status == "rewritten" or gemm.quantized or node.target not in MATMULS:
                continue  # has scales for blocks or groups: earlier passes set its verdict
            captured = [
                _try_dequantize(operand, dim, mode) for operand, dim in zip(operands(node), (-1, -2), strict=True)
            ]
            types = [c.dtype if isinstance(c, Dequantize) else None for c in captured]
            rejects = [c for c in captured if isinstance(c, Reject)] + check_matmul(node, target) + check_types(types)
            if rejects:  # all reasons at once: whoever removes the first one need not find the next by trying
                rejects += check_batches(*(Fp8Operand(val(x)) for x in operands(node)))
            else:
                dq_a, dq_b = (c for c in captured if isinstance(c, Dequantize))
                matched = match(node, dq_a, dq_b, mode, fakes, target)
                rejects = check_batches(matched.a, matched.b) + check_scale(matched)
            if rejects:
                _decline(gemm, captured, rejects)
            else:
                rewriter.rewrite(matched, gemm)
                applied += 1
        if applied:
            erase_unused(graph)
        return applied


def _decline(gemm: Gemm, captured: list[Dequantize | Reject], rejects: list[Reject]) -> None:
    """Set the verdict of a declined matmul.

    If an operand is not quantized, a reason that the annotate pass gave stays; otherwise `rejects` give the reason.
    """
    quantized = [isinstance(c, Dequantize) or c.rule != "not float8" for c in captured]
    gemm.quantized, gemm.near_miss = all(quantized), any(quantized) and len(rejects) == 1
    if gemm.reason and not gemm.quantized:
        return
    gemm.rule = rejects[0].rule
    alone = "; no other rule declines it" if gemm.near_miss else ""
    gemm.reason = "; and ".join(dict.fromkeys(map(str, rejects))) + alone


class _MatmulRewriter:
    """Emits nodes before the matmul being rewritten. Nodes made for one matmul are shared with all later ones."""

    def __init__(self, graph: fx.Graph, context: JointContext) -> None:
        self.graph = graph
        self.build = context.builder(graph, ScaledMM.name)
        self.batches = Batches(self._emit)
        self.matmul = self.at = next(iter(graph.nodes))
        self.emitted: dict[Hashable, fx.Node] = {}
        self.moved: dict[fx.Node, Any] = {}
        self.scales: dict[Hashable, fx.Node] = {}

    def rewrite(self, m: MatmulMatch, gemm: Gemm) -> None:
        self.build.gemm = m.node.name
        is_saved = m.node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE  # set by a checkpoint policy
        # reshapes of a saved result may be tagged to be recomputed: new nodes do not join their region
        self.build.region = m.node if is_saved else None
        self.matmul = self.at = m.node  # nodes that later matmuls may share go here; the others where the epilogue ends
        a, b = _fp8_operands(m.dq_a, m.dq_b, self.build.mode, self._emit, self.moved)
        y = self._row_scaled(m, a, b, gemm.fast_accum) if m.by_row else self._scaled(m, a, b, gemm.fast_accum)
        if m.bias is not None and m.after.bias is None:
            y = self._add_bias(y, m)
        for node in m.after.reshapes:
            y = view_ops.move(node, y, m.after.dtype, self._emit)
        if is_saved:
            y.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        self.build.replace(m.after.end, y)
        gemm.status, gemm.rule, gemm.reason, gemm.note = "rewritten", "", "", m.after.note or gemm.note
        gemm.scaling = gemm.scaling or "user"
        gemm.dtypes = short(m.a.x.dtype), short(m.b.x.dtype), short(m.after.dtype)

    def _scaled(self, m: MatmulMatch, a: Fp8Operand, b: Fp8Operand, fast_accum: bool) -> fx.Node:
        """Emit the product with one scale for each operand."""
        scale_a, scale_b = self._scales(m, a.x, b.x)
        products = self.batches.products(a, b)
        self.at = m.after.end
        bias = None if m.after.bias is None else self.batches.bias(m.after.bias, a, b)
        arguments = scale_a, scale_b, bias, None, m.after.dtype, fast_accum  # None: scale_result, see epilogue.py
        return self.batches.assembled([self.batches.call(p, *arguments) for p in products], a, b)

    def _row_scaled(self, m: MatmulMatch, a: Fp8Operand, b: Fp8Operand, fast_accum: bool) -> fx.Node:
        """Emit the product with a scale for each row of at least one operand."""
        products = self.batches.products(a, b)
        one = self._scale_inv(UNSCALED, a.x)
        folded = m.after.scale != m.dq_a.scale * m.dq_b.scale
        of_both = (UNSCALED, UNSCALED) if folded else (m.dq_a.scale, m.dq_b.scale)
        factor_a, factor_b = (None if s == UNSCALED else self._scale_inv(s, a.x) for s in of_both)
        self.at = m.after.end
        if folded:  # may depend on nodes after the matmul, so it is not shared
            factor_a = self._make_scale_inv(m.after.scale, val(a.x).device)
        bias = None if m.after.bias is None else self.batches.bias(m.after.bias, a, b)
        results = []
        for p in products:
            scale_a, scale_b = self._rows(p.rows_a, p.a, factor_a), self._rows(p.rows_b, p.b, factor_b)
            column = self._emit(aten.view.default, scale_a, [self.batches.layout.size(scale_a, 0), 1])
            if m.by_row == "kernel":  # takes f32[M, 1] and f32[1, N]
                row = self._emit(aten.view.default, scale_b, [1, self.batches.layout.size(scale_b, 0)])
                y = self.batches.call(p, column, row, bias, None, m.after.dtype, fast_accum)
            else:  # multiplied after the kernel, in float32: as exact, and Inductor fuses it with other ops
                y = self.batches.call(p, one, one, None, None, torch.float32, fast_accum)
                unpadded = self._emit(aten.slice.Tensor, scale_b, 0, 0, p.n)
                y = self._emit(aten.mul.Tensor, self._emit(aten.mul.Tensor, y, column), unpadded)
                y = self._cast(y, m.after.dtype)
            results.append(y)
        return self.batches.assembled(results, a, b)

    def _rows(self, rows: fx.Node | None, x: fx.Node, factor: fx.Node | None) -> fx.Node:
        """Return the scale of each row of `x` f8[R, K], times `factor`: f32[R], contiguous, and padded as `x` is."""
        if rows is None:
            size = self.batches.layout.size(x, 0)
            if factor is None:
                rows = self._emit(aten.full.default, [size], 1.0, dtype=torch.float32, device=val(x).device)
            else:
                rows = self._emit(aten.expand.default, factor, [size])
        elif factor is not None:
            rows = self._emit(aten.mul.Tensor, rows, factor)
        rows = self._cast(rows, torch.float32)
        if not statically_known_true(val(rows).shape[0] == val(x).shape[0]):
            rows = self.batches.layout.pad(rows, (-1,))
        # force a buffer: of an expression Inductor would make a view with strides that CPU kernels refuse
        contiguous = self._emit(aten.clone.default, rows, memory_format=torch.contiguous_format)
        return self._emit(FORCE_STRIDE_ORDER, contiguous, [1])

    def _cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return x if val(x).dtype == dtype else self._emit(prims.convert_element_type.default, x, dtype)

    def _emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if self.at is not self.matmul or target is aten._scaled_mm.default:
            return self.build.emit(self.at, target, *args, **kwargs)
        key = target, repr((args, kwargs))  # matmuls that read one tensor share its views
        if key not in self.emitted:
            self.emitted[key] = self.build.emit(self.at, target, *args, **kwargs)
        return self.emitted[key]

    def _scales(self, m: MatmulMatch, a: fx.Node, b: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Return the scales of both operands.

        If the epilogue folded a scale, all factors are in the first and the second is 1: a partial product might not
        be a normal float32.
        """
        if m.after.scale == m.dq_a.scale * m.dq_b.scale:
            return self._scale_inv(m.dq_a.scale, a), self._scale_inv(m.dq_b.scale, b)
        one = self._scale_inv(UNSCALED, b)
        self.at = m.after.end
        folded = self._make_scale_inv(m.after.scale, val(a).device)
        self.at = m.node  # back to where later matmuls can share what is emitted next, the laid out operands
        return folded, one

    def _scale_inv(self, scale: Scale, operand: fx.Node) -> fx.Node:
        """Return the scale as f32[], as `_scaled_mm` takes it; equal scales of operands share one node."""
        key = scale.number, scale.key(), val(operand).device
        if key not in self.scales:
            self.scales[key] = self._make_scale_inv(scale, val(operand).device)
        return self.scales[key]

    def _make_scale_inv(self, scale: Scale, device: torch.device) -> fx.Node:
        nodes = (*scale.multiplied, *scale.divided)
        if not nodes:
            return self._emit(aten.full.default, [], scale.number, dtype=torch.float32, device=device)
        single = len(nodes) == 1 and scale.number == 1 and val(nodes[0]).dtype != torch.float64
        dtype = torch.float32 if single else torch.float64  # a partial product may leave float32's range
        factors = [self._scalar(n, dtype) for n in scale.multiplied]
        factors += [self._emit(aten.reciprocal.default, self._scalar(n, dtype)) for n in scale.divided]
        product = functools.reduce(functools.partial(self._emit, aten.mul.Tensor), factors)
        if scale.number != 1:
            product = self._emit(aten.mul.Tensor, product, scale.number)
        return self._scalar(product, torch.float32)

    def _scalar(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        if val(x).dtype != dtype:
            x = self._emit(prims.convert_element_type.default, x, dtype)
        return self._emit(aten.reshape.default, x, []) if val(x).dim() else x

    def _add_bias(self, y: fx.Node, m: MatmulMatch) -> fx.Node:
        bias = m.bias if m.beta == 1 else self._emit(aten.mul.Tensor, m.bias, m.beta)
        return self._emit(aten.add.Tensor, y, bias)
