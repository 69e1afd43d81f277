"""Tracks the steps of one graph of an instance. Only this file writes the fields; `steps.py` says when."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

_clock = itertools.count(1)


def now() -> int:
    """Return a number that is larger than all that it returned before: tells which of two calls was the later one."""
    return next(_clock)


@dataclass(eq=False)
class StepTracker:
    """The steps that an instance has begun with one graph, and what is still to come of the step that goes on."""

    steps: int = 0
    """How many steps the instance has begun with this graph."""
    step: int = 0
    """The number of the step that it began last, of those that the instance has begun with any graph."""
    returned: int = 0
    """The newest such step in which a backward of this graph has come."""
    last_used_at: int = 0
    """When the graph was last called in training, by `now`; 0 for never."""
    synced_at: int = 0
    """The newest `last_used_at` of another graph whose slots this one has taken in."""
    pending_recomputes: int = 0
    """Forwards without gradients, of checkpointed regions, that no backward has repeated yet."""
    forwards_awaiting_backward: int = 0
    """How many forwards in a row went on with the step of the one before, only because no backward had come."""
    in_accumulation: bool = False
    """The forward that began last is one of several that are one step, by DistributedDataParallel."""
    stage: int | None = None
    """The stage of a pipeline that the instance was in last."""
    has_rank_of_its_own: bool = False
    """No other rank has that stage."""

    def begin(self, neighbours: Iterable[StepTracker], joins: bool = False) -> None:
        """Begin a step with this graph. joins: another graph of the instance is known to have begun it already.

        Else it is the one that another began, unless this graph has had that, or a backward has come in it.
        neighbours: of other graphs of the instance.
        """
        around = [self, *neighbours]
        newest = max(t.step for t in around)
        is_over = self.step == newest or any(t.returned == newest for t in around)
        self.steps += 1
        self.step = newest + (is_over and not joins)

    def begin_repeated(self, neighbours: Iterable[StepTracker]) -> None:
        """Begin the step that the instance is in: a forward of it is repeated that this graph has not seen."""
        self.steps += 1
        self.step = max(t.step for t in (self, *neighbours))
        self.use()

    def raise_to(self, steps: int, step: int) -> None:
        """Count at least so many steps, as a checkpoint says, or other graphs."""
        self.steps, self.step = max(self.steps, steps), max(self.step, step)

    def reset_to(self, steps: int) -> None:
        """Count as many steps as a checkpoint says, with this graph and with any."""
        self.steps = self.step = steps

    def use(self) -> None:
        """Note that the graph is called in training now."""
        self.last_used_at = self.synced_at = now()

    def use_elsewhere(self) -> None:
        """Note that another graph has rolled this one's slots now, in its place."""
        self.last_used_at = now()

    def sync(self, at: int) -> None:
        """Note that what another graph has learnt up to then is taken in."""
        self.synced_at = at

    def end_backward(self) -> None:
        """Note that a backward has come in the step that goes on."""
        self.returned = self.step

    def expect_recompute(self) -> None:
        """Note a forward without gradients of a checkpointed region: its backward will repeat it."""
        self.pending_recomputes += 1

    def take_recompute(self) -> bool:
        """Note that a forward is repeated. Returns whether it was one that `expect_recompute` noted."""
        if not self.pending_recomputes:
            return False
        self.pending_recomputes -= 1
        return True

    def accumulate(self, goes_on: bool) -> bool:
        """Note whether the step goes on after the forward that begins. Returns whether it went on before that."""
        went_on, self.in_accumulation = self.in_accumulation, goes_on
        return went_on

    def await_backward(self, waits: bool) -> None:
        """Note whether the forward that begins goes on with a step only because no backward has come."""
        self.forwards_awaiting_backward = self.forwards_awaiting_backward + 1 if waits else 0

    def enter(self, stage: int | None, has_rank_of_its_own: bool) -> None:
        """Note the stage of a pipeline that calls the graph; None for none."""
        self.stage, self.has_rank_of_its_own = stage, has_rank_of_its_own
