"""Return the counts of the numerics monitor as a table, JSON lines, or TensorBoard scalars: `fp8pass.stats(model)`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fp8pass.base.errors import Fp8Error, warn
from fp8pass.base.fields import nearest
from fp8pass.quant.monitor_ops import MonitorBuffer, Numerics
from fp8pass.recipes import matches
from fp8pass.report.text_table import aligned, ruled
from fp8pass.states.checkpoint import usual_name
from fp8pass.states.model_state import state as state_of
from fp8pass.states.slots import InstanceState, registry

PLOTTED = ("amax", "scale", "underflow", "saturation", "sqnr", "kurtosis")
"""The fields of a row that change from step to step."""


@dataclass(frozen=True)
class SlotStats:
    """The effect of quantization on one tensor in one step.

    slot: its name, such as `layers.0.up.input`; role: "input", "weight" or "grad_output"; source: the user's line of
    its matmul; step: counted from 0. amax: max(abs(x)); scale: the factor that x is multiplied with, the smallest if
    there are several. underflow: share of the non-zero elements that became 0; saturation: share of all elements that
    were too large for the format; sqnr: signal to quantization noise ratio in dB,
    10 log10(sum(x**2) / sum((x - dequantized x)**2)) over finite elements, inf without noise, NaN without signal.
    nonfinite: number of elements that are NaN or inf; elements: number of elements, summed over all uses in the step.
    requantized: how often it was quantized again by its own amax, under `on_saturation="requantize"`. kurtosis: n *
    sum(x**4) / sum(x**2)**2 over the n finite elements, from 1 (all of one magnitude) to n (one that is
    not 0); NaN for a tensor of zeros. It is 3 for a normal distribution, and grows with outliers.
    """

    slot: str
    role: str
    source: str
    step: int
    amax: float
    scale: float
    underflow: float
    saturation: float
    sqnr: float
    nonfinite: int
    elements: int
    kurtosis: float = math.nan
    requantized: int = 0
    order: tuple[int, int, int] = field(default=(0, 0, 0), repr=False, compare=False)
    """The position of its quantization within the step; rows are sorted by it."""


@dataclass(frozen=True)
class Stats:
    """Rows sorted by step, and within a step by the order in which the tensors were quantized."""

    rows: tuple[SlotStats, ...]

    @property
    def latest(self) -> list[SlotStats]:
        """The newest row of each slot."""
        return list({row.slot: row for row in self.rows}.values())

    def of(self, slot: str) -> list[SlotStats]:
        """Return the rows of a slot, or of all slots that match a name pattern, oldest first."""
        return [row for row in self.rows if matches(row.slot, slot)]

    def first_saturated(self, share: float = 0.01) -> SlotStats | None:
        """Return the first row whose saturation exceeds `share` (0 to 1): its amax grew faster than its scale fell."""
        return next((row for row in self.rows if row.saturation > share), None)

    @property
    def first_nonfinite(self) -> SlotStats | None:
        """The first tensor with NaN or inf, or None. An op after the previously quantized tensor produced it."""
        return next((row for row in self.rows if row.nonfinite), None)

    @property
    def last_finite(self) -> SlotStats | None:
        """The tensor quantized just before `first_nonfinite` in the same step; None if there is no such tensor."""
        first = self.first_nonfinite
        index = self.rows.index(first) if first is not None else 0
        before = self.rows[index - 1] if index else None
        return before if before is not None and first is not None and before.step == first.step else None

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as plain dicts of numbers and strings."""
        return [{k: v for k, v in asdict(row).items() if k != "order"} for row in self.rows]

    def to_jsonl(self, path: str | Path, append: bool = False) -> None:
        """Write one line of JSON per row. NaN and infinities become null, because JSON cannot represent them."""
        with Path(path).open("a" if append else "w") as file:
            for row in self.to_dicts():
                finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
                file.write(json.dumps(finite) + "\n")

    def to_tensorboard(self, writer: Any) -> None:
        """Add scalars `fp8/<slot>/<number>` to a `torch.utils.tensorboard.SummaryWriter`."""
        for row in self.rows:
            for name in (*PLOTTED, "nonfinite", "requantized"):
                writer.add_scalar(f"fp8/{row.slot}/{name}", getattr(row, name), row.step)

    def __str__(self) -> str:
        if not self.rows:
            return "nothing has been watched yet: call the model, with gradients, after compiling it with monitor=True"
        steps = sorted({row.step for row in self.rows})
        lines = [
            f"steps {steps[0]} to {steps[-1]}; of each tensor the newest",
            *ruled(aligned([_HEAD, *map(_cells, self.latest)], right=range(1, len(_HEAD) - 1))),
        ]
        return "\n".join([*lines, *self._notes()])

    def _notes(self) -> Iterator[str]:
        first = self.first_saturated()
        if first is not None:
            yield f"the first to saturate: {first.saturation:.2%} of {first.slot}, step {first.step} ({first.source})"
        again = [row for row in self.rows if row.requantized]
        if again:
            slots, last = len({row.slot for row in again}), again[-1]
            yield f"quantized again by their own amax: {slots} tensors, the last one {last.slot} in step {last.step}"
        lost = max(self.rows, key=lambda row: row.underflow)
        if lost.underflow > 0:
            yield f"most lost to zero: {lost.underflow:.2%} of {lost.slot}, step {lost.step} ({lost.source})"
        first, before = self.first_nonfinite, self.last_finite
        if first is not None:
            behind = f"; {before.slot}, quantized before it, is finite" if before is not None else ""
            yield (
                f"the first NaN or inf is in {first.slot}, step {first.step} ({first.source}): {first.nonfinite} of "
                f"{first.elements} elements{behind}"
            )


