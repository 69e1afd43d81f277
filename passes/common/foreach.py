"""Replace an optimizer's `_foreach_` ops on lists of tensors, in Dynamo's graph, by one op for each tensor."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

SPLITS = {
    *("abs", "add", "addcdiv", "addcmul", "clamp_max", "clamp_min", "div", "exp", "lerp", "mul", "neg", "pow"),
    *("reciprocal", "rsqrt", "sign", "sqrt", "sub"),
}
"""Ops whose `_foreach_` form on a list equals the op on each tensor, argument by argument."""


def expand_symbolic(graph: fx.Graph) -> int:
    """Replace ops on lists that have a symbolic number among their arguments by one op for each tensor.

    A learning rate that may change from call to call is such a number. In ops on lists, torch treats it as a constant,
    and recompiles for each value. Returns how many ops were replaced.
    """
    return expand_foreach(graph, lambda node: any(map(_is_symbolic, node.all_input_nodes)))


def expand_foreach(graph: fx.Graph, wanted: Callable[[fx.Node], bool] = lambda _: True) -> int:
    """Replace ops on lists, in Dynamo's graph, by one op for each tensor; return how many were replaced.

    wanted: True for nodes to replace.
    """
    applied = 0
    for node in list(graph.nodes):
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        base = name.removeprefix("_foreach_")
        if name == base or base.removesuffix("_") not in SPLITS or not wanted(node):
            continue
        in_place = base.endswith("_")
        # another reader would need the list as a whole
        if not all(u.target is operator.getitem for u in node.users) and not (in_place and not node.users):
            continue
        count = max(len(a) for a in node.args if isinstance(a, (list, tuple)))
        with graph.inserting_before(node):
            results = [_call_one(graph, node, base, i) for i in range(count)]
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        applied += 1
    return applied


def _call_one(graph: fx.Graph, node: fx.Node, method: str, i: int) -> fx.Node:
    args = [a[i] if isinstance(a, (list, tuple)) else a for a in node.args]
    kwargs = dict(node.kwargs)
    # `value` is positional in `_foreach_` ops, and keyword-only in the ops on one tensor
    if method.removesuffix("_") in ("addcdiv", "addcmul") and len(args) > 3:
        kwargs["value"] = args.pop()
    if method.endswith("_"):
        new = graph.call_method(method, tuple(args), kwargs)
    else:  # a function, not a method: the first argument may be a number, as in 0.9 ** step
        new = graph.call_function(getattr(torch, method), tuple(args), kwargs)
    new.meta = {key: value for key, value in node.meta.items() if key != "example_value"}  # which is a list
    return new


def _is_symbolic(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.SymFloat)
