"""The callables that Dynamo gets for a graph with state: each call adds the state of the instance to the inputs."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8pass import scaling
from fp8pass._torch import pipeline_call
from fp8pass.errors import Fp8Error
from fp8pass.graph.annotation import Annotation
from fp8pass.graph.inputs import Call
from fp8pass.states.amax_reduction import Reducer, continues, differentiable, finish, reducer_of
from fp8pass.states.slots import InstanceState, SlotTable, registry
from fp8pass.states.steps import Pass, Region, begin_step, checkpointed_region, is_shape_inference, join_step

log = logging.getLogger(__name__)

EAGER_FIRST_STEPS = 3
"""Number of steps that an instance may run eagerly while a slot has no history. Later ones run compiled code."""

Run = Callable[..., Any]


@dataclass
class _Forward:
    """A call in the forward of a checkpointed region: the code and the scales with which the backward repeats it.

    run: the code that ran; None after a no-grad forward, which ran the code of another graph. eager: True if that ran
    op by op. scales: the keys of the slots and their scales f32[T], for each instance state. user_scales: the scales
    f32[] of the `ScaleState`s that the user placed.
    """

    run: Run | None
    eager: bool
    scales: list[tuple[list[tuple[Any, ...]], Tensor]]
    user_scales: list[Tensor]


_ONLY_SHAPES = _Forward(None, False, [], [])
"""Remembered for a forward that only infers shapes."""


class Kind(Enum):
    """The kinds of calls of a graph."""

    PLAIN = "outside of checkpointed regions"
    FIRST = "the forward of a checkpointed region, with gradients"
    AHEAD = "the forward of a reentrant region, without gradients, which its backward will repeat with them"
    REPEATED = "run again by the backward of a region"
    SHAPES = "of no step: a stage of a pipeline finds out what it returns"


@dataclass
class _Call(Call):
    """A call of a graph, of one kind. forward: the call it repeats; None if unknown.

    run: the code that runs. eager: True if it runs op by op because the repetition will. cold: for a repetition, True
    if a slot has no scale.
    """

    kind: Kind = Kind.PLAIN
    region: Region | None = None
    forward: _Forward | None = None
    run: Run | None = None
    eager: bool = False
    cold: bool = False


class CompiledGraph:
    """A compiled graph with state, which Dynamo calls.

    The first step of an instance runs the annotated graph eagerly and scales each slot without history by the amax of
    its current tensor. That needs no second compilation, and leaves every slot that saw data with a history. If some
    slots see no data for several steps (zeros, or no backward yet), the graph is compiled once more with that choice in
    it, at the cost of a pass over each tensor, and this code runs until all slots have a history.
    """

    def __init__(self, compiled: Run, annotation: Annotation, for_cold_slots: Callable[[], Run]) -> None:
        self._compiled = compiled
        self._annotation = annotation
        self._compile_for_cold_slots = for_cold_slots
        self._for_cold_slots: Run | None = None
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        """Call the graph with Dynamo's inputs and the state of the instance that they belong to."""
        call = self._classified(args)
        row = _TABLE[call.kind]
        row.roll(self, call)
        call.run = run = row.code(self, call)
        given = self._with_held_scale_states(call) if call.repeats else args
        return row.record(self, call, run(*given, *[x.value(call) for x in self._annotation.inputs]))

    def _classified(self, args: Sequence[Any]) -> _Call:
        owned = [args[i] for i in self._annotation.owned]
        states = [registry.of(table, owned) for table in self._annotation.tables]
        region, how = checkpointed_region() or (None, None)
        forward = None
        if region is not None and how is Pass.REPEATED:
            forward = region.next_forward(self._key(states))
            kind = Kind.SHAPES if forward is _ONLY_SHAPES else Kind.REPEATED
        elif (region is not None or torch.is_grad_enabled()) and is_shape_inference():
            kind = Kind.SHAPES
        else:
            kind = {None: Kind.PLAIN, Pass.FIRST: Kind.FIRST, Pass.AHEAD: Kind.AHEAD}[how]
        region = region if how is not Pass.REPEATED else None
        return _Call(args, owned, states, [s.tensors for s in states], kind=kind, region=region, forward=forward)

    def _key(self, states: Sequence[InstanceState]) -> Hashable:
        """Return the key of the code and the instance: the same for training and evaluation."""
        names = tuple((s.table.forward_names(), *s.owned_ids) for s in states)
        return names or id(self)

    # `_Row.roll`

    def _roll(self, call: _Call) -> None:
        finish()  # histories roll what all ranks have recorded
        for state in call.states:
            state.begin()
            if state.table.training:
                begin_step(state)

    def _roll_trained(self, call: _Call) -> None:
        """Roll these slots in the graph that trains: this no-grad forward belongs to training, and will be repeated."""
        finish()
        for state in call.states:
            state.tracker.expect_recompute()
            state.begin_trained_step(begin_step)
        self._roll(call)

    def _join(self, call: _Call) -> None:
        """Roll nothing, and take the scales of the repeated forward.

        The forward of a region within a region is unknown: its repetition takes the newest scales.
        """
        forward = call.forward
        call.repeats, call.is_counted = True, forward is not None and forward.run is not None
        finish()  # or the result of the reduction would overwrite the amaxes recorded here
        for i, state in enumerate(call.states):
            join_step(state)
            if not state.table.remembers:
                continue
            state.begin_repeated()
            t, again = state.tensors, state.for_repetition()
            for keys, then in forward.scales if forward else ():
                state.copy_slots(keys, then, again.scale)
            # `warm` first: to ask the device waits for it
            call.cold |= not state.warm and bool((again.scale == 0).any())
            if state.catch_up():
                continues(state)
                if state.table.reduces is not None:
                    state.reduction.complete()  # the repetition runs in the backward
                # its forward has recorded nothing, so what is recorded now is not discarded
                again = again._replace(amax_forward=t.amax_forward, amax_weights=t.amax_weights)
            call.slots[i] = again
            state.tracker.raise_to(1, 1)

    def _discard(self, call: _Call) -> None:
        """Leave all slots as they are; let the call record into buffers that nothing reads."""
        call.repeats = call.is_counted = True
        call.slots = [s.for_shape_inference() if s.table.remembers else s.tensors for s in call.states]

    # `_Row.code`

    def _for_step(self, call: _Call) -> Run:
        waiting = [s for s in call.states if s.table.training and not s.warm]
        return self._for_step_of(waiting) if waiting else self._compiled

    def _as_its_repetition(self, call: _Call) -> Run:
        """Return code that runs op by op if the repetition will.

        Both must draw the same random numbers (`preserve_rng_state`), and Inductor draws other ones than eager ops do.
        """
        call.eager = not all(s.is_trained() for s in call.states)
        return self._annotation.run if call.eager else self._for_step(call)

    def _as_then(self, call: _Call) -> Run:
        forward = call.forward
        if forward is not None and forward.run is not None:
            return forward.run
        eager = forward.eager if forward else call.cold
        return self._annotation.bootstrapped.run if eager else self._compiled

    def _for_shapes(self, call: _Call) -> Run:
        states = [s for s in call.states if s.table.remembers]
        cold = any(not s.warm and bool((s.tensors.scale == 0).any()) for s in states)
        return self._annotation.bootstrapped.run if cold else self._compiled

    def _with_held_scale_states(self, call: _Call) -> list[Any]:
        """Return Dynamo's inputs with copies of the user's scale states that neither roll nor record.

        Their scales are those of `call.forward`; without it, the current ones.
        """
        args, held = call.args, list(call.args)
        forward = None if call.forward is _ONLY_SHAPES else call.forward
        for i, (scale, history, amax, step_ended, flag) in enumerate(self._annotation.scale_states):
            held[scale] = (forward.user_scales[i] if forward else args[scale]).clone()
            held[history], held[amax] = args[history].clone(), torch.full_like(args[amax], scaling.NOTHING)
            held[step_ended], held[flag] = torch.zeros_like(args[step_ended]), torch.ones_like(args[flag])
        return held

    # `_Row.record`

    def _record(self, call: _Call, result: Any) -> Any:
        """Note that a forward has recorded amaxes, and watch for its backward, which will record more."""
        recording = [s for s in call.states if s.table.remembers and len(s.tensors.amax_backward)]
        if recording:
            _watch_backward(result, call.states)
        reduced = [s for s in call.states if s.reduces is not None and s.table.training]
        if (reducer := _reducer_of(reduced)) is not None:
            reducer.watch(result, reduced, may_end=pipeline_call() is None)
        return result

    def _remember(self, call: _Call, result: Any) -> Any:
        """Store in the region the scales and the code that ran, for the repetition."""
        assert call.region is not None
        # `Kind.AHEAD` ran the code of evaluation, which the repetition cannot use
        run = call.run if call.kind is Kind.FIRST else None
        scales = [(s.keys, s.tensors.scale.clone()) for s in call.states]
        user_scales = [call.args[scale].clone() for scale, *_ in self._annotation.scale_states]
        call.region.remember(self._key(call.states), _Forward(run, call.eager, scales, user_scales))
        return result

    def _remember_and_record(self, call: _Call, result: Any) -> Any:
        return self._record(call, self._remember(call, result))

    def _remember_shapes(self, call: _Call, result: Any) -> Any:
        if call.region is not None:
            call.region.remember(self._key(call.states), _ONLY_SHAPES)
        return result

    def _record_nothing(self, call: _Call, result: Any) -> Any:
        return result

    def _for_step_of(self, states: Sequence[InstanceState]) -> Run:
        """Return the code for a step in which slots may have no scale. Synchronizes with the device."""
        cold = [name for state in states for name in state.cold()]
        if not cold:
            return self._compiled
        if max(state.cold_steps for state in states) <= EAGER_FIRST_STEPS:
            return self._annotation.bootstrapped.run
        with self._lock:
            if self._for_cold_slots is None:
                log.warning(
                    "%d FP8 slots have no scale after %d steps (%s%s): compiling once more, to scale them by their "
                    "own amax until they have. If they never see data, leave them out with filter=",
                    len(cold),
                    EAGER_FIRST_STEPS,
                    ", ".join(cold[:5]),
                    ", ..." if len(cold) > 5 else "",
                )
                self._for_cold_slots = self._compile_for_cold_slots()
        return self._for_cold_slots


