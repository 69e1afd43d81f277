"""Keep the strides of what attention reads, where a pass has replaced one of the tensors that its backward reads.

before   y = attention(q, k, v);                  gradients = attention_backward(g, q, k, v, o_, ...)
after    y = attention(laid_out(q, [...]), ...);  gradients = attention_backward(g, ..., laid_out(o_, [...]), ...)
changes  nothing: each tensor gets the strides that it has in the joint graph

Strides in a graph do not bind Inductor. It may lay out what attention reads in any way with a contiguous last
dimension, in another way in the backward than in the forward. That is right as long as the forward gives its result to
the backward, since the result then fits q as the forward has read it. A result that `read_copies` makes from FP8 has
the strides of the graph instead, so q, k and v get those of the graph too, in both calls. The kernel that computes a
tensor writes it with these strides; only a tensor that is in memory with others is copied.

Runs on the graphs of forward and backward, after the partitioner.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fp8pass.base.node_meta import STRIDES
from fp8pass.graph.builder import Builder, val
from fp8pass.graph.other_libraries import has_strides, tensors_of
from fp8pass.graph.pass_base import KernelsContext
from fp8pass.quant.kernel_ops import LAID_OUT


class KeepStrides:
    """Lays out the arguments of all ops that have a note."""

    name = "keep_strides"

    def run(self, graph: fx.Graph, context: KernelsContext) -> int:
        """Lay out every argument that Inductor may lay out otherwise; return their number."""
        build = context.builder(graph, self.name)
        return sum(_laid_out(build, node) for node in graph.nodes if STRIDES in node.meta)


def _laid_out(build: Builder, node: fx.Node) -> int:
    given, noted = tensors_of(node), node.meta[STRIDES]
    assert len(given) == len(noted), f"{node.name} reads {len(given)} tensors, and {len(noted)} have a note"
    todo = {n: strides for n, strides in zip(given, noted, strict=True) if strides and not _has(n, strides)}
    for argument, strides in todo.items():
        node.replace_input_with(argument, build.emit(node, LAID_OUT, argument, list(strides)))
    return len(todo)


def _has(argument: fx.Node, strides: Any) -> bool:
    """Return whether Inductor can't but give an argument these strides."""
    return argument.target is LAID_OUT or (argument.op == "placeholder" and has_strides(val(argument), strides))
