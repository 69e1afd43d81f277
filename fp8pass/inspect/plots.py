"""Plot the counts of the numerics monitor over steps: `fp8pass plot`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fp8pass.base.errors import Fp8Error
from fp8pass.recipes import matches

MAX_SLOTS = 10
"""The most slots that are drawn: those with NaN or inf first, then those with the most saturation and underflow."""
PANELS = {
    "amax": "max |x|",
    "scale": "scale",
    "saturation": "saturated, share",
    "underflow": "became 0, share",
    "sqnr": "SQNR, dB",
    "kurtosis": "kurtosis",
}
LOGARITHMIC = ("amax", "scale", "kurtosis")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file that `Stats.to_jsonl` wrote.

    Raises Fp8Error, with the line number, for a line that is not such a row.
    """
    return [_row(line, f"{path}, line {i}") for i, line in enumerate(path.read_text().splitlines(), 1)]


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        row.setdefault("kurtosis", None)  # files of earlier versions lack it
        return {**row, "step": int(row["step"]), "slot": str(row["slot"]), **{k: row[k] for k in PANELS}}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise Fp8Error(f"{where} is not a row of fp8pass.stats(model).to_jsonl: {error}") from error


def plot(rows: Sequence[dict[str, Any]], path: Path, slots: str = "*") -> list[str]:
    """Write an image with a panel for each number and a line for each slot; return the slots that have a line.

    path: its suffix selects the image format of matplotlib, PNG for example. slots: a name pattern. A cross marks a
    step with NaN or inf. Raises Fp8Error if no slot matches, ImportError without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")  # needs no display
    from matplotlib import pyplot

    by_slot: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if matches(row["slot"], slots):
            by_slot.setdefault(row["slot"], []).append(row)
    if not by_slot:
        raise Fp8Error(f"no slot is named {slots!r}, of {len({row['slot'] for row in rows})}")
    chosen = sorted(by_slot, key=lambda slot: _worst(by_slot[slot]), reverse=True)[:MAX_SLOTS]
    figure, panels = pyplot.subplots(len(PANELS), 1, figsize=(9, 11), sharex=True, layout="constrained")
    for axes, (name, label) in zip(panels, PANELS.items(), strict=True):
        for slot in sorted(chosen):
            steps = [row["step"] for row in by_slot[slot]]
            values = [math.nan if row[name] is None else row[name] for row in by_slot[slot]]
            # A line through fewer than three points is hardly seen, or not at all.
            (line,) = axes.plot(steps, values, label=slot, linewidth=1.2, marker="." if len(steps) < 3 else None)
            bad = [row["step"] for row in by_slot[slot] if row.get("nonfinite")]
            # At 4% of the panel's height, because a NaN has no place on the axis.
            axes.plot(bad, [0.04] * len(bad), "x", color=line.get_color(), transform=axes.get_xaxis_transform())
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if name in LOGARITHMIC:
            axes.set_yscale("log")
    panels[-1].set_xlabel("step")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return sorted(chosen)


def _worst(rows: Iterable[dict[str, Any]]) -> tuple[float, float]:
    return max((float(bool(row.get("nonfinite"))), row["saturation"] + row["underflow"]) for row in rows)
