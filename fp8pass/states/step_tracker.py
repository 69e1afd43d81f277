"""Tracks the steps of one graph of an instance. Only this file writes the fields; `steps.py` says when."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

_clock = itertools.count(1)


def now() -> int:
    """Return a number larger than all returned before, so that the later of two calls has the larger one."""
    return next(_clock)


@dataclass(eq=False)
class StepTracker:
    """The steps that an instance has begun with one graph, and the events that its current step still awaits."""

    steps: int = 0
    """Number of steps that the instance has begun with this graph."""
    step: int = 0
    """The number of the last step that it began, counted over all graphs of the instance."""
    returned: int = 0
    """The number, counted as `step` is, of the newest step in which a backward of this graph has run."""
    last_used_at: int = 0
    """The time of `now` when the graph was last called in training; 0 if it was never."""
    synced_at: int = 0
    """The newest `last_used_at` of the graphs from which this one has copied shared slots."""
    pending_recomputes: int = 0
    """Number of no-grad forwards of checkpointed regions that no backward has repeated yet."""
    forwards_awaiting_backward: int = 0
    """Number of forwards in a row that continued the step of the previous one only because no backward had run."""
    in_accumulation: bool = False
    """True if the step continues after the latest forward, because it ran under DistributedDataParallel's `no_sync`."""
    stage: int | None = None
    """The index of the pipeline stage that last called the instance; None outside of pipelines."""
    has_rank_of_its_own: bool = False
    """True if no other rank has that stage."""

    def begin(self, neighbours: Iterable[StepTracker], joins: bool = False) -> None:
        """Begin a step with this graph. joins: True if another graph of the instance has already begun it.

        Without `joins`, the step is the newest one that another graph has begun, unless this graph has begun it too or
        a backward has run in it: then the step is a new one. neighbours: the trackers of other graphs of the instance.
        """
        around = [self, *neighbours]
        newest = max(t.step for t in around)
        is_over = self.step == newest or any(t.returned == newest for t in around)
        self.steps += 1
        self.step = newest + (is_over and not joins)

    def begin_repeated(self, neighbours: Iterable[StepTracker]) -> None:
        """Begin the current step of the instance with a graph whose first call repeats a forward of that step."""
        self.steps += 1
        self.step = max(t.step for t in (self, *neighbours))
        self.use()

    def raise_to(self, steps: int, step: int) -> None:
        """Raise the counts to at least these, which a checkpoint or other graphs give."""
        self.steps, self.step = max(self.steps, steps), max(self.step, step)

    def reset_to(self, steps: int) -> None:
        """Set both counts, of this graph and of all graphs, to the number of steps in a checkpoint."""
        self.steps = self.step = steps

    def use(self) -> None:
        """Note that the graph is called in training now."""
        self.last_used_at = self.synced_at = now()

    def use_elsewhere(self) -> None:
        """Note that the state of another graph has rolled this graph's slots now."""
        self.last_used_at = now()

    def sync(self, at: int) -> None:
        """Note that the shared slots of another graph, last used at time `at`, have been copied."""
        self.synced_at = at

    def end_backward(self) -> None:
        """Note that a backward has run in the current step."""
        self.returned = self.step

    def expect_recompute(self) -> None:
        """Note a no-grad forward of a checkpointed region, which the backward will repeat."""
        self.pending_recomputes += 1

    def take_recompute(self) -> bool:
        """Note that a forward is repeated, and return whether `expect_recompute` had noted one."""
        if not self.pending_recomputes:
            return False
        self.pending_recomputes -= 1
        return True

    def accumulate(self, goes_on: bool) -> bool:
        """Note whether the step continues after the current forward, and return what the previous forward noted."""
        went_on, self.in_accumulation = self.in_accumulation, goes_on
        return went_on

    def await_backward(self, waits: bool) -> None:
        """Note whether the current forward continues a step only because no backward has run."""
        self.forwards_awaiting_backward = self.forwards_awaiting_backward + 1 if waits else 0

    def enter(self, stage: int | None, has_rank_of_its_own: bool) -> None:
        """Note the index of the pipeline stage that calls the graph; None if none does."""
        self.stage, self.has_rank_of_its_own = stage, has_rank_of_its_own
