"""Tell which ops another library runs, and compare the strides of their arguments before and after a pass.

Inductor writes the code of pointwise ops, views and reductions itself, for whatever strides their inputs have. The code
of attention, convolutions, collectives and custom ops comes from other libraries, and is called for the strides of the
annotated graph: torch looks up cuDNN's plan for the backward of attention by the strides of q, k and v, and the plan
has those of the result.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass.base._torch import HigherOrderOperator, OpOverload, inductor_lowering
from fp8pass.base.node_meta import MADE_BY, STRIDES
from fp8pass.graph.builder import is_tensor, multiplies, val
from fp8pass.graph.sizes import alike

aten = torch.ops.aten

Arguments = Mapping[fx.Node, tuple[Any, tuple[Tensor, ...]]]
"""{node that another library runs: (its target, its tensor arguments)}."""


def runs_elsewhere(node: fx.Node) -> bool:
    """Return whether a node calls an op that another library runs, which no pass has made.

    Matmuls do not count: passes rewrite them, and `_scaled_mm` has layouts of its own. Nor do nodes that passes made:
    the pass that makes a kernel lays out what the kernel reads.
    """
    if node.op != "call_function" or MADE_BY in node.meta or not _is_elsewhere(node.target):
        return False
    return not multiplies(node)


@functools.cache
def _is_elsewhere(target: Any) -> bool:
    # kernels of the user's, flex_attention, and branches, whose graphs were traced for the strides of their inputs
    if isinstance(target, HigherOrderOperator):
        return True
    if not isinstance(target, OpOverload) or target.namespace in ("prims", "prim", "fp8pass"):
        return False
    if target.namespace == "aten":
        return target in inductor_lowering.fallbacks or target is aten.convolution.default
    return True


def arguments_of(graph: fx.Graph) -> Arguments:
    """Return the arguments of all ops of the graph that another library runs."""
    return {node: (node.target, tuple(map(val, tensors_of(node)))) for node in graph.nodes if runs_elsewhere(node)}


def tensors_of(node: fx.Node) -> list[fx.Node]:
    """Return the tensors among a node's arguments, in order; one that is passed twice, twice."""
    return [argument for _, argument in _named(node)]


def check_strides(node: fx.Node, before: Arguments, made_by: str) -> None:
    """Raise AssertionError if the strides of an argument differ from those before, or from those in its note.

    An op that was replaced passes. made_by: the pass that ran. Adds no guard on a symbolic size.
    """
    target, were = before.get(node, (None, ()))
    if node.target is not target:
        return
    now, noted = list(_named(node)), node.meta.get(STRIDES, [None] * len(were))
    assert len(now) == len(were), f"{made_by} left {node.name} = {target} {len(now)} tensors; it read {len(were)}"
    for (name, argument), old, note in zip(now, were, noted, strict=True):
        new = val(argument)
        assert new is old or has_strides(new, old.stride()) or (note and has_strides(new, note)), (
            f"{made_by} gave {node.name} = {target} another layout of `{name}`: {argument.name} has strides "
            f"{new.stride()}, not {old.stride()}; another library runs this op, so passes keep what it reads"
        )


def has_strides(x: Tensor, strides: Sequence[Any]) -> bool:
    """Return whether `x` has these strides for all sizes of this compilation, but for dimensions with one element."""
    if x.dim() != len(strides):
        return False
    long = [d for d in range(x.dim()) if not _is_one(x.shape[d])]  # the stride of a single element has no meaning
    return alike([x.stride(d) for d in long], [strides[d] for d in long])


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _named(node: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    """Yield the tensors among a node's arguments, with the names of the arguments."""
    schema = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema is not None else []
    for position, given in enumerate(node.args):
        yield from ((names[position] if position < len(names) else str(position), n) for n in _in(given))
    for name, given in node.kwargs.items():
        yield from ((name, n) for n in _in(given))


def _in(argument: Any) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    fx.map_arg(argument, nodes.append)
    return [n for n in nodes if is_tensor(n)]
