"""Check that a graph is legal, after every pass that changed it.

A legal graph lints; `meta["val"]` of every node that a pass made has the shape, strides, dtype and device that the node
computes; and the arguments of every op that another library runs have the strides that they had before the passes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fp8pass.base.node_meta import MADE_BY
from fp8pass.graph.builder import Computed, all_of, compute_val, fake_mode_of, laid_out_alike
from fp8pass.graph.other_libraries import Arguments, check_strides


def verify(
    graph: fx.Graph, computed: Computed | None = None, before: Arguments | None = None, made_by: str = "a pass"
) -> None:
    """Raise AssertionError, naming the node, unless the graph is legal.

    computed: nodes whose values were computed or checked before, which are skipped unless something that they depend on
    has changed. Gets the nodes that are checked now. before: `arguments_of` the graph before the passes. made_by: the
    pass that has run.
    """
    graph.lint()
    mode = fake_mode_of(graph)
    computed = {} if computed is None else computed
    for node in graph.nodes:
        if before and node in before:
            check_strides(node, before, made_by)
        if node.op != "call_function" or MADE_BY not in node.meta:
            continue
        state = all_of(node)
        earlier = computed.get(node, ())
        # by identity, not by `==`, which on symbolic sizes would add guards
        if len(earlier) == len(state) and all(map(operator.is_, earlier, state)):
            continue
        says, really = node.meta["val"], compute_val(node, mode)
        assert _alike(says, really), (
            f"{node.meta[MADE_BY]} made {node.name} = {node.target} and says it is {_describe(says)}; it is "
            f"{_describe(really)}"
        )
        computed[node] = state


def _alike(a: Any, b: Any) -> bool:
    """Return whether both look the same to nodes that read them. Comparing texts needs no guard on symbolic sizes."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and _describe(a) != _describe(b):
        return (a.dtype, a.device) == (b.dtype, b.device) and laid_out_alike(a, b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_alike, a, b))
    return bool(_describe(a) == _describe(b))


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), str(tuple(value.shape)), str(value.stride()), str(value.device)
    if isinstance(value, (list, tuple)):
        return [_describe(v) for v in value]
    return type(value).__name__
