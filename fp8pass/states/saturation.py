"""Warn once if delayed scales saturated much, as after a jump of the inputs; once if values round to 0.

Every few steps, the device compares the newest amaxes with the scales that the earlier ones gave. The host reads the
result in a later step, when it is there: no step waits for it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8pass.base.errors import warn
from fp8pass.base.scaling import FP8_DTYPES
from fp8pass.states.slots import InstanceState, SlotTable

MUCH = 16.0
"""So many times the largest value that its scale can represent is too large: if a tensor of normally distributed
elements grew so much, 80% of them saturate."""
FIRST_STEPS, MOST_STEPS = 16, 64
"""The steps after which the device compares: at first, and later in a run, if the history is long enough."""


def watch(state: InstanceState) -> None:
    """Before a training forward, look for steps that saturated or vanished, if it is time to."""
    table = state.table
    if not _tellers or not table.remembers or not table.training:
        return
    _watches.setdefault(state, _Watch()).step(state)


@dataclass
class _Watch:
    """Compares the amaxes of one instance state, and keeps what is on its way from the device."""

    compared_at: int = 0
    found: _Later | None = None

    def step(self, state: InstanceState) -> None:
        if self.found is not None and self.found.is_there():
            _tell(state, *self.found.numbers.tolist())
            self.found = None
        steps, history = state.tracker.steps, state.tensors.amax_history
        rows = min(max(FIRST_STEPS, self.compared_at), MOST_STEPS, len(history) // 2)
        is_time = rows and steps - self.compared_at >= rows and self.found is None
        if is_time and not (history.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.compared_at = steps
            recipe = state.table.delayed
            scale, algo = state.tensors.scale, recipe.amax_compute_algo
            self.found = _Later(compared(history, scale, rows, algo, recipe.margin))


@torch.no_grad()
def compared(history: Tensor, scale: Tensor, rows: int, algo: object, margin: int) -> Tensor:
    """Compare the newest amaxes of slots with their scales and with the older amaxes; return what was found, f32[3, T].

    By how much the largest of the newest ones exceeded what its own scale could represent, 0 for slots without an older
    amax; what `scale` makes of it; and how many times as large the largest of the history is. history: f32[H, T], the
    newest amaxes at row 0. scale: f32[T], the newest. rows: how many of the amaxes count.
    """
    # a history is long, and its older part is read once
    oldest_first = torch.cat([history[rows:].amax(0, keepdim=True), history[: rows + 1].flip(0)]).clamp(min=0)
    largest = oldest_first.cummax(0).values
    # the largest of all older ones made a scale; of a function, which may return less, it is a bound
    older, newest = (oldest_first if algo == "most_recent" else largest)[1:-1], oldest_first[2:]
    grown = (newest / older / 2**margin).nan_to_num(0, 0).amax(0)
    at_most = torch.stack([newest.amax(0), largest[-1]]).nan_to_num(torch.inf)
    return torch.stack([grown, at_most[0] * scale, at_most[1] / at_most[0]])


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


def _tell(state: InstanceState, grown: list[float], scaled: list[float], fallen: list[float]) -> None:
    """Warn of what was found, of either kind once per process.

    For each slot, grown: as `overshoots` returns it; scaled: what the largest of the newest values became by its scale;
    fallen: how many times as large the largest of the history was.
    """
    for teller in [*_tellers]:
        if said := teller(state.table, grown, scaled, fallen):
            _tellers.remove(teller)
            warn(said)


def _of_growth(table: SlotTable, grown: list[float], *_: list[float]) -> str:
    much = [i for i, times in enumerate(grown) if times > MUCH]
    if not much or table.delayed.requantizes:
        return ""
    worst = max(much, key=grown.__getitem__)
    return (
        f"fp8pass: {len(much)} of {len(table.names)} tensors had, in one of the last steps, values more than {MUCH:g} "
        f"times as large as their delayed scales allow, and saturated: {table.names[worst]} {grown[worst]:.0f} times. "
        "After a jump of the inputs, one layer more heals in each step. "
        "DelayedScaling(on_saturation='requantize') scales such a tensor by its own amax in the step itself"
    )


def _of_fall(table: SlotTable, _: list[float], scaled: list[float], fallen: list[float]) -> str:
    far = [
        i
        for i, (value, times, most) in enumerate(zip(scaled, fallen, table.fp8_max, strict=True))
        # both, since numbers can be too small for any scale
        if 0 < value < smallest_normal(most) and times > most / smallest_normal(most) / 2**table.delayed.margin
    ]
    if not far:
        return ""
    worst, steps = max(far, key=fallen.__getitem__), table.delayed.amax_history_len
    return (
        f"fp8pass: {len(far)} of {len(table.names)} tensors are rounded to 0, or nearly so: their delayed scales fit "
        f"the largest amax of {steps} steps, that of {table.names[worst]} one that is {fallen[worst]:.1g} times as "
        "large as those of the last steps. A shorter amax_history_len forgets it sooner. If it is an outlier, as in "
        "rows that are masked after the matmul, mask them before it, or choose recipe='rowwise', where each row has "
        "its own scale"
    )


_tellers: list[Callable[..., str]] = [_of_growth, _of_fall]
"""Name the warnings that this process has not given yet; each returns its text, or "" if there is no reason for it."""


@functools.cache
def smallest_normal(fp8_max: float) -> float:
    """Return the smallest normal number of the FP8 format with that largest value."""
    return next(f.smallest_normal for f in map(torch.finfo, FP8_DTYPES) if f.max == fp8_max)


_watches: weakref.WeakKeyDictionary[InstanceState, _Watch] = weakref.WeakKeyDictionary()
