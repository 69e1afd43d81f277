"""Print a report, with rich on a terminal if rich is installed, otherwise as plain text: `Report.show`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8pass.report.text_table import terminal

if TYPE_CHECKING:
    from fp8pass.report.report import Report

RIGHT = ("M x K x N", "predicted", "pays from M")


def show(report: Report) -> None:
    """Print a report."""
    console = terminal()
    if console is None:
        print(report)
    else:
        draw(report, console)


def draw(report: Report, console: object) -> None:
    """Print a report to rich's console: matmuls in FP8 in green, declined matmuls in yellow."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    assert isinstance(console, Console)
    heads, *rows = report.rows()
    table = Table(header_style="bold")
    for head in heads:
        table.add_column(head, justify="right" if head in RIGHT else "left", overflow="fold")
    for gemm, row in zip(report.gemms, rows, strict=True):
        colour = "green" if gemm.status == "rewritten" else "yellow"
        status = heads.index("status")
        table.add_row(*(Text(cell, style=colour if i == status else "") for i, cell in enumerate(row)))
    console.print(table)
    for line in report.footnotes():
        console.print(Text(line), highlight=False)
