"""Budgets of memory for activations: torch's partitioner computes again in the backward what does not fit into them.

A budget is the setting `torch._functorch.config.activation_memory_budget`, or, from torch 2.13 on, that of
`torch.autograd.graph.region_activation_memory_budget`, which is in the metadata of each node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import fx

from fp8pass.base._torch import functorch_config
from fp8pass.graph.annotation import graphs_of

aten = torch.ops.aten
_KEY = "_region_activation_memory_budget"
_LEAST = 1e-9


@contextlib.contextmanager
def in_region(module: fx.GraphModule) -> Iterator[None]:
    """Give the nodes that passes insert within the context the budget of the others.

    Torch accepts no graph of which only a part has a budget.
    """
    # AOTAutograd's writes to mutated inputs, here those of state, have none either
    outside = {n for n in _nodes(module) if _budget(n) is None and n.target is not aten.copy_.default}
    yield
    found = (budget for node in _nodes(module) if (budget := _budget(node)) is not None)
    if (budget := next(found, None)) is not None:
        for node in _nodes(module):
            if node not in outside and _budget(node) is None:
                _set_budget(node, budget)


@contextlib.contextmanager
def heeding_must_save(joint: fx.GraphModule) -> Iterator[None]:
    """Replace a budget of 0 by the least above it within the context: at 0 torch saves nothing but inputs."""
    for node in _nodes(joint):
        if _budget(node) == 0:
            _set_budget(node, _LEAST)
    with functorch_config.patch(activation_memory_budget=functorch_config.activation_memory_budget or _LEAST):
        yield


def _nodes(module: fx.GraphModule) -> list[fx.Node]:
    return [node for part in graphs_of(module) for node in part.graph.nodes]


def _budget(node: fx.Node) -> float | None:
    custom = node.meta.get("custom")
    return custom.get(_KEY) if isinstance(custom, dict) else None


def _set_budget(node: fx.Node, budget: float) -> None:
    node.meta["custom"] = {**(node.meta.get("custom") or {}), _KEY: budget}
