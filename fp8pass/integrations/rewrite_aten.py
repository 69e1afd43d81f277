"""Copy a user's graph as a flat, functional graph of ATen ops, in which every node has its fake tensor."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functional_call, functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from fp8pass.base._torch import FakeTensor, FakeTensorMode, HigherOrderOperator, OpOverload, pytree
from fp8pass.base.errors import Fp8Error, first_line
from fp8pass.graph.annotation import copy_to_edit

aten = torch.ops.aten

_COMPOSITES = {
    aten.bilinear.default,
    aten.chain_matmul.default,
    aten.einsum.default,
    aten.inner.default,
    aten.linalg_multi_dot.default,
    aten.linear.default,
    aten.matmul.default,
    aten.tensordot.default,
}
"""Ops that `torch.export` leaves whole, and that multiply matrices: they are traced again, as their matmuls."""


def functional_aten(gm: fx.GraphModule, leaves: Sequence[Any]) -> fx.GraphModule:
    """Return a copy of a graph for the passes; parameters and buffers stay attributes, the inputs become flat.

    leaves: example inputs, one for each input of the graph.

    Raises:
        Fp8Error: If the inputs are not those of the graph, or if it can't be traced to ATen ops.
    """
    flat = copy_to_edit(gm)
    _drop_guards(flat)
    placeholders = flat.graph.find_nodes(op="placeholder")
    leaves = _with_defaults(placeholders, leaves)
    _check_inputs(placeholders, leaves)
    mode = _its_mode(flat.graph)
    if not _is_functional_aten(flat.graph):
        flat = _traced(flat, leaves, mode)
    elif mode is None:
        _find_values(flat, leaves)
    output = flat.graph.output_node()
    (results,) = output.args
    output.args = (tuple(pytree.tree_leaves(results)),)
    return flat


def _drop_guards(module: fx.GraphModule) -> None:
    """Remove the check of inputs that `ExportedProgram.module()` begins with: it reads sizes as Python numbers."""
    for node in module.graph.find_nodes(op="call_module", target="_guards_fn"):
        if not node.users:
            module.graph.erase_node(node)


def _with_defaults(placeholders: Sequence[fx.Node], leaves: Sequence[Any]) -> list[Any]:
    missing = placeholders[len(leaves) :]
    if len(leaves) > len(placeholders) or not all(p.args for p in missing):
        names = ", ".join(p.name for p in placeholders[:8]) + (", ..." if len(placeholders) > 8 else "")
        raise Fp8Error(
            f"example_inputs hold {len(leaves)} values, and the graph takes {len(placeholders)}: {names}. Pass what "
            "the graph is called with; tuples, lists and dicts in it are flattened"
        )
    return [*leaves, *(p.args[0] for p in missing)]


def _check_inputs(placeholders: Sequence[fx.Node], leaves: Sequence[Any]) -> None:
    for node, x in zip(placeholders, leaves, strict=True):
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            continue
        same = isinstance(x, Tensor) and x.dtype == value.dtype and x.device == value.device and x.dim() == value.dim()
        if not same or any(isinstance(s, int) and s != t for s, t in zip(value.shape, x.shape, strict=True)):
            was = f"{value.dtype}{list(value.shape)} on {value.device}"
            got = f"{x.dtype}{list(x.shape)} on {x.device}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise Fp8Error(f"the graph was traced with {node.name} = {was}, and example_inputs have {got} there")


def _its_mode(graph: fx.Graph) -> FakeTensorMode | None:
    """Return the fake mode of the graph's values; None if not all nodes have a value of one mode."""
    modes: dict[int, FakeTensorMode] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op not in ("get_attr", "output") and "val" not in node.meta:
            return None
        if isinstance(value, FakeTensor):
            modes[id(value.fake_mode)] = value.fake_mode
    return next(iter(modes.values())) if len(modes) == 1 else None


def _is_functional_aten(graph: fx.Graph) -> bool:
    """Return whether all ops are ATen ops, or control flow, that write into nothing and contain no matmul."""
    for node in graph.nodes:
        if node.op in ("call_method", "call_module"):
            return False
        if node.op != "call_function":
            continue
        is_op = isinstance(node.target, OpOverload | HigherOrderOperator)
        if not is_op and getattr(node.target, "__module__", "") not in ("_operator", "math", "torch"):
            return False
        if not is_op and (node.target in _MATMULS_OF_PYTHON or _reads_tensors(node)):
            return False
        if node.target in _COMPOSITES or (isinstance(node.target, OpOverload) and node.target._schema.is_mutable):
            return False
    return True


_MATMULS_OF_PYTHON = {operator.matmul, operator.imatmul}


def _reads_tensors(node: fx.Node) -> bool:
    """Return whether a Python function, such as `operator.add`, computes with tensors, and not with sizes."""
    return node.target is not operator.getitem and any(
        isinstance(n.meta.get("val", n), Tensor | fx.Node) for n in node.all_input_nodes
    )


def _fakes_of(mode: FakeTensorMode, values: Sequence[Any]) -> list[Any]:
    def fake(x: Any) -> Any:
        if isinstance(x, FakeTensor) and x.fake_mode is mode:
            return x
        if isinstance(x, FakeTensor):
            with mode:
                return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return mode.from_tensor(x.detach(), static_shapes=True) if isinstance(x, Tensor) else x

    return [fake(x) for x in values]


