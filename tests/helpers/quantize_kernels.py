"""Kernels that quantize tile by tile: run in Triton's interpreter, or compiled for several GPUs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor, fx
from torch._inductor import config
from triton.runtime import interpreter

from fp8pass import hardware
from fp8pass.base._torch import pointer_type
from fp8pass.base.scaling import quantize
from fp8pass.hardware import TARGETS
from fp8pass.inspect.fake_cuda import FakeCuda
from fp8pass.passes.common import transposed_copies
from fp8pass.passes.common.kernel_outputs import Made
from fp8pass.passes.kernels.fold_quantizes import FoldQuantizes
from fp8pass.passes.kernels.quantize_groups import GroupMatch, amaxes_before, match, plan_of, why_not
from fp8pass.passes.kernels.tiles_source import Choice, TilesPlan, kernel_of
from fp8pass.quant.kernel_ops import QUANTIZE
from fp8pass.quant.ops import Blockwise
from fp8pass.recipes import BlockwiseScaling
from tests.helpers.asked import answer_all, ask
from tests.helpers.fused_matmuls import _spilled, both, compared_output, filled, spoil, values_of
from tests.helpers.harness import BF16, E5M2, capture, on_kernels
from tests.helpers.triton_on_cpu import convert_float


def weight(w: Tensor, scale: Tensor) -> Any:
    return both(w, scale)


def siblings(a: Tensor, b: Tensor, c: Tensor, scale: Tensor) -> Any:
    return both(torch.cat([a, b, c]), scale)


def gelu(y: Tensor, scale: Tensor) -> Any:
    return both(F.gelu(y, approximate="tanh"), scale)


def exact_gelu(y: Tensor, scale: Tensor) -> Any:
    return both(F.gelu(y), scale)


def tanh(y: Tensor, scale: Tensor) -> Any:
    return both(torch.tanh(y), scale)


def gradient(y: Tensor, grad: Tensor, scale: Tensor, other: Tensor) -> Any:
    """Return what the backward of GELU makes: the gradient, its bias's gradient, and the hidden tensor again."""
    of_y = torch.ops.aten.gelu_backward(grad, y, approximate="tanh")
    hidden = quantize(F.gelu(y, approximate="tanh"), other, torch.float8_e4m3fn).t().contiguous()
    return *both(of_y, scale, E5M2), of_y.sum(0), hidden


def gated(wide: Tensor, scale: Tensor) -> Any:
    gate, up = wide.chunk(2, -1)
    hidden = F.silu(gate) * up
    return quantize(hidden, scale, torch.float8_e4m3fn), *both(hidden, scale)[2:]


def gated_gradient(wide: Tensor, grad: Tensor, scale: Tensor, other: Tensor) -> Any:
    gate, up = wide.chunk(2, -1)
    of_gate = torch.ops.aten.silu_backward(grad * up, gate)
    both_grads = torch.cat([of_gate, grad * F.silu(gate)], -1)
    hidden = quantize(F.silu(gate) * up, other, torch.float8_e4m3fn).t().contiguous()
    return *both(both_grads, scale, E5M2), hidden


def by_rows(x: Tensor, of_rows: Tensor, of_columns: Tensor) -> Any:
    """Quantize with a scale for each row, and transposed with one for each column."""
    turned = quantize(x, of_columns, torch.float8_e4m3fn).t().contiguous()
    return quantize(x, of_rows, torch.float8_e4m3fn), turned


def scaled_by_rows(x: Tensor) -> Any:
    """Quantize as `rowwise` does: with scales made of the amaxes of rows and of columns."""
    size = x.abs()
    by_row, by_column = (448 / size.amax(d, keepdim=True).float().clamp(min=1e-12) for d in (1, 0))
    return by_rows(x, by_row, by_column)


def gated_by_rows(gate: Tensor, up: Tensor, grad: Tensor, of_columns: Tensor) -> Any:
    """Return the gradients of gate and up, and the hidden tensor again."""
    of_gate, of_up = torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)
    hidden = quantize(F.silu(gate) * up, of_columns, torch.float8_e4m3fn).t().contiguous()
    return *scaled_by_rows(of_gate), *scaled_by_rows(of_up), hidden


