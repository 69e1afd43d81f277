"""Two dequantizes, a matmul and its epilogue become one scaled matmul.

before   a: bf16[M, K] = a_q: f8e4m3fn[M, K] * a_scale_inv: f32[]       (movement may stand anywhere in between)
         b: bf16[K, N] = permute(b_q: f8e4m3fn[N, K] * b_scale_inv: f32[])
         y: bf16[M, N] = mm(a, b) * s + bias
after    y: bf16[M, N] = _scaled_mm(a_q, permute(b_q), a_scale_inv * s, b_scale_inv, bias, out_dtype=bf16)
changes  y by the rounding of a, b and intermediate results to bf16, which no longer happens; a and b stay if anything
         else reads them

1. Movement goes onto the FP8 tensor, once for all matmuls that read the same (dequantize.py, movement.py).
2. Operands are laid out along K and padded; the result is sliced back (layout.py).
3. What follows goes into the kernel where it can (epilogue.py); a bias that can't is added behind it.
4. Batches: flattened where one operand is the same for the whole batch, else one call per batch entry.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass._torch import FakeTensorMode, detect_fake_mode
from fp8pass.graph import Builder, compute, val
from fp8pass.hardware import target_of, why_no_fp8
from fp8pass.passes import movement
from fp8pass.passes.dequantize import UNSCALED, Dequantize, Scale, dequantize
from fp8pass.passes.epilogue import Epilogue, epilogue
from fp8pass.passes.layout import Layout
from fp8pass.passes.matmuls import added, operands, short
from fp8pass.passes.patterns import aten, fp8_behind, prims
from fp8pass.report import Gemm
from fp8pass.rewrite import MAX_BATCHES, Context, Reject
from fp8pass.scaling import E5M2


@dataclass(frozen=True)
class Match:
    """A matmul whose operands are both dequantized from FP8. bias: what addmm and baddbmm add; beta, alpha: factors.

    a_q, b_q: the FP8 operands as they will be, with all movement done: fake tensors.
    """

    node: fx.Node
    dq_a: Dequantize
    dq_b: Dequantize
    a_q: torch.Tensor
    b_q: torch.Tensor
    bias: fx.Node | None
    beta: Any
    alpha: Any


def match(node: fx.Node) -> Match | list[Reject]:
    """Capture both operands, or say for each that can't be why."""
    captured = [_try_dequantize(operand) for operand in operands(node)]
    rejects = [c for c in captured if isinstance(c, Reject)]
    if rejects:
        return rejects
    dq_a, dq_b = (c for c in captured if isinstance(c, Dequantize))
    mode = detect_fake_mode([val(node)])
    assert mode is not None
    a_q, b_q = (_compute(dq, mode) for dq in (dq_a, dq_b))
    beta = node.kwargs.get("beta", 1)
    bias = None if beta == 0 else added(node)  # beta 0 ignores the bias, whatever it holds
    return Match(node, dq_a, dq_b, a_q, b_q, bias, beta, node.kwargs.get("alpha", 1))


def _try_dequantize(operand: fx.Node) -> Dequantize | Reject:
    try:
        return dequantize(operand)
    except Reject as reject:
        return reject


def _compute(dq: Dequantize, mode: FakeTensorMode) -> torch.Tensor:
    """The FP8 operand with all movement done, as a fake tensor; adds nothing to the graph."""
    operand = dq.moved(lambda target, *args, **kwargs: compute(mode, target, args, kwargs), {})
    return val(operand) if isinstance(operand, fx.Node) else operand


def check(m: Match, target: str | None = None) -> list[Reject]:
    """Every condition that fails."""
    failed = []
    if reason := why_no_fp8(m.a_q.device, target_of(m.a_q.device, target)):
        failed.append(Reject("device", reason))
    if m.a_q.dtype is m.b_q.dtype is E5M2:
        kernels = "both operands are float8_e5m2, for which no GPU has a kernel; store one as float8_e4m3fn"
        failed.append(Reject("e5m2 x e5m2", kernels))
    if val(m.node).dtype == torch.float64:
        failed.append(Reject("float64", "the result is float64, and `_scaled_mm` accumulates in float32"))
    *batch, rows, k = m.a_q.shape
    n = m.b_q.shape[-1]
    if any(statically_known_true(size == 0) for size in (*batch, rows, k, n)):
        failed.append(Reject("empty", f"the matmul of {list(m.a_q.shape)} by {list(m.b_q.shape)} is empty"))
    elif batch and not (_is_one_matrix(m.a_q) or _is_one_matrix(m.b_q)) and not _are_few(batch[0]):
        products = f"{batch[0]} products of [{rows}, {k}] by [{k}, {n}]"
        why = (
            f"`_scaled_mm` has no batch dimension, and more than {MAX_BATCHES} launches would cost more than FP8 gains"
        )
        failed.append(Reject("batches", f"{products}: {why}"))
    return failed


