"""XLA's rules for finding FP8 matmuls, one by one, and what fp8pass makes of the same program.

The rules are those of XLA's GemmRewriter (August 2026) and the passes around it, numbered P (operands), M (movement),
S (structure), L (layout), T (types), E (epilogues). `docs/xla-rules.md` is made from this file and can't drift from it:
`python -m tests.helpers.xla_rules` writes it, `test_xla_rules.py` runs every case and compares the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers import ROOT

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
aten = torch.ops.aten


@dataclass(frozen=True)
class Case:
    """One program. calls: how many `_scaled_mm` it becomes, 0 if it is declined; why: how the reason begins.

    copies: how many FP8 tensors are copied to another layout, if the rule is about that. after: the ops on whole matrices
    that stay after the kernel, if it is about those. note: what the report says of an op that stayed.
    """

    name: str
    function: Callable[..., Any]
    inputs: tuple[Any, ...]
    calls: int = 1
    why: str = ""
    copies: int | None = None
    after: tuple[str, ...] | None = None
    note: str = ""
    target: str | None = None
    device: str = "cpu"
    dynamic: bool = False


@dataclass(frozen=True)
class Rule:
    """xla: XLA's verdict. ours: fp8pass's. cases: programs that show it; none if torch has no such program."""

    number: str
    what: str
    xla: str
    ours: str
    cases: list[Case] = field(default_factory=list)


def q(*shape: int, dtype: torch.dtype = E4M3, gain: float = 1.0) -> Tensor:
    """Return an FP8 tensor."""
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * gain).to(dtype)


def s(value: float = 0.25, dtype: torch.dtype = F32) -> Tensor:
    """Return a scale."""
    return torch.tensor(value, dtype=dtype)


def wide(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    """Return a high-precision tensor."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def product(a: Tensor, b: Tensor, sa: Any = 0.5, sb: Any = 0.25, dtype: torch.dtype = F32) -> Tensor:
    """Dequantize two tensors and multiply them."""
    return (a.to(dtype) * sa) @ (b.to(dtype) * sb)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return the `product` in float32."""
    return product(a, b)


A, B = q(32, 64), q(64, 48)
BT = q(48, 64)


def quantized(y: Tensor, scale: Any, dtype: torch.dtype = E4M3, limit: float | None = None) -> Tensor:
    """Quantize with a clamp and a cast, the pattern that XLA matches."""
    limit = torch.finfo(dtype).max if limit is None else limit
    return (y * scale).clamp(-limit, limit).to(dtype)


def moving(move: Callable[..., Tensor], *inputs: Any, **expected: Any) -> Case:
    """Return a case with movement on the first operand."""
    name = expected.pop("name")
    return Case(name, lambda a, b, *rest: move(a.float() * 0.5, *rest) @ (b.float() * 0.25), inputs, **expected)


def following(name: str, epilogue: Callable[..., Any], *rest: Any, dtype: torch.dtype = BF16, **expected: Any) -> Case:
    """Return a case with an epilogue."""
    return Case(name, lambda a, b, *rest: epilogue(product(a, b, dtype=dtype), *rest), (A, B, *rest), **expected)


RULES: list[Rule] = [
    Rule("P1", "direct FP8 operands", "accepts", "accepts", [
        Case("float8 matmul", lambda a, b: torch.mm(a, b), (A, B)),
    ]),
    Rule("P2", "convert only, no scale", "accepts", "accepts", [
        Case("no scale", lambda a, b: a.float() @ b.float(), (A, B)),
    ]),
    Rule("P3", "convert, times a scale", "accepts", "accepts", [
        Case("times a scale", lambda a, b, x, y: (a.float() * x) @ (b.float() * y), (A, B, s(), s(2))),
        Case("scale first", lambda a, b, x, y: (x * a.float()) @ (y * b.float()), (A, B, s(), s(2))),
    ]),
    Rule("P4", "convert, divided by a scale", "accepts", "accepts", [
        Case("divided by a scale", lambda a, b, x, y: (a.float() / x) @ (b.float() / y), (A, B, s(), s(2))),
        Case("number divided by float8", lambda a, b: (2 / a.float()) @ b.float(), (A, B), 0, "reciprocal = aten.reciprocal is between a_1 and the matmul; .*; no other rule declines it"),
    ]),
    Rule("P5", "bf16, f16 or f32 in between", "accepts; not with an output type that differs", "accepts, any output type", [
        Case("bfloat16", lambda a, b: product(a, b, dtype=BF16), (A, B)),
        Case("float16", lambda a, b: product(a, b, dtype=F16), (A, B)),
        Case("float32 to bfloat16", lambda a, b: product(a, b).bfloat16(), (A, B), after=()),
        Case("float16 to bfloat16", lambda a, b: product(a, b, dtype=F16).bfloat16(), (A, B), after=()),
        Case("float64 in between", lambda a, b: (a.double() * 0.5).float() @ b.float(), (A, B)),
        Case("float64 matmul", lambda a, b: product(a, b, dtype=F64), (A, B), 0, "the result is float64"),
    ]),
    Rule("P6", "movement between convert and scale", "declines", "accepts, any order", [
        Case("reshape before the scale", lambda a, b: (a.float().reshape(32, 64) * 0.5) @ b.float(), (q(4, 8, 64), B)),
    ]),
    Rule("P7", "several scales or converts", "declines", "accepts: folded into one scale", [
        Case("two scales", lambda a, b, x, y: (a.float() * x * y / 3) @ b.float(), (A, B, s(), s(2))),
        Case("chain of converts", lambda a, b, x: (a.bfloat16().float() * x) @ b.float(), (A, B, s())),
        Case("convert after the scale", lambda a, b, x: (a.bfloat16() * x).float() @ b.float(), (A, B, s(0.5, BF16))),
    ]),
    Rule("P8", "shape of the scale", "only rank 0", "one number in any shape, or one per row; blocks declined", [
        Case("one element", lambda a, b, x: (a.float() * x) @ (b.float() * x.view(1, 1)), (A, B, s().view(1))),
        Case("expanded", lambda a, b, x: (a.float() * x.expand(32, 64)) @ b.float(), (A, B, s())),
        Case("one per row", lambda a, b, x: (a.float() * x) @ b.float(), (A, B, wide(32, 1))),
        Case("one per column", lambda a, b, x: (a.float() * x) @ b.float(), (A, B, wide(64)), 0, r"scales by a tensor of shape \[64\], which may change along the sum"),
        Case("one per block", lambda a, b, x: (a.float().view(32, 4, 16) * x).view(32, 64) @ b.float(), (A, B, wide(32, 4, 1)), 0, r"scales by a tensor of shape \[32, 4, 1\]"),
    ]),
    Rule("P9", "type of the scale", "accepts, converts to f32; 1/s in another type untested", "accepts, converts to f32", [
        Case("bfloat16 scale", lambda a, b, x: (a.float() * x) @ (b.float() / x), (A, B, s(0.3, BF16))),
        Case("float64 scale", lambda a, b, x: (a.float() * x) @ (b.float() / x), (A, B, s(0.3, F64))),
        Case("integer scale", lambda a, b, x: (a.float() * x) @ (b.float() / x), (A, B, torch.tensor(3))),
    ]),
    Rule("P10", "who computes the scale", "anyone", "anyone", [
        Case("from an amax history", lambda a, b, h: (a.float() * (h.amax(0) / 448)) @ b.float(), (A, B, wide(16).abs())),
    ]),
    Rule("P11", "only one side scaled", "accepts", "accepts", [
        Case("one side scaled", lambda a, b, x: a.float() @ (b.float() * x), (A, B, s())),
    ]),
    Rule("P12", "only one side FP8", "declines", "declines", [
        Case("float8 weight alone", lambda a, b: a @ (b.float() * 0.5), (wide(32, 64), B), 0, "operand a_1: float32 is not a float8 tensor times a scale; no other rule declines it"),
    ]),
    Rule("P13", "dequantize with other users", "accepts, they keep theirs", "accepts, they keep theirs", [
        Case("another user", lambda a, b: ((x := a.float() * 0.5) @ b.float(), x.relu()), (A, B)),
    ]),
    Rule("P14", "scale that comes from FP8 itself", "declines: the walk takes the wrong turn", "accepts", [
        Case("float8 scale", lambda a, b, x: (x.float() * a.float()) @ b.float(), (A, B, q(1))),
        Case("float8 scale, one element each", lambda a, b, x: (x * a.float()) @ b.float(), (q(1, 1), q(1, 48), s())),
    ]),
    Rule("P15", "quantized in the same graph", "accepts, the quantize stays", "accepts, the quantize stays", [
        Case("quantized here", lambda x, b: (quantized(x, 4.0).float() / 4) @ b.float(), (wide(32, 64), B)),
    ]),
    Rule("M1", "bitcast of the same type", "accepts", "accepts", [
        moving(lambda x: aten.view.default(x, [32, 64]), q(8, 4, 64), B, name="view"),
    ]),
    Rule("M2", "copy", "accepts", "accepts; not made", [
        moving(lambda x: x.t().contiguous().t().clone(), A, B, name="clones", copies=1),
    ]),
    Rule("M3", "reshape", "accepts", "accepts", [
        moving(lambda x: x.reshape(32, 64), q(8, 4, 64), B, name="reshape"),
        moving(lambda x: x.squeeze(1).unsqueeze(0).squeeze(), q(32, 1, 64), B, name="squeeze"),
    ]),
    Rule("M4", "transpose", "accepts", "accepts", [
        moving(lambda x: x.permute(2, 0, 1).reshape(32, 64), q(8, 8, 32), B, name="permute"),
        moving(lambda x: x.t(), q(64, 32), B, name="transpose"),
    ]),
    Rule("M5", "broadcast", "accepts", "accepts", [
        moving(lambda x: x.expand(32, 64), q(1, 64), B, name="expand"),
        moving(lambda x: x.repeat(2, 2), q(16, 32), B, name="repeat"),
    ]),
    Rule("M6", "slice", "accepts", "accepts", [
        moving(lambda x: x[4:36, ::2], q(40, 128), B, name="slice"),
        moving(lambda x: x[1].narrow(0, 3, 32), q(2, 40, 64), B, name="select and narrow"),
        moving(lambda x: x.split([8, 32], 0)[1], q(40, 64), B, name="split"),
        moving(lambda x: x.unbind(1)[1], q(32, 2, 64), B, name="unbind"),
        moving(lambda x: x.diagonal(0, 0, 1).t(), q(32, 32, 64), B, name="diagonal"),
    ]),
    Rule("M7", "pad", "accepts any value: wrong unless it is 0", "accepts 0", [
        moving(lambda x: F.pad(x, (3, 5, 2, 0)), q(30, 56), B, name="pad"),
        moving(lambda x: F.pad(x, (-3, -5, 2, 0)), q(30, 72), B, name="crop and pad"),
        moving(lambda x: F.pad(x, (3, 5), value=1.0), q(32, 56), B, name="pad with 1", calls=0, why="pads with 1.0; only 0"),
    ]),
    Rule("M8", "dynamic slice", "accepts", "accepts; a start that is read from a tensor needs `torch._check`ed bounds", [
        moving(lambda x, n: x[n.shape[0] : n.shape[0] + 32], q(48, 64), B, wide(7), name="symbolic start", dynamic=True),
    ]),
    Rule("M9", "select between FP8 and 0", "accepts", "accepts", [
        moving(lambda x, m: torch.where(m, x, 0.0), A, B, wide(32, 64) > 0, name="where"),
        moving(lambda x, m: torch.where(m, torch.zeros_like(x), x), A, B, wide(32, 1) > 0, name="where, other way round"),
        moving(lambda x: x.tril(), A, B, name="tril"),
        moving(lambda x, m: x.masked_fill(m, 0), A, B, wide(32, 64) > 0, name="masked fill"),
    ]),
    Rule("M10", "select between FP8 and another constant", "declines", "declines", [
        moving(lambda x, m: torch.where(m, x, 1.0), A, B, wide(32, 64) > 0, name="where 1", calls=0, why="where fills in 1; only 0"),
    ]),
    Rule("M11", "any mix of these", "accepts", "accepts", [
        moving(lambda x, m: F.pad(torch.where(m, x.permute(1, 0, 2)[:, ::2] * 3, 0.0).reshape(64, 30), (0, 2)).t(), q(4, 64, 15), B, wide(2, 15) > 0, name="mix"),
    ]),
    Rule("M12", "all-gather, all-to-all, broadcast, collective-permute", "declines here; CollectiveQuantizer moves the convert", "accepts; `tests/passes/joint/test_quantize_collectives.py`. torch's `permute_tensor` is an all-to-all"),
    Rule("M13", "concatenate, gather, reverse, negate", "declines", "accepts where exact", [
        moving(lambda x: torch.cat([x[:16], x[16:].flip(1)]), A, B, name="cat of one scale"),
        moving(lambda x: torch.cat([-x[:, 32:], x[:, :32]], 1), A, B, name="cat with a negated half"),
        moving(lambda x: torch.stack([x, torch.zeros_like(x)]).view(32, 64), q(16, 64), B, name="stack with zeros"),
        moving(lambda x, i: x[i], q(40, 64), B, torch.arange(32), name="gather"),
        moving(lambda x: x.flip(0).roll(3, 1), A, B, name="reverse"),
        moving(lambda x: F.pad(x[None], (2, 6, 1, 7), mode="reflect")[0], q(24, 56), B, name="reflect"),
        moving(lambda x: -x, A, B, name="negate"),
        Case("cat of two scales", lambda a, b: torch.cat([a.float() * 0.5, a.float()]) @ b.float(), (A, B), 0, "joins tensors with 2 different scales"),
        moving(lambda x: x.abs(), A, B, name="abs", calls=0, why="abs_1 = aten.abs is between arg0_1 and the matmul"),
        moving(lambda x, y: x.slice_scatter(y, 0, 0, 4), A, B, wide(4, 64), name="slice scatter", calls=0, why="slice_scatter"),
        moving(lambda x: x.sum(0), q(2, 32, 64), B, name="reduce", calls=0, why="sum_1 = aten.sum.dim_IntList is between arg0_1 and the matmul"),
    ]),
    Rule("S1", "one contracting dimension", "declines others", "accepts: torch flattens them", [
        Case("two contracted", lambda a, b: torch.einsum("abc,bcd->ad", a.float() * 0.5, b.float()), (q(32, 8, 8), q(8, 8, 48))),
    ]),
    Rule("S2", "matrix by vector", "declines rank 1; [1, K] is fine", "same: torch multiplies and sums it; the report says so", [
        Case("one row", lambda a, b: product(a, b), (q(1, 64), B)),
        Case("vector", lambda a, b: (a.float() * 0.5) @ b.float(), (A, q(64)), 0, note="a_1 is dequantized for mul"),
    ]),
    Rule("S3", "dot product", "declines", "declines: torch multiplies and sums it; the report says so", [
        Case("dot product", lambda a, b: product(a, b), (q(1, 64), q(64, 1)), 0, note="a_1 is dequantized for mul"),
    ]),
    Rule("S4", "batch dimensions", "accepts, not the fastest one", "accepts anywhere, up to 16 products; any number where one operand has none", [
        Case("bmm", lambda a, b: torch.bmm(a.float() * 0.5, b.float()), (q(3, 8, 24), q(3, 24, 40)), 3),
        Case("matmul, two batch dimensions", lambda a, b: product(a, b), (q(2, 3, 8, 32), q(2, 3, 32, 16)), 6),
        Case("batch in the middle", lambda a, b: torch.einsum("mbk,kbn->mnb", a.float() * 0.5, b.float()), (q(8, 3, 24), q(24, 3, 40)), 3),
        Case("batch fastest", lambda a, b: torch.einsum("mkb,knb->bmn", a.float() * 0.5, b.float()), (q(8, 24, 3), q(24, 40, 3)), 3),
        Case("first operand without batch", lambda a, b: torch.einsum("mk,bkn->bmn", a.float() * 0.5, b.float()), (q(8, 24), q(40, 24, 32)), 1),
        Case("expanded first operand", lambda a, b: torch.bmm((a.float() * 0.5).expand(40, 8, 24), b.float()), (q(8, 24), q(40, 24, 32)), 1),
        Case("expanded second operand", lambda a, b: torch.bmm(a.float() * 0.5, b.expand(40, 24, 32).float()), (q(40, 8, 24), q(24, 32)), 1),
        Case("17 products", lambda a, b: torch.bmm(a.float() * 0.5, b.float()), (q(17, 8, 24), q(17, 24, 40)), 0, r"17 products of \[8, 24\] by \[24, 40\]"),
    ]),
    Rule("S5", "first operand of higher rank", "accepts once flattened", "accepts", [
        Case("three dimensions", lambda a, b: product(a, b), (q(2, 16, 64), B)),
        Case("linear", lambda a, w: F.linear(a.float() * 0.5, w.float()), (q(2, 3, 4, 64), BT)),
    ]),
    Rule("S6", "tiny", "declines below a threshold", "accepts what you quantized; recipes have `min_speedup`", [
        Case("tiny", lambda a, b: product(a, b), (q(2, 3), q(3, 2))),
    ]),
    Rule("S7", "Triton's fusion takes the dot first", "tries again inside the autotuner", "not applicable: runs before Inductor fuses"),
    Rule("L1", "K fastest on both sides before Blackwell", "copies", "copies", [
        Case("neither along K", lambda a, b: product(a.t(), b), (q(64, 32), B), copies=2, target="sm_90"),
    ]),
    Rule("L2", "A column-major", "transposed copy", "transposed FP8 copy", [
        Case("a in columns", lambda a, b: product(a.t(), b.t()), (q(64, 32), BT), copies=1),
    ]),
    Rule("L3", "B row-major", "transposed copy", "transposed FP8 copy", [
        Case("b in rows", matmul, (A, B), copies=1),
    ]),
    Rule("L4", "both along K already", "no copy", "no copy", [
        Case("linear layer", lambda a, w: product(a, w.t()), (A, BT), copies=0),
        Case("weight laid out anew for nothing", lambda a, w: product(a.t().contiguous().t(), w.t().contiguous()), (A, BT), copies=0),
    ]),
    Rule("L5", "operands in other layouts", "accepts; was wrong (issue 17276)", "accepts", [
        Case("columns and strides", lambda a, b: product(a.t()[::2, :48].t().t(), b[:, 1:49].t()[:, :48].t()), (q(64, 64), q(64, 56))),
    ]),
    Rule("L6", "transpose with a batch that does not lead", "accepts; was wrong (PR 42104)", "accepts", [
        Case("batch in second place", lambda a, b: torch.einsum("mbk,nbk->bmn", a.float() * 0.5, b.float()), (q(32, 2, 64), q(48, 2, 64)), 2, copies=0),
    ]),
    Rule("L7", "Blackwell", "no transposes", "copies: torch refuses other layouts for every GPU (pytorch issue 152150)", [
        Case("Blackwell", lambda a, b: product(a.t(), b), (q(64, 32), B), copies=2, target="sm_100"),
    ]),
    Rule("L8", "layout of the result", "accepts rows and columns", "accepts; the result has the strides it had", [
        Case("transposed result", lambda a, b: product(a, b).t(), (A, B)),
        Case("square", lambda a, b: product(a, b) + product(b, a).t(), (q(64, 64), q(64, 64).t()), 2),
    ]),
    Rule("L9", "sizes that are not multiples of 16", "pads M, K, N", "pads K and N, as cuBLASLt asks", [
        Case("unaligned", matmul, (q(31, 60), q(60, 47))),
        Case("prime", matmul, (q(7, 5), q(5, 3))),
        Case("batched and unaligned", lambda a, b: torch.bmm(a.float() * 0.5, b.float()), (q(3, 7, 5), q(3, 5, 3)), 3),
        Case("empty", matmul, (q(0, 64), B), 0, r"\[0, 64\] by \[64, 48\] is empty"),
        Case("symbolic", matmul, (q(31, 60), q(60, 47)), dynamic=True),
    ]),
    Rule("L10", "padding a bias", "pads it; a 2-D GEMM's vector not", "pads it", [
        Case("padded bias", lambda a, b, v: product(a, b, dtype=BF16) + v, (q(31, 60), q(60, 47), wide(47, dtype=BF16)), after=("slice", "clone")),
    ]),
    Rule("L11", "K fastest from the start", "only for E4M3 operands", "not applicable: torch has no layout assignment; both types are treated alike", [
        Case("e5m2 in rows", matmul, (A, q(64, 48, dtype=E5M2)), copies=1),
    ]),
    Rule("T1", "E4M3 x E4M3", "accepts", "accepts", [
        Case("e4m3 x e4m3", lambda a, b: product(a, b, dtype=BF16), (A, B)),
    ]),
    Rule("T2", "E4M3 x E5M2, E5M2 x E4M3", "accepts", "accepts", [
        Case("e4m3 x e5m2", matmul, (A, q(64, 48, dtype=E5M2))),
        Case("e5m2 x e4m3", matmul, (q(32, 64, dtype=E5M2), B)),
    ]),
    Rule("T3", "E5M2 x E5M2", "declines", "declines", [
        Case("e5m2 x e5m2", matmul, (q(32, 64, dtype=E5M2), q(64, 48, dtype=E5M2)), 0, "both operands are float8_e5m2, for which no GPU has a kernel"),
    ]),
    Rule("T4", "FNUZ", "declines on CUDA", "declines", [
        Case("e4m3fnuz", matmul, (q(32, 64, dtype=torch.float8_e4m3fnuz), B), 0, "comes from float8_e4m3fnuz, which no NVIDIA GPU multiplies"),
        Case("e5m2fnuz", matmul, (q(32, 64, dtype=torch.float8_e5m2fnuz), B), 0, "comes from float8_e5m2fnuz, which no NVIDIA GPU multiplies"),
    ]),
    Rule("E1", "times a constant", "into alpha", "into the scale", [
        following("times a constant", lambda y: y * 3, after=()),
        Case("alpha", lambda a, b, c: torch.addmm(c, a.bfloat16(), b.bfloat16(), alpha=3), (A, B, wide(48, dtype=BF16)), after=()),
    ]),
    Rule("E2", "unscaled operands, scaled result", "into the first scale", "into the first scale", [
        Case("times a scale", lambda a, b, x: torch.mm(a.bfloat16(), b.bfloat16()) * x, (A, B, s()), after=()),
        Case("divided by a scale", lambda a, b, x: torch.mm(a.float(), b.float()) / x, (A, B, s()), after=()),
    ]),
    Rule("E3", "scaled operands and scaled result", "leaves the result's scale outside", "into the first scale", [
        following("scaled twice over", lambda y, x: y * x, s(), after=()),
        following("by a wider type", lambda y, x: y * x, s().view(1), after=("mul",)),
    ]),
    Rule("E4", "relu(y) * s", "moves s before the ReLU: wrong if s < 0", "leaves both outside", [
        following("negative scale after relu", lambda y, x: y.relu() * x, s(-2.0), after=("relu", "mul")),
    ]),
    Rule("E5", "clamp to exactly +-max, cast", "FP8 output", "FP8 output", [
        Case("quantized result", lambda a, b, x: quantized(product(a, b, dtype=BF16), x), (A, B, s(4)), after=(), device="cuda"),
        Case("divided, in float32", lambda a, b, x: (product(a, b, dtype=BF16).float() / x).clamp(-448, 448).to(E4M3), (A, B, s(4)), after=(), device="cuda"),
        Case("e5m2 result", lambda a, b, x: quantized(product(a, b), x, E5M2), (q(32, 64, dtype=E5M2), B, s(4)), after=(), device="cuda"),
        Case("no kernel for the type", lambda a, b, x: quantized(product(a, b), x, E5M2), (A, B, s(4)), after=("mul", "clamp_min", "clamp_max", "convert_element_type"), note="no kernel multiplies float8_e4m3fn by float8_e4m3fn into float8_e5m2", device="cuda"),
        Case("on CPU", lambda a, b, x: quantized(product(a, b), x), (A, B, s(1000.0))),
    ]),
    Rule("E6", "cast without clamp, or other bounds", "leaves it outside", "leaves it outside, with a note", [
        Case("no clamp", lambda a, b: product(a, b).to(E4M3), (A, B), after=("convert_element_type",), note="is not clamped to ±448"),
        Case("other bounds", lambda a, b: product(a, b).clamp(-400, 448).to(E4M3), (A, B), after=("clamp_min", "clamp_max", "convert_element_type"), note=r"clamped to \[-400, 448\], and float8_e4m3fn ends at ±448"),
    ]),
    Rule("E7", "amax beside FP8 output", "both in the kernel", "both in one kernel after it, and one for the tail of a large amax: `_scaled_mm` has no amax", [
        following("amax and quantize", lambda y, x: (quantized(y, x), y.abs().amax()), s(4), after=("mul", "clamp_min", "clamp_max", "convert_element_type", "abs", "amax")),
    ]),
    Rule("E8", "amax of the scaled value, more users", "nothing fused", "same: as E7", [
        following("amax of the scaled", lambda y, x: (quantized(y, x), (y * x).abs().amax()), s(4), after=("mul", "clamp_min", "clamp_max", "convert_element_type", "mul", "abs", "amax")),
    ]),
    Rule("E9", "scale from this GEMM's own amax; amax of rows", "no check: makes a cycle", "never folded", [
        following("own amax", lambda y: quantized(y, 448 / y.abs().amax()), after=("abs", "amax", "reciprocal", "mul", "mul", "clamp_min", "clamp_max", "convert_element_type")),
        following("amax of rows", lambda y, x: (quantized(y, x), y.abs().amax(1)), s(4), after=("mul", "clamp_min", "clamp_max", "convert_element_type", "abs", "amax")),
    ]),
    Rule("E10", "y / s with another user", "fuses, and leaves a stray operand", "leaves it outside", [
        following("another user", lambda y, x: (quantized(y, x), y.relu()), s(4), after=("mul", "clamp_min", "clamp_max", "convert_element_type", "relu")),
    ]),
    Rule("E11", "scale or FP8 output after padding or rank 3", "leaves them outside", "fuses them", [
        Case("unaligned", lambda a, b, x: product(a, b, dtype=BF16) * x, (q(31, 60), q(60, 47), s()), after=("slice", "clone")),
        Case("rank 3", lambda a, b, x: product(a, b, dtype=BF16) * x, (q(2, 16, 64), B, s()), after=("view",)),
        Case("batched", lambda a, b, x: torch.bmm(a.bfloat16(), b.bfloat16()) * x, (q(2, 16, 64), q(2, 64, 48), s()), 2, after=("unsqueeze", "unsqueeze", "cat")),
    ]),
    Rule("E12", "plus a vector over N", "into the kernel", "into the kernel", [
        following("bfloat16 vector", lambda y, v: y + v, wide(48, dtype=BF16), after=()),
        following("float16 vector", lambda y, v: v + y, wide(48, dtype=F16), dtype=F16, after=()),
        following("[1, N]", lambda y, v: y + v, wide(1, 48, dtype=BF16), after=()),
        following("scaled, then added", lambda y, x, v: y * x + v, s(), wide(48, dtype=BF16), after=()),
        Case("addmm", lambda a, b, v: torch.addmm(v, a.bfloat16(), b.bfloat16()), (A, B, wide(48, dtype=BF16)), after=()),
        Case("square, along rows", lambda a, b, v: product(a, b, dtype=BF16) + v, (q(64, 64), q(64, 64), wide(64, 1, dtype=BF16)), after=("add",)),
        following("added, then scaled (46110)", lambda y, v: (y + v) * 3, wide(48, dtype=BF16), after=("mul",)),
    ]),
    Rule("E13", "f32 vector", "only if it was bf16 or f16 before", "only if it was the output's type before", [
        following("float32 vector", lambda y, v: y + v, wide(48), dtype=F32, after=("add",)),
        following("widened vector", lambda y, v: (y.float() + v.float()).bfloat16(), wide(48, dtype=BF16), after=()),
    ]),
    Rule("E14", "plus a matrix", "into the kernel (beta)", "outside: `_scaled_mm` has no beta; Inductor fuses it with what follows", [
        following("matrix", lambda y, c: y + c, wide(32, 48, dtype=BF16), after=("add",)),
        Case("addmm with a matrix", lambda a, b, c: torch.addmm(c, a.bfloat16(), b.bfloat16(), beta=0.5, alpha=2), (A, B, wide(32, 48, dtype=BF16)), after=("add",)),
    ]),
    Rule("E15", "plus an FP8 matrix", "leaves it outside", "same", [
        following("float8 matrix", lambda y, c: y + c.bfloat16(), q(32, 48), after=("add",), note="arg2_1 is dequantized for add"),
    ]),
    Rule("E16", "matrix after a slice that is not a prefix", "leaves it outside", "same", [
        following("sliced, then a matrix", lambda y, c: y[:, 16:] + c, wide(32, 32, dtype=BF16), after=("slice", "add")),
    ]),
    Rule("E17", "matrix, then vector", "matrix in the kernel", "both outside, in one kernel", [
        following("matrix, then vector", lambda y, c, v: y + c + v, wide(32, 48, dtype=BF16), wide(48, dtype=BF16), after=("add", "add")),
    ]),
    Rule("E18", "matrix and FP8 output", "bf16 and f16 matrices", "outside", [
        following("matrix, then quantized", lambda y, c: quantized(y + c, 2.0), wide(32, 48, dtype=BF16), after=("add", "mul", "clamp_min", "clamp_max", "convert_element_type")),
    ]),
    Rule("E19", "plus one number", "leaves it outside", "same", [
        following("one number", lambda y, v: y + v, s(3.0, BF16), after=("add",)),
    ]),
    Rule("E20", "vector after rank 3 or batches", "becomes a matrix bias", "into the kernel", [
        Case("rank 3", lambda a, b, v: product(a, b, dtype=BF16) + v, (q(2, 16, 64), B, wide(48, dtype=BF16)), after=("view",)),
        Case("batched", lambda a, b, v: torch.bmm(a.bfloat16(), b.bfloat16()) + v, (q(2, 16, 64), q(2, 64, 48), wide(48, dtype=BF16)), 2, after=("unsqueeze", "unsqueeze", "cat")),
    ]),
    Rule("E21", "ReLU", "into the kernel", "outside; Inductor fuses it", [
        following("relu", lambda y: y.relu(), after=("relu",)),
        following("bias and relu", lambda y, v: (y + v).relu(), wide(48, dtype=BF16), after=("relu",)),
    ]),
    Rule("E22", "GELU (tanh)", "into the kernel", "outside; Inductor fuses it", [
        following("gelu", lambda y: F.gelu(y, approximate="tanh")),
    ]),
    Rule("E23", "GELU with other users of its input", "fails to compile", "outside; Inductor fuses it", [
        following("gelu and its input", lambda y: (F.gelu(y, approximate="tanh"), y)),
    ]),
    Rule("E24", "SiLU", "only on ROCm", "outside; Inductor fuses it", [
        following("silu", lambda y: F.silu(y)),
    ]),
    Rule("E25", "no add fused with asynchronous dots", "a flag", "not applicable: torch has no such mode"),
]  # fmt: skip
CASES = {f"{rule.number} {case.name}": case for rule in RULES for case in rule.cases}


def on_gpu(which: str) -> dict[str, Case]:
    """Return "every" case, or the "first" of each rule that becomes a matmul of a GPU, by name."""
    first = {n.split()[0]: n for n, c in reversed(CASES.items()) if c.calls and c.target is None and not c.dynamic}
    return CASES if which == "every" else {name: CASES[name] for name in CASES if name in first.values()}


PAGE = ROOT / "docs" / "xla-rules.md"

_HEAD = """\
# XLA's rules, and ours

Each rule by which XLA's GemmRewriter finds FP8 matmuls (read in its source, August 2026), what fp8pass does with the
same program, and the cases of `tests/passes/joint/test_xla_rules.py` that show it. Made by `python -m tests.helpers.xla_rules`; a test
compares. P: operands, M: movement between dequantize and matmul, S: structure, L: layout, T: types, E: epilogues.

Every matmul that is declined has a reason with names and numbers in `fp8pass.explain`, and a conversion to float8 that
stays after a kernel has a note. "Accepts" means the same numbers as eager, but for rounding that no longer happens;
under an infinite or NaN scale the whole product is NaN, also where a pad or a select filled in zeros (M7, M9). A scale
goes into the kernel (E1 to E3) where that saves a kernel: before an elementwise op or a reduction, Inductor does it
for free.

| rule | program | XLA | fp8pass | shown by |
|---|---|---|---|---|
"""


def page() -> str:
    """Return the text of `docs/xla-rules.md`."""
    rows = []
    for rule in RULES:
        shown = ", ".join(case.name for case in rule.cases) or "-"
        rows.append(f"| {rule.number} | {rule.what} | {rule.xla} | {rule.ours} | {shown} |")
    return _HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
