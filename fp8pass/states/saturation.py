"""Warn once if delayed scales saturated much, as after a jump of the inputs; once if tensors vanish after an outlier.

Every few steps, the device compares the newest amaxes with the scales that the earlier ones gave. The host reads the
result in a later step, when it is there: no step waits for it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8pass.base.errors import warn
from fp8pass.base.scaling import FP8_DTYPES
from fp8pass.states.slots import InstanceState

MUCH = 16.0
"""So many times the largest value that its scale can represent is too large: if a tensor of normally distributed
elements grew so much, 80% of them saturate."""
MOST_STEPS = 16
"""The steps after which the device compares, if the history is long enough."""

_said: set[str] = set()
"""The warnings that this process has seen."""


def watch(state: InstanceState) -> None:
    """Before a training forward, look for steps that saturated or vanished, if it is time to."""
    table = state.table
    if len(_said) == len(_TELL) or not table.remembers or not table.training:
        return
    _watches.setdefault(state, _Watch()).step(state)


@dataclass
class _Watch:
    """Compares the amaxes of one instance state, and keeps what is on its way from the device."""

    compared_at: int = 0
    found: _Later | None = None

    def step(self, state: InstanceState) -> None:
        if self.found is not None and self.found.is_there():
            for tell, numbers in zip(_TELL, self.found.numbers.tolist(), strict=True):
                tell(state, numbers)
            self.found = None
        steps, history = state.tracker.steps, state.tensors.amax_history
        rows = min(MOST_STEPS, len(history) // 2)
        is_time = rows and steps - self.compared_at >= rows and self.found is None
        if is_time and not (history.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.compared_at = steps
            recipe = state.table.delayed
            grown = overshoots(history, rows, recipe.amax_compute_algo, recipe.margin)
            self.found = _Later(torch.stack([grown, largest_scaled(history, rows, state.tensors.scale)]))


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


@torch.no_grad()
def largest_scaled(history: Tensor, rows: int, scale: Tensor) -> Tensor:
    """Return the largest values that the newest amaxes became by the scales, f32[T]; 0 for slots without any."""
    return history[:rows].nan_to_num(torch.inf).amax(0).clamp(min=0) * scale


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


def _tell_of_growth(state: InstanceState, times: list[float]) -> None:
    if state.table.delayed.requantizes or "growth" in _said:
        return
    if much := [i for i, number in enumerate(times) if number > MUCH]:
        _said.add("growth")
        names, worst = state.table.names, max(much, key=times.__getitem__)
        warn(
            f"fp8pass: {len(much)} of {len(names)} tensors had, in one of the last steps, values more than {MUCH:g} "
            f"times as large as their delayed scales allow, and saturated: {names[worst]} {times[worst]:.0f} times. "
            "After a jump of the inputs, one layer more heals in each step. "
            "DelayedScaling(on_saturation='requantize') scales such a tensor by its own amax in the step itself"
        )


def _tell_of_outliers(state: InstanceState, largest: list[float]) -> None:
    table = state.table
    found = [i for i, value in enumerate(largest) if 0 < value < smallest_normal(table.fp8_max[i])]
    if found and "outliers" not in _said:
        _said.add("outliers")
        worst = min(found, key=largest.__getitem__)
        warn(
            f"fp8pass: {len(found)} of {len(table.names)} tensors are rounded to 0, or nearly so: their delayed scales "
            f"fit an amax of an earlier step, that of {table.names[worst]} one that was "
            f"{table.fp8_max[worst] / largest[worst]:.1g} times as large as those of the last steps. Such an outlier, "
            "which may lie in rows that are masked later, is forgotten after "
            f"{table.delayed.amax_history_len} steps: a shorter amax_history_len forgets it sooner, "
            "recipe='rowwise' scales each row by its own amax, and masking before the matmul avoids it"
        )


_TELL = (_tell_of_growth, _tell_of_outliers)


def smallest_normal(fp8_max: float) -> float:
    """Return the smallest normal number of the FP8 format with that largest value."""
    return next(f.smallest_normal for f in map(torch.finfo, FP8_DTYPES) if f.max == fp8_max)


_watches: weakref.WeakKeyDictionary[InstanceState, _Watch] = weakref.WeakKeyDictionary()
