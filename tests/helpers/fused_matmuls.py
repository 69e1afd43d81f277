"""Fused matmuls on the CPU: their kernels run in Triton's interpreter, or are compiled for several GPUs."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor, fx
from torch._inductor import config
from triton.runtime import interpreter

from fp8pass.base.scaling import amax, quantize
from fp8pass.hardware import TARGETS
from fp8pass.inspect.fake_cuda import FakeCuda, resources, run_tool
from fp8pass.passes.common.gpu import Gpu
from fp8pass.passes.kernels import fused_matmul
from fp8pass.passes.kernels.fold_quantizes import FoldQuantizes
from fp8pass.passes.kernels.fused_matmul import FusedMatch, match, plan_of, tiled, with_code
from fp8pass.passes.kernels.fused_plan import Plan, Tile
from fp8pass.passes.kernels.matmul_source import kernel_of
from fp8pass.passes.kernels.trial_compile import compiled
from tests.helpers.asked import answer_all, ask
from tests.helpers.harness import BF16, E4M3, E5M2, F32, capture, on_kernels
from tests.helpers.triton_on_cpu import compare, convert_float, hyperbolic_tangent

H100 = Gpu(90, multiprocessors=3, shared_memory=232448)  # with three programs, each has several tiles
L40S = Gpu(89, multiprocessors=3, shared_memory=101376)


def both(x: Tensor, scale: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, ...]:
    """Return what a training step makes of a tensor: FP8 in both orientations, and the amax."""
    q = quantize(x, scale, dtype)
    return q, q.reshape(-1, q.shape[-1]).t().contiguous(), amax(x)


def product(
    a: Tensor, b: Tensor, s: Tensor, bias: Tensor | None = None, fast: bool = True, dtype: Any = BF16
) -> Tensor:
    """Multiply a: f8[M, K] by b: f8[N, K], transposed."""
    return torch._scaled_mm(a, b.t(), s, s, bias, None, dtype, fast)


def gelu(a: Tensor, b: Tensor, s: Tensor, scale: Tensor, bias: Tensor) -> Any:
    y = product(a, b, s, bias)
    return *both(F.gelu(y), scale), y


def relu_squared(a: Tensor, b: Tensor, s: Tensor, scale: Tensor) -> Any:
    y = F.relu(product(a, b, s))
    return both(y * y, scale)


def gated(a: Tensor, b: Tensor, s: Tensor, scale: Tensor) -> Any:
    y = product(a, b, s)
    gate, up = y.chunk(2, -1)
    return *both(F.silu(gate) * up, scale), y


def gated_backward(a: Tensor, b: Tensor, s: Tensor, scale: Tensor, saved: Tensor) -> Any:
    grad, (gate, up) = product(a, b, s, fast=False), saved.chunk(2, -1)
    sigmoid = torch.sigmoid(gate.float())
    of_gate = (grad * up).float() * (sigmoid * (1 + gate.float() * (1 - sigmoid)))
    both_grads = torch.cat([of_gate.to(BF16), grad * F.silu(gate)], -1)
    hidden = F.silu(gate) * up  # computed again for the gradient of the weight
    return *both(both_grads, scale, E5M2), both_grads.sum(0), quantize(hidden, scale, E4M3).t().contiguous()


def residual(a: Tensor, b: Tensor, s: Tensor, x: Tensor) -> Any:
    y = product(a, b, s)
    return x.view(y.shape) + y


def several_dims(a: Tensor, b: Tensor, s: Tensor, scale: Tensor, rows: Tensor, columns: Tensor, x: Tensor) -> Any:
    y = product(a, b, s).view(2, -1, b.shape[0])
    return both(torch.tanh(y) * rows.view(2, -1, 1) + columns * x.view(y.shape), scale)


def strided(a: Tensor, b: Tensor, s: Tensor, scale: Tensor, x: Tensor, turned: Tensor) -> Any:
    wide = x[:, : b.shape[0]]
    return both(product(a, b, s) * wide + turned.t(), scale)


def by_rows(a: Tensor, b: Tensor, s: Tensor, t: Tensor, scale: Tensor) -> Any:
    y = torch._scaled_mm(a, b.t(), s, t.t(), None, None, BF16, True)
    return both(F.silu(y), scale)


def in_float32(a: Tensor, b: Tensor, s: Tensor, scale: Tensor) -> Any:
    return both(product(a, b, s, dtype=F32) * 2, scale)


def summed(a: Tensor, b: Tensor, s: Tensor, scale: Tensor) -> Any:
    y = F.silu(product(a, b, s, fast=False))
    return *both(y, scale, E5M2), y.sum(0), y


STEPS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "silu": lambda y, *_: F.silu(y),
    "gelu": lambda y, *_: F.gelu(y),
    "relu": lambda y, *_: F.relu(y),
    "abs": lambda y, *_: y.abs(),
    "square": lambda y, *_: y * y,
    "tanh": lambda y, *_: torch.tanh(y),
    "float": lambda y, *_: (y.float() * 0.7 + 0.1).to(BF16),
    "where": lambda y, rows, columns, x: torch.where(x > y, x, y * 0.5),
    "rows": lambda y, rows, columns, x: y * rows[:, None],
    "columns": lambda y, rows, columns, x: y + columns,
    "matrix": lambda y, rows, columns, x: y * x,
    "of_matrix": lambda y, rows, columns, x: y + F.silu(x) * 0.25,
}
"""Elementwise ops, of which random epilogues are made."""


def chain(*names: str) -> Callable[..., Any]:
    """Return a case whose epilogue computes the named STEPS in order."""

    def computed(a: Tensor, b: Tensor, s: Tensor, scale: Tensor, rows: Tensor, columns: Tensor, x: Tensor) -> Any:
        y = product(a, b, s)
        for name in names:
            y = STEPS[name](y, rows, columns, x)
        return both(y, scale)

    return computed


CASES: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        gelu, relu_squared, gated, gated_backward, residual, several_dims, strided, by_rows, in_float32, summed,
    )
}  # fmt: skip


def inputs_of(name: str, m: int, n: int, k: int, exact: bool) -> list[Tensor]:
    """Return the arguments of a case. exact: operands whose products sum without rounding."""

    def fp8(rows: int, dtype: torch.dtype = E4M3) -> Tensor:
        x = torch.randint(-2, 3, (rows, k)).float() if exact else torch.randn(rows, k).clamp(-4, 4)
        return x.to(dtype)

    def wide(*shape: int) -> Tensor:
        return torch.randn(*shape).to(BF16)

    backward = name in ("gated_backward", "summed")
    found = [fp8(m, E5M2 if backward else E4M3), fp8(2 * n if name == "gated" else n), torch.tensor(0.125)]
    scale = torch.tensor(3.0)
    if name == "by_rows":
        found[2] = torch.rand(m, 1) + 0.5
        found.append(torch.rand(n, 1) + 0.5)
    more = {
        "gelu": [scale, wide(n)],
        "gated_backward": [scale, wide(m, 2 * n)],
        "residual": [wide(m, n)],
        "several_dims": [scale, wide(m), wide(n), wide(m, n)],
        "chain": [scale, wide(m), wide(n), wide(m, n)],
        "strided": [scale, wide(m, n + 32), wide(n, m)],
    }
    return [*found, *more.get(name.partition(":")[0], [scale])]


def spoil(tensors: list[Tensor]) -> None:
    """Put NaN and infinities into every tensor, each into another row, and a column of zeros."""
    for i, x in enumerate(t for t in tensors if t.dim() == 2 and min(t.shape) > 1):
        row = x[(3 * i + 1) % x.shape[0]]
        row[0] = float("nan")
        if x.dtype not in (E4M3,):
            row[1] = float("inf")


def found_in(name: str, given: list[Tensor]) -> tuple[FusedMatch, fx.GraphModule]:
    """Return the graph of a case, and the match of its first matmul."""
    steps = name.partition(":")[2]
    graph = capture(chain(*steps.split(",")) if steps else CASES[name], *given)
    on_kernels(graph, FoldQuantizes())
    (matmul, *_) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten._scaled_mm.default)
    m = match(matmul)
    assert m is not None
    return m, graph


def values_of(graph: fx.GraphModule, given: list[Tensor]) -> dict[str, Any]:
    """Run a graph op by op; return the value of each node by its name."""
    values: dict[str, Any] = {}

    class Keep(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            values[n.name] = super().run_node(n)
            return values[n.name]

    Keep(graph).run(*given)
    return values


def filled(shape: list[int], dtype: torch.dtype) -> Tensor:
    """Return memory for a kernel to write, in which what it leaves out is seen."""
    return torch.empty(shape, dtype=dtype).view(torch.uint8).fill_(0x55).view(dtype)


def compared_output(kind: str, got: Tensor, wanted: Tensor) -> tuple[dict[str, Any], Tensor]:
    """Compare an output of a kernel with the node that it replaces; return how they differ, and the output finished."""
    if kind.startswith("amax"):
        got = got.amax() if kind == "amax" else got.amax(0)
    got = got.sum(0).to(wanted.dtype) if kind == "sums" else got
    got = got.view(wanted.shape)
    finite = torch.equal(got.float().isfinite(), wanted.float().isfinite())
    same_nan = torch.equal(got.float().isnan(), wanted.float().isnan())
    of = compare(kind, *(x.float().nan_to_num(0, 1e9, -1e9).to(x.dtype) for x in (wanted, got)))
    special = finite and same_nan
    return {"kind": kind, "steps": of.steps, "differing": of.differing, "sqnr": of.sqnr, "special": special}, got


def run(m: FusedMatch, plan: Plan, graph: fx.GraphModule, given: list[Tensor]) -> list[dict[str, Any]]:
    """Run the kernel in Triton's interpreter; return comparisons of what it writes with the graph, run op by op."""
    values = values_of(graph, given)
    args = [values[a.name] for a in m.epilogue.matmul.args[:5] if isinstance(a, fx.Node)]
    tensors = dict(zip(["a", "b", "scale_a", "scale_b", "bias"], args, strict=False))
    for i, node in enumerate(m.epilogue.inputs, len(m.epilogue.products.parts)):
        tensors[f"in{i}"] = values[node.name]
    for i, o in enumerate(plan.outputs):
        tensors[f"out{i}"] = filled(with_m(plan, len(args[0])).shape(o), o.dtype)
    kernel = kernel_of(plan).fn
    kernel.fn.__globals__["libdevice"] = tl.math  # the interpreter can't call NVIDIA's library of the same functions
    with (
        mock.patch.object(interpreter, "_convert_float", convert_float),
        mock.patch.object(tl.math, "tanh", hyperbolic_tangent, create=True),
    ):
        sizes = [len(args[0])] if plan.matmul.symbolic else []
        kernel[(plan.programs,)](*(tensors[p] for p in plan.parameters), *sizes)
    found = []
    written = [made for made in m.made if not plan.matmul.symbolic or made.kind in ("rows", "amax")]
    for i, made in enumerate(written):
        of, got = compared_output(made.kind, tensors[f"out{i}"], values[made.instead_of.name])
        found.append(of | ({"oracle": _is_oracles(got, *args)} if plan.outputs[i].is_product else {}))
    return found


