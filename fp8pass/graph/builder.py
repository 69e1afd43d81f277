"""Building FX nodes. The only file that writes `node.meta["val"]`.

Inductor allocates memory by `meta["val"]`; a node whose dtype or strides are wrong there corrupts memory instead of
failing. So every node that a pass makes is made here, by running the op on its inputs' fake tensors.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import fx
from torch.fx.node import Argument, Target
from torch.utils.checkpoint import CheckpointPolicy

from fp8pass._torch import (
    EXACT_INPUTS,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    detect_fake_mode,
    enable_python_dispatcher,
    pytree,
    select_decomp_table,
)
from fp8pass.node_meta import GEMM, MADE_BY

aten = torch.ops.aten

_MATMULS = frozenset(
    ("_grouped_mm", "_scaled_grouped_mm", "_scaled_mm", "addmm", "baddbmm", "bmm", "mm", "scaled_grouped_mm")
)


def val(node: object) -> torch.Tensor:
    """The fake tensor of a node: its shape, strides, dtype and device."""
    assert isinstance(node, fx.Node), node
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor), (node, value)
    return value


def is_tensor(x: object) -> TypeGuard[fx.Node]:
    """Return whether x is a node that holds a tensor, not a symbolic size."""
    return isinstance(x, fx.Node) and isinstance(x.meta.get("val"), torch.Tensor)


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """The fake mode that the graph's values live in."""
    values = (n.meta.get("val") for n in graph.nodes)
    first = next((v for v in values if isinstance(v, FakeTensor)), None)
    mode = detect_fake_mode([first])
    assert mode is not None, "the graph holds no fake tensors"
    return mode