class _Row(NamedTuple):
    """The actions for one kind of call, in this order: roll slots, choose code, record the result."""

    roll: Callable[[CompiledGraph, _Call], None]
    code: Callable[[CompiledGraph, _Call], Run]
    record: Callable[[CompiledGraph, _Call, Any], Any]


_G = CompiledGraph
_TABLE = {
    Kind.PLAIN: _Row(_G._roll, _G._for_step, _G._record),
    Kind.FIRST: _Row(_G._roll, _G._for_step, _G._remember_and_record),
    Kind.AHEAD: _Row(_G._roll_trained, _G._as_its_repetition, _G._remember),
    Kind.REPEATED: _Row(_G._join, _G._as_then, _G._record_nothing),
    Kind.SHAPES: _Row(_G._discard, _G._for_shapes, _G._remember_shapes),
}


def _watch_backward(result: Any, states: Sequence[InstanceState]) -> None:
    """Register a hook on the backward of a graph's outputs: it notes that it runs, and rejects `create_graph=True`."""
    hook = functools.partial(_in_backward, [weakref.ref(state) for state in states])
    for node in {x.grad_fn for x in differentiable(result)}:
        assert node is not None
        # of the node, not of the tensors: outputs share nodes, and the hook of a node runs once in a backward
        node.register_prehook(hook)