class _Attributes:
    """The tensors that a graph, or a module that it calls, reads: parameters, buffers, constants. Each counts once.

    names: the first name of each. own: those of parameters and buffers.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        owned = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.own = set(owned)
        names = {id(x): name for name, x in owned.items()}
        self._known = dict(owned)
        self._first: dict[str, str] = {}
        for node in module.graph.find_nodes(op="get_attr"):
            value = attribute(module, str(node.target))
            if isinstance(value, Tensor):
                self._first[str(node.target)] = first = names.setdefault(id(value), str(node.target))
                self._known.setdefault(first, value)
        self.names = list(self._known)
        self.tensors = list(self._known.values())

    def by_target(self, values: Sequence[Any]) -> dict[str, Any]:
        """Return values, one for each name, by the targets of the graph's `get_attr`."""
        value_of = dict(zip(self.names, values, strict=True))
        return {target: value_of[first] for target, first in self._first.items()}


def attribute(module: fx.GraphModule, target: str) -> Any:
    """Return what a `get_attr` of a graph reads."""
    owner, _, name = target.rpartition(".")
    return getattr(module.get_submodule(owner), name)


class _Values(fx.Interpreter):
    """Runs a graph on fake tensors, which each node keeps."""

    def __init__(self, module: fx.GraphModule, attributes: Mapping[str, Any], keeps: bool) -> None:
        super().__init__(module)
        self.attributes = attributes
        self.keeps = keeps

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.attributes[target] if target in self.attributes else super().get_attr(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if self.keeps and n.op != "output":
            n.meta["val"] = result
        return result


class _Interpreted(torch.nn.Module):
    """Runs a graph node by node, so that the new nodes keep its source lines."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, attributes: Mapping[str, Any], *inputs: Any) -> Any:
        return _Values(self.module, attributes, keeps=False).run(*inputs, enable_io_processing=False)


def _find_values(module: fx.GraphModule, leaves: Sequence[Any]) -> None:
    """Compute the fake tensors of all nodes, in one mode."""
    mode, attributes = FakeTensorMode(), _Attributes(module)
    fakes, inputs = _fakes_of(mode, attributes.tensors), _fakes_of(mode, leaves)
    run = _Values(module, attributes.by_target(fakes), keeps=True).run
    with mode, torch.no_grad():
        _explained(lambda: run(*inputs, enable_io_processing=False))


def _traced(module: fx.GraphModule, leaves: Sequence[Any], mode: FakeTensorMode | None) -> fx.GraphModule:
    """Trace the graph again: in ATen ops, with writes into tensors only at its end, into its inputs."""
    if mode is not None:  # its sizes may be symbolic
        leaves = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
    mode, attributes = mode or FakeTensorMode(), _Attributes(module)
    count = len(attributes.names)
    fakes = [*_fakes_of(mode, attributes.tensors), *_fakes_of(mode, leaves)]

    def run(*values: Any) -> Any:
        tensors = {f"module.{n}": x for n, x in zip(attributes.names, values, strict=False) if n in attributes.own}
        inputs = (attributes.by_target(values[:count]), *values[count:])
        # tie_weights: a parameter may have several names, of which `tensors` has one
        return functional_call(_Interpreted(module), tensors, inputs, tie_weights=True)

    with mode, torch.no_grad(), preserve_node_meta():
        traced = _explained(lambda: make_fx(run)(*fakes))
        if not _is_functional_aten(traced.graph):
            traced = _explained(lambda: make_fx(functionalize(run))(*fakes))
    return _with_attributes(module, traced, attributes.names)


def _explained(trace: Callable[[], Any]) -> Any:
    try:
        return trace()
    except Exception as error:
        raise Fp8Error(
            f"the graph can't be traced to ATen ops with these inputs: {type(error).__name__}: {first_line(error)}. "
            "Pass a graph of torch functions or of ATen ops that runs on the example inputs"
        ) from error


def _with_attributes(module: fx.GraphModule, traced: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    """Return the traced graph, whose first inputs become attributes again, and whose others keep their names."""
    graph = copy_to_edit(traced).graph
    inputs = graph.find_nodes(op="placeholder")
    placeholders = module.graph.find_nodes(op="placeholder")
    for node, name in zip(inputs, names, strict=False):
        if node.users:
            with graph.inserting_after(inputs[-1]):
                read = graph.create_node("get_attr", name)
            read.meta = dict(node.meta)
            node.replace_all_uses_with(read)
        graph.erase_node(node)
    for node, old in zip(inputs[len(names) :], placeholders, strict=True):
        node.name = node.target = old.name
    for name, value in _constants(traced).items():
        if not hasattr(module, name):
            setattr(module, name, value)
    return fx.GraphModule(module, graph)


def _constants(traced: fx.GraphModule) -> dict[str, Any]:
    """Return what the traced graph reads by `get_attr`: constants, and the graphs of control flow."""
    constants: dict[str, Any] = {}
    for node in traced.graph.find_nodes(op="get_attr"):
        constants[str(node.target)] = getattr(traced, str(node.target))
    return constants
