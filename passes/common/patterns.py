"""Ops that several captures know, and what one can say of a node without knowing what it is for."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from fp8pass._torch import FakeTensor, unset_fake_temporarily
from fp8pass.graph.builder import is_tensor, val
from fp8pass.names import source_of

aten, prims = torch.ops.aten, torch.ops.prims

ADDING_MATMULS = (
    aten.addmm.default,
    aten.baddbmm.default,
    aten.addmm.dtype,
    aten.baddbmm.dtype,
)
MATMULS = (aten.mm.default, aten.bmm.default, aten.mm.dtype, aten.bmm.dtype, *ADDING_MATMULS)
ALL_MATMULS = (*MATMULS, aten._grouped_mm.default)
"""Those of experts too, which have kernels of their own."""

CASTS = {prims.convert_element_type.default, aten._to_copy.default}
WIDE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

MULTIPLYING = {aten.mul.Tensor, aten.mul.Scalar}
DIVIDING = {aten.div.Tensor, aten.div.Scalar}
ADDING = {aten.add.Tensor, aten.sub.Tensor}

# Movement: ops that rearrange elements and change none, as Inductor's decompositions leave them.
RESHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
COPIES = {aten.clone.default, aten.alias.default}
VIEWS = {
    *RESHAPES,
    aten.permute.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.diagonal.default,
    aten.unfold.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    operator.getitem,
}
GATHERS = {aten.repeat.default, aten.index.Tensor, aten._unsafe_index.Tensor, aten.embedding.default, prims.rev.default}
JOINS = {aten.cat.default, aten.where.self}
MOVEMENT = {*VIEWS, *COPIES, *GATHERS, *JOINS, aten.constant_pad_nd.default}


def as_node(x: Any) -> fx.Node:
    """`x`, which is a node."""
    assert isinstance(x, fx.Node), x
    return x


def first(node: fx.Node) -> fx.Node:
    """The first argument, where that is a tensor."""
    return as_node(node.args[0])


def at(node: fx.Node) -> str:
    """A node as reasons name it: with the user's line, where torch knows it."""
    return f"{node.name} ({source_of(node)})" if source_of(node) else node.name


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """The dtype of a node; None for what is no tensor."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def dtype_name(dtype: torch.dtype | None) -> str:
    """The name of a dtype without its module: float32."""
    return str(dtype).removeprefix("torch.") if dtype is not None else "no tensor"


def is_wide_cast(node: fx.Node) -> bool:
    """A cast from one high-precision type to another, on the same device."""
    if node.target not in CASTS:
        return False
    old, new = val(first(node)), val(node)
    return old.dtype in WIDE and new.dtype in WIDE and old.device == new.device


def constant(x: Any) -> float | None:
    """The real number that `x` holds in every element, if the graph says so; None if it does not."""
    if isinstance(x, (int, float)):
        return float(x)
    if not is_tensor(x) or val(x).dtype.is_complex:
        return None
    if x.op == "get_attr":
        return _attribute(x)
    if x.target is aten.full.default:
        value: Any = x.args[1]
    elif x.target is aten.scalar_tensor.default:
        value = x.args[0]
    elif x.target in {*CASTS, *VIEWS, *COPIES, aten.lift_fresh_copy.default}:
        value = constant(x.args[0])
    else:
        return None
    if not isinstance(value, (int, float)):
        return None
    with unset_fake_temporarily():
        return float(torch.tensor(value).to(val(x).dtype))


def _attribute(node: fx.Node) -> float | None:
    """The number in a constant tensor that the graph holds: `torch.tensor(448.0)` in compiled code."""
    module = node.graph.owning_module
    tensor = getattr(module, str(node.target), None)
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor) or tensor.numel() != 1:
        return None
    with unset_fake_temporarily():
        return float(tensor)


def one_number(x: Any) -> Any:
    """What `x` is one and the same value of, in every element: a number or a one-element tensor; None if it is not."""
    known = constant(x)
    if known is not None:
        return known
    while is_tensor(x) and x.target is aten.expand.default and not has_one_element(x):
        x = x.args[0]
    return x if is_tensor(x) and has_one_element(x) else None


def has_one_element(node: fx.Node) -> bool:
    """Return whether that is known, without a guard."""
    return all(isinstance(size, int) and size == 1 for size in val(node).shape)


def is_elementwise(node: fx.Node) -> bool:
    """Return whether each element of `node` is made of elements at its place, or is one: views and casts too."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or (node.target in VIEWS | CASTS and is_tensor(node.args[0]))


