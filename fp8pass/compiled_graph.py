"""What Dynamo calls in place of a graph with state: at each call it brings the state of the instance along."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8pass import scaling
from fp8pass.passes.annotate import Annotation
from fp8pass.recipes import Schedule
from fp8pass.slots import SlotGroup, SlotTable, registry
from fp8pass.static import frozen_weights
from fp8pass.steps import Pass, begin_step, checkpointed_region

log = logging.getLogger(__name__)

EAGER_FIRST_STEPS = 3
"""So many steps of an instance may run eagerly, while some slot has no history; then the graph is compiled for it."""

Run = Callable[..., Any]


@dataclass
class _Forward:
    """A call in the forward of a checkpointed region: what ran, with which scales.

    recorded: whether its amaxes are in the state already, as they are not after a forward without gradients.
    """

    run: Run | None
    scales: list[tuple[list[tuple[Any, ...]], Tensor]]
    recorded: bool


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

    def __call__(self, *args: Any) -> Any:
        """Call the graph with Dynamo's inputs and the state of the instance that they belong to."""
        owned = [args[i] for i in self._annotation.owned]
        groups = [registry.of(table, owned) for table in self._annotation.tables]
        last = [*frozen_weights(self._annotation.frozen, args, groups), *self._annotation.late_inputs(args)]
        region = checkpointed_region() if groups else None
        if region is None:
            run = self._begin(groups)
            return run(*args, *_inputs(groups), *last)
        (of, repeated), key = region, self._key(groups)
        if repeated is Pass.REPEATED and any(g.table.training for g in groups):
            return self._repeat(of.next_forward(key), groups, args, last)
        trains = torch.is_grad_enabled()
        if repeated is Pass.FIRST and not trains:
            for group in groups:
                group.begin_trained_step(begin_step)
        run = self._begin(groups)
        result = run(*args, *_inputs(groups), *last)
        if repeated is Pass.FIRST:
            scales = [(g.keys(), g.tensors.scale.clone()) for g in groups]
            of.remember(key, _Forward(run if trains else None, scales, recorded=trains))
        return result

    def _begin(self, groups: Sequence[SlotGroup]) -> Run:
        for group in groups:
            group.begin()
            if group.table.training:
                begin_step(group)
        waiting = [g for g in groups if g.table.training and not g.warm]
        return self._for_step_of(waiting) if waiting else self._compiled

    def _key(self, groups: Sequence[SlotGroup]) -> Hashable:
        """Of the code and the instance; the same for its training and its evaluation."""
        return tuple((g.table.names[: g.table.n_forward], *map(id, g.owned_tensors())) for g in groups)

    def _repeat(
        self, forward: _Forward | None, groups: Sequence[SlotGroup], args: Sequence[Any], last: Sequence[Tensor]
    ) -> Any:
        """Run a forward again as it was: same code, same scales; nothing rolls, nothing is recorded twice."""
        if forward is None:  # of a region within a region: no later step can have begun, unless steps overlap
            forward = _Forward(None, [], recorded=True)
        inputs: list[Tensor] = []
        for group in groups:
            t, scale = group.tensors, group.tensors.scale.clone()
            for keys, then in forward.scales:
                group.copy_slots(keys, then, scale)
            amax_forward = torch.full_like(t.amax_forward, scaling.NOTHING) if forward.recorded else t.amax_forward
            held = torch.ones_like(t.held)
            inputs += t._replace(scale=scale, amax_forward=amax_forward, held=held).inputs()
            group.steps = max(group.steps, 1)
        cold = forward.run is None and any(bool((x == 0).any()) for x in inputs[:: len(inputs) // len(groups)])
        forward.recorded = True
        run = forward.run or (self._annotation.bootstrapped().run if cold else self._compiled)
        return run(*args, *inputs, *last)

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
                    "%d FP8 slots have seen no data in %d steps (%s%s): compiling once more, to scale them by their "
                    "own amax when they do. If they never will, leave them out with filter=",
                    len(cold),
                    EAGER_FIRST_STEPS,
                    ", ".join(cold[:5]),
                    ", ..." if len(cold) > 5 else "",
                )
                self._for_cold_slots = self._compile_for_cold_slots()
        return self._for_cold_slots


class ScheduledGraph:
    """A graph whose recipe changes with the steps of the instance that it is called for; what Dynamo calls.

    compile_at: compiles for the recipe of a step. table: without slots, by which the steps are counted.
    """

    def __init__(
        self, schedule: Schedule, owned: Sequence[int], table: SlotTable, compile_at: Callable[[int], Run]
    ) -> None:
        self._schedule = schedule
        self._owned = owned
        self._table = table
        self._compile_at = compile_at
        self._runs: dict[int, Run] = {}
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        """Call the graph as it is at this step. Evaluation is as the last step was."""
        counter = registry.of(self._table, [args[i] for i in self._owned])
        region = checkpointed_region()
        repeated = region is not None and region[1] is Pass.REPEATED
        if not repeated and (torch.is_grad_enabled() or region is not None):
            begin_step(counter)
        begin = self._schedule.begin_of(max(counter.steps - 1, 0))
        with self._lock:
            if begin not in self._runs:
                self._runs[begin] = self._compile_at(begin)
        return self._runs[begin](*args)


def _inputs(groups: Sequence[SlotGroup]) -> Iterator[Tensor]:
    return itertools.chain.from_iterable(g.inputs() for g in groups)
