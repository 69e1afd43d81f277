"""The inputs that the numerics monitor counts into: the statistics of the current step, for one graph and instance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8pass.graph.inputs import Call
from fp8pass.quant.monitor_ops import MonitorBuffer, N, WatchTable
from fp8pass.states.slots import SlotTable, registry
from fp8pass.states.step_tracker import now
from fp8pass.states.steps import begin_step


@dataclass(frozen=True)
class MonitorInput:
    """A part of a graph's `MonitorBuffer`: the statistics of the forward's tensors, or of gradients.

    counter: a table without slots, whose state counts the steps and holds the buffer.
    """

    name: str
    table: WatchTable
    counter: SlotTable
    of_gradients: bool

    def example(self, call: Call) -> Tensor:
        """Return a tensor of this shape, f32[F, 13] or f32[T-F, 13]."""
        total, forward = len(self.table.watched), self.table.n_forward
        return torch.zeros(total - forward if self.of_gradients else forward, N, device=self.table.device)

    def value(self, call: Call) -> Tensor:
        """Return the instance's tensor, after beginning the step that the call belongs to."""
        return call.once(self.counter, self._inputs)[self.of_gradients]

    def _inputs(self, call: Call) -> list[Tensor]:
        counter = registry.of(self.counter, call.owned)
        if counter.counted is None:
            counter.counted = MonitorBuffer(self.table)
        buffer: MonitorBuffer = counter.counted
        if not call.is_counted:  # a repeated forward counts into the step of its first run
            begin_step(counter)
            buffer.begin(registry.step_of(call.owned) - 1, now())
        return buffer.inputs(call.is_counted)
