"""An annotated graph: what the annotate pass hands over, and how it runs eagerly, as the reference of what follows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils.checkpoint import checkpoint

from fp8pass.graph.refusal import Reject
from fp8pass.quant import ops
from fp8pass.quant.monitor_ops import WatchTable, watch_cached, watch_operand
from fp8pass.states.slots import SlotTable

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
STATE_INPUTS = "fp8pass_state_inputs"
"""In the meta of a region's body: how many of its inputs, the last ones, are state."""


@dataclass(frozen=True)
class FrozenWeightInput:
    """An input of the graph that is a parameter in FP8, quantized in advance.

    position: of the parameter among Dynamo's inputs; table, slot: where its scale is; by_columns: laid out so that its
    first dimension, which the matmul sums over, is contiguous.
    """

    position: int
    table: int
    slot: int
    by_columns: bool


@dataclass(frozen=True)
class CachedWeightInput:
    """Inputs of the graph that are a weight's FP8 copy, quantized when the weight changes: see `weight_cache.py`.

    positions: among Dynamo's inputs, of the parameter, or of those that it consists of, one below the other; table,
    slot: where its scale is; transposed: whether the transposed copy is wanted as well.
    """

    positions: tuple[int, ...]
    table: int
    slot: int
    transposed: bool


@dataclass
class MatmulChoice:
    """What the recipe made of one matmul call. scaling: the recipe's name, "" if it was not annotated, for `reason`.

    wanted: the recipe and filter took it, and it could not be done: an error under `strict`. declined: those of its
    matmuls, by kind, that are not annotated although the call is. fast_accum: those that may add up in less than f32.
    predicted_speedup: of all its matmuls together (roofline.py); None without a target.
    """

    name: str
    source: str
    scaling: str = ""
    reason: str = ""
    rule: str = ""
    wanted: bool = False
    declined: dict[str, Reject] = field(default_factory=dict)
    fast_accum: tuple[str, ...] = ("output",)
    predicted_speedup: float | None = None


@dataclass
class Annotation:
    """An annotated copy of Dynamo's graph.

    owned, owned_paths: positions and names of the inputs that its state goes by. tables: its slots, a table for each
    recipe that has any, in the order of the state inputs. After those come `frozen` and `cached`, parameters in FP8,
    and `backward_amax_inputs`, positions of inputs that the graph takes once more, for its backward to write. states:
    of each scale state that the user wrote, the positions of its scale, amax_history, amax, step_ended and held.
    is_update: True for a graph that updates parameters. watched: the tensors that the numerics monitor watches; its
    buffers are the last inputs.
    """

    module: fx.GraphModule
    choices: list[MatmulChoice]
    owned: list[int]
    tables: list[SlotTable] = field(default_factory=list)
    frozen: list[FrozenWeightInput] = field(default_factory=list)
    cached: list[CachedWeightInput] = field(default_factory=list)
    backward_amax_inputs: list[int] = field(default_factory=list)
    states: list[tuple[int, ...]] = field(default_factory=list)
    is_update: bool = False
    owned_paths: tuple[str, ...] = ()
    watched: WatchTable | None = None

    @property
    def has_state(self) -> bool:
        """Whether it takes more than Dynamo's inputs."""
        return bool(self.tables or self.states or self.watched)

    def bootstrapped(self) -> Annotation:
        """A copy in which a slot without history is scaled by the tensor's own amax."""
        module = copy_to_edit(self.module)
        for part in filter(_is_graph, module.modules()):
            for node in part.graph.nodes:
                if node.target is ops.scales_or_one:
                    node.replace_all_uses_with(node.args[0])
                node.args = map_aggregate(node.args, _bootstrapped)
            part.recompile()
        return replace(self, module=module)

    def late_inputs(self, args: Sequence[Any]) -> list[Tensor]:
        """What the graph, called with Dynamo's `args`, takes last: see `SlotTensors.inputs`."""
        return [args[i].data for i in self.backward_amax_inputs]

    def run(self, *args: Any) -> Any:
        """The graph, eagerly."""
        return _Eager(self.module).run(*args)


def _bootstrapped(argument: Any) -> Any:
    return replace(argument, bootstrap=True) if isinstance(argument, ops.Delayed) else argument


class _Eager(fx.Interpreter):
    """Runs checkpointed regions as eager checkpoints, for which state, which changes meanwhile, is no argument.

    record: false where the backward runs a region again.
    """

    def __init__(self, module: fx.GraphModule, record: bool = True) -> None:
        super().__init__(module)
        self.record = record

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is CHECKPOINT:
            return self._checkpoint(*args, **kwargs)
        if not self.record and target in (watch_operand, watch_cached):
            return None
        if not self.record and target in (
            ops.qdq_operand,
            ops.qdq_no_grad,
        ):  # a gradient is quantized by its backward only
            args = [replace(a, record=False) if isinstance(a, ops.Delayed) else a for a in args]
        return super().call_function(target, args, kwargs)

    def _checkpoint(self, body: fx.GraphModule, *inputs: Any, **kwargs: Any) -> Any:
        first_state = len(inputs) - body.meta.get(STATE_INPUTS, 0)
        runs = itertools.count()

        def run(*args: Any) -> Any:
            return _Eager(body, record=self.record and next(runs) == 0).run(*args, *inputs[first_state:])

        if (context := body.meta.get("_checkpoint_context_fn")) is not None:
            kwargs["context_fn"] = context
        return checkpoint(run, *inputs[:first_state], **{**kwargs, "use_reentrant": False})


def _is_graph(module: torch.nn.Module) -> TypeGuard[fx.GraphModule]:
    return isinstance(module, fx.GraphModule)


def copy_to_edit(module: fx.GraphModule) -> fx.GraphModule:
    """A copy to edit: Dynamo goes on using its own graph's placeholders. Carries over what AOTAutograd reads of it."""
    graph = fx.Graph()
    twin: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, twin))
    for old, new in twin.items():
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    _put_inputs_first(graph)
    copy = fx.GraphModule(module, graph)
    for name, child in module.named_children():
        if isinstance(child, fx.GraphModule) and hasattr(copy, name):
            setattr(copy, name, copy_to_edit(child))
    copy.meta = dict(module.meta)
    if hasattr(module, "_param_name_to_source"):
        copy._param_name_to_source = dict(module._param_name_to_source)  # type: ignore[arg-type, assignment]
    return copy


def _put_inputs_first(graph: fx.Graph) -> None:
    """Move all inputs to the graph's front, where passes add theirs behind the last one: nothing may read it earlier.

    Dynamo of torch 2.11 puts the parameters that a hook reads where the hook is called.
    """
    inputs = graph.find_nodes(op="placeholder")
    if inputs:
        next(iter(graph.nodes)).prepend(inputs[0])
    for node, following in itertools.pairwise(inputs):
        node.append(following)