def heads(x: Tensor, scale: Tensor) -> Any:
    """Quantize what attention returns, [2, H, S, 16] in memory, with the heads of each position side by side."""
    m, n = x.shape
    return both(x.view(2, n // 16, m // 2, 16).transpose(1, 2).reshape(m, n), scale)


def _turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradients of queries and keys before they were rotated, side by side: [M, 128 + N].

    Those of queries by halves that are joined, those of keys as transformers writes it, with halves that are scattered.
    """

    def by_head(x: Tensor) -> Tensor:
        width = 16 if x.shape[-1] < 1024 else 128
        return x.view(2, x.shape[-1] // width, x.shape[0] // 2, width).float()

    low, high = by_head(q).chunk(2, -1)
    of_q = torch.cat([high * sin + low * cos, high * cos - low * sin], -1).to(q.dtype)
    turned, half = by_head(k) * sin, by_head(k).shape[-1] // 2
    zeros = torch.zeros_like(turned)
    scattered = torch.slice_scatter(zeros, -turned[..., :half], 3, half, 2 * half)
    of_k = by_head(k) * cos + scattered + torch.slice_scatter(zeros, turned[..., half:], 3, 0, half)
    return torch.cat([x.transpose(1, 2).reshape(q.shape[0], -1) for x in (of_q, of_k.to(k.dtype))], -1)


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, scale: Tensor) -> Any:
    return both(_turned(q, k, cos, sin), scale, E5M2)


def padded(x: Tensor, first: Tensor, rest: Tensor, scale: Tensor) -> Any:
    """Quantize heads whose first half is one number, scaled by a table that is joined from two."""
    heads = x.view(2, x.shape[1] // 16, x.shape[0] // 2, 16) * torch.cat([first, rest])
    y = F.pad(heads[..., 8:], (8, 0), value=1.5).transpose(1, 2).reshape(x.shape).to(x.dtype)
    return *both(y, scale), y.sum(0)


def rotated_by_rows(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return scaled_by_rows(_turned(q, k, cos, sin))


def _parts(x: Tensor, **how: Any) -> Any:
    """Return `x` quantized in blocks, with 1 / scale of each, as `blockwise` has it traced."""
    return Blockwise(BlockwiseScaling(), torch.float8_e4m3fn, 128, **how).parts(x)


def in_blocks(x: Tensor) -> Any:
    """Quantize a weight in square blocks, and copy it transposed."""
    x_q, scale_inv = _parts(x, square=True)
    return x_q, x_q.t().contiguous(), scale_inv.t().contiguous()


def in_columns(x: Tensor) -> Any:
    return _parts(x, dims=(0,))


def in_rows_and_columns(gate: Tensor, up: Tensor, grad: Tensor) -> Any:
    """Return the gradients of gate and up, each in blocks of rows and of columns, and the hidden tensor again."""
    of_gate, of_up = torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)
    gradients = [part for g in (of_gate, of_up) for dim in (1, 0) for part in _parts(g, dims=(dim,))]
    return *gradients, *in_columns(F.silu(gate) * up)


CASES: dict[str, tuple[Callable[..., Any], str]] = {
    "weight": (weight, "x s"),
    "siblings": (siblings, "p p p s"),
    "gelu": (gelu, "x s"),
    "exact_gelu": (exact_gelu, "x s"),
    "tanh": (tanh, "x s"),
    "gradient": (gradient, "x x s s"),
    "heads": (heads, "x s"),
    "rotated": (rotated, "h x t t s"),
    "rotated_by_rows": (rotated_by_rows, "h x t t"),
    "padded": (padded, "x q q s"),
    "gated": (gated, "w s"),
    "gated_gradient": (gated_gradient, "w x s s"),
    "by_rows": (by_rows, "x r c"),
    "gated_by_rows": (gated_by_rows, "x x x c"),
    "in_blocks": (in_blocks, "x"),
    "in_columns": (in_columns, "x"),
    "in_rows_and_columns": (in_rows_and_columns, "x x x"),
}
"""Functions, and their inputs: x bf16[M, N], w bf16[M, 2 * N], p bf16[128, N], h bf16[M, 128], t bf16[M / 2, 1],
q bf16[M / 4, 1]; scales: s one, r [M, 1], c [1, N]."""
PART = 128


def inputs_of(name: str, m: int, n: int) -> list[Tensor]:
    shapes = {"x": (m, n), "w": (m, 2 * n), "p": (PART, n), "h": (m, PART), "t": (m // 2, 1), "q": (m // 4, 1)}
    scales = {"s": (), "r": (m, 1), "c": (1, n)}
    return [
        3 + torch.rand(scales[k]) if k in scales else (2 * torch.randn(shapes[k])).to(BF16)
        for k in CASES[name][1].split()
    ]


def found_in(name: str, given: list[Tensor]) -> tuple[list[GroupMatch], fx.GraphModule]:
    """Return the match of a case that reads most, with the amaxes that are taken before, if any; and the graph."""
    graph = capture(CASES[name][0], *given)
    on_kernels(graph, FoldQuantizes())
    quantizes = [n for n in graph.graph.nodes if n.target is QUANTIZE]
    m = max(filter(None, map(match, quantizes)), key=lambda m: len(m.group.matrices))
    assert why_not(m) == ""
    return list(filter(None, (m, amaxes_before(m.group)))), graph


def run(
    m: GroupMatch, plan: TilesPlan, choice: Choice, graph: fx.GraphModule, given: list[Tensor]
) -> list[dict[str, Any]]:
    """Run the kernel in Triton's interpreter; return comparisons of what it writes with the graph, run op by op."""
    values = values_of(graph, given)
    inputs = [values[n.name] for n in m.group.tensors()]
    outputs = [filled(plan.shape(o), o.dtype) for o in plan.outputs]
    kernel = kernel_of(plan).fn
    kernel.fn.__globals__["libdevice"] = tl.math  # the interpreter can't call NVIDIA's library of the same functions
    with mock.patch.object(interpreter, "_convert_float", convert_float):
        kernel[(plan.programs(choice),)](*inputs, *outputs, ROWS=choice.rows, COLUMNS=choice.columns)
    made = zip(m.made, outputs, strict=True)
    return [compared_output(o.kind, _as_it_was(o, got), values[o.instead_of.name])[0] for o, got in made]


def _as_it_was(o: Made, got: Tensor) -> Tensor:
    """Return the numbers of blocks in the order that they have in the graph, and other outputs as they are."""
    return got.t().contiguous() if o.kind == "numbers" and o.blocks is not None and o.blocks.is_moved else got


def interpret(gpu: FakeCuda, name: str, m: str, n: str, choice: str, how: str) -> list[dict[str, Any]]:
    """Compare one case. choice: its numbers. how: words of "nan", "zero"."""
    torch.manual_seed(0)
    given = inputs_of(name, int(m), int(n))
    if "nan" in how:
        spoil(given)
    if "zero" in how:
        for x in given:
            if x.dim() == 0:
                x.zero_()
    with gpu.there(), config.patch(emulate_precision_casts=True):
        matches, graph = found_in(name, given)
        plans = list(map(plan_of, matches))
    wanted = Choice(*map(int, choice.split()))
    kernels = zip(matches, plans, strict=True)
    return [of for m, plan in kernels for of in run(m, replace(plan, choices=(wanted,)), wanted, graph, given)]


def compared(name: str, m: int, n: int, choice: str, how: str) -> list[dict[str, Any]]:
    """Ask a process of Triton's interpreter for what `interpret` returns."""
    words = name, str(m), str(n), choice, how
    found: list[dict[str, Any]] = ask("tests.helpers.quantize_kernels", "interpret", *words, TRITON_INTERPRET="1")
    return found


def compile_case(gpu: FakeCuda, name: str, capability: str) -> list[dict[str, Any]]:
    """Compile each choice of a case of a large matrix for a GPU; return what its code does."""
    given = [x.new_empty([16 * size if size > 1 else 1 for size in x.shape]) for x in inputs_of(name, 128, 128)]
    with gpu.there():
        plans = list(map(plan_of, found_in(name, given)[0]))
    return [found for plan in plans for found in _compiled_choices(plan, capability)]


def _compiled_choices(plan: TilesPlan, capability: str) -> Iterator[dict[str, Any]]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {p: pointer_type(d) for p, d in plan.parameters.items()} | {"ROWS": "constexpr", "COLUMNS": "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(plan.parameters))}
    for c in plan.choices:
        source = ASTSource(kernel_of(plan).fn, signature, {"ROWS": c.rows, "COLUMNS": c.columns}, aligned)
        options = {"num_warps": c.warps, "num_stages": 1}
        done = triton.compile(source, target=GPUTarget("cuda", int(capability), 32), options=options)
        ptx = done.asm["ptx"]
        elements = c.rows * c.columns // (32 * c.warps)
        casts = re.findall(r"cvt\.\S*\.e[45]m[32]x2\.f(?:32|16x2)", ptx)  # by float16 on sm_89, with Triton 3.6
        yield {
            "choice": [c.rows, c.columns, c.warps],
            "kinds": [o.kind for o in plan.outputs],
            "spilled": _spilled(done),
            "exponentials": len(re.findall(r"\bex2\.approx", ptx)) / elements,
            "saturates": all("satfinite" in cast for cast in casts),
            "casts": 2 * len(casts) / elements,
            "stores": sorted({int(v or 1) * int(b) for v, b in re.findall(r"st\.global(?:\.v(\d))?\.b(\d+)", ptx)}),
        }


def compiled(name: str, capability: int) -> list[dict[str, Any]]:
    """Ask a process for what `compile_case` returns."""
    found: list[dict[str, Any]] = ask("tests.helpers.quantize_kernels", "compiled", name, str(capability))
    return found


def answer(gpu: FakeCuda, what: str, *arguments: str) -> Any:
    with (
        mock.patch.object(hardware, "pretended_device", torch.device("cuda")),
        mock.patch.object(transposed_copies, "is_launched", return_value=True),
    ):
        return {"interpret": interpret, "compiled": compile_case}[what](gpu, *arguments)


if __name__ == "__main__":
    torch.backends.mkldnn.set_flags(False)
    answer_all(functools.partial(answer, FakeCuda(TARGETS["h100"])))
