"""Two dequantizes and a matmul become one scaled matmul.

before   a: bf16[M, K] = a_q: f8e4m3fn[M, K] * a_scale_inv: f32[]       (views may stand anywhere in between)
         b: bf16[K, N] = permute(b_q: f8e4m3fn[N, K] * b_scale_inv: f32[])
         y: bf16[M, N] = mm(a, b)
after    y: bf16[M, N] = _scaled_mm(a_q, permute(b_q), a_scale_inv, b_scale_inv, out_dtype=bf16)
changes  y by the rounding of a and b to bf16, which no longer happens; a and b stay if anything else reads them

1. Views move onto the FP8 tensor, once for all matmuls that read the same view.
2. `_scaled_mm` on sm_89 and sm_90 wants both operands contiguous along K: where a view is not, a transposed FP8 copy is
   made. K and N are padded with FP8 zeros to a multiple of 16, and the result is sliced back.
3. `addmm`: a bias vector of the output's type goes into the kernel, anything else is added behind it.
4. `bmm` and `baddbmm`: flattened where one operand is the same for the whole batch, else one call per batch entry.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass._torch import CPU_LOADS_FP8_UNDER_A_MASK
from fp8pass.graph import Builder, val
from fp8pass.hardware import target_of, why_no_fp8
from fp8pass.passes.matmuls import operands, short
from fp8pass.passes.patterns import Dequantize, aten, dequantize, prims
from fp8pass.report import Gemm
from fp8pass.rewrite import MAX_BATCHES, Context, Reject
from fp8pass.scaling import E5M2

ALIGNMENT = 16
"""Elements that K and N must be a multiple of: cuBLASLt wants 16-byte rows."""


@dataclass(frozen=True)
class Match:
    """A matmul whose operands are both dequantized from FP8. bias: what addmm and baddbmm add; beta, alpha: factors."""

    node: fx.Node
    a: fx.Node
    b: fx.Node
    dq_a: Dequantize
    dq_b: Dequantize
    bias: fx.Node | None
    beta: Any
    alpha: Any


def match(node: fx.Node) -> Match:
    """Capture both operands. Raises Reject with the first that is not dequantized from FP8."""
    a, b = operands(node)
    dq_a, dq_b = dequantize(a), dequantize(b)
    bias = node.args[0] if len(node.args) == 3 else None
    assert bias is None or isinstance(bias, fx.Node)
    return Match(node, a, b, dq_a, dq_b, bias, node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1))


def check(m: Match, target: str | None = None) -> None:
    """Only refuses."""
    a_q, b_q = val(m.dq_a.x_q), val(m.dq_b.x_q)
    if reason := why_no_fp8(a_q.device, target_of(a_q.device, target)):
        raise Reject(reason)
    if a_q.dtype is b_q.dtype is E5M2:
        raise Reject("both operands are float8_e5m2, for which no GPU has a kernel; store one as float8_e4m3fn")
    *batch, rows, k = val(m.a).shape
    n = val(m.b).shape[-1]
    if any(statically_known_true(size == 0) for size in (*batch, rows, k, n)):
        raise Reject(f"the matmul of {list(val(m.a).shape)} by {list(val(m.b).shape)} is empty")
    if batch and not _is_one_matrix(m.b) and not (isinstance(batch[0], int) and batch[0] <= MAX_BATCHES):
        raise Reject(
            f"{batch[0]} products of [{rows}, {k}] by [{k}, {n}]: `_scaled_mm` has no batch dimension, and more than "
            f"{MAX_BATCHES} launches would cost more than FP8 gains"
        )


class ScaledMM:
    """Detects and rewrites; `context.gemms` gets the verdicts."""

    name = "scaled_mm"

    def run(self, graph: fx.Graph, context: Context) -> int:
        """Rewrite every matmul that `check` does not refuse."""
        rewriter = _Rewriter(graph, context)
        applied = 0
        for node, gemm in context.gemms.items():
            try:
                found = match(node)
                check(found, context.config.target)
            except Reject as reject:
                gemm.reason = gemm.reason or str(reject)
                continue
            rewriter.rewrite(found, gemm)
            applied += 1
        if applied:
            graph.eliminate_dead_code()
        return applied


class _Rewriter:
    """Builds in front of the matmul at hand. What is made for one matmul is there for all later ones too."""

    def __init__(self, graph: fx.Graph, context: Context) -> None:
        self.graph = graph
        self.build = Builder(graph, ScaledMM.name)
        self.config = context.config
        self.at = next(iter(graph.nodes))
        self.twins: dict[fx.Node, fx.Node] = {}
        self.rows: dict[tuple[fx.Node, int], fx.Node] = {}
        self.scales: dict[tuple[Any, bool, torch.device], fx.Node] = {}

    def rewrite(self, m: Match, gemm: Gemm) -> None:
        self.at = m.node
        a_q, b_q = self._twin(m.dq_a), self._twin(m.dq_b)
        scale_a = self._scale_inv(m.dq_a)
        if m.alpha != 1:  # behind the product it could come too late: float16 overflows
            scale_a = self._emit(aten.mul.Tensor, scale_a, m.alpha)
        product = _Product(
            scales=(scale_a, self._scale_inv(m.dq_b)),
            dtype=val(m.node).dtype,
            fast_accum=gemm.kind == "output",  # gradients need the full accumulator
            bias=m.bias if _fits_kernel(m) else None,
        )
        y = self._matmul(a_q, b_q, product) if val(a_q).dim() == 2 else self._batched(m, a_q, b_q, product)
        if m.bias is not None and product.bias is None:
            y = self._add_bias(y, m)
        gemm.status, gemm.reason, gemm.scaling = "rewritten", "", gemm.scaling or "user"
        gemm.dtypes = short(val(a_q).dtype), short(val(b_q).dtype), short(product.dtype)
        self._replace(m.node, y)

    def _emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.build.emit(self.at, target, *args, **kwargs)

    def _replace(self, old: fx.Node, new: fx.Node) -> None:
        was, now = val(old), val(new)
        assert (was.dtype, was.shape, was.stride()) == (now.dtype, now.shape, now.stride()), (old, was, now)
        for key, value in old.meta.items():
            new.meta.setdefault(key, value)
        users = list(old.users)
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)
        if len(users) == 1 and users[0].target is aten.clone.default and not users[0].kwargs:
            users[0].replace_all_uses_with(new)  # qdq_gradient's copy, which only eager needs
            self.graph.erase_node(users[0])

    def _twin(self, dq: Dequantize) -> fx.Node:
        """The views of the dequantized tensor, on the FP8 tensor."""
        twin = dq.x_q
        for view in dq.views:
            if view not in self.twins:
                self.twins[view] = self._emit(view.target, twin, *view.args[1:], **view.kwargs)
            twin = self.twins[view]
        return twin

    def _scale_inv(self, dq: Dequantize) -> fx.Node:
        """The factor as f32[]: what `_scaled_mm` takes."""
        key = (dq.factor, dq.divided, val(dq.x_q).device)
        if key not in self.scales:
            self.scales[key] = self._make_scale_inv(*key)
        return self.scales[key]

    def _make_scale_inv(self, factor: Any, divided: bool, device: torch.device) -> fx.Node:
        if not isinstance(factor, fx.Node):
            number = 1.0 if factor is None else float(factor)
            number = 1 / number if divided else number
            return self._emit(aten.full.default, [], number, dtype=torch.float32, device=device)
        if val(factor).dtype != torch.float32:
            factor = self._emit(prims.convert_element_type.default, factor, torch.float32)
        if val(factor).dim():
            factor = self._emit(aten.reshape.default, factor, [])
        return self._emit(aten.reciprocal.default, factor) if divided else factor

    def _matmul(self, a: fx.Node, b: fx.Node, p: _Product) -> fx.Node:
        """`_scaled_mm` of a: f8[M, K] and b: f8[K, N]."""
        a_rows, b_rows = self._k_major(a, k_dim=1), self._k_major(b, k_dim=0)
        bias = None if p.bias is None else self._pad(p.bias, (0,))
        b_columns = self._transposed(b_rows)
        y = self._emit(aten._scaled_mm.default, a_rows, b_columns, *p.scales, bias, None, p.dtype, p.fast_accum)
        if statically_known_true(val(y).shape[1] == val(b).shape[1]):
            return y
        y = self._emit(aten.slice.Tensor, y, 1, 0, self._size(b, 1))
        # users, and nodes behind this one, count on the strides that the result of mm has
        return self._emit(aten.clone.default, y, memory_format=torch.contiguous_format)

    def _transposed(self, x: fx.Node) -> fx.Node:
        if x.target is aten.permute.default and x.args[1] == [1, 0]:
            assert isinstance(x.args[0], fx.Node)
            return x.args[0]
        return self._emit(aten.permute.default, x, [1, 0])

    def _k_major(self, x: fx.Node, k_dim: int) -> fx.Node:
        """`x` as FP8 rows [M or N, K], padded and laid out as the kernel needs; once per tensor and orientation."""
        key = (x, k_dim)
        if key not in self.rows:
            rows = x if k_dim == 1 else self._transposed(x)
            rows = self._pad(rows, (1,) if k_dim == 1 else (0, 1))
            target = target_of(val(x).device, self.config.target)
            if not _is_row_major(val(rows)) and (target is None or target.needs_k_major):
                rows = self._emit(aten.clone.default, rows, memory_format=torch.contiguous_format)
            self.rows[key] = rows
        return self.rows[key]

    def _pad(self, x: fx.Node, dims: tuple[int, ...]) -> fx.Node:
        """`x` with zeros behind the end of `dims`, up to a multiple of 16."""
        sizes = val(x).shape
        missing = {d: self._missing(x, d) for d in dims if not statically_known_true(sizes[d] % ALIGNMENT == 0)}
        if not missing:
            return x
        if val(x).device.type == "cpu" and not CPU_LOADS_FP8_UNDER_A_MASK:
            return self._pad_by_cat(x, missing)
        padding = [side for d in reversed(range(len(sizes))) for side in (0, missing.get(d, 0))]
        return self._emit(aten.constant_pad_nd.default, x, padding, 0)

    def _pad_by_cat(self, x: fx.Node, missing: dict[int, Any]) -> fx.Node:
        for d, size in missing.items():
            shape = [size if i == d else self._size(x, i) for i in range(val(x).dim())]
            zeros = self._emit(aten.full.default, shape, 0, dtype=val(x).dtype, device=val(x).device)
            x = self._emit(aten.cat.default, [x, zeros], d)
        return x

    def _missing(self, x: fx.Node, dim: int) -> Any:
        """How many elements dimension `dim` lacks to a multiple of 16: an int, or a node."""
        size = self._size(x, dim)
        if isinstance(size, fx.Node):
            return self._emit(operator.mod, self._emit(operator.neg, size), ALIGNMENT)
        return -size % ALIGNMENT

    def _size(self, x: fx.Node, dim: int) -> Any:
        size = val(x).shape[dim]
        known = size if isinstance(size, int) else size.node.maybe_as_int()
        return self._emit(aten.sym_size.int, x, dim) if known is None else known

    def _batched(self, m: Match, a: fx.Node, b: fx.Node, p: _Product) -> fx.Node:
        """[B, M, K] by [B, K, N]: one product where b is one matrix, else one per entry of the batch."""
        if _is_one_matrix(m.b):
            flat = self._emit(aten.reshape.default, a, [-1, self._size(a, 2)])
            y = self._matmul(flat, self._emit(aten.select.int, b, 0, 0), p)
            return self._emit(aten.reshape.default, y, [self._size(m.node, d) for d in range(3)])
        entries = [
            self._matmul(self._emit(aten.select.int, a, 0, i), self._emit(aten.select.int, b, 0, i), p)
            for i in range(int(val(m.node).shape[0]))
        ]
        if len(entries) == 1:
            return self._emit(aten.unsqueeze.default, entries[0], 0)
        return self._emit(aten.stack.default, entries)

    def _add_bias(self, y: fx.Node, m: Match) -> fx.Node:
        """`beta * bias + y`; a beta of 0 ignores the bias, whatever it holds."""
        if m.beta == 0:
            return y
        bias = m.bias if m.beta == 1 else self._emit(aten.mul.Tensor, m.bias, m.beta)
        return self._emit(aten.add.Tensor, y, bias)


@dataclass(frozen=True)
class _Product:
    """What all 2-D products that one matmul becomes have in common: the arguments of `_scaled_mm`."""

    scales: tuple[fx.Node, fx.Node]
    dtype: torch.dtype
    fast_accum: bool
    bias: fx.Node | None


def _fits_kernel(m: Match) -> bool:
    """Whether the bias can go into `_scaled_mm`: a vector over N, of the output's 16-bit type, added as it is."""
    if m.bias is None or m.node.target is not aten.addmm.default or m.beta != 1:
        return False
    bias, n, dtype = val(m.bias), val(m.b).shape[1], val(m.node).dtype
    fits = bias.dim() == 1 and statically_known_true(bias.shape[0] == n)
    return fits and bias.dtype == dtype and dtype in (torch.bfloat16, torch.float16)


def _is_row_major(x: torch.Tensor) -> bool:
    """As cuBLASLt means it: rows one behind the other, each beginning at a multiple of 16 bytes.

    `is_contiguous` does not look at the stride of a dimension of size 1; CUDA's checks do.
    """
    row, column = x.stride()
    aligned = row % ALIGNMENT == 0, x.storage_offset() % ALIGNMENT == 0
    return all(map(statically_known_true, (column == 1, row >= x.shape[1], *aligned)))


def _is_one_matrix(operand: fx.Node) -> bool:
    """Whether a batched operand is the same matrix for every entry of the batch."""
    value = val(operand)
    return value.shape[0] != 1 and value.stride(0) == 0
