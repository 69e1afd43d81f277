"""Steps of delayed scaling: which calls of a compiled graph begin one, continue one, or repeat one.

a training forward                               begins a step
in `with accumulate(module):`                    the first begins a step, the others continue it
under `no_sync` of DistributedDataParallel       continues it, up to and including the first forward outside of it
of a stage of `torch.distributed.pipelining`     continues it, until a microbatch comes that the step has had already
where ranks share amaxes                         continues it while no backward has run: see `amax_reduction.py`
without gradients                                reads the scales
activation checkpointing around compiled code    the forward begins a step; the backward repeats it with the scales
                                                 of that step
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import CellType, FrameType
from typing import Any

import torch
from torch import nn

from fp8pass.base._torch import (
    CheckpointFunction,
    PipelineCall,
    _CheckpointFrame,
    current_graph_task_id,
    ddp_goes_on,
    ddp_runs,
    modules_of,
    pipeline_call,
    top_saved_tensors_hooks,
)
from fp8pass.base.module_tensors import ids_of, unwrapped
from fp8pass.states.amax_reduction import begins, postponed
from fp8pass.states.scale_state import ScaleState
from fp8pass.states.slots import InstanceState, registry


# eq=False: steps are compared by identity, as `_accumulations.remove` does
@dataclass(eq=False)
class _Step:
    """Several forwards that are one step. begun: keys of the slots, and of graphs of instances, that have begun it.

    entire: states that have begun it with all their slots, whose keys are not in `begun`: each step begins so.
    """

    begun: set[Hashable] = field(default_factory=set)
    entire: list[InstanceState] = field(default_factory=list)

    def has(self, key: Hashable) -> bool:
        """Return whether a slot, or a graph of an instance, has begun the step."""
        return key in self.begun or any(key in state.all_keys for state in self.entire)

    def has_any(self, keys: Set[Hashable]) -> bool:
        """Return whether one of several has begun the step."""
        return not self.begun.isdisjoint(keys) or any(not s.all_keys.isdisjoint(keys) for s in self.entire)


@dataclass(eq=False, kw_only=True)
class _Accumulation(_Step):
    """A step under `accumulate(module)`. owned, foreign: ids of tensors known to belong to the module, or not to."""

    module: nn.Module
    owned: set[int] = field(default_factory=set)
    foreign: set[int] = field(default_factory=set)

    def covers(self, state: InstanceState) -> bool:
        """Return whether all tensors of an instance belong to the module; once they do, without a walk."""
        if self.module in state.owners:
            return True
        if not self.owns(*state.owned_ids):
            return False
        state.owners.add(self.module)
        return True

    def owns(self, *tensors: int) -> bool:
        """Return whether the tensors with these ids belong to the module, whose first forward may make new ones."""
        missing = set(tensors) - self.owned
        # not walked again for tensors that are known to be foreign: each step asks for the same ones
        if missing and missing.isdisjoint(self.foreign):
            self.owned = ids_of(self.module)
            missing -= self.owned
            self.foreign |= missing
        return not missing


@dataclass(eq=False)
class _PipelineStep(_Step):
    """The current step of a pipeline stage. microbatches: those seen in the step. newest: the last of them."""

    microbatches: set[int] = field(default_factory=set)
    newest: int = -1

    def take(self, microbatch: int, graph: Hashable, chunks: int | None) -> None:
        """Note that a graph is called for a microbatch; begin the next step if the step has had the microbatch.

        The newest microbatch may call several graphs without ending the step. chunks: number of microbatches; if it is
        1, the next step begins when a graph is called that the step has had already.
        """
        is_newest = microbatch == self.newest and not (chunks == 1 and self.has(graph))
        if microbatch in self.microbatches and not is_newest:
            self.begun.clear()
            self.entire.clear()
            self.microbatches.clear()
        self.microbatches.add(microbatch)
        self.newest = microbatch


_accumulations: list[_Accumulation] = []
_pipeline_steps: weakref.WeakKeyDictionary[Any, _PipelineStep] = weakref.WeakKeyDictionary()
"""The current step of each stage."""
_held: Counter[ScaleState] = Counter()
"""Number of open `accumulate` contexts that cover each scale state."""


@contextmanager
def accumulate(module: Any) -> Iterator[None]:
    """Make all forwards and backwards of a module within this context one step of delayed scaling.

    For the microbatches of one optimizer step: their amaxes merge by max, and the history rolls once. Within another
    `accumulate` that covers the module it changes nothing. It holds for all threads.

    Args:
        module: An `nn.Module`, compiled or not.

    Raises:
        TypeError: If `module` is not a module or a compiled module.
    """
    module = unwrapped(module)
    if not isinstance(module, nn.Module):
        raise TypeError(f"accumulate() takes a module or a compiled module, not {type(module).__name__}")
    with accumulate_all([module]):
        yield


@contextmanager
def accumulate_all(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Make all forwards and backwards of each module within this context one step: `accumulate` of each."""
    begun = [_Accumulation(module=module) for module in modules]
    with ExitStack() as stack, postponed():
        if ScaleState.was_made:  # a walk takes long, and few programs have any
            for scale_state in (m for module in modules for m in modules_of(module) if isinstance(m, ScaleState)):
                stack.enter_context(_holding(scale_state))
        _accumulations.extend(begun)
        try:
            yield
        finally:
            for accumulation in begun:
                _accumulations.remove(accumulation)


