"""Find the tensors that a graph of Dynamo's writes into, and so whether it is an update."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass.base._torch import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    enable_python_dispatcher,
    pytree,
)
from fp8pass.base.names import gradients_of
from fp8pass.passes.common.matmul_calls import mutates
from fp8pass.quant.sharded import part_of, with_part
from fp8pass.weights.update_key import TensorRef, attribute


def written(module: fx.GraphModule) -> list[TensorRef]:
    """Return the places of the tensors that a graph writes into if it is an update, [] if it is not.

    An update writes into a parameter, or only into gradients, as one that clips them; it returns nothing that requires
    a gradient. The graph is run on fake tensors to find its writes.
    """
    graph = module.graph
    tensors = {ref: x for node, ref in refs(graph).items() if isinstance(x := example(module, node), Tensor)}
    parameters, of_gradients = {ref for ref, x in tensors.items() if _is_parameter(x)}, {*gradients_of(graph)}
    if not (parameters or of_gradients) or not any(map(mutates, graph.nodes)):
        return []
    if any(x.requires_grad for x in _results(graph)):
        return []
    # Dynamo's fake mode; the backend has another
    modes = [x.fake_mode for x in tensors.values() if isinstance(x, FakeTensor)]
    changed = _OnFakes(module, modes[0] if modes else FakeTensorMode()).written()
    return [p for p in tensors if p in changed] if changed & parameters or changed <= of_gradients else []


def written_only_by_optimizers(module: fx.GraphModule) -> bool:
    """Return whether every op that writes is one of torch's optimizers: nothing else changes what they update."""
    return all((node.stack_trace or "").count(_OPTIMIZERS) for node in module.graph.nodes if mutates(node))


_OPTIMIZERS = f'File "{Path(torch.optim.__file__).parent}'
"""The beginning of a line of a stack trace that is in torch's optimizers."""


def in_bfloat16(module: fx.GraphModule, written: Sequence[TensorRef]) -> list[TensorRef]:
    """Return those of the written tensors that are in bfloat16."""
    dtypes = {ref: getattr(example(module, node), "dtype", None) for node, ref in refs(module.graph).items()}
    return [ref for ref in written if dtypes[ref] == torch.bfloat16]


def real_inputs(module: fx.GraphModule) -> list[Any] | None:
    """Return the real inputs that Dynamo compiles the graph for; None if one of them is not recorded."""
    arguments = [n.meta.get("grapharg") for n in module.graph.nodes if n.op == "placeholder"]
    return None if any(arg is None for arg in arguments) else [arg.example for arg in arguments]


def refs(graph: fx.Graph) -> dict[fx.Node, TensorRef]:
    """Return the place of each input and each `get_attr` node of the graph."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    return {**{n: i for i, n in enumerate(inputs)}, **{n: str(n.target) for n in graph.nodes if n.op == "get_attr"}}


def example(module: torch.nn.Module, node: fx.Node) -> Any:
    """Return the value of a node of `refs`: an input's example value, which is fake, or the attribute itself."""
    return node.meta.get("example_value") if node.op == "placeholder" else attribute(module, str(node.target))


def _is_parameter(x: Tensor) -> bool:
    """Return whether `x` is a parameter, also a frozen one (as of averages), or another leaf that requires grad."""
    return x.is_leaf and (x.requires_grad or isinstance(x, torch.nn.Parameter))


def _results(graph: fx.Graph) -> list[Tensor]:
    values = (n.meta.get("example_value") for n in graph.output_node().all_input_nodes)
    return [x for x in values if isinstance(x, Tensor)]


def _ignored_symbols(mode: FakeTensorMode) -> Any:
    """Return a context that ignores new symbols for sizes that depend on data: the real graph already has its own."""
    return contextlib.nullcontext() if mode.shape_env is None else mode.shape_env.ignore_fresh_unbacked_symbols()


class _OnFakes(fx.Interpreter):
    """An interpreter that runs a graph on new fake tensors, and restores grad mode after."""

    def __init__(self, module: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(module)
        self.mode = mode
        self.of: dict[TensorRef, Tensor] = {}
        self.refs = refs(module.graph)

    def written(self) -> set[TensorRef]:
        """Run the graph; return the places of the tensors that it writes into."""
        grad_enabled = torch.is_grad_enabled()
        try:
            # enable_python_dispatcher: some implementations in C++ take no symbolic sizes
            with self.mode, enable_python_dispatcher(), _ignored_symbols(self.mode), _Writes() as writes:
                self.run(enable_io_processing=False)
        finally:
            torch.set_grad_enabled(grad_enabled)
        return {ref for ref, x in self.of.items() if _storage(x) in writes.into}

    def run_node(self, n: fx.Node) -> Any:
        """Return a fake for an input or attribute; run other nodes. Symbolic numbers keep the graph's symbols."""
        if n not in self.refs:
            traced_value = n.meta.get("example_value")
            is_symbolic = isinstance(traced_value, (torch.SymFloat, torch.SymInt, torch.SymBool))
            return traced_value if is_symbolic else super().run_node(n)
        ref, x = self.refs[n], example(self.module, n)
        if not isinstance(x, Tensor):
            return x
        if ref not in self.of:
            part = part_of(x)
            fake = with_part(x, torch.empty_strided(part.shape, part.stride(), dtype=x.dtype, device=x.device))
            self.of[ref] = fake.requires_grad_(x.is_leaf and x.requires_grad)
        return self.of[ref]


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records written tensors by op schemas: on fake tensors, `_foreach_` ops do not bump versions."""

    # otherwise torch raises at a higher-order op such as torch.cond; none is taken to write
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.into: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the storages of the arguments that the op's schema marks as written, and run the op."""
        kwargs = kwargs or {}
        arguments = func._schema.arguments if isinstance(func, OpOverload) else []
        for i, argument in enumerate(arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[i] if i < len(args) else kwargs.get(argument.name)
                self.into |= {_storage(x) for x in pytree.tree_leaves(given) if isinstance(x, Tensor)}
        return func(*args, **kwargs)


def _storage(x: Tensor) -> int:
    return int(part_of(x).untyped_storage()._cdata)  # the storage object, since fake tensors have no addresses