class ScaledMM:
    """Detects and rewrites; `context.gemms` gets the verdicts."""

    name = "scaled_mm"

    def run(self, graph: fx.Graph, context: Context) -> int:
        """Rewrite every matmul that `match` and `check` have nothing against."""
        rewriter = _Rewriter(graph, context.config.target)
        applied = 0
        for node, gemm in context.gemms.items():
            found = match(node)
            rejects = check(found, context.config.target) if isinstance(found, Match) else found
            if isinstance(found, Match) and not rejects:
                rewriter.rewrite(found, gemm)
                applied += 1
            else:
                _decline(gemm, node, rejects)
        if applied:
            graph.eliminate_dead_code()
        return applied


def _decline(gemm: Gemm, node: fx.Node, rejects: list[Reject]) -> None:
    """The verdict. What the annotate pass had against the matmul is said rather than that nobody quantized it."""
    behind = [fp8_behind(operand) is not None for operand in operands(node)]
    gemm.quantized, gemm.near_miss = all(behind), any(behind) and len(rejects) == 1
    if gemm.reason and not gemm.quantized:
        return
    gemm.rule = rejects[0].rule
    gemm.reason = "; and ".join(dict.fromkeys(map(str, rejects))) + ("; all else matches" if gemm.near_miss else "")


