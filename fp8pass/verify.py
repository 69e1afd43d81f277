"""What a legal graph is, checked after every pass that changed one.

A pass must leave a graph that lints, in which every node that it made says of itself what it computes: shape, strides,
dtype and device in `meta["val"]`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fp8pass.graph import MADE_BY, compute_val, fake_mode_of, laid_out_alike

Verified = dict[fx.Node, tuple[Any, ...]]
"""By node what it was when it was checked: everything that its value depends on."""


def verify(graph: fx.Graph, verified: Verified | None = None) -> None:
    """Raise AssertionError, naming the node, unless the graph is legal.

    verified: nodes that were checked before, and are not checked again unless something of theirs is another object
    now; is added to.
    """
    graph.lint()
    mode = fake_mode_of(graph)
    verified = {} if verified is None else verified
    for node in graph.nodes:
        if node.op != "call_function" or MADE_BY not in node.meta:
            continue
        state = _state(node)
        known = verified.get(node, ())
        if len(known) == len(state) and all(map(operator.is_, known, state)):
            continue
        recorded, computed = node.meta["val"], compute_val(node, mode)
        assert _alike(recorded, computed), (
            f"{node.meta[MADE_BY]} made {node.name} = {node.target} and says it is {_describe(recorded)}; it is "
            f"{_describe(computed)}"
        )
        verified[node] = state


def _state(node: fx.Node) -> tuple[Any, ...]:
    """Neither fx nor fake tensors change in place what is listed here: whoever changes it puts another object there."""
    return node.target, node.args, node.kwargs, *(n.meta.get("val") for n in (node, *node.all_input_nodes))


def _alike(a: Any, b: Any) -> bool:
    """Return whether both are the same to whoever reads them. Equal texts need no guard on symbolic sizes."""
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
