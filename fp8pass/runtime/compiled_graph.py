"""What Dynamo calls in place of a graph with state: at each call it brings the state of the instance along."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8pass import scaling
from fp8pass._torch import pipeline_call
from fp8pass.errors import Fp8Error
from fp8pass.graph.annotation import Annotation
from fp8pass.quant.monitor_ops import Ring
from fp8pass.runtime.frozen_weights import frozen_weights
from fp8pass.runtime.weight_cache import cached_weights
from fp8pass.states.amax_reduction import Reducer, continues, differentiable, finish, reducer_of
from fp8pass.states.slots import SlotGroup, SlotTable, clock, registry
from fp8pass.states.steps import Pass, begin_step, checkpointed_region, is_rehearsal, join_step

log = logging.getLogger(__name__)

EAGER_FIRST_STEPS = 3
"""So many steps of an instance may run eagerly, while some slot has no history; then the graph is compiled for it."""

Run = Callable[..., Any]


@dataclass
class _Forward:
    """A call in the forward of a checkpointed region: what ran, with which scales, and how it is to be repeated.

    run: None after a forward without gradients, of another graph; eager: whether that ran op by op. states: the scales
    of the scale states that the user wrote, a list per state.
    """

    run: Run | None
    eager: bool
    scales: list[tuple[list[tuple[Any, ...]], Tensor]]
    states: list[Tensor]


_REHEARSAL = _Forward(None, False, [], [])
"""Of a region that a rehearsal calls."""


class CompiledGraph:
    """A compiled graph with state; what Dynamo calls.

    The first step of an instance runs the annotated graph eagerly, each slot without history scaled by its tensor's own
    amax. That needs no second compilation, and leaves every slot that saw data with a history. Where some slots see no
    data for long (zeros, or no backward yet), the graph is compiled once more with that choice in it, which costs a
    pass over each tensor, and is used until the last of them has a history.
    """

    def __init__(self, compiled: Run, annotation: Annotation, for_cold_slots: Callable[[], Run]) -> None:
        self._compiled = compiled
        self._annotation = annotation
        self._compile_for_cold_slots = for_cold_slots
        self._for_cold_slots: Run | None = None
        self._lock = threading.Lock()
        self._counter: SlotTable | None = None
        """Of the steps that the numerics monitor counts in."""
        if (watched := annotation.watched) is not None:
            self._counter = SlotTable.counter(annotation.owned_paths, watched.code)

    def __call__(self, *args: Any) -> Any:
        """Call the graph with Dynamo's inputs and the state of the instance that they belong to."""
        owned = [args[i] for i in self._annotation.owned]
        groups = [registry.of(table, owned) for table in self._annotation.tables]
        found = checkpointed_region()
        if found is None:
            if torch.is_grad_enabled() and is_rehearsal():
                return self._rehearse(groups, args, owned)
            result = self._begin(groups)(*args, *self._state(groups, args), *self._numbers(owned))
            return self._recorded(result, groups)
        (region, how), key = found, self._key(groups)
        if how is not Pass.REPEATED and is_rehearsal():
            region.remember(key, _REHEARSAL)
            return self._rehearse(groups, args, owned)
        if how is Pass.REPEATED:
            forward = region.next_forward(key)
            if forward is _REHEARSAL:
                return self._rehearse(groups, args, owned)
            numbers = self._numbers(owned, repeats=forward is not None and forward.run is not None)
            return self._repeat(forward, groups, args, numbers)
        if how is Pass.AHEAD:
            finish()
            for group in groups:
                group.ahead += 1
                group.begin_trained_step(begin_step)
        run = self._begin(groups)
        eager = how is Pass.AHEAD and not all(g.is_trained() for g in groups)
        if eager:  # as its repetition will, which has to draw the same random numbers
            run = self._annotation.run
        result = run(*args, *self._state(groups, args), *self._numbers(owned))
        scales = [(g.keys(), g.tensors.scale.clone()) for g in groups]
        states = [args[state[0]].clone() for state in self._annotation.states]
        region.remember(key, _Forward(run if how is Pass.FIRST else None, eager, scales, states))
        return result if how is Pass.AHEAD else self._recorded(result, groups)

    def _state(self, groups: Sequence[SlotGroup], args: Sequence[Any]) -> list[Tensor]:
        """What the graph is called with behind `args`, Dynamo's."""
        return [*(x for group in groups for x in group.inputs()), *self._last(groups, args)]

    def _last(self, groups: Sequence[SlotGroup], args: Sequence[Any], repeats: bool = False) -> list[Tensor]:
        """What the graph is called with behind the state."""
        of = self._annotation
        return [
            *frozen_weights(of.frozen, args, groups),
            *cached_weights(of.cached, args, groups, repeats),
            *of.late_inputs(args),
        ]

    def _numbers(self, owned: Sequence[Tensor], repeats: bool = False) -> list[Tensor]:
        """What the graph is called with last: where it counts for the numerics monitor."""
        if self._annotation.watched is None:
            return []
        assert self._counter is not None
        counter = registry.of(self._counter, owned)
        if counter.ring is None:
            counter.ring = Ring(self._annotation.watched)
        if not repeats:
            begin_step(counter)
            counter.ring.begin(registry.step_of(owned) - 1, next(clock))
        return counter.ring.inputs(repeats)

    def _begin(self, groups: Sequence[SlotGroup]) -> Run:
        finish()
        for group in groups:
            group.begin()
            if group.table.training:
                begin_step(group)
        waiting = [g for g in groups if g.table.training and not g.warm]
        return self._for_step_of(waiting) if waiting else self._compiled

    def _recorded(self, result: Any, groups: Sequence[SlotGroup]) -> Any:
        """`result`, of a forward that has recorded amaxes, and whose backward will."""
        if any(len(g.tensors.amax_backward) for g in groups):
            _watch_backward(result, groups)
        reduced = [g for g in groups if g.reduces is not None and g.table.training]
        if (reducer := _reducer_of(reduced)) is not None:
            reducer.watch(result, reduced, may_end=pipeline_call() is None)
        return result

    def _rehearse(self, groups: Sequence[SlotGroup], args: Sequence[Any], owned: Sequence[Tensor]) -> Any:
        """Run a forward that is of no step: nothing rolls, and neither it nor its backward records anything."""
        remember = [g for g in groups if g.table.remembers]
        inputs = [x for g in groups for x in (g.for_rehearsal().inputs() if g.table.remembers else g.inputs())]
        cold = any(not g.warm and bool((g.tensors.scale == 0).any()) for g in remember)
        run = self._annotation.bootstrapped().run if cold else self._compiled
        last = [*self._last(groups, args, repeats=True), *self._numbers(owned, repeats=True)]
        return run(*self._with_held_states(args, None), *inputs, *last)

    def _key(self, groups: Sequence[SlotGroup]) -> Hashable:
        """Of the code and the instance; the same for its training and its evaluation."""
        names = tuple((g.table.forward_names(), *map(id, g.owned_tensors())) for g in groups)
        return names or id(self)

    def _repeat(
        self, forward: _Forward | None, groups: Sequence[SlotGroup], args: Sequence[Any], numbers: Sequence[Tensor]
    ) -> Any:
        """Run a forward again as it was: same code, same scales; nothing rolls, nothing is recorded twice.

        forward: None in a region within a region, which is another one each time: then the newest scales are taken.
        """
        inputs: list[Tensor] = []
        cold = False
        finish()  # or it would overwrite what is recorded here
        for group in groups:
            join_step(group)
            if not group.table.remembers:
                inputs += group.inputs()
                continue
            group.begin_repeated()
            t, again = group.tensors, group.for_repetition()
            for keys, then in forward.scales if forward else ():
                group.copy_slots(keys, then, again.scale)
            cold |= not group.warm and bool((again.scale == 0).any())
            if group.catch_up():
                continues(group)
                group.unreduced |= group.table.reduces is not None  # this is its backward
                again = again._replace(amax_forward=t.amax_forward, amax_weights=t.amax_weights)
            inputs += again.inputs()
            group.steps, group.step = max(group.steps, 1), max(group.step, 1)
        run = forward.run if forward else None
        if run is None:
            run = self._annotation.bootstrapped().run if (forward.eager if forward else cold) else self._compiled
        last = self._last(groups, args, repeats=True)
        return run(*self._with_held_states(args, forward), *inputs, *last, *numbers)

    def _with_held_states(self, args: Sequence[Any], forward: _Forward | None) -> list[Any]:
        """Dynamo's inputs, with scale states that neither roll nor record, and have the scales of then."""
        held = list(args)
        for i, (scale, history, amax, step_ended, flag) in enumerate(self._annotation.states):
            held[scale] = (forward.states[i] if forward else args[scale]).clone()
            held[history], held[amax] = args[history].clone(), torch.full_like(args[amax], scaling.NOTHING)
            held[step_ended], held[flag] = torch.zeros_like(args[step_ended]), torch.ones_like(args[flag])
        return held

    def _for_step_of(self, groups: Sequence[SlotGroup]) -> Run:
        """What runs a step of which some slots may have no scale. Asks the device, until there is none."""
        cold = [name for group in groups for name in group.cold()]
        if not cold:
            return self._compiled
        if max(group.cold_steps for group in groups) <= EAGER_FIRST_STEPS:
            return self._annotation.bootstrapped().run
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


