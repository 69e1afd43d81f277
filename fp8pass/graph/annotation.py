"""The annotated graph, which is the result of the annotate pass and, run eagerly, the reference for later passes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.node import map_aggregate
from torch.utils.checkpoint import checkpoint

from fp8pass.base._torch import autograd_function_apply
from fp8pass.base.node_meta import IS_STATE, SAVED_RESULT
from fp8pass.graph.inputs import Call, Input, Together, examples_of
from fp8pass.graph.prediction import Prediction
from fp8pass.graph.refusal import Reject
from fp8pass.graph.verdict import SavedTensor
from fp8pass.quant import ops
from fp8pass.recipes import Kind, Recipe, Role
from fp8pass.states.slots import SlotTable

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
COND = torch.ops.higher_order.cond
FUNCTION = autograd_function_apply
"""The op that calls a `torch.autograd.Function`, with the graphs of its forward and its backward."""
STATE_INPUTS = "fp8pass_state_inputs"
"""Key in the meta of a region's body: the number of its inputs, the last ones, that are state."""


@dataclass
class MatmulChoice:
    """The annotate pass's choice for one matmul call. scaling: the recipe's name; "" if it is not annotated.

    rule, reason: why it is not annotated. wanted: True if the recipe and the filter select it, but it cannot be
    annotated, which is an error under `strict`. declined: the reasons, by kind, for matmuls that are not annotated
    although the call is. fast_accum: the matmuls that may accumulate in less than float32. prediction: of all matmuls
    of the call together; None without a target. note: a sentence for the verdict on the output.
    """

    name: str
    source: str
    scaling: str = ""
    reason: str = ""
    rule: str = ""
    wanted: bool = False
    declined: dict[str, Reject] = field(default_factory=dict)
    fast_accum: tuple[str, ...] = ("output",)
    prediction: Prediction | None = None
    note: str = ""


@dataclass(frozen=True)
class WeightUse:
    """A linear layer's call in the graph, and how it quantizes the weight of the layer's output.

    positions: among Dynamo's inputs, of the parameter [N, K], or of the parameters that are concatenated along dim 0.
    recipe: None in high precision, for which `reason` says why.
    """

    positions: tuple[int, ...]
    recipe: Recipe | None
    reason: str = ""


@dataclass(frozen=True)
class Body:
    """A function that pieces of the graph share: equal layers, for example.

    layers: for each call, the path of the layer; "" if it is not a layer. choices: for each call, the indices of the
    choices of its matmuls, in equal order.
    """

    layers: list[str]
    choices: list[tuple[int, ...]]

    @property
    def title(self) -> str:
        """The calls, in words."""
        number, first, last = len(self.layers), self.layers[0], self.layers[-1]
        if number == 1:
            return first or "what is around the layers"
        return f"{number} calls of {first}" if first == last else f"{number} equal layers, {first} to {last}"


@dataclass(frozen=True)
class SingleProduct:
    """Tells of a matmul in a Function or an update, which is one product, which one it is, and what its operands are.

    A call of a layer stands for three. roles: of its two operands, as in `MatmulSignature`. late: True if the backward
    of a Function computes it. told: False if nothing tells which operand is a gradient. forward: the product of the
    forward that it belongs to; None if it is one itself, or if none was found.
    """

    kind: Kind
    roles: tuple[Role, Role]
    late: bool
    told: bool = True
    forward: fx.Node | None = None