class _Rewriter:
    """Builds in front of the node at hand. What is made for one matmul is there for all later ones too."""

    def __init__(self, graph: fx.Graph, target: str | None) -> None:
        self.graph = graph
        self.build = Builder(graph, ScaledMM.name)
        self.layout = Layout(self._emit, target)
        self.at = next(iter(graph.nodes))
        self.moved: dict[fx.Node, Any] = {}
        self.scales: dict[Hashable, fx.Node] = {}

    def rewrite(self, m: Match, gemm: Gemm) -> None:
        self.at = m.node  # what later matmuls may share stands here; the rest where the epilogue ends
        a, b = (dq.moved(self._emit, self.moved) for dq in (m.dq_a, m.dq_b))
        scale_a, scale_b = self._scale_inv(m.dq_a.scale, a), self._scale_inv(m.dq_b.scale, b)
        pairs = self._pairs(m, a, b)
        after = _epilogue(m)
        self.at = after.end
        if m.alpha != 1 or after.scale != UNSCALED:  # behind the product alpha could come too late: float16 overflows
            scale_a = self._make_scale_inv(m.dq_a.scale.times(m.alpha) * after.scale, val(a).device)
        bias = None if after.bias is None else self._bias(m, after.bias, b)
        fast_accum = gemm.kind == "output"  # gradients need the full accumulator
        arguments = scale_a, scale_b, bias, None, after.dtype, fast_accum
        y = self._assembled(m, a, b, [self._scaled_mm(*pair, *arguments) for pair in pairs])
        if m.bias is not None and after.bias is None:
            y = self._add_bias(y, m)
        for node in after.reshapes:
            y = movement.move(node, y, after.dtype, self._emit)
        gemm.status, gemm.rule, gemm.reason, gemm.note = "rewritten", "", "", after.note
        gemm.scaling = gemm.scaling or "user"
        gemm.dtypes = short(m.a_q.dtype), short(m.b_q.dtype), short(after.dtype)
        self._replace(after.end, y)

    def _emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.build.emit(self.at, target, *args, **kwargs)

    def _replace(self, old: fx.Node, new: fx.Node) -> None:
        was, now = val(old), val(new)
        assert (was.dtype, was.shape, was.stride()) == (now.dtype, now.shape, now.stride()), (old, was, now)
        for key, value in old.meta.items():
            new.meta.setdefault(key, value)
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)

    def _scale_inv(self, scale: Scale, operand: fx.Node) -> fx.Node:
        """The scale as f32[]: what `_scaled_mm` takes."""
        key = scale.number, scale.key(), val(operand).device
        if key not in self.scales:
            self.scales[key] = self._make_scale_inv(scale, val(operand).device)
        return self.scales[key]

    def _make_scale_inv(self, scale: Scale, device: torch.device) -> fx.Node:
        nodes = (*scale.multiplied, *scale.divided)
        if not nodes:
            return self._emit(aten.full.default, [], scale.number, dtype=torch.float32, device=device)
        dtype = torch.float64 if any(val(n).dtype == torch.float64 for n in nodes) else torch.float32
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

    def _pairs(self, m: Match, a: fx.Node, b: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        """The operands of each product: FP8 rows [M, K] and [N, K]."""
        if _is_one_matrix(m.b_q):
            b = self._emit(aten.select.int, b, 0, 0)
            return [(self._flat(self.layout.rows_of_a(a)), self.layout.rows_of_b(b))]
        if _is_one_matrix(m.a_q):
            a = self._emit(aten.select.int, a, 0, 0)
            return [(self.layout.rows_of_a(a), self._flat(self.layout.rows_of_b(b)))]
        rows = self.layout.rows_of_a(a), self.layout.rows_of_b(b)
        if m.a_q.dim() == 2:
            return [rows]
        a, b = rows
        entries = range(int(m.a_q.shape[0]))
        return [(self._emit(aten.select.int, a, 0, i), self._emit(aten.select.int, b, 0, i)) for i in entries]

    def _flat(self, rows: fx.Node) -> fx.Node:
        return self._emit(aten.reshape.default, rows, [-1, self.layout.size(rows, -1)])

    def _scaled_mm(self, a: fx.Node, b: fx.Node, *arguments: Any) -> fx.Node:
        return self._emit(aten._scaled_mm.default, a, self.layout.transposed(b), *arguments)

    def _assembled(self, m: Match, a: fx.Node, b: fx.Node, products: list[fx.Node]) -> fx.Node:
        """The products without their padding, laid out as the matmul's result is: users count on its strides."""
        y, size = products[0], self.layout.size
        if _is_one_matrix(m.b_q):
            return self._emit(aten.reshape.default, self._columns(y, b), [size(a, 0), size(a, 1), size(b, 2)])
        if _is_one_matrix(m.a_q):
            y = self._emit(aten.reshape.default, y, [size(a, 1), size(b, 0), -1])
            y = self._emit(aten.permute.default, self._columns(y, b), [1, 0, 2])
            return self._emit(aten.clone.default, y, memory_format=torch.contiguous_format)
        products = [self._columns(y, b) for y in products]
        if m.a_q.dim() == 2:
            return products[0]
        entries = [self._emit(aten.unsqueeze.default, y, 0) for y in products]
        return entries[0] if len(entries) == 1 else self._emit(aten.cat.default, entries)

    def _columns(self, y: fx.Node, b: fx.Node) -> fx.Node:
        """As many columns of y: [..., N'] as b: [..., K, N] has."""
        if statically_known_true(val(y).shape[-1] == val(b).shape[-1]):
            return y
        y = self._emit(aten.slice.Tensor, y, -1, 0, self.layout.size(b, -1))
        return self._emit(aten.clone.default, y, memory_format=torch.contiguous_format)

    def _bias(self, m: Match, bias: fx.Node, b: fx.Node) -> fx.Node:
        """The bias over all columns that the kernel computes."""
        if val(bias).dim() > 1:
            bias = self._emit(aten.reshape.default, bias, [-1])
        bias = self.layout.pad(bias, (-1,))
        if _is_one_matrix(m.a_q) and not _is_one_matrix(m.b_q):
            bias = self._emit(aten.repeat.default, bias, [self.layout.size(b, 0)])
        return bias

    def _add_bias(self, y: fx.Node, m: Match) -> fx.Node:
        bias = m.bias if m.beta == 1 else self._emit(aten.mul.Tensor, m.bias, m.beta)
        return self._emit(aten.add.Tensor, y, bias)


def _epilogue(m: Match) -> Epilogue:
    if m.bias is not None and m.beta != 1:
        return Epilogue(m.node, val(m.node).dtype)
    return epilogue(m.node, m.bias, (m.a_q.dtype, m.b_q.dtype))


def _is_one_matrix(x: torch.Tensor) -> bool:
    """Whether a batched operand is the same matrix for every entry of the batch."""
    return x.dim() == 3 and x.shape[0] != 1 and x.stride(0) == 0


def _are_few(batches: Any) -> bool:
    return isinstance(batches, int) and batches <= MAX_BATCHES
