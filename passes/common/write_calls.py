"""Add calls of torch functions to Dynamo's graph, with the metadata of the call that they replace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass.base._torch import FakeTensor, enable_python_dispatcher, pytree


class CallWriter:
    """Adds calls at the insertion point, with the metadata of `node`."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph = graph
        self.node = node
        self.meta = node.meta
        results = node.meta["example_value"]
        results = results if isinstance(results, (tuple, list)) else [results]
        self.needs_grad = any(r.requires_grad for r in results if isinstance(r, Tensor))
        fakes = (r.fake_mode for r in results if isinstance(r, FakeTensor))
        self.mode: Any = next(fakes, contextlib.nullcontext())

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call of a function, with what it returns for the inputs' examples: tensors or a size."""
        node = self.graph.call_function(function, args, kwargs)
        examples = fx.map_arg((args, kwargs), lambda n: n.meta["example_value"])
        # no_grad: examples are leaves, as Dynamo's are, and get their requires_grad below. In the mode, tensors that
        # the function creates are fake, too; some ops in C++ take symbolic sizes from Python's dispatcher only
        with torch.no_grad(), self.mode, enable_python_dispatcher():
            value = function(*examples[0], **examples[1])
        needs_grad = self.needs_grad and any(_needs_grad(n) for n in node.all_input_nodes)

        def with_grad(x: Tensor) -> Tensor:
            return x.detach().requires_grad_(needs_grad and x.is_floating_point())

        node.meta = {**self.meta, "example_value": pytree.tree_map_only(Tensor, with_grad, value)}
        return node

    def copy(self, to: fx.Node, source: fx.Node) -> fx.Node:
        """Add a call that writes `source` into `to`."""
        node = self.graph.call_method("copy_", (to, source))
        node.meta = dict(self.meta)
        return node

    def replace(self, result: Any) -> None:
        """Erase the call. Its result, or each of its results, becomes `result`, in the dtype that it had."""
        if isinstance(result, fx.Node):
            self.node.replace_all_uses_with(self.as_was(result, self.meta["example_value"]))
        for user in list(self.node.users):  # getitem
            assert isinstance(user.args[1], int)
            user.replace_all_uses_with(self.as_was(result[user.args[1]], user.meta["example_value"]))
            self.graph.erase_node(user)
        self.graph.erase_node(self.node)

    def as_was(self, result: fx.Node, example: Tensor) -> fx.Node:
        """Return `result` in the dtype of `example`, which autocast gave the original call."""
        if result.meta["example_value"].dtype == example.dtype:
            return result
        return self(torch.Tensor.to, result, example.dtype)


def _needs_grad(node: fx.Node) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(node.meta["example_value"]))


def rewrite(graph: fx.Graph, node: fx.Node, writer: Callable[..., Any]) -> bool:
    """Replace a call with what `writer` adds and returns; return False if that is None, and the call stays."""
    with graph.inserting_before(node):
        write = CallWriter(graph, node)
        result = writer(write, *node.args, **node.kwargs)
        if result is not None:
            write.replace(result)
    return result is not None
