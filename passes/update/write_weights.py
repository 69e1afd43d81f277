"""Whoever updates a weight writes its FP8 copy along with it, for the next forward to find.

before   p.addcdiv_(exp_avg, denom)                              or whatever else writes into a parameter, last of all
after    p.addcdiv_(exp_avg, denom)
         s: f32[W] = usable(next_scales(scale: f32[T], amax_history: f32[H, T], amax_weights: f32[W]))
         a: f32[]  = write_weight(s, 0, [p], [x_q: f8[N, K]], [x_t: f8[K, N]])
         write_made(made: f32[2, W], s, [a, ...])
changes  nothing that was there; the copy is that which the next forward would have made

Runs on Dynamo's graph of an update: one that writes into parameters and gives nothing that has a gradient. Optimizers
are not known by name. Behind AOTAutograd the parameter's `copy_` and these writes read one value, which Inductor has at
hand in one kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass._torch import FakeTensor, FakeTensorMode, OpOverload, TorchDispatchMode, enable_python_dispatcher, pytree
from fp8pass.passes.common.matmul_calls import mutates
from fp8pass.passes.common.state_inputs import state_input
from fp8pass.quant import ops
from fp8pass.runtime.update_key import Place, State, Write, attribute

# ---------------------------------------------------------------------------------------------------------------------
# Pattern: only reads.


def written(module: fx.GraphModule) -> list[Place]:
    """The tensors that a graph writes into, if it is an update; none if it is anything else.

    It is run on fake tensors, to see.
    """
    graph = module.graph
    tensors = {place: x for node, place in places(graph).items() if isinstance(x := example(module, node), Tensor)}
    if not any(_is_parameter(x) for x in tensors.values()) or not any(map(mutates, graph.nodes)):
        return []
    if any(x.requires_grad for x in _results(graph)):
        return []
    modes = [x.fake_mode for x in tensors.values() if isinstance(x, FakeTensor)]  # Dynamo's; the backend has another
    changed = _OnFakes(module, modes[0] if modes else FakeTensorMode()).written()
    return [p for p in tensors if p in changed] if any(_is_parameter(tensors[p]) for p in changed) else []


def real_inputs(module: fx.GraphModule) -> list[Any] | None:
    """What Dynamo compiles the graph for, the tensors themselves; None where it does not say."""
    known = [n.meta.get("grapharg") for n in module.graph.nodes if n.op == "placeholder"]
    return None if any(arg is None for arg in known) else [arg.example for arg in known]


def places(graph: fx.Graph) -> dict[fx.Node, Place]:
    """The nodes that give a tensor which the graph does not compute, and where each is."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    return {**{n: i for i, n in enumerate(inputs)}, **{n: str(n.target) for n in graph.nodes if n.op == "get_attr"}}


def example(module: torch.nn.Module, node: fx.Node) -> Any:
    """What a node of `places` gives: of an input a fake."""
    return node.meta.get("example_value") if node.op == "placeholder" else attribute(module, str(node.target))


def _is_parameter(x: Tensor) -> bool:
    """One that is frozen too: an average of others, say."""
    return x.is_leaf and (x.requires_grad or isinstance(x, torch.nn.Parameter))


def _results(graph: fx.Graph) -> list[Tensor]:
    values = (n.meta.get("example_value") for n in graph.output_node().all_input_nodes)
    return [x for x in values if isinstance(x, Tensor)]


def _ignored_symbols(mode: FakeTensorMode) -> Any:
    """Sizes that depend on data, and that the real graph knows already."""
    return contextlib.nullcontext() if mode.shape_env is None else mode.shape_env.ignore_fresh_unbacked_symbols()


