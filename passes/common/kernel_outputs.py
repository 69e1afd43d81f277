"""List what a kernel writes that computes elementwise ops tile by tile, and write these ops as a graph.

For the passes that write such kernels: after a matmul, or by themselves.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass.base._torch import call_of_kernel, hint_of, triton_kernel_wrapper_functional
from fp8pass.base.node_meta import ONE_STAGE
from fp8pass.graph.builder import Builder, val
from fp8pass.passes.common.after_matmul import TileEpilogue
from fp8pass.passes.common.block_scales import BlockScales, contiguous_copies
from fp8pass.passes.common.patterns import RESHAPES, as_node, aten, first, prims
from fp8pass.passes.common.transposed_copies import of_amax


@dataclass(frozen=True)
class Made:
    """An output of the kernel: of which tensors it consists, side by side, and the node that it replaces.

    quantize: the node whose scale and dtype the tensors are quantized with; None for others. blocks: how they are
    scaled instead, or whose numbers these are.
    """

    kind: str
    of: tuple[fx.Node, ...]
    instead_of: fx.Node
    dtype: torch.dtype
    quantize: fx.Node | None = None
    blocks: BlockScales | None = None

    @property
    def results(self) -> list[tuple[fx.Node, fx.Node | None]]:
        """The results of the epilogue that the output consists of, each with the quantize that scales it."""
        return [(node, self.quantize) for node in self.of]


def outputs_of(e: TileEpilogue) -> Iterator[Made]:
    """Yield what a kernel writes that computes these ops."""
    closed, numbers = e.closed(), set[fx.Node]()
    for node in e.amaxes:
        yield Made("amax", tuple(e.parts(of_amax(node))), node, val(node).dtype)
    for node in e.sums:
        yield Made("sums", tuple(e.parts(first(node))), node, torch.float32)
    for node in e.quantizes:
        parts, dtype, blocks = tuple(e.parts(e.quantized(node))), val(node).dtype, e.blocks.get(node)
        scaled = None if blocks else node, blocks
        stored = blocks.stored if blocks else node
        if not closed.issuperset(stored.users):
            yield Made("columns" if blocks and blocks.is_turned else "rows", parts, stored, dtype, *scaled)
        for copy, copied in e.copies.items():
            if copied is node:
                yield Made("columns", parts, copy, dtype, *scaled)
        for number in [n for n in blocks.kept if n not in numbers] if blocks else ():
            numbers.add(number)
            yield Made("numbers", parts, number, val(number).dtype, *scaled)
    if e.kept is not None:
        yield Made("rows", e.products.parts if e.kept is e.matmul else (e.kept,), e.kept, val(e.kept).dtype)


def results_of(e: TileEpilogue, made: Sequence[Made]) -> list[tuple[fx.Node, fx.Node | None]]:
    """Return what the kernel computes for these outputs, in order.

    First what does not depend on the products: what it shares with the rest need not be held for it.
    """
    results = dict.fromkeys(r for m in made for r in m.results)  # in order, so that the kernel is the same everywhere
    return sorted(results, key=lambda r: (r[0] in e.after, r[0], r[1] is not None))


def module_of(e: TileEpilogue, results: Sequence[tuple[fx.Node, fx.Node | None]]) -> fx.GraphModule:
    """Return the ops of a kernel as a graph on matrices [M, N], whose first inputs are the products.

    What is quantized is only scaled: the kernel casts what it stores.
    """
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}

    def take(node: fx.Node, value: torch.Tensor) -> None:
        if node not in made:
            made[node] = graph.placeholder(f"in{len(made)}")
            made[node].meta["val"] = value

    for part in e.products.parts:
        take(part, val(part).new_empty(hint_of(e.products.m), e.products.n))
    for reader, node in e.reads():
        take(node, e.as_matrix(reader, node))
    for q, scale in e.scales.items():
        take(scale, e.as_matrix(q, scale))
    e.arrange(graph, made)
    for node in e.nodes:
        made[node] = made[first(node)] if node.target in RESHAPES else graph.node_copy(node, made.__getitem__)

    def result(computed: fx.Node, q: fx.Node | None) -> fx.Node:
        if q is None:
            return made[computed]
        wide = graph.call_function(prims.convert_element_type.default, (made[computed], torch.float32))
        return graph.call_function(aten.mul.Tensor, (wide, made[as_node(q.args[1])]))

    graph.output(tuple(result(computed, q) for computed, q in results))
    return fx.GraphModule({}, graph)


def replace_by_kernel(
    build: Builder,
    at: fx.Node,
    kernel: tuple[Any, Sequence[int]],
    given: Mapping[str, Any],
    made: Sequence[Made],
    shapes: Sequence[Sequence[Any]],
) -> None:
    """Call a kernel before `at`, and let readers of what it computes read its outputs.

    kernel: a Triton kernel, and the number of programs in each of its configurations. given: its arguments but for
    outputs, by name. shapes: of what it writes for `made`.
    """
    function, programs = kernel
    device = val(made[0].instead_of).device
    # the op is functional, but Inductor lets the kernel write into these tensors, which nothing else reads
    # (reinplace.py)
    outputs = {
        f"out{i}": build.emit(at, aten.empty.memory_format, shape, dtype=o.dtype, device=device)
        for i, (o, shape) in enumerate(zip(made, shapes, strict=True))
    }
    call = call_of_kernel(function, programs, {**given, **outputs}, list(outputs))
    result = build.emit(at, triton_kernel_wrapper_functional, **call)
    for name, o in zip(outputs, made, strict=True):
        finished = _finished(build, at, o, build.emit(at, operator.getitem, result, name))
        o.instead_of.replace_all_uses_with(finished)


def erase_unread(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erase the nodes among these that nothing reads any more: the next match would count them as readers."""
    for node in sorted(set(nodes), reverse=True):  # readers before what they read
        if not node.users:
            graph.erase_node(node)


def _finished(build: Builder, at: fx.Node, o: Made, made: fx.Node) -> fx.Node:
    """Emit what is left to do after the kernel: the last stage of reductions, and shapes."""
    wanted = val(o.instead_of)
    if o.kind == "amax":
        return build.emit(at, aten.amax.default, made)
    if o.kind == "numbers":
        made = _numbers(build, at, o, made)
    if o.kind.startswith("amaxes"):
        made = build.emit(at, aten.amax.default, made, [0])
        made.meta[ONE_STAGE] = True
    if o.kind == "sums":
        made = build.emit(at, aten.sum.dim_IntList, made, [0])
        if wanted.dtype != torch.float32:
            made = build.emit(at, prims.convert_element_type.default, made, wanted.dtype)
    shape = list(wanted.shape)
    return made if list(val(made).shape) == shape else build.emit(at, aten.reshape.default, made, shape)


def _numbers(build: Builder, at: fx.Node, o: Made, made: fx.Node) -> fx.Node:
    """Emit the blocks' scales in their order in the graph; readers of a copy in the kernel's order get its output."""
    assert o.blocks is not None
    if not o.blocks.is_moved:
        return made
    views = [u for u in o.instead_of.users if u.target in RESHAPES]
    moved = [u for v in views for u in v.users if u.target is aten.permute.default and u.args[1] == [1, 0]]
    for copy in [c for m in moved for c in contiguous_copies(m) if val(c).shape == val(made).shape]:
        copy.replace_all_uses_with(made)
    turned = build.emit(at, aten.permute.default, made, [1, 0])
    return build.emit(at, aten.clone.default, turned, memory_format=torch.contiguous_format)
