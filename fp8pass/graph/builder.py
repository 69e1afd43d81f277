"""Build FX nodes. The only file that writes `node.meta["val"]`.

Inductor allocates memory by `meta["val"]`; a node whose dtype or strides are wrong there corrupts memory instead of
failing. So every node that a pass makes is made here, by running the op on its inputs' fake tensors.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeGuard

import sympy
import torch
from torch import fx
from torch.fx.node import Argument, Target
from torch.fx.operator_schemas import normalize_function
from torch.utils.checkpoint import CheckpointPolicy

from fp8pass.base._torch import (
    EXACT_INPUTS,
    FORCE_STRIDE_ORDER,
    FakeTensor,
    FakeTensorMode,
    FloorDiv,
    Mod,
    PythonMod,
    TorchDispatchMode,
    another_like,
    computed_by_meta,
    detect_fake_mode,
    enable_python_dispatcher,
    is_alias_of,
    select_decomp_table,
)
from fp8pass.base.node_meta import GEMM, MADE_BY
from fp8pass.quant.kernel_ops import QUANTIZE
from fp8pass.quant.ops import RECORD

aten = torch.ops.aten

_MATMULS = frozenset(
    ("_grouped_mm", "_scaled_grouped_mm", "_scaled_mm", "addmm", "baddbmm", "bmm", "mm", "scaled_grouped_mm")
)


def val(node: object) -> torch.Tensor:
    """Return the fake tensor of a node: its shape, strides, dtype and device."""
    assert isinstance(node, fx.Node), node
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor), (node, value)
    return value


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call of an op by their names, with the defaults of those that are left out."""
    found = normalize_function(node.target, node.args, node.kwargs, normalize_to_only_use_kwargs=True)  # type: ignore[arg-type]
    return dict(node.kwargs if found is None else found.kwargs)


def is_tensor(x: object) -> TypeGuard[fx.Node]:
    """Return whether x is a node that holds a tensor, not a symbolic size."""
    return isinstance(x, fx.Node) and isinstance(x.meta.get("val"), torch.Tensor)


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """Return the fake mode of the graph's values."""
    values = (n.meta.get("val") for n in graph.nodes)
    # one value: `detect_fake_mode` looks at all that it is given, and each builder asks it
    first = next((v for v in values if isinstance(v, FakeTensor)), None)
    mode = detect_fake_mode([first])
    assert mode is not None, "the graph holds no fake tensors"
    return mode


_BY_META = frozenset(
    (
        FORCE_STRIDE_ORDER,
        aten._scaled_mm.default,
        aten.amax.default,
        aten.clone.default,
        aten.expand.default,
        aten.permute.default,
        aten.reshape.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.unsqueeze.default,
        aten.view.default,
    )
)
"""The ops that passes make most: their result is one tensor, on the device of their first argument."""

_LIKE_FIRST: dict[object, Callable[..., torch.dtype]] = {
    **dict.fromkeys(
        (aten.abs.default, aten.clamp_max.default, aten.clamp_min.default, aten.reciprocal.default, RECORD),
        lambda x, *_: x.dtype,
    ),
    aten.mul.Tensor: lambda x, _: x.dtype,
    torch.ops.prims.convert_element_type.default: lambda _, dtype: dtype,
    QUANTIZE: lambda _, scale, dtype: dtype,
}
"""{op whose result has the layout of its first argument, if that is contiguous: its dtype}. The others of its tensors
have the dtype of the first and one element, or are scales."""


def _computed_fast(
    mode: FakeTensorMode, target: Callable[..., Any], args: Sequence[Any], kwargs: Any
) -> FakeTensor | None:
    """Compute an op without the fake mode, in a fraction of the time; return None if that is not possible."""
    if not (target in _BY_META or target in _LIKE_FIRST) or _is_symbolic(args):
        return None
    if target in _BY_META:
        return computed_by_meta(mode, target, args, kwargs)
    x, *others = args
    tensors = [y for y in others if isinstance(y, torch.Tensor)]
    if target is not QUANTIZE and any(y.dim() or y.dtype != x.dtype for y in tensors):
        return None
    return another_like(x, _LIKE_FIRST[target](*args)) if x.is_floating_point() and x.is_contiguous() else None


def _is_symbolic(x: Any) -> bool:
    if isinstance(x, (list, tuple)):
        return any(map(_is_symbolic, x))
    return isinstance(x, torch.SymInt) or (isinstance(x, torch.Tensor) and x._has_symbolic_sizes_strides)


