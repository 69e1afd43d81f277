"""Draw the pipeline for docs/compiler.md from the lists of passes in `fp8pass/compiler/order.py`.

python docs/diagram.py        prints the SVG; `python docs/generate.py` writes it to docs/images/
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import NamedTuple

from fp8pass.compiler.order import DYNAMO, JOINT, KERNELS, TRACED, UPDATE

WIDTH, MARGIN, LINE, GAP = 860, 20, 26, 30
LABELS = 250  # width of the left column, which names the graph
PILL, CHARACTER = 10, 7.3

STYLE = """
  .panel { fill: #ffffff; stroke: #d0d7de }
  .stage { fill: #f6f8fa; stroke: #afb8c1 }
  .pass { fill: #ddf4ff; stroke: #54aeff }
  .update { fill: #fff8c5; stroke: #d4a72c }
  .arrow { stroke: #57606a; fill: none; stroke-width: 1.5 }
  .head { fill: #57606a }
  text { fill: #1f2328; font: 13px sans-serif }
  .title { font-weight: bold }
  .note { fill: #57606a; font-size: 12px }
  .name { font: 12px monospace }
  @media (prefers-color-scheme: dark) {
    .panel { fill: #0d1117; stroke: #30363d }
    .stage { fill: #161b22; stroke: #484f58 }
    .pass { fill: #0c2d6b; stroke: #388bfd }
    .update { fill: #3b2300; stroke: #9e6a03 }
    .arrow { stroke: #8b949e }
    .head { fill: #8b949e }
    text { fill: #e6edf3 }
    .note { fill: #8b949e }
  }
"""


class Stage(NamedTuple):
    """A box of the drawing: a component or a graph, with notes, and fp8pass's passes over the graph."""

    title: str
    notes: tuple[str, ...]
    passes: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()


def stages() -> list[Stage]:
    """Return the boxes in order, from torch.compile to kernels."""
    return [
        Stage("TorchDynamo", ("turns the user's Python into a graph of torch functions",)),
        Stage(
            "Dynamo's graph",
            ("of a forward: annotated (blue);", "of an update: rewritten (yellow)"),
            tuple(p.name for p in DYNAMO),
            tuple(p.name for p in UPDATE),
        ),
        Stage("AOTAutograd", ("traces autograd, and decomposes functions into ATen ops",)),
        Stage(
            "joint graph",
            ("forward and backward together:", "passes change numbers;", "of another tracer: the yellow one first"),
            tuple(p.name for p in JOINT),
            tuple(p.name for p in TRACED),
        ),
        Stage("partitioner", ("cuts the graph in two, and saves FP8 where matmuls of the backward read FP8",)),
        Stage(
            "forward, backward, update",
            ("separate graphs: passes change", "kernels, not numbers"),
            tuple(p.name for p in KERNELS),
        ),
        Stage("Inductor", ("generates fused kernels, Triton on a GPU, C++ on a CPU; calls torch._scaled_mm",)),
    ]


def svg() -> str:
    """Return the drawing as SVG."""
    parts: list[str] = []
    y = float(MARGIN)
    for i, stage in enumerate(stages()):
        if i:
            x = MARGIN + LABELS / 2
            parts.append(f'<path class="arrow" d="M{x:g} {y - GAP:g} V{y - 7:g}"/>')
            parts.append(f'<path class="head" d="M{x - 5:g} {y - 8:g} h10 l-5 8 z"/>')
        pills, rows = _pills(stage, y + 12)
        height = max(rows * (LINE + 6) + 18, 22 + 18 * (1 + (len(stage.notes) if pills else 0)))
        parts.append(
            f'<rect class="stage" x="{MARGIN}" y="{y:g}" width="{WIDTH - 2 * MARGIN}" height="{height:g}" rx="6"/>'
        )
        parts.append(f'<text class="title" x="{MARGIN + 12}" y="{y + 25:g}">{escape(stage.title)}</text>')
        for j, note in enumerate(stage.notes):
            left, down = (MARGIN + 12, y + 44 + 17 * j) if pills else (MARGIN + LABELS, y + 25 + 17 * j)
            parts.append(f'<text class="note" x="{left:g}" y="{down:g}">{escape(note)}</text>')
        parts += pills
        y += height + GAP
    return document("From torch.compile to kernels, with the passes in order", parts, y - GAP + MARGIN)


def document(title: str, parts: Iterable[str], bottom: float) -> str:
    """Return an SVG of these parts on a panel that is WIDTH wide and `bottom` high."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom:g}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="panel" x="0.5" y="0.5" width="{WIDTH - 1}" height="{bottom - 1:g}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _pills(stage: Stage, y: float) -> tuple[list[str], int]:
    """Draw the passes of a stage from left to right, in as many rows as they need; return SVG and number of rows."""
    parts: list[str] = []
    row = 0
    for kind, names in (("pass", stage.passes), ("update", stage.updates)):
        x = float(MARGIN + LABELS)
        row += bool(names)
        for name in names:
            width = len(name) * CHARACTER + 2 * PILL
            if x + width > WIDTH - MARGIN - 12:
                x, row = MARGIN + LABELS, row + 1
            top = y + (row - 1) * (LINE + 6)
            parts.append(f'<rect class="{kind}" x="{x:g}" y="{top:g}" width="{width:g}" height="{LINE}" rx="13"/>')
            parts.append(f'<text class="name" x="{x + PILL:g}" y="{top + 17:g}">{escape(name)}</text>')
            x += width + 8
    return parts, row


if __name__ == "__main__":
    print(svg(), end="")
