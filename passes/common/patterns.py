"""Sets of ops that several captures use, and general queries of nodes: dtype, constant value, readers, sources."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fp8pass.base._torch import FakeTensor, unset_fake_temporarily
from fp8pass.base.names import source_of
from fp8pass.base.scaling import FP8_DTYPES
from fp8pass.graph.builder import is_tensor, val

aten, prims = torch.ops.aten, torch.ops.prims

# The `dtype` overloads of matmuls are those with `out_dtype`.
ADDING_MATMULS = (
    aten.addmm.default,
    aten.baddbmm.default,
    aten.addmm.dtype,
    aten.baddbmm.dtype,
)
MATMULS = (aten.mm.default, aten.bmm.default, aten.mm.dtype, aten.bmm.dtype, *ADDING_MATMULS)
ALL_MATMULS = (*MATMULS, aten._grouped_mm.default)
"""All matmuls, with the grouped ones of experts, which run in other kernels."""

CONSTANTS = {aten.full.default, aten.scalar_tensor.default}

# a cast is traced as _to_copy, of which Inductor's decompositions make convert_element_type
CASTS = {prims.convert_element_type.default, aten._to_copy.default}
WIDE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

MULTIPLYING = {aten.mul.Tensor, aten.mul.Scalar}
DIVIDING = {aten.div.Tensor, aten.div.Scalar}
ADDING = {aten.add.Tensor, aten.sub.Tensor}

# Movement: ops that rearrange elements without changing their values, as Inductor's decompositions leave them.
RESHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
SPLITS = {aten.split.Tensor, aten.split_with_sizes.default}
COPIES = {aten.clone.default, aten.alias.default}
VIEWS = {
    *RESHAPES,
    aten.permute.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.diagonal.default,
    aten.unfold.default,
    *SPLITS,
    aten.unbind.int,
    operator.getitem,
}
# prims.rev is what Inductor's decompositions make of flip
GATHERS = {aten.repeat.default, aten.index.Tensor, aten._unsafe_index.Tensor, aten.embedding.default, prims.rev.default}
JOINS = {aten.cat.default, aten.where.self}
MOVEMENT = {*VIEWS, *COPIES, *GATHERS, *JOINS, aten.constant_pad_nd.default}
_c10d = torch.ops._c10d_functional
COLLECTIVES = {_c10d.all_gather_into_tensor.default, _c10d.all_to_all_single.default, _c10d.broadcast.default}
"""Collectives that move elements between ranks and change none."""


def as_node(x: Any) -> fx.Node:
    """Assert that `x` is a node, and return it."""
    assert isinstance(x, fx.Node), x
    return x


def first(node: fx.Node) -> fx.Node:
    """Return the first argument of `node`, which must be a node."""
    return as_node(node.args[0])


def at(node: fx.Node) -> str:
    """Return the name of a node for reasons, with the user's source line if torch recorded it."""
    return f"{node.name} ({source_of(node)})" if source_of(node) else node.name


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """Return the dtype of a node; None if it is not a tensor."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def dtype_name(dtype: torch.dtype | None) -> str:
    """Return the name of a dtype without its module, such as "float32"; "no tensor" for None."""
    return str(dtype).removeprefix("torch.") if dtype is not None else "no tensor"


def is_wide_cast(node: fx.Node) -> bool:
    """Return whether `node` casts from one high-precision type to another, on the same device."""
    if node.target not in CASTS:
        return False
    old, new = val(first(node)), val(node)
    return old.dtype in WIDE and new.dtype in WIDE and old.device == new.device


def constant(x: Any) -> float | None:
    """Return the real number that every element of `x` holds, if the graph shows it; otherwise None."""
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
    with unset_fake_temporarily():  # a real tensor, whose value can be read
        return float(torch.tensor(value).to(val(x).dtype))  # 0.1 is another number in bfloat16, and 0 as an integer


def _attribute(node: fx.Node) -> float | None:
    """Return the number in a one-element constant of the graph, such as `torch.tensor(448.0)` in compiled code."""
    module = node.graph.owning_module
    tensor = getattr(module, str(node.target), None)
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor) or tensor.numel() != 1:
        return None
    with unset_fake_temporarily():
        return float(tensor)


def one_number(x: Any) -> Any:
    """Return the number or one-element tensor that equals every element of `x`; None if none is known."""
    number = constant(x)
    if number is not None:
        return number
    while is_tensor(x) and x.target is aten.expand.default and not has_one_element(x):
        x = x.args[0]
    return x if is_tensor(x) and has_one_element(x) else None


def has_one_element(node: fx.Node) -> bool:
    """Return whether `node` is known to have one element, without adding a guard on a symbolic size."""
    return all(isinstance(size, int) and size == 1 for size in val(node).shape)


def is_elementwise(node: fx.Node) -> bool:
    """Return whether `node` is a pointwise op, a view or a cast: each element depends on one element of each input."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or (node.target in VIEWS | CASTS and is_tensor(node.args[0]))