def compute(mode: FakeTensorMode, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What `target` computes, on fake tensors; nodes among the arguments stand for theirs."""
    args, kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    with mode, enable_python_dispatcher():  # what C++ has no symbolic sizes for
        return target(*args, **kwargs)


def compute_val(node: fx.Node, mode: FakeTensorMode) -> Any:
    """What `node` computes, on fake tensors."""
    assert callable(node.target)
    return compute(mode, node.target, node.args, node.kwargs)


Computed = dict[fx.Node, tuple[Any, ...]]
"""By node everything that its value depends on, as it was when the value was computed."""


def all_of(node: fx.Node) -> tuple[Any, ...]:
    """Return everything that a node's value depends on, and the value.

    Neither fx nor fake tensors change in place what is listed here: whoever changes it puts another object there.
    """
    return node.target, node.args, node.kwargs, *(n.meta.get("val") for n in (node, *node.all_input_nodes))


_INHERITED = ("stack_trace", "nn_module_stack", "seq_nr", GEMM)
"""Metadata that says where in the user's code a node comes from."""
_REGION = ("recompute", "ac_graph_id")
"""Metadata of what activation checkpointing computes again in the backward: by what policy, and in which region."""


class Builder:
    """Adds nodes to a graph, stamped with the pass that made them.

    computed: gets the new nodes, so that `verify` need not compute again what is still as it was made.
    """

    def __init__(self, graph: fx.Graph, made_by: str, computed: Computed | None = None) -> None:
        self.graph = graph
        self.made_by = made_by
        self.computed = {} if computed is None else computed
        self.gemm = ""
        """The matmul that new nodes stand for, where that is not the one that they are put in front of: see `GEMM`."""
        self.region: fx.Node | None = None
        """The node that new ones are in one region with, where that is not the one that they are put in front of."""
        self.mode = fake_mode_of(graph)

    def emit(self, before: fx.Node, target: Target, *args: Argument, **kwargs: Argument) -> fx.Node:
        """A new node in front of `before`, whose source line it inherits, and whose region of checkpointing."""
        node = self._new(before, target, args, kwargs)
        node.meta["val"] = compute_val(node, self.mode)
        self.computed[node] = all_of(node)
        return node

    def inline(self, before: fx.Node, function: Callable[..., Any], *inputs: fx.Node) -> list[fx.Node]:
        """The ATen ops of `function(*inputs)`, in front of `before`; returns the nodes of its results.

        What a pass computes can so be written, and tested, as a plain torch function.
        """
        recorder = _Recorder(functools.partial(self._new, before), self.computed)
        fakes = [recorder.know(val(node), node) for node in inputs]
        with self.mode, recorder:
            results = function(*fakes)
        return [recorder.node_of[id(r)] for r in (results if isinstance(results, (list, tuple)) else [results])]

    def _new(self, before: fx.Node, target: Target, args: Any, kwargs: Any) -> fx.Node:
        args, kwargs = fx.node.map_aggregate((args, kwargs), functools.partial(self._size, before, args))
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
        node.meta = {key: before.meta[key] for key in _INHERITED if key in before.meta}
        region = (self.region or before).meta
        if region.get("recompute") is not CheckpointPolicy.MUST_SAVE:  # that is said of one result alone
            node.meta.update({key: region[key] for key in _REGION if key in region})
        node.meta[MADE_BY] = self.made_by
        if self.gemm:
            node.meta[GEMM] = self.gemm
        if torch.Tag.needs_exact_strides in getattr(target, "tags", ()):
            # without this, Inductor lays out the inputs of an op that a pass made as it likes: first operands of
            # `_scaled_mm` by columns, which torch refuses
            node.meta[EXACT_INPUTS] = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        return node

    def _size(self, before: fx.Node, args: Any, size: Any) -> Any:
        """Return the node of a symbolic size, which stands for nothing by itself in code that is run as it is.

        args: of a call, the tensors among which mostly have it. Whatever is no symbolic size is returned as it is.
        """
        if not isinstance(size, torch.SymInt):
            return size
        given: list[fx.Node] = []
        fx.map_arg(args, given.append)
        holders = [*given, *(n for n in self.graph.nodes if n.op == "placeholder")]

        def built(expr: Any) -> Any:
            if expr.is_Integer:
                return int(expr)
            for holder in holders:
                if (found := self._read(before, holder, expr)) is not None:
                    return found
            assert expr.is_Add or expr.is_Mul, f"no tensor of the graph has the size {expr}"
            operation = operator.add if expr.is_Add else operator.mul
            return functools.reduce(lambda a, b: self.emit(before, operation, a, b), map(built, expr.args))

        return built(size.node.expr)

    def _read(self, before: fx.Node, holder: fx.Node, expr: Any) -> fx.Node | None:
        """Return a node with the value of `expr`, if `holder` is that number, or has it as a size or stride."""
        value = holder.meta.get("val")
        if isinstance(value, torch.SymInt):
            return holder if value.node.expr == expr else None
        if not isinstance(value, torch.Tensor):
            return None
        both: list[tuple[Any, Any]] = [(aten.sym_size.int, value.shape), (aten.sym_stride.int, value.stride())]
        for op, sizes in both:
            for dim, size in enumerate(sizes):
                if isinstance(size, torch.SymInt) and size.node.expr == expr:
                    return self.emit(before, op, holder, dim)
        return None

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Put `new` in the place of `old`, whose metadata it inherits and whose dtype, shape and strides it has."""
        was, now = val(old), val(new)
        assert was.dtype == now.dtype and laid_out_alike(was, now), (old, was, now)
        for key, value in old.meta.items():
            new.meta.setdefault(key, value)
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)


def laid_out_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether shapes and strides are the same, but for the stride of a dimension of one element.

    That says nothing, and torch's fakes are not of one mind: `x * s` and `empty_like(x)` may differ in it. Of a
    symbolic size one of the tensors may know that it is 1.
    """
    if a.shape != b.shape:
        return False
    dims = zip(a.shape, b.shape, a.stride(), b.stride(), strict=True)
    return all(_is_one(m) or _is_one(n) or s == t for m, n, s, t in dims)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records ATen ops, decomposed as Inductor does it. Unlike `make_fx` local to its thread: backwards have theirs."""

    def __init__(self, record: Callable[[Any, Any, Any], fx.Node], computed: Computed) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = record
        self.computed = computed
        self.decompositions = select_decomp_table()
        self.node_of: dict[int, fx.Node] = {}
        self.alive: list[torch.Tensor] = []

    def know(self, tensor: torch.Tensor, node: fx.Node) -> torch.Tensor:
        """`tensor`, which stands for `node` from here on."""
        self.alive.append(tensor)  # ids of what is gone are given to others
        self.node_of[id(tensor)] = node
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One op."""
        kwargs = kwargs or {}
        for decomposed in (self.decompositions.get(func), func.decompose if func.namespace == "aten" else None):
            with self:
                result = NotImplemented if decomposed is None else decomposed(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if not isinstance(result, torch.Tensor):
            return result  # a question about a tensor, as for its device
        node = self.record(func, *pytree.tree_map_only(torch.Tensor, lambda t: self.node_of[id(t)], (args, kwargs)))
        node.meta["val"] = result
        if all(map(is_tensor, node.all_input_nodes)):  # sizes were numbers here, and are nodes there
            self.computed[node] = all_of(node)
        return self.know(result, node)


def op_name(node: fx.Node) -> str:
    """Return the op that a node calls, without its namespace and overload."""
    name = getattr(node.target, "__name__", str(node.target))
    return str(name).removeprefix("aten.").partition(".")[0]


def multiplies(node: fx.Node) -> bool:
    """Return whether a node multiplies matrices, in whatever precision."""
    return node.op == "call_function" and op_name(node) in _MATMULS


def readable(module: fx.GraphModule) -> str:
    """The graph as Python text with shapes and dtypes."""
    return module.print_readable(print_output=False)