def stats(model: Any, slots: str = "*", since: int = 0) -> Stats:
    """Return the counts of the numerics monitor for a module, compiled or not, or for the models of a `train_step`.

    Synchronizes with the device. The newest step may still be running.

    Args:
        model: A module, a compiled module, or a `train_step`.
        slots: A name pattern.
        since: The first step to return, counted from 0.

    Returns:
        A `Stats`, with one row per tensor and step.

    Raises:
        Fp8Error: If no tensor of the model is watched: compile with `monitor=True` to watch them.
        ValueError: If `slots` matches no watched tensor.
        TypeError: If an argument has another type.
    """
    if not isinstance(slots, str):
        raise TypeError(f"slots is {slots!r}: pass a name pattern, such as 'layers.3' or '*.grad_output'")
    if not isinstance(since, int):
        raise TypeError(f"since is {since!r}: pass the number of a step")
    module = state_of(model).module
    assert module is not None
    watched = _watched(module)
    rows = [row for state, buffer in watched for row in _rows(module, state, buffer, since)]
    if not watched:
        raise Fp8Error(
            "no tensor of this model is watched: compile it with options={'monitor': True}, or with "
            "@fp8pass.train_step(monitor=True), and call it with gradients"
        )
    for _, buffer in watched:
        _warn_of_kurtosis(buffer, rows)
    slot_names = {row.slot for row in rows}
    rows = [row for row in rows if matches(row.slot, slots)]
    if slot_names and not rows:
        raise ValueError(
            f"slots={slots!r}: matches none of {len(slot_names)} watched tensors{nearest(slots, slot_names, n=3)}"
        )
    return Stats(tuple(sorted(rows, key=lambda row: (row.step, row.order))))


def is_watched(model: Any) -> bool:
    """Return whether `stats` has anything to return for a module: it was compiled with `monitor=True`, and has run."""
    return bool(_watched(state_of(model).module))


def _watched(module: Any) -> list[tuple[InstanceState, MonitorBuffer]]:
    of_module = [state for state in registry.states() if usual_name(module, state, "") is not None]
    return [(state, state.counted) for state in of_module if state.counted is not None]


def _rows(module: Any, state: InstanceState, monitor_buffer: MonitorBuffer, since: int) -> Iterator[SlotStats]:
    names = [str(usual_name(module, state, w.name)) for w in monitor_buffer.table.watched]
    for step, called, numbers in zip(
        monitor_buffer.steps, monitor_buffer.called, monitor_buffer.read().tolist(), strict=True
    ):
        if step < since:
            continue
        for i, (name, watched) in enumerate(zip(names, monitor_buffer.table.watched, strict=True)):
            numerics = Numerics(*numbers[i])
            if numerics.elements:  # otherwise the tensor was not quantized in this step
                # A backward goes through calls and matmuls from the last to the first.
                order = (0, called, i) if i < monitor_buffer.table.n_forward else (1, -called, -i)
                yield SlotStats(name, watched.role, watched.source, step, **_shares(numerics), order=order)


def _shares(numerics: Numerics) -> dict[str, Any]:
    return {
        "amax": numerics.amax,
        "scale": 1 / numerics.scale_inv if numerics.scale_inv else math.inf,
        "underflow": numerics.underflowed / max(numerics.nonzero, 1),
        "saturation": numerics.saturated / numerics.elements,
        "sqnr": _sqnr(numerics),
        "kurtosis": (numerics.elements - numerics.nonfinite) * numerics.fourth / numerics.square**2
        if numerics.square
        else math.nan,
        "nonfinite": round(numerics.nonfinite),
        "elements": round(numerics.elements),
        "requantized": round(numerics.requantized),
    }


def _sqnr(counts: Numerics) -> float:
    if not counts.signal:
        return math.nan
    return 10 * math.log10(counts.signal / counts.noise) if counts.noise else math.inf


def _warn_of_kurtosis(buffer: MonitorBuffer, rows: Sequence[SlotStats]) -> None:
    """Warn once of each activation whose kurtosis exceeds the option `monitor_kurtosis`."""
    level = buffer.table.kurtosis
    if level is None:
        return
    for row in rows:
        if row.role == "input" and row.kurtosis > level and row.slot not in buffer.warned_of:
            buffer.warned_of.add(row.slot)
            warn(
                f"fp8pass: the kurtosis of {row.slot} is {row.kurtosis:.4g} in step {row.step} ({row.source}), above "
                f"monitor_kurtosis={level:g}; a normal distribution has 3. Few large values, up to {row.amax:.3g}, "
                "take the range of its scale: look for the layer before it that makes them, or scale it by rows"
            )


_HEAD = ("slot", "step", "amax", "scale", "underflow", "saturation", "SQNR dB", "kurtosis", "NaN, inf", "source")


def _cells(row: SlotStats) -> tuple[str, ...]:
    return (
        row.slot, str(row.step), f"{row.amax:.3g}", f"{row.scale:.3g}", f"{row.underflow:.2%}",
        f"{row.saturation:.2%}", f"{row.sqnr:.1f}", f"{row.kurtosis:.3g}", str(row.nonfinite or ""), row.source,
    )  # fmt: skip
