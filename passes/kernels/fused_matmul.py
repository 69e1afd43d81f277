"""Generate one kernel for a matmul and the ops after it: what `fuse_matmuls` does with each matmul; see there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.base._torch import hint_of
from fp8pass.base.errors import first_line
from fp8pass.base.names import short
from fp8pass.base.node_meta import GEMM
from fp8pass.graph.builder import Builder, erase_unused, val
from fp8pass.graph.pass_base import KernelsContext
from fp8pass.hardware import target_of
from fp8pass.passes.common.after_matmul import TileEpilogue, epilogue_of, products_of
from fp8pass.passes.common.copy_part import alone
from fp8pass.passes.common.gpu import Gpu, gpu_of
from fp8pass.passes.common.kernel_outputs import (
    Made,
    erase_unread,
    module_of,
    outputs_of,
    replace_by_kernel,
    results_of,
)
from fp8pass.passes.common.patterns import (
    as_node,
    aten,
    has_one_element,
    is_elementwise_in_high_precision,
    move_before,
    readers,
)
from fp8pass.passes.common.transposed_copies import saturation_flag
from fp8pass.passes.kernels.element_addresses import CannotFuse
from fp8pass.passes.kernels.fused_plan import ANY, Matmul, Output, Plan
from fp8pass.passes.kernels.matmul_source import kernel_of
from fp8pass.passes.kernels.tile_sizes import candidates
from fp8pass.passes.kernels.trial_compile import shared_memory
from fp8pass.passes.kernels.triton_epilogue import Read, written
from fp8pass.passes.kernels.triton_epilogue import TritonEpilogue as Code
from fp8pass.passes.kernels.when_to_fuse import Decide
from fp8pass.quant.kernel_ops import QUANTIZE

log = logging.getLogger(__name__)

_PASS = "fuse_matmuls"
"""The name of the pass, which new nodes bear."""


@dataclass(frozen=True)
class FusedMatch:
    """A matmul with its epilogue. made: the outputs of the kernel. results: what the epilogue computes, in order."""

    epilogue: TileEpilogue
    made: list[Made]
    results: list[tuple[fx.Node, fx.Node | None]]


def match(matmul: fx.Node) -> FusedMatch | None:
    """Return what can go into the kernel of a `_scaled_mm`; None if nothing can."""
    # as two halves first: ops that combine gate and up do not fit the whole matrix
    for products in products_of(matmul):
        if (e := epilogue_of(products)) is not None:
            made = list(outputs_of(e))
            return FusedMatch(e, made, results_of(e, made))
    return None


def why_other(matmul: fx.Node) -> str:
    """Return the reason why the kernels here do not compute this matmul; "" if they do."""
    if matmul.kwargs or _arguments(matmul)[5] is not None or val(matmul).dtype.itemsize == 1:
        return "it scales its result"
    a, b, scale_a, scale_b = (val(as_node(x)) for x in matmul.args[:4])
    if not all(isinstance(size, int) for size in (*b.shape, *a.stride(), *b.stride())):
        return "its K or N is symbolic"
    if not a.stride()[1] == b.stride()[0] == 1:
        return "its operands are not contiguous along the sum"
    of_rows = scale_a.shape[1:] == (1,) and statically_known_true(scale_a.shape[0] == a.shape[0])
    by_rows = of_rows and scale_b.shape == (1, b.shape[1])
    by_tensor = scale_b.numel() == 1 and has_one_element(as_node(matmul.args[2]))
    scaled = (by_rows or by_tensor) and scale_a.dtype == scale_b.dtype == torch.float32
    return "" if scaled else "its scales are those of blocks"


def _arguments(matmul: fx.Node) -> list[Any]:
    """Return all eight arguments of a `_scaled_mm`; None for those that are left out."""
    return [*matmul.args, *[None] * 8][:8]


def plan_of(m: FusedMatch, gpu: Gpu) -> Plan:
    """Return the kernel's plan, without a tile, and without code: only with the matrices that its epilogue reads."""
    e = m.epilogue
    matmul, first_input = _matmul(m, gpu), len(e.products.parts)
    outputs = tuple(
        Output(o.kind, tuple(map(m.results.index, o.results)), o.dtype, o.instead_of is e.matmul) for o in m.made
    )
    reads = (
        Read("", i, val(n).dtype, matmul.n, 1, 0) for i, n in enumerate(e.inputs, first_input) if e.products.holds(n)
    )
    return Plan(matmul, Code(tuple(reads), ()), outputs, ANY, gpu.capability, 0)


