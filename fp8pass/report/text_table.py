"""Format tables as text, with two spaces between columns, and find rich's console for terminals."""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from typing import Any

Rows = Sequence[Sequence[str]]


def aligned(rows: Rows, right: Container[int] = ()) -> list[str]:
    """Return a line for each row. right: indices of right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return "  ".join(cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in cells).rstrip()

    return [line(row) for row in rows]


def ruled(lines: Sequence[str]) -> list[str]:
    """Return the lines with a rule after the first line, which holds the headings."""
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def terminal() -> Any:
    """Return rich's console if standard output is a terminal and rich is installed, otherwise None."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console()