def same_value(x: Any, depth: int = 8) -> Hashable:
    """Equal for one-element arguments that certainly hold the same: the same elementwise ops on the same nodes."""
    if not is_tensor(x):
        return str(x)
    if x.target in RESHAPES | COPIES:
        return same_value(first(x), depth)
    tags = getattr(x.target, "tags", ())
    if not depth or torch.Tag.nondeterministic_seeded in tags or not (x.target in CASTS or torch.Tag.pointwise in tags):
        return x
    return x.target, tuple(same_value(a, depth - 1) for a in x.args), str(x.kwargs), val(x).dtype


def changes_places(node: fx.Node) -> bool:
    """Whether a scale commutes with `node`, or is it: movement, casts, negation, scaling by one number, adding 0."""
    if node.target in MULTIPLYING or node.target in DIVIDING:
        return any(one_number(a) is not None for a in node.args)
    if node.target in ADDING:
        return constant(node.args[1]) == 0
    return node.target in MOVEMENT or node.target in CASTS or node.target is aten.neg.default


MAX_OPS_BETWEEN = 4
"""Ops that a scale does not commute with, between an FP8 tensor and a matmul that still seems meant to be FP8."""


def fp8_behind(node: fx.Node, ops_between: int = 0) -> fx.Node | None:
    """A float8 tensor of any kind, behind `node` and ops that change places with its scale.

    ops_between: how many other ops may be in between; matmuls are never looked through.
    """
    return next((n for n in _within(node, ops_between, lambda n: n.all_input_nodes) if _is_float8(n)), None)


def feeds_matmul(node: fx.Node) -> bool:
    """Return whether a matmul reads `node`, by way of no more ops than `fp8_behind` looks through."""
    return any(n.target in ALL_MATMULS for n in _within(node, MAX_OPS_BETWEEN, lambda n: list(n.users)))


def _within(node: fx.Node, ops_between: int, neighbours: Callable[[fx.Node], list[fx.Node]]) -> Iterator[fx.Node]:
    """All nodes that are that near; matmuls end the way."""
    budget, todo = {node: ops_between}, [node]
    while todo:
        node = todo.pop()
        yield node
        left = budget[node] - (0 if node.op == "call_function" and changes_places(node) else 1)
        if left < 0 or node.target in ALL_MATMULS or node.target is aten._scaled_mm.default:
            continue
        for n in neighbours(node):
            if budget.get(n, -1) < left:
                budget[n] = left
                todo.append(n)


def _is_float8(node: fx.Node) -> bool:
    dtype = dtype_of(node)
    return dtype is not None and dtype.is_floating_point and dtype.itemsize == 1


def readers(node: fx.Node, looked_through: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """What reads `node`, directly or behind ops that are looked through."""
    return _reached(node, lambda n: n.users, lambda n: n.op != "output" and looked_through(n))


def sources(node: fx.Node, looked_through: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """The tensors that `node` is computed of, directly or by ops that are looked through."""
    return _reached(node, lambda n: filter(is_tensor, n.all_input_nodes), looked_through)


def _reached(
    node: fx.Node, neighbours: Callable[[fx.Node], Iterable[fx.Node]], looked_through: Callable[[fx.Node], bool]
) -> list[fx.Node]:
    found: list[fx.Node] = []
    seen, todo = {node}, deque([node])
    while todo:
        new = [n for n in neighbours(todo.popleft()) if n not in seen]
        seen.update(new)
        for n in new:
            (todo if looked_through(n) else found).append(n)
    return found


def move_before(at: fx.Node, nodes: Iterable[fx.Node]) -> None:
    """Move `nodes`, and what they are computed of, in front of `at`, which none of them depends on."""
    late: set[fx.Node] = set()
    todo = [n for n in nodes if n > at]
    while todo:
        node = todo.pop()
        if node not in late:
            assert node is not at
            late.add(node)
            todo += [n for n in node.all_input_nodes if n > at]
    for node in sorted(late):
        at.prepend(node)