class _OnFakes(fx.Interpreter):
    """Runs a graph on fake tensors of its own, under the grad mode that it begins with."""

    def __init__(self, module: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(module)
        self.mode = mode
        self.of: dict[Place, Tensor] = {}
        self.places = places(module.graph)

    def written(self) -> set[Place]:
        """Run it; the places of the tensors that it writes into."""
        grad_enabled = torch.is_grad_enabled()
        try:
            with self.mode, enable_python_dispatcher(), _ignored_symbols(self.mode), _Writes() as writes:
                self.run(enable_io_processing=False)
        finally:
            torch.set_grad_enabled(grad_enabled)
        return {place for place, x in self.of.items() if _storage(x) in writes.into}

    def run_node(self, n: fx.Node) -> Any:
        """Inputs and attributes are replaced by fakes; numbers of the data, a learning rate, are those of the graph."""
        if n not in self.places:
            known = n.meta.get("example_value")
            return known if isinstance(known, (torch.SymFloat, torch.SymInt, torch.SymBool)) else super().run_node(n)
        place, x = self.places[n], example(self.module, n)
        if not isinstance(x, Tensor):
            return x
        if place not in self.of:
            fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            self.of[place] = fake.requires_grad_(x.is_leaf and x.requires_grad)
        return self.of[place]


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what ops write into. Not by versions: on fake tensors, those of `_foreach_` ops stay what they are."""

    supports_higher_order_operators = True  # which write into nothing, or, if kernels of the user's, count up versions

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.into: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One op."""
        kwargs = kwargs or {}
        arguments = func._schema.arguments if isinstance(func, OpOverload) else []
        for i, argument in enumerate(arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[i] if i < len(args) else kwargs.get(argument.name)
                self.into |= {_storage(x) for x in pytree.tree_leaves(given) if isinstance(x, Tensor)}
        return func(*args, **kwargs)


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


# ---------------------------------------------------------------------------------------------------------------------
# Rewrite: only builds.


def inputs_of_states(graph: fx.Graph, states: Sequence[State], skips: bool) -> list[dict[str, fx.Node]]:
    """Inputs for the tensors of each state, by their names in `SlotTensors`, behind those that the graph has.

    Those that have to do with weights, if there are any; if an update may be skipped, all amaxes of the step.
    """
    return [
        {name: state_input(graph, f"fp8pass_{name}_{i}") for name in state.inputs(skips)}
        for i, state in enumerate(states)
    ]


def write_weights(
    graph: fx.Graph, states: Sequence[State], inputs: Sequence[dict[str, fx.Node]], writes: Sequence[Write]
) -> None:
    """Write FP8 copies at the end of the graph. inputs: those of the states.

    Behind all inputs come the copies of each weight's parts, their transposes, and those parts that the graph has no
    place for.
    """
    nodes = {place: node for node, place in places(graph).items()}
    of_writes = [_inputs_of(graph, i, w) for i, w in enumerate(writes)]
    with graph.inserting_before(graph.output_node()):
        for i, (state, of_state) in enumerate(zip(states, inputs, strict=True)):
            if not state.count:
                continue
            scales_of = (of_state[name] for name in ("scale", "amax_history", "amax_weights"))
            of: Any = (state.recipe, state.first, *scales_of)
            scales = graph.call_function(ops.next_scales, of)
            scales = graph.call_function(ops.usable, (scales,))
            amaxes: list[fx.Node | None] = [None] * state.count
            for w, (copies, transposes, others) in zip(writes, of_writes, strict=True):
                if w.state == i:
                    parts = [others.pop(0) if place is None else nodes[place] for place in w.parts]
                    args = scales, w.index, parts, copies, transposes
                    amaxes[w.index] = graph.call_function(ops.write_weight, args)
            graph.call_function(ops.write_made, (of_state["made"], scales, amaxes))


def at_beginning(graph: fx.Graph, wanted: Sequence[Place]) -> list[fx.Node]:
    """Nodes for the tensors at some places, ahead of everything that is computed."""
    nodes = {place: node for node, place in places(graph).items()}
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    found = []
    for place in wanted:
        if isinstance(place, str):
            with graph.inserting_after(last):
                last = graph.get_attr(place)
            last.meta = dict(nodes[place].meta)
        found.append(last if isinstance(place, str) else nodes[place])
    return found


def _inputs_of(graph: fx.Graph, i: int, w: Write) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
    def several(name: str, count: int) -> list[fx.Node]:
        return [state_input(graph, f"fp8pass_weight_{i}_{name}_{k}") for k in range(count)]

    parts = len(w.parts)
    return several("x_q", parts), several("x_t", parts * w.transposed), several("part", w.parts.count(None))
