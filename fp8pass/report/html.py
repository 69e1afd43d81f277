"""Write a report as one self-contained page: `Report.to_html`. This module makes the JSON that page.html shows.

Every text is stored once in a list and referenced by index, because a graph of 200 layers repeats most texts.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fp8pass.graph.prediction import in_words
from fp8pass.graph.verdict import Gemm
from fp8pass.report.report import RECOMPUTED, Picture, Report, predicted_gain, saved_summary

CHARTS = ("amax", "scale", "underflow", "saturation", "sqnr", "kurtosis")
"""The keys that a row of numerics may have besides slot and step."""


def page(report: Report, numerics: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Return the page as text. See `Report.to_html`."""
    data = json.dumps(page_data(report, numerics), separators=(",", ":"), allow_nan=False)
    template = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    parts = {"<!--summary-->": html.escape(report.summary()), "/*data*/": script_safe(data)}
    for marker, text in parts.items():
        head, separator, tail = template.partition(marker)
        assert separator, marker
        template = head + text + tail
    return template


def script_safe(text: str) -> str:
    """Escape JSON so that it cannot end the script element: names come from users."""
    # U+2028 and U+2029, which JSON allows in strings, end a line in JavaScript before ES2019.
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


class _Texts:
    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def all(self) -> list[str]:
        return list(self._numbers)


def page_data(report: Report, numerics: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Return the data of the page, without NaN and infinities, which JSON cannot represent."""
    texts = _Texts()
    return {
        "torch": torch.__version__,
        "summary": report.summary(),
        "flops": sum(g.in_call(g.flops) for g in report.matmuls),
        "fp8_flops": sum(g.in_call(g.flops) for g in report.rewritten),
        "matmuls": len(report.matmuls),
        "graphs": report.graphs,
        "gemms": [_gemm(g, texts) for g in report.gemms],
        "pictures": [_picture(p, texts) for p in report.pictures],
        "breaks": [str(b) for b in report.breaks],
        "recompiles": [str(r) for r in report.recompiles],
        "notes": [*map(str, report.sizes), *map(str, report.timings), *_saved(report), *report.notes, *report.faults],
        "error": report.error,
        "numerics": None if numerics is None else _numerics(numerics),
        "texts": texts.all(),
    }


def _saved(report: Report) -> list[str]:
    return [saved_summary(report.saved), *map(str, report.saved)] if report.saved else []


def _gemm(g: Gemm, texts: _Texts) -> list[Any]:
    batches = "" if g.batches == 1 else f"{g.batches} × "
    note = "; ".join(filter(None, (g.note, RECOMPUTED if g.recomputed else "")))
    words = (
        g.name or "-", g.kind, f"{batches}{g.M} × {g.K} × {g.N}", " @ ".join(g.dtypes[:2]) + f" → {g.dtypes[2]}",
        g.scaling, g.status, g.rule, g.reason, note, g.source, predicted_gain(g), in_words(g.pays_from, g.pays_of),
    )  # fmt: skip
    # what the page sorts by
    gain = g.predicted_ends[1] if g.predicted_ends else g.predicted_speedup
    return [*map(texts, words), g.in_call(g.flops), gain]


def _picture(p: Picture, texts: _Texts) -> dict[str, Any]:
    ops = [
        [*map(texts, (o.name, o.label, o.kind, o.module, o.source, o.shape, o.made_by)), o.inputs, o.gemms, o.kernel]
        for o in p.ops
    ]
    return {
        "number": p.number,
        "part": p.part,
        "title": p.title,
        "ops": ops,
        "kernels": [[texts(k.name), texts(k.code)] for k in p.kernels],
    }


def _numerics(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Group rows by slot: {"slot", "step": [...], and [number or null, ...] for each of `CHARTS` that a row has}."""
    slots: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        for name in ("slot", "step"):
            if row.get(name) is None:
                raise ValueError(f"a row of numerics has no {name!r}: {dict(row)}")
        slots.setdefault(str(row["slot"]), []).append(row)
    tensors = []
    for slot, by_step in slots.items():
        by_step.sort(key=lambda row: row["step"])
        charts = {name: [_finite(row.get(name)) for row in by_step] for name in CHARTS}
        shown = {name: values for name, values in charts.items() if any(v is not None for v in values)}
        tensors.append({"slot": slot, "step": [int(row["step"]) for row in by_step], **shown})
    return tensors


def _finite(value: Any) -> float | None:
    """Return the number rounded to 6 digits, or None if it is None, NaN or infinite."""
    number = math.nan if value is None else float(value)
    return float(f"{number:.6g}") if math.isfinite(number) else None
