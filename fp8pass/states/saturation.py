"""Warn once if delayed scales were much too small for a step, as after a jump of the inputs.

Every few steps, the device compares the newest amaxes with the scales that the earlier ones gave. The host reads the
result in a later step, when it is there: no step waits for it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8pass.base.errors import warn
from fp8pass.states.slots import InstanceState

MUCH = 16.0
"""So many times the largest value that its scale can represent is too large: if a tensor of normally distributed
elements grew so much, 80% of them saturate."""
MOST_STEPS = 16
"""The steps after which the device compares, if the history is long enough."""

_has_warned = False


def watch(state: InstanceState) -> None:
    """Before a training forward, look for steps that saturated, if it is time to; warn at most once per process."""
    table = state.table
    if _has_warned or not table.remembers or table.delayed.requantizes or not table.training:
        return
    _watches.setdefault(state, _Watch()).step(state)


@dataclass
class _Watch:
    """Compares the amaxes of one instance state, and keeps what is on its way from the device."""

    compared_at: int = 0
    found: _Later | None = None

    def step(self, state: InstanceState) -> None:
        if self.found is not None and self.found.is_there():
            _tell(state, self.found.numbers)
            self.found = None
        steps, history = state.tracker.steps, state.tensors.amax_history
        rows = min(MOST_STEPS, len(history) // 2)
        is_time = rows and steps - self.compared_at >= rows and self.found is None
        if is_time and not (history.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.compared_at = steps
            recipe = state.table.delayed
            self.found = _Later(overshoots(history, rows, recipe.amax_compute_algo, recipe.margin))


@torch.no_grad()
def overshoots(history: Tensor, rows: int, algo: object, margin: int) -> Tensor:
    """Return by how much the largest of the newest amaxes exceeded what its scale can represent, f32[T].

    history: f32[H, T], the newest at row 0. rows: how many of the amaxes count. 0 for slots without an older amax.
    """
    # the largest of all older ones; of a function, which may return less, it is a bound
    of_history = history if algo == "most_recent" else history.flip(0).cummax(0).values.flip(0)
    newest, older = history[:rows], of_history[1 : rows + 1]
    ratio = newest / older / 2**margin
    return torch.where((older > 0) & torch.isfinite(ratio), ratio, 0).amax(0)


class _Later:
    """Numbers that are on their way from the device."""

    def __init__(self, x: Tensor) -> None:
        self.event: torch.cuda.Event | None = None
        self.numbers = x.to("cpu", non_blocking=True)
        if x.is_cuda:
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record()

    def is_there(self) -> bool:
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]


def _tell(state: InstanceState, numbers: Tensor) -> None:
    global _has_warned
    times, names = numbers.tolist(), state.table.names
    much = [i for i, number in enumerate(times) if number > MUCH]
    if not much or _has_warned:
        return
    _has_warned = True
    worst = max(much, key=times.__getitem__)
    warn(
        f"fp8pass: {len(much)} of {len(names)} tensors had, in one of the last steps, values more than {MUCH:g} times "
        f"as large as their delayed scales allow, and saturated: {names[worst]} {times[worst]:.0f} times. After a jump "
        "of the inputs, one layer more heals in each step. "
        "DelayedScaling(on_saturation='requantize') scales such a tensor by its own amax in the step itself"
    )


_watches: weakref.WeakKeyDictionary[InstanceState, _Watch] = weakref.WeakKeyDictionary()