# in a compiled training step, Dynamo would trace this hook as the user's code
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _in_backward(states: Sequence[weakref.ref[InstanceState]], _: Any) -> None:
    # autograd enables gradients in a backward only for create_graph=True
    if torch.is_grad_enabled():
        raise Fp8Error(
            "backward(create_graph=True) through a graph with delayed scaling: its backward records amaxes, and torch "
            "compiles no second derivatives. Compute this loss with the module as it was before torch.compile"
        )
    for state in (ref() for ref in states):
        if state is not None:
            state.tracker.end_backward()


def _reducer_of(states: Sequence[InstanceState]) -> Reducer | None:
    """Return the reducer of the states' amaxes; None if none of them is reduced, or there are no other ranks."""
    reduced = ((s.reduces, s.table.device) for s in states if s.reduces is not None)
    return next((reducer_of(*of) for of in reduced), None)


class VaryingGraph:
    """A graph that differs between the steps of its instance, which Dynamo calls.

    variant: maps a step to a key, equal for steps that run the same compiled code. owned: positions of the instance's
    tensors among the inputs. table: a table without slots, whose state counts the steps. compile_at: compiles the graph
    for a step.
    """

    def __init__(
        self,
        variant: Callable[[int], Hashable],
        owned: Sequence[int],
        table: SlotTable,
        compile_at: Callable[[int], Run],
    ) -> None:
        self._variant = variant
        self._owned = owned
        self._table = table
        self._compile_at = compile_at
        self._runs: dict[Hashable, Run] = {}
        self._lock = threading.Lock()

    def has(self, step: int, run: Run) -> None:
        """Add code that has already been compiled for a step."""
        self._runs[self._variant(step)] = run

    def __call__(self, *args: Any) -> Any:
        """Call the graph for the current step; in evaluation, for the last step that began."""
        counter = registry.of(self._table, [args[i] for i in self._owned])
        found, key = checkpointed_region(), (self._table.code, *counter.owned_ids)
        region, how = found or (None, None)
        step = region.next_forward(key) if region is not None and how is Pass.REPEATED else None
        if how is not Pass.REPEATED and (region is not None or torch.is_grad_enabled()):
            begin_step(counter)
        if step is None:
            step = max(counter.tracker.steps - 1, 0)
        if region is not None and how is not Pass.REPEATED:
            region.remember(key, step)
        variant = self._variant(step)
        with self._lock:
            if variant not in self._runs:
                self._runs[variant] = self._compile_at(step)
        return self._runs[variant](*args)