def compute(mode: FakeTensorMode, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Compute `target` on fake tensors; a node among the arguments stands for its fake tensor."""
    args, kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    if (result := _computed_fast(mode, target, args, kwargs)) is not None:
        return result
    with mode, enable_python_dispatcher():  # some implementations in C++ take no symbolic sizes
        return target(*args, **kwargs)


def compute_val(node: fx.Node, mode: FakeTensorMode) -> Any:
    """Compute `node` on fake tensors."""
    assert callable(node.target)
    return compute(mode, node.target, node.args, node.kwargs)


Computed = dict[fx.Node, tuple[Any, ...]]
"""{node: everything that its value depended on when it was computed, see `all_of`}."""


def all_of(node: fx.Node) -> tuple[Any, ...]:
    """Return everything that a node's value depends on, and the value.

    fx and fake tensors do not change these objects in place, so comparing identities finds any change.
    """
    return node.target, node.args, node.kwargs, *(n.meta.get("val") for n in (node, *node.all_input_nodes))


_INHERITED = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "seq_nr", GEMM)
"""Keys of metadata that says where in the user's code a node comes from."""
_REGION = ("recompute", "ac_graph_id")
"""Keys of metadata of nodes that activation checkpointing recomputes in the backward: the policy and the region."""


Inlined = tuple[Sequence[fx.Node], list[fx.Node], list[fx.Node]]
"""(inputs, all nodes, nodes of the results): `Builder.inline` writes one function into a graph as these nodes."""


def _layout(x: torch.Tensor) -> tuple[Hashable, ...]:
    return x.shape, x.stride(), x.dtype, x.device


class Builder:
    """Adds nodes to a graph, marked with the name of the pass that makes them.

    computed: gets the new nodes, so that `verify` does not compute them again unless they have changed.
    """

    def __init__(self, graph: fx.Graph, made_by: str, computed: Computed | None = None) -> None:
        self.graph = graph
        self.made_by = made_by
        self.computed = {} if computed is None else computed
        self.gemm = ""
        """The matmul that new nodes belong to, if it is not that of the node after them: see `GEMM`."""
        self.region: fx.Node | None = None
        """The node whose region of checkpointing new nodes join, if it is not the node after them."""
        self.like: fx.Node | None = None
        """The node whose source line new nodes have, if it is not that of the node after them."""
        self.mode = fake_mode_of(graph)
        self._inlined: dict[Hashable, Inlined] = {}

    def emit(self, before: fx.Node, target: Target, *args: Argument, **kwargs: Argument) -> fx.Node:
        """Insert a node before `before`, and return it. It inherits the source line and region of checkpointing."""
        node = self._new(before, target, args, kwargs)
        node.meta["val"] = compute_val(node, self.mode)
        self.computed[node] = all_of(node)
        return node

    def inline(
        self, before: fx.Node, function: Callable[..., Any], *inputs: fx.Node, key: Hashable = None
    ) -> list[fx.Node]:
        """Insert the ATen ops of `function(*inputs)` before `before`; return the nodes of its results.

        So the computation of a pass can be written, and tested, as a plain torch function. key: equal for functions
        that compute the same. Then the ops are copied from the last call with this key and such inputs, if there was
        one: that takes a fifth of the time.
        """
        whole = None if key is None else (key, *(_layout(val(node)) for node in inputs))
        if whole in self._inlined:
            return self._again(before, self._inlined[whole], inputs)
        # the ops run on the nodes' fake tensors; the mode records each as a node before `before`
        recorder = _Recorder(self.mode, functools.partial(self._new, before), self.computed)
        fakes = [recorder.know(val(node), node) for node in inputs]
        with self.mode, recorder:
            results = function(*fakes)
        nodes = [recorder.node_of[id(r)] for r in (results if isinstance(results, (list, tuple)) else [results])]
        if whole is not None:
            self._inlined[whole] = inputs, recorder.made, nodes
        return nodes

    def _again(self, before: fx.Node, inlined: Inlined, inputs: Sequence[fx.Node]) -> list[fx.Node]:
        """Copy the nodes that `inline` has made of a function, for other inputs."""
        earlier, made, results = inlined
        copies = dict(zip(earlier, inputs, strict=True))
        for node in made:
            args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = copy = self._new(before, node.target, args, kwargs)
            value, of = val(node), node.all_input_nodes
            if isinstance(value, FakeTensor) and not (of and is_alias_of(value, val(of[0]))):
                copy.meta["val"] = another_like(value, value.dtype)
            else:
                copy.meta["val"] = compute_val(copy, self.mode)
            self.computed[copy] = all_of(copy)
        return [copies[result] for result in results]

    def _new(self, before: fx.Node, target: Target, args: Any, kwargs: Any) -> fx.Node:
        args, kwargs = fx.node.map_aggregate((args, kwargs), functools.partial(self._size, before, args))
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
        source = (self.like or before).meta
        node.meta = {key: source[key] for key in _INHERITED if key in source}
        region = (self.region or self.like or before).meta
        if region.get("recompute") is not CheckpointPolicy.MUST_SAVE:  # which is about one result, not about a region
            node.meta.update({key: region[key] for key in _REGION if key in region})
        node.meta[MADE_BY] = self.made_by
        if self.gemm:
            node.meta[GEMM] = self.gemm
        if torch.Tag.needs_exact_strides in getattr(target, "tags", ()):
            # without this, Inductor chooses the strides of the inputs of an op that a pass made: it makes first
            # operands of `_scaled_mm` column-major, which torch refuses
            node.meta[EXACT_INPUTS] = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        return node

    def _size(self, before: fx.Node, args: Any, size: Any) -> Any:
        """Return a node that computes a symbolic size, and anything else as it is.

        In code that runs op by op a SymInt would be an undefined name. args: arguments of the call that has the size;
        a tensor among them usually has it as a dimension.
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
                if (node := self._read(before, holder, expr)) is not None:
                    return node
            if expr.is_Symbol:  # a size that depends on data, which no input has
                earlier = itertools.takewhile(lambda n: n is not before, self.graph.nodes)
                node = next(filter(None, (self._read(before, n, expr) for n in earlier)), None)
                assert node is not None, f"no tensor of the graph has the size {expr}"
                return node
            operation = _OPERATIONS[type(expr)]
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
        """Replace `old` by `new`, which inherits its metadata and must have its dtype, shape and strides."""
        was, now = val(old), val(new)
        assert was.dtype == now.dtype and laid_out_alike(was, now), (old, was, now)
        for key, value in old.meta.items():
            new.meta.setdefault(key, value)  # not over `val`, which belongs to what `new` computes
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)


_OPERATIONS = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    FloorDiv: operator.floordiv,
    Mod: operator.mod,
    PythonMod: operator.mod,
}
"""The functions that torch's expressions of sizes call."""


def laid_out_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether shapes and strides are equal, except for the strides of dimensions with one element.

    These strides have no meaning, and torch's fake implementations differ in them: `x * s` and `empty_like(x)`, for
    example. If a size is symbolic, only one of the tensors may know that it is 1.
    """
    if a.shape != b.shape:
        return False
    dims = zip(a.shape, b.shape, a.stride(), b.stride(), strict=True)
    return all(_is_one(m) or _is_one(n) or s == t for m, n, s, t in dims)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records ATen ops, decomposed as in Inductor. Local to its thread, unlike `make_fx`: backwards have their own."""

    def __init__(self, mode: FakeTensorMode, record: Callable[[Any, Any, Any], fx.Node], computed: Computed) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        self.record = record
        self.computed = computed
        self.decompositions = select_decomp_table()
        self.node_of: dict[int, fx.Node] = {}
        self.made: list[fx.Node] = []
        self.alive: list[torch.Tensor] = []

    def know(self, tensor: torch.Tensor, node: fx.Node) -> torch.Tensor:
        """Let `tensor` stand for `node` from now on; return it."""
        self.alive.append(tensor)  # Python gives ids of freed objects to new ones
        self.node_of[id(tensor)] = node
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record one op, or the ops that it decomposes into."""
        kwargs = kwargs or {}
        fast = None if func in self.decompositions else _computed_fast(self.mode, func, args, kwargs)
        if fast is not None:
            return self._recorded(fast, func, args, kwargs)
        # Inductor's table, then the composite implementation, if the op has one (otherwise NotImplemented)
        for decomposed in (self.decompositions.get(func), func.decompose if func.namespace == "aten" else None):
            # torch takes the mode off while this runs; with it on, what the op decomposes into comes back here
            with self:
                result = NotImplemented if decomposed is None else decomposed(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if not isinstance(result, torch.Tensor):
            return result  # a query, for example for a tensor's device
        return self._recorded(result, func, args, kwargs)

    def _recorded(self, result: torch.Tensor, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        def node_of(x: Any) -> Any:
            return self.node_of[id(x)] if isinstance(x, torch.Tensor) else x

        node = self.record(func, *fx.node.map_aggregate((args, kwargs), node_of))
        node.meta["val"] = result
        self.made.append(node)
        if all(map(is_tensor, node.all_input_nodes)):  # a symbolic size was a number here, and is a node in the graph
            self.computed[node] = all_of(node)
        return self.know(result, node)


def erase_unused(graph: fx.Graph) -> None:
    """Erase nodes that nothing reads, as `eliminate_dead_code` does.

    That lints the graph, as `verify` does too, and asks of each node in use whether it has side effects.
    """
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)


def op_name(node: fx.Node) -> str:
    """Return the op that a node calls, without its namespace and overload."""
    name = getattr(node.target, "__name__", str(node.target))
    return str(name).removeprefix("aten.").partition(".")[0]


def multiplies(node: fx.Node) -> bool:
    """Return whether a node multiplies matrices, in any precision."""
    return node.op == "call_function" and op_name(node) in _MATMULS


def readable(module: fx.GraphModule) -> str:
    """Return the graph as Python text with shapes and dtypes."""
    return module.print_readable(print_output=False)