@dataclass
class Annotation:
    """An annotated copy of Dynamo's graph.

    owned, owned_paths: positions and names of the inputs that identify the instance, which owns the state. tables: the
    slot tables, one for each recipe that has slots. inputs: the graph's inputs after Dynamo's, in order. scale_states:
    for each `ScaleState` that the user wrote, the positions of its scale, amax_history, amax, step_ended and held.
    is_update: True for a graph that updates parameters. bodies: the functions that the graph consists of, by the names
    of their graphs; empty if it is in one piece. saved: verdicts on what `save_fp8` is for. weights: the calls of
    linear layers. written: the positions of Dynamo's inputs that an update writes.
    """

    module: fx.GraphModule
    choices: list[MatmulChoice]
    owned: list[int]
    tables: list[SlotTable] = field(default_factory=list)
    inputs: list[Input[Any]] = field(default_factory=list)
    scale_states: list[tuple[int, ...]] = field(default_factory=list)
    is_update: bool = False
    owned_paths: tuple[str, ...] = ()
    bodies: dict[str, Body] = field(default_factory=dict)
    saved: list[SavedTensor] = field(default_factory=list)
    weights: list[WeightUse] = field(default_factory=list)
    written: frozenset[int] = frozenset()

    @property
    def has_state(self) -> bool:
        """True if the graph takes more than Dynamo's inputs."""
        return bool(self.inputs or self.scale_states)

    @functools.cached_property
    def bootstrapped(self) -> Annotation:
        """A copy in which a tensor whose slot has no history is scaled by its own amax."""
        module = copy_to_edit(self.module)
        for part in graphs_of(module):
            for node in part.graph.nodes:
                # without the replacement by 1, a scale stays 0, by which `bootstrap` knows that there is no history
                if node.target is ops.scales_or_one:
                    node.replace_all_uses_with(node.args[0])
                node.args = map_aggregate(node.args, _bootstrapped)
        generate_code(module)
        return replace(self, module=module)

    def examples(self, args: Sequence[Any], call: Any = None) -> list[Any]:
        """Return examples of all inputs of the graph. args: of Dynamo's. call: for inputs that read more than those."""
        return [*args, *examples_of(self.inputs, call or Call(args), args)]

    @functools.cached_property
    def _by_kind(self) -> list[tuple[Together | None, list[Input[Any]]]]:
        return [(x, list(same)) for x, same in itertools.groupby(self.inputs, lambda x: getattr(x, "together", None))]

    def values(self, call: Any) -> list[Tensor]:
        """Return the values of the graph's inputs after Dynamo's in a call."""
        values: list[Tensor] = []
        for together, inputs in self._by_kind:
            values += [x.value(call) for x in inputs] if together is None else together.values(inputs, call)
        return values

    def run(self, *args: Any) -> Any:
        """Run the graph eagerly."""
        return run_eagerly(self.module, *args)


def run_eagerly(module: fx.GraphModule, *args: Any) -> Any:
    """Run an annotated graph, or a function of it, eagerly."""
    return _Eager(module).run(*args)


def _bootstrapped(argument: Any) -> Any:
    return replace(argument, bootstrap=True) if isinstance(argument, ops.Delayed) else argument


class _Function(torch.autograd.Function):
    """A Function of Dynamo's graph, run eagerly: as torch's op for it, except that its backward is never compiled."""

    @staticmethod
    def forward(ctx: Any, graphs: tuple[fx.GraphModule, fx.GraphModule], how: dict[str, Any], *operands: Any) -> Any:
        ctx.graphs, ctx.how = graphs, how
        results, ctx.saved = fx.Interpreter(graphs[0]).run(*operands)
        each = results if isinstance(results, (tuple, list)) else (results,)
        ctx.mark_non_differentiable(*(each[i] for i in how["non_differentiable_idx"]))
        ctx.mark_dirty(*(each[i] for i in how.get("dirty_idx", ())))
        return results

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> Any:
        # not compiled: in a training step that is compiled, Dynamo would treat it as the user's code
        return None, None, *fx.Interpreter(ctx.graphs[1]).run(*grads, *ctx.saved)