def accumulates() -> bool:
    """Return whether gradients of several microbatches are added up in parameters: within `accumulate`, without DDP.

    DistributedDataParallel has its own buffers for them.
    """
    return bool(_accumulations) and not ddp_runs()


@contextmanager
def _holding(scale_state: ScaleState) -> Iterator[None]:
    if not _held[scale_state]:
        scale_state.begin_accumulation()
    _held[scale_state] += 1
    try:
        yield
    finally:
        _held[scale_state] -= 1
        if not _held[scale_state]:
            del _held[scale_state]
            scale_state.end_accumulation()


def is_shape_inference() -> bool:
    """Return whether this forward belongs to no step: a pipeline stage infers the shapes of its outputs."""
    call = pipeline_call()
    return call is not None and call.microbatch is None


def begin_step(state: InstanceState) -> None:
    """Before a training forward, let the slots roll whose step it begins, and hold the others."""
    call = pipeline_call()
    if call is not None and call.microbatch is None:
        return
    for callback in registry.on_step:  # before the step begins: `State.warn_of_unused` asks which steps have ended
        callback(state)
    step = _step_of_pipeline(call, state)
    # torch.distributed.pipelining runs all forwards of a DDP module under no_sync, so no_sync says nothing there.
    # `accumulate` is called there too: it clears what a forward outside of the pipeline has noted.
    goes_on = state.tracker.accumulate(step is None and ddp_goes_on()) and step is None
    holds = goes_on or state.reduction.awaits_backward
    if step is None and not _accumulations:
        state.hold_all(holds)
        if not holds:
            state.begin_step()
        state.tracker.await_backward(holds and not goes_on)
        begins(state)
        return
    whole = _covering(state, step)
    if whole is not None and not whole.has_any(state.all_keys):
        state.hold_all(holds)
        if not holds:
            state.begin_step(joins=any(whole.has(s.graph_key) for s in state.neighbours))
        whole.entire.append(state)
        begins(state)
        return
    # held: all slots if the step continues, otherwise those that have begun the step already, in this or another graph
    slots, graph = _covered(state, step)
    state.hold([holds or (around is not None and around.has(key)) for key, around in slots])
    key, around = graph
    if not holds and (around is None or not around.has(key)):
        state.begin_step(joins=around is not None and any(around.has(s.graph_key) for s in state.neighbours))
    _begin(slots, graph)
    begins(state)


def join_step(state: InstanceState) -> None:
    """Note that the current call belongs to a step that has begun: no slot of `state` rolls before it ends."""
    if _accumulations:
        _begin(*_covered(state))


_Covered = tuple[Hashable, _Step | None]


def _begin(slots: Sequence[_Covered], graph: _Covered) -> None:
    for key, step in (*slots, graph):
        if step is not None:
            step.begun.add(key)


def _covered(state: InstanceState, otherwise: _Step | None = None) -> tuple[list[_Covered], _Covered]:
    """Return the key of each slot, and of the whole graph, with the outermost accumulation that covers it.

    `otherwise` is used where no accumulation covers the slot or the graph.
    """
    ids, around = state.owned_ids, list(_accumulations)  # a copy: other threads may end theirs
    whole = next((a for a in around if a.covers(state)), otherwise)
    # the context that was entered first decides: if it owns the whole instance, it covers every slot
    if not around or whole is around[0]:
        return [(key, whole) for key in state.keys], (state.graph_key, whole)
    anchors = zip(state.keys, state.table.anchors, strict=True)
    slots: list[_Covered] = [
        (key, whole if anchor < 0 else next((a for a in around if a.owns(ids[anchor])), otherwise))
        for key, anchor in anchors
    ]
    return slots, (state.graph_key, whole)