def with_symbolic_m(plan: Plan) -> Plan:
    """Return the plan as it would be for a symbolic M: no pass finds transposed copies or sums there."""
    outputs = tuple(o for o in plan.outputs if o.kind in ("rows", "amax"))
    return replace(plan, matmul=replace(plan.matmul, symbolic=True), outputs=outputs)


def with_m(plan: Plan, m: int) -> Plan:
    """Return the plan as if it had been made for another M."""
    return replace(plan, matmul=replace(plan.matmul, m=m))


def _is_oracles(
    got: Tensor, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None
) -> bool:
    """Return whether a product of operands that sum exactly is that of float64, rounded once."""
    exact = (a.double() @ b.double()) * scale_a.double() * scale_b.double()
    return torch.equal(got, (exact if bias is None else exact + bias.double()).to(got.dtype))


def interpret(gpu: FakeCuda, name: str, m: str, n: str, k: str, tile: str, how: str) -> dict[str, Any]:
    """Compare one case. tile: its numbers; "" for the one that is chosen. how: words of "exact", "nan", "zero", "pointers", "symbolic"."""
    torch.manual_seed(0)
    given = inputs_of(name, int(m), int(n), int(k), "exact" in how)
    if "nan" in how:
        spoil(given)
    if "zero" in how:
        for scale in (x for x in given if x.dtype == F32):
            scale[scale > 0.9 if scale.dim() else ...] = 0.0
    # the interpreter's functions can't be compiled
    nothing = mock.patch.object(fused_matmul, "shared_memory", return_value=0)
    with gpu.there(), nothing, config.patch(emulate_precision_casts=True):
        found, graph = found_in(name, given)
        sizes = L40S if "pointers" in how else H100
        plan = next(tiled(with_code(plan_of(found, sizes), found), sizes))
    if tile:
        plan = replace(plan, tile=Tile(*map(int, tile.split())))
        down, across = plan.tiles()
        plan = replace(plan, programs=min(sizes.multiprocessors, down * across))
    if "symbolic" in how:  # the kernel must not depend on what M was when it was generated
        plan = with_m(replace(with_symbolic_m(plan), programs=sizes.multiprocessors), 4096)
    return {"outputs": run(found, plan, graph, given), "products": plan.matmul.products}