def _without_records(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph that records no amaxes."""
    copy = copy_to_edit(module)
    for node in copy.graph.nodes:
        node.args = map_aggregate(node.args, _unrecorded)
    return copy


def _unrecorded(argument: Any) -> Any:
    return replace(argument, record=False) if isinstance(argument, ops.Delayed) else argument


_QUANTIZE = (ops.qdq_operand, ops.qdq_no_grad, ops.quantize_once)


class _Eager(fx.Interpreter):
    """Runs a graph whose checkpointed regions become eager checkpoints. State is not an argument of a checkpoint.

    record: False if the backward runs a region again.
    """

    def __init__(self, module: fx.GraphModule, record: bool = True) -> None:
        super().__init__(module)
        self.record = record
        self.kept: dict[fx.Node, tuple[Tensor, list[list[Tensor]]]] = {}
        """For each op that `SAVED_RESULT` marks, its result, and what autograd has saved for it, in lists of one."""
        self.sizes: dict[fx.Node, int] = {}
        """The sizes that vary, which views take."""

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; let the backward of an op that is marked read its result as the marked quantize returns it."""
        part, kept = (n.meta.get("custom") or {}).get(SAVED_RESULT), list[list[Tensor]]()
        if part == "op":
            with saved_tensors_hooks(functools.partial(_keep, kept), lambda box: box[0]):
                result = super().run_node(n)
            self.kept[n] = result.detach(), kept
            return result
        result = super().run_node(n)
        if isinstance(result, int):
            self.sizes[n] = result
        if part == "quantize":
            self._replace_kept(n, result.detach())
        return result

    def _replace_kept(self, quantize: fx.Node, copy: Tensor) -> None:
        """Let the backward of a marked op read `copy`, what `quantize` returned, instead of the op's result.

        Between the two are only nodes that move elements, such as views and transposes: the copy is moved back.
        """
        moves: list[Any] = [quantize.args[0]]
        while moves[-1] not in self.kept:
            moves.append(moves[-1].args[0])
        result, kept = self.kept[moves.pop()]
        # where each element of the copy has come from
        positions = torch.arange(result.numel(), device=result.device).view(result.shape)
        for move in reversed(moves):
            called = {"call_method": super().call_method, "call_function": super().call_function}[move.op]
            args, kwargs = fx.map_arg((move.args[1:], move.kwargs), self.sizes.__getitem__)
            positions = called(move.target, (positions, *args), kwargs)
        moved_back = torch.empty_like(copy.reshape(-1))
        moved_back[positions.reshape(-1)] = copy.reshape(-1)
        for box in kept:  # of what autograd saved, only the result itself, not for example a mask or another input
            same = box[0].untyped_storage()._cdata == result.untyped_storage()._cdata
            box[:] = [moved_back.view(result.shape) if same and box[0].shape == result.shape else box[0]]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is CHECKPOINT:
            return self._checkpoint(*args, **kwargs)
        if not self.record and getattr(target, "is_in_forward_only", False):
            return None
        if not self.record and target in _QUANTIZE:  # gradients are quantized in backward only
            args = [*map(_unrecorded, args)]
        if target is FUNCTION:
            forward, backward, *operands = args
            graphs = forward if self.record else _without_records(forward), backward
            return _Function.apply(graphs, kwargs, *operands)  # type: ignore[no-untyped-call]
        return super().call_function(target, args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return _Eager(self.fetch_attr(target), self.record).run(*args)

    def _checkpoint(self, body: fx.GraphModule, *inputs: Any, **kwargs: Any) -> Any:
        # state is in the closure: of arguments autograd saves the version, and the graph writes state before the
        # backward
        first_state = len(inputs) - body.meta.get(STATE_INPUTS, 0)
        # run 0 is the forward; later ones repeat it in a backward, and record nothing
        runs = itertools.count()

        def run(*args: Any) -> Any:
            return _Eager(body, record=self.record and next(runs) == 0).run(*args, *inputs[first_state:])

        if (context := body.meta.get("_checkpoint_context_fn")) is not None:
            kwargs["context_fn"] = context
        # not reentrant, like torch's own implementation of `tag_activation_checkpoint`
        return checkpoint(run, *inputs[:first_state], **{**kwargs, "use_reentrant": False})


def _keep(kept: list[list[Tensor]], x: Tensor) -> list[Tensor]:
    kept.append([x])
    return kept[-1]


def graphs_of(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield a graph, and the graphs that it calls: branches, loop bodies, regions, functions of layers."""
    return (part for part in module.modules() if isinstance(part, fx.GraphModule))


def generate_code(module: fx.GraphModule) -> None:
    """Generate the code of an annotated graph, and of the graphs in it.

    Branches of `torch.cond` are interpreted, node by node: torch calls them, their code would have to know quantizers,
    and so their ATen nodes get what the annotate pass noted on theirs.
    """
    for part in graphs_of(module):
        part.recompile()
        for call in part.graph.find_nodes(op="call_function", target=COND):
            for holder in call.args[1:3]:
                branch = getattr(part, holder.target)
                branch.forward = functools.partial(_interpret, branch)


def _interpret(branch: fx.GraphModule, *args: Any) -> Any:
    return fx.Interpreter(branch).run(*args)


def is_state_input(node: fx.Node) -> bool:
    """Return whether a node is an input that a pass has added to an annotated graph, or to a function of it."""
    return node.op == "placeholder" and node.meta.get(IS_STATE, False)


def keeps_address(node: fx.Node) -> bool:
    """Return whether an input of a graph has the same address in each call, as parameters and state have."""
    return "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})


def copy_to_edit(module: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph of Dynamo's to edit it, since Dynamo goes on using the placeholders of the original.

    Copies the attributes that AOTAutograd reads: `_dynamo_source` of placeholders, `_param_name_to_source` and `meta`.
    """
    graph = fx.Graph()
    # Inputs first: passes add inputs after the last one, and nothing may read them earlier. Dynamo of torch 2.11 puts
    # the parameters that a hook reads where the hook is called.
    copies = {node: graph.node_copy(node) for node in module.graph.find_nodes(op="placeholder")}
    # `graph_copy` copies all other nodes but the output, and returns what that returned
    graph.output(graph.graph_copy(module.graph, copies))
    for old, new in copies.items():
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    copy = fx.GraphModule(module, graph)  # with the attributes of `module` that the nodes name, not copies of them
    for name, child in module.named_children():
        if isinstance(child, fx.GraphModule) and hasattr(copy, name):
            setattr(copy, name, copy_to_edit(child))
    copy.meta = dict(module.meta)
    if hasattr(module, "_param_name_to_source"):
        copy._param_name_to_source = dict(module._param_name_to_source)  # type: ignore[arg-type, assignment]
    return copy