def _watch_backward(result: Any, groups: Sequence[SlotGroup]) -> None:
    """Have the backward through what a graph returned say that it comes, and why it can't be differentiated."""
    hook = functools.partial(_in_backward, [weakref.ref(group) for group in groups])
    for node in {x.grad_fn for x in differentiable(result)}:
        assert node is not None
        node.register_prehook(hook)


# in a step that is compiled, Dynamo would take it for code of the user's
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _in_backward(groups: Sequence[weakref.ref[SlotGroup]], _: Any) -> None:
    if torch.is_grad_enabled():
        raise Fp8Error(
            "backward(create_graph=True) through a graph with delayed scaling: its backward records amaxes, and torch "
            "compiles no second derivatives. Compute this loss with the module as it was before torch.compile"
        )
    for group in (ref() for ref in groups):
        if group is not None:
            group.returned = group.step


def _reducer_of(groups: Sequence[SlotGroup]) -> Reducer | None:
    """What shares their amaxes with other ranks; None where there is nothing, or nobody, to share them with."""
    reduced = ((g.reduces, g.table.device) for g in groups if g.reduces is not None)
    return next((reducer_of(*of) for of in reduced), None)


class VaryingGraph:
    """A graph that is not the same in all steps of the instance that it is called for; what Dynamo calls.

    variant: of a step; the same for steps that are compiled alike. compile_at: compiles for a step. table: without
    slots; its group counts the steps.
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
        """What has been compiled for a step already."""
        self._runs[self._variant(step)] = run

    def __call__(self, *args: Any) -> Any:
        """Call the graph as it is at this step. Evaluation is as the last step was."""
        counter = registry.of(self._table, [args[i] for i in self._owned])
        found, key = checkpointed_region(), (self._table.code, *map(id, counter.owned_tensors()))
        region, how = found or (None, None)
        step = region.next_forward(key) if region is not None and how is Pass.REPEATED else None
        if how is not Pass.REPEATED and (region is not None or torch.is_grad_enabled()):
            begin_step(counter)
        if step is None:
            step = max(counter.steps - 1, 0)
        if region is not None and how is not Pass.REPEATED:
            region.remember(key, step)
        variant = self._variant(step)
        with self._lock:
            if variant not in self._runs:
                self._runs[variant] = self._compile_at(step)
        return self._runs[variant](*args)