def _covering(state: InstanceState, otherwise: _Step | None) -> _Step | None:
    """Return the step that covers every slot: of the outermost accumulation, or `otherwise` if there is none."""
    around = list(_accumulations)
    if not around:
        return otherwise
    return around[0] if around[0].covers(state) else None


def _step_of_pipeline(call: PipelineCall | None, state: InstanceState) -> _PipelineStep | None:
    """Return the step of the pipeline stage that makes the call, and note the stage in `state`; None without one."""
    if call is None or call.microbatch is None:
        state.tracker.enter(None, has_rank_of_its_own=False)
        return None
    state.tracker.enter(call.stage.stage_index, call.has_rank_of_its_own)
    step = _pipeline_steps.setdefault(call.stage, _PipelineStep())
    step.take(call.microbatch, state.graph_key, call.stage.chunks)
    return step


class RegionPass(Enum):
    """The kinds of calls inside a checkpointed region."""

    FIRST = "a forward, with gradients"
    AHEAD = "the forward of a reentrant region, without gradients, which its backward will repeat with them"
    REPEATED = "run again by the backward"


@dataclass
class CheckpointCall:
    """One call of `torch.utils.checkpoint.checkpoint`: the calls in it, and how many of them each backward repeated."""

    forwards: dict[Hashable, list[Any]] = field(default_factory=dict)
    repeated: Counter[Hashable] = field(default_factory=Counter)

    def remember(self, key: Hashable, forward: Any) -> None:
        """Remember a call in the forward of the region. key: identifies the graph and the instance."""
        self.forwards.setdefault(key, []).append(forward)

    def next_forward(self, key: Hashable) -> Any:
        """Return what was remembered for the call that is now repeated; None if the region has no such call."""
        # each backward (autograd graph task) repeats the region from its start: retain_graph allows several
        token = (key, current_graph_task_id())
        # A graph may be called several times in a region; the backward repeats the calls in their order.
        position = self.repeated[token]
        self.repeated[token] += 1
        forwards = self.forwards.get(key, [])
        return forwards[position] if position < len(forwards) else None


def checkpointed_region() -> tuple[CheckpointCall, RegionPass] | None:
    """Return the running checkpointed region and the kind of the call in it; None outside of any region."""
    trains, in_backward = torch.is_grad_enabled(), current_graph_task_id() != -1
    # where gradients are on outside of a backward, no reentrant region runs: its forward switches them off
    contexts = [] if trains and not in_backward else _contexts_of_stack()
    if not trains:
        # `CheckpointFunction` repeats a forward, in its backward, only if an input needs a gradient (`next_functions`)
        ahead = None if in_backward else next((c for c in contexts if c.next_functions), None)
        return None if ahead is None else (_region_of(ahead), RegionPass.AHEAD)
    owner = _frame_of_hooks() or next(iter(contexts), None)
    return None if owner is None else (_region_of(owner), RegionPass.REPEATED if in_backward else RegionPass.FIRST)


def repeats_forward() -> bool:
    """Return whether the call is in a region with use_reentrant=True that a backward repeats."""
    return current_graph_task_id() != -1 and bool(_contexts_of_stack())


def _region_of(owner: Any) -> CheckpointCall:
    # an attribute of torch's object for the region, with which it is freed
    if not hasattr(owner, "fp8pass_region"):
        owner.fp8pass_region = CheckpointCall()
    region: CheckpointCall = owner.fp8pass_region
    return region


def _frame_of_hooks() -> Any:
    """Return the `_CheckpointFrame` of the innermost region with use_reentrant=False; None if there is none.

    It is found in the closure of the region's saved-tensor hook.
    """
    hooks: Any = top_saved_tensors_hooks(False)
    if hooks is None:
        return None
    # unwrap: `torch._dynamo.disable` wraps the hook of the recomputation
    cells = getattr(inspect.unwrap(hooks[0]), "__closure__", None) or ()
    contents = (cell.cell_contents for cell in cells if cell != _EMPTY)  # cells compare by their contents
    # torch's hook of the forward closes over the frame, that of the recomputation over a weak reference to it
    objects = (c() if isinstance(c, weakref.ref) else c for c in contents)
    return next((c for c in objects if isinstance(c, _CheckpointFrame)), None)


_EMPTY = CellType()
"""An empty cell, whose `cell_contents` would raise ValueError."""


_REENTRANT = (CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__)
"""The code of frames that run a region with use_reentrant=True."""


def _contexts_of_stack() -> list[Any]:
    """Return the autograd Function contexts of the running regions with use_reentrant=True, innermost first."""
    contexts = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in _REENTRANT:
            contexts.append(frame.f_locals["ctx"])  # the first parameter of both functions
        frame = frame.f_back
    return contexts
