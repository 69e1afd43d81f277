"""Budgets of memory for activations: torch's partitioner computes again in the backward what does not fit into them.

A budget is the setting `torch._functorch.config.activation_memory_budget`, or, from torch 2.13 on, that of
`torch.autograd.graph.region_activation_memory_budget`, which is in the metadata of each node.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from fp8pass.base._torch import partitioners
from fp8pass.graph.annotation import graphs_of
from fp8pass.graph.builder import is_tensor

aten = torch.ops.aten
NOT_NEEDED = int(1e9)
"""The partitioner's distance from the backward of nodes that it does not need."""
_KEY = "_region_activation_memory_budget"


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
def saving(is_marked: Callable[[fx.Node], bool]) -> Iterator[None]:
    """Let torch's partitioner save nodes that are marked MUST_SAVE, under every budget, within the context.

    Under a budget of 0 it saves nothing but inputs, whatever is marked, and under others it may save the tuple that a
    node returns, where autograd takes tensors.
    """
    of_torch = partitioners.choose_saved_values_set

    def chosen(joint: fx.Graph, info: Any, memory_budget: float = 1) -> list[fx.Node]:
        saved = of_torch(joint, info, memory_budget=memory_budget)
        if memory_budget == 0:
            saved = [*saved, *(n for n in joint.nodes if is_marked(n))]
        return list(dict.fromkeys(x for n in saved for x in (_needed(n) if is_marked(n) else [n])))

    partitioners.choose_saved_values_set = chosen  # type: ignore[assignment]
    try:
        yield
    finally:
        partitioners.choose_saved_values_set = of_torch


def _needed(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that a node returns and that the backward needs, as the partitioner has found out."""
    tensors = [node] if is_tensor(node) else [x for x in node.users if x.target is operator.getitem and is_tensor(x)]
    return [x for x in tensors if getattr(x, "dist_from_bw", 0) < NOT_NEEDED]


def _nodes(module: fx.GraphModule) -> list[fx.Node]:
    return [node for part in graphs_of(module) for node in part.graph.nodes]


def _budget(node: fx.Node) -> float | None:
    custom = node.meta.get("custom")
    return custom.get(_KEY) if isinstance(custom, dict) else None


def _set_budget(node: fx.Node, budget: float) -> None:
    node.meta["custom"] = {**(node.meta.get("custom") or {}), _KEY: budget}
