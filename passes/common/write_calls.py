"""Add calls of torch functions to Dynamo's graph, with the metadata of the call that they replace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass.base._torch import FakeTensor


class CallWriter:
    """Adds calls at the insertion point, with the metadata of `node`."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph = graph
        self.meta = node.meta
        results = node.meta["example_value"]
        results = results if isinstance(results, (tuple, list)) else [results]
        self.needs_grad = any(r.requires_grad for r in results if isinstance(r, Tensor))
        fakes = (r.fake_mode for r in results if isinstance(r, FakeTensor))
        self.mode: Any = next(fakes, contextlib.nullcontext())

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call of a function, with the example value that it returns for the inputs' examples: tensor or size."""
        node = self.graph.call_function(function, args, kwargs)
        examples = fx.map_arg((args, kwargs), lambda n: n.meta["example_value"])
        # no_grad: examples are leaves, as Dynamo's are, and get their requires_grad below
        with torch.no_grad(), self.mode:  # in the mode, tensors that the function creates are fake, too
            value = function(*examples[0], **examples[1])
        if isinstance(value, Tensor):
            needs_grad = self.needs_grad and any(_needs_grad(n) for n in node.all_input_nodes)
            value = value.detach().requires_grad_(needs_grad)
        node.meta = {**self.meta, "example_value": value}
        return node

    def copy(self, to: fx.Node, source: fx.Node) -> fx.Node:
        """Add a call that writes `source` into `to`."""
        node = self.graph.call_method("copy_", (to, source))
        node.meta = dict(self.meta)
        return node

    def as_was(self, result: fx.Node, example: Tensor) -> fx.Node:
        """Return `result` in the dtype of `example`, which autocast gave the original call."""
        if result.meta["example_value"].dtype == example.dtype:
            return result
        return self(torch.Tensor.to, result, example.dtype)


def _needs_grad(node: fx.Node) -> bool:
    value = node.meta["example_value"]
    return isinstance(value, Tensor) and value.requires_grad