def compared(name: str, m: int, n: int, k: int, tile: str, how: str) -> dict[str, Any]:
    """Ask a process of Triton's interpreter for what `interpret` returns."""
    words = name, str(m), str(n), str(k), tile, how
    found: dict[str, Any] = ask("tests.helpers.fused_matmuls", "interpret", *words, TRITON_INTERPRET="1")
    return found


def compile_case(gpu: FakeCuda, name: str, capability: str) -> dict[str, Any]:
    """Compile a case of a large matmul for a GPU; return registers, spills, and how it stores.

    name: of a case, and "symbolic" if M is an argument of the kernel.
    """
    name, _, symbolic = name.partition(" ")
    given = inputs_of(name, 64, 64, 64, True)
    large = {64: 4096, 128: 8192, 96: 4128}
    given = [x.new_empty([large.get(size, size) for size in x.shape]) for x in given]
    shared = 232448 if int(capability) >= 90 else 101376
    sizes = Gpu(int(capability), 132, shared)
    with gpu.there():
        m, _ = found_in(name, given)
        plan = with_code(plan_of(m, sizes), m)
        plan = next(tiled(with_symbolic_m(plan) if symbolic else plan, sizes))
    done = compiled(plan)
    ptx = done.asm["ptx"]
    return {
        "spilled": _spilled(done),
        "shared": done.metadata.shared,
        "tma_stores": len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.global\.shared", ptx)),
        "blocks": sum(len(o.results) * plan.tile.parts for o in plan.outputs if o.kind in ("rows", "columns")),
        "widths": sorted({int(v or 1) * int(b) for v, b in re.findall(r"st\.global(?:\.v(\d))?\.b(\d+)", ptx)}),
        "tensor_cores": bool(re.search(r"wgmma|tcgen05\.mma|mma\.sync", ptx)),
    }


def _spilled(done: Any) -> int:
    """Return the bytes of local memory per thread."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(done.asm["cubin"])
        return resources(run_tool("cuobjdump", "--dump-resource-usage", file))[1]


def answer(gpu: FakeCuda, what: str, *arguments: str) -> Any:
    return {"interpret": interpret, "compiled": compile_case}[what](gpu, *arguments)


if __name__ == "__main__":
    torch.backends.mkldnn.set_flags(False)
    answer_all(functools.partial(answer, FakeCuda(TARGETS["h100"])))
