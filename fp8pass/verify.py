"""What a legal graph is, checked after every pass that changed one.

A pass must leave a graph that lints, in which every node that it made says of itself what it computes: shape, strides,
dtype and device in `meta["val"]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8pass.graph import MADE_BY, compute_val, fake_mode_of


def verify(graph: fx.Graph) -> None:
    """Raise AssertionError, naming the node, unless the graph is legal."""
    graph.lint()
    mode = fake_mode_of(graph)
    for node in graph.nodes:
        if node.op == "call_function" and MADE_BY in node.meta:
            recorded, computed = _describe(node.meta["val"]), _describe(compute_val(node, mode))
            assert recorded == computed, (
                f"{node.meta[MADE_BY]} made {node.name} = {node.target} and says it is {recorded}; it is {computed}"
            )


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), str(tuple(value.shape)), str(value.stride()), str(value.device)
    if isinstance(value, (list, tuple)):
        return [_describe(v) for v in value]
    return type(value).__name__