def with_code(plan: Plan, m: FusedMatch) -> Plan:
    """Return the plan with the code of the epilogue. Raises CannotFuse if an op can't be generated."""
    return replace(plan, epilogue=written(module_of(m.epilogue, m.results), plan.matmul.products))


def tiled(plan: Plan, gpu: Gpu) -> Iterator[Plan]:
    """Yield the plan with each tile that fits the GPU, the best as far as is known first. Raises CannotFuse if none."""
    fits = False
    for tile in candidates(plan, gpu.shared_memory):
        fitted = replace(plan, tile=tile)
        down, across = fitted.tiles()
        programs = gpu.multiprocessors if plan.matmul.symbolic else min(gpu.multiprocessors, down * across)
        fitted = replace(fitted, programs=programs)
        if shared_memory(fitted) <= gpu.shared_memory:
            fits = True
            yield fitted
    if not fits:
        moved = plan.bytes_per_element
        raise CannotFuse(f"no tile whose epilogue moves {moved} bytes per element fits into {gpu.shared_memory} bytes")


# by plan and not by node: equal layers are timed once
_fastest: dict[tuple[Plan, Gpu], Plan | str] = {}
"""{(a plan without a tile, a GPU): the plan with the fastest tile, or the reason why two kernels are better}."""


def fastest(m: FusedMatch, plan: Plan, gpu: Gpu, seconds_of: Callable[[fx.GraphModule], float]) -> Plan:
    """Return the plan with the tile that takes least time. Raises CannotFuse if what runs otherwise takes less.

    seconds_of: times a graph. The graphs hold everything that the kernel computes, and the last stages of its amaxes.
    """
    if plan.matmul.symbolic:
        raise CannotFuse("its M is symbolic, and only kernels for one size are timed; epilogues='always' fuses it")
    if (plan, gpu) not in _fastest:
        _fastest[plan, gpu] = _timed(m, plan, gpu, seconds_of)
    if isinstance(outcome := _fastest[plan, gpu], str):
        raise CannotFuse(outcome)
    return outcome


def _timed(m: FusedMatch, plan: Plan, gpu: Gpu, seconds_of: Callable[[fx.GraphModule], float]) -> Plan | str:
    try:
        apart = seconds_of(_alone(m))
        fused = {p: seconds_of(_fused_alone(m, p, gpu)) for p in tiled(plan, gpu)}
    except Exception as error:  # noqa: BLE001, of many types: from Inductor, Triton and CUDA
        log.warning("fp8pass: %s could not be timed, and stays as it is: %s", m.epilogue.matmul, first_line(error))
        return f"timing it failed: {first_line(error)}"
    best = min(fused, key=fused.__getitem__)
    if fused[best] < apart:
        return best
    return f"one kernel takes {1e6 * fused[best]:.0f} us as timed, and separate ones {1e6 * apart:.0f} us"


def _alone(m: FusedMatch) -> fx.GraphModule:
    """Return a graph of the matmul and of what its kernel could compute after it."""
    e = m.epilogue
    return alone({*e.matmul.all_input_nodes, *e.inputs}, [o.instead_of for o in m.made])


def _fused_alone(m: FusedMatch, plan: Plan, gpu: Gpu) -> fx.GraphModule:
    """Return the graph of `_alone` after its rewrite."""
    module = _alone(m)
    matched = match(*module.graph.find_nodes(op="call_function", target=aten._scaled_mm.default))
    assert matched is not None
    same = with_code(plan_of(matched, gpu), matched) == replace(plan, tile=ANY, programs=0)
    assert same, "alone, the matmul is matched in another way"
    rewrite(Builder(module.graph, _PASS), matched, plan)
    erase_unused(module.graph)
    return module


def _matmul(m: FusedMatch, gpu: Gpu) -> Matmul:
    node, products = m.epilogue.matmul, m.epilogue.products
    a, b = (val(as_node(x)) for x in node.args[:2])
    scales = "tensorwise" if has_one_element(as_node(node.args[2])) else "rowwise"
    bias = None if _arguments(node)[4] is None else val(as_node(_arguments(node)[4])).dtype
    fast = bool(_arguments(node)[7]) or gpu.capability >= 100  # whose tensor cores add in float32 in any case
    operands, strides = (a.dtype, b.dtype), (a.stride()[0], b.stride()[1])
    symbolic = not isinstance(products.m, int)
    return Matmul(
        hint_of(products.m), products.n, a.shape[1], len(products.parts), operands, strides, scales, bias,
        val(node).dtype, fast, symbolic,
    )  # fmt: skip