def is_elementwise_in_high_precision(node: fx.Node) -> bool:
    """Return whether `is_elementwise` holds for a node, and its result is not in FP8, which is another tensor."""
    return is_elementwise(node) and dtype_of(node) not in FP8_DTYPES


def same_value(x: Any, depth: int = 8) -> Hashable:
    """Return a key that is equal only for one-element arguments that certainly hold the same value.

    They do if they are the same elementwise ops on the same nodes. depth: how many ops to compare.
    """
    if not is_tensor(x):
        return str(x)
    if x.target in RESHAPES | COPIES:
        return same_value(first(x), depth)
    tags = getattr(x.target, "tags", ())
    # of the pointwise ops of ATen, rrelu draws random numbers: two calls with equal arguments differ
    if not depth or torch.Tag.nondeterministic_seeded in tags or not (x.target in CASTS or torch.Tag.pointwise in tags):
        return x
    return x.target, tuple(same_value(a, depth - 1) for a in x.args), str(x.kwargs), val(x).dtype


def changes_places(node: fx.Node) -> bool:
    """Return whether a scale commutes with `node`: movement, casts, negation, scaling by one number, adding 0."""
    if node.target in MULTIPLYING or node.target in DIVIDING:
        return any(one_number(a) is not None for a in node.args)
    if node.target in ADDING:
        return constant(node.args[1]) == 0
    return node.target in MOVEMENT or node.target in CASTS or node.target is aten.neg.default


MAX_OPS_BETWEEN = 4
"""Most ops that do not commute with a scale between an FP8 tensor and a matmul, for the matmul to count as meant to be
FP8."""


def fp8_source(node: fx.Node, ops_between: int = 0) -> fx.Node | None:
    """Return a float8 tensor of any kind that `node` is computed from by ops that commute with its scale; None if none.

    ops_between: how many other ops may be in between. The search never goes through a matmul.
    """
    return next((n for n in _within(node, ops_between, lambda n: n.all_input_nodes) if _is_float8(n)), None)


def feeds_matmul(node: fx.Node) -> bool:
    """Return whether a matmul reads `node`, through at most MAX_OPS_BETWEEN ops that do not commute with a scale."""
    return any(n.target in ALL_MATMULS for n in _within(node, MAX_OPS_BETWEEN, lambda n: list(n.users)))


def _within(node: fx.Node, ops_between: int, neighbours: Callable[[fx.Node], list[fx.Node]]) -> Iterator[fx.Node]:
    """Yield `node` and all nodes that it reaches through at most `ops_between` ops that do not commute with a scale.

    Paths end at matmuls.
    """
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


def always(_: fx.Node) -> bool:
    """Return True: a walk goes on through every node."""
    return True


def through(node: fx.Node, views: Container[object]) -> fx.Node:
    """Return the first node, from `node` on along first arguments, whose op is not one of `views`."""
    while node.target in views:
        node = first(node)
    return node


def reach(
    starts: Iterable[fx.Node],
    neighbours: Callable[[fx.Node], Iterable[fx.Node]],
    through: Callable[[fx.Node], bool] = always,
) -> dict[fx.Node, None]:
    """Return the starts and all nodes that a walk from them meets, nearest first. Keys of a dict, to be in order.

    neighbours: returns the nodes next to a node. through: returns whether the walk goes on from a node that it has met;
    it goes on from every start.
    """
    met = dict.fromkeys(starts)
    todo = deque(met)
    while todo:
        for node in neighbours(todo.popleft()):
            if node not in met:
                met[node] = None
                if through(node):
                    todo.append(node)
    return met


def readers(node: fx.Node, looked_through: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Return the nodes that read `node`, directly or through ops that `looked_through` accepts."""
    return _ends(node, lambda n: n.users, lambda n: n.op != "output" and looked_through(n))


def sources(node: fx.Node, looked_through: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Return the tensors that `node` is computed from, directly or through ops that `looked_through` accepts."""
    return _ends(node, lambda n: filter(is_tensor, n.all_input_nodes), looked_through)


def _ends(
    node: fx.Node, neighbours: Callable[[fx.Node], Iterable[fx.Node]], through: Callable[[fx.Node], bool]
) -> list[fx.Node]:
    """Return the nodes at which a walk from `node` ends."""
    return [n for n in reach([node], neighbours, through) if n is not node and not through(n)]


def move_before(at: fx.Node, nodes: Sequence[fx.Node]) -> fx.Node:
    """Move `nodes`, and the nodes that they depend on, before `at`; return the node that they stand before now.

    That is a later one if `at` is one of `nodes`. None of the others may depend on it.
    """
    while at in nodes:
        at = at.next
    later = reach([n for n in nodes if n > at], lambda node: (n for n in node.all_input_nodes if n > at))
    for node in sorted(later):
        assert at not in node.all_input_nodes, f"{node} reads {at}"
        at.prepend(node)
    return at