def fuse(matmul: fx.Node, context: KernelsContext) -> bool:
    """Rewrite one matmul if its epilogue can be generated, and pays."""
    device, name = val(matmul).device, matmul.meta.get(GEMM, "")
    decide = Decide(context.config.epilogues, target_of(device, context.config.target))
    if not decide.may_fuse(times=context.seconds_of is not None):
        return False
    try:
        if reason := why_other(matmul):
            raise CannotFuse(reason)
        if (m := match(matmul)) is None:
            if any(map(saturation_flag, _quantizes_after(matmul))):
                context.fused[name] = REQUANTIZES
            return False
        plan = _planned(m, gpu_of(device), decide, context.seconds_of)
    except CannotFuse as error:
        reason = f"its kernel does not compute the ops after it: {error}"
        log.debug("%s: %s", name or matmul.name, reason)
        if decide.how == "always":
            context.fused[name] = reason
        return False
    context.fused[name] = _said(m, plan, "" if context.seconds_of is not None else decide.how_known)
    rewrite(context.builder(matmul.graph, _PASS), m, plan)
    return True


REQUANTIZES = (
    "its kernel does not quantize its result: under on_saturation='requantize' a tensor that saturates is quantized "
    "again from high precision, which this kernel would not write"
)


def _quantizes_after(matmul: fx.Node) -> list[fx.Node]:
    """Return the quantizes of the result of a matmul, or of what is computed from it elementwise."""
    return [n for n in readers(matmul, is_elementwise_in_high_precision) if n.target is QUANTIZE]


def _planned(m: FusedMatch, gpu: Gpu, decide: Decide, seconds_of: Callable[[fx.GraphModule], float] | None) -> Plan:
    """Return the plan of the kernel, with its tile. Raises CannotFuse if none fits, or if two kernels are better."""
    plan = with_code(plan_of(m, gpu), m)
    if seconds_of is not None and decide.how == "auto":
        return fastest(m, plan, gpu, seconds_of)
    if reason := decide.why_apart(plan):
        raise CannotFuse(reason)
    return next(tiled(plan, gpu))


def _said(m: FusedMatch, plan: Plan, how_known: str) -> str:
    """Return a sentence for the matmul's verdict, which ends with how it is known that one kernel is better."""
    made = dict.fromkeys(short(val(q).dtype) for q in m.epilogue.quantizes)
    what = f"computes the ops after it and quantizes to {', '.join(made)}" if made else "computes the ops after it"
    saved = (plan.bytes_apart - plan.extra_bytes) / 1e6
    return f"its kernel {what}, which moves {saved:.0f} MB less{how_known}"


def rewrite(build: Builder, m: FusedMatch, plan: Plan) -> None:
    """Call the kernel, and let readers of what it computes read its outputs."""
    e, dead = m.epilogue, m.epilogue.closed()
    given = [a for a in e.matmul.args[:5] if isinstance(a, fx.Node)]
    # a companion does not depend on the matmul, so its readers may stand before it
    at = min([e.matmul.next, *(user for o in m.made for user in o.instead_of.users)])
    at = move_before(at, [*given, *e.inputs])
    build.like = e.matmul
    operands = dict(zip(["a", "b", "scale_a", "scale_b", "bias"], given, strict=False))  # without a bias, four
    inputs = {f"in{i}": node for i, node in enumerate(e.inputs, len(e.products.parts))}
    rows = build.emit(at, aten.sym_size.int, given[0], 0) if plan.matmul.symbolic else plan.matmul.m
    arguments = {**operands, **inputs, **({"m": rows} if plan.matmul.symbolic else {})}
    shapes = [_shape(plan, o, rows) for o in plan.outputs]
    replace_by_kernel(build, at, (kernel_of(plan), [plan.programs]), arguments, m.made, shapes)
    build.like = None
    erase_unread(build.graph, {e.matmul, *e.nodes, *dead})


def _shape(plan: Plan, output: Output, rows: Any) -> list[Any]:
    """Return the shape of an output. rows: M, or a node that holds it."""
    shape = plan.shape(output)
    return [rows, *shape[1:]] if output.kind == "rows" else shape
