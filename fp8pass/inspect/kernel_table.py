"""Print the result of `fp8pass inspect` as tables: by rich on a terminal if installed, otherwise as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from fp8pass.inspect.inspector import Held, InspectedRun, Inspection, Kernel
from fp8pass.report.text_table import aligned, terminal

Rows = list[tuple[str, ...]]
MEGABYTE = 1e6


def show(shown: Inspection) -> None:
    """Print every kernel of fp8pass and of the peer, and the totals of all runs."""
    print(f"{shown.spec}, one training step for {shown.target}, compiled by torch {shown.torch} without a GPU.")
    print("Bytes are those of the compiler's own count. All times are predictions, not measurements.")
    for run in shown.runs:
        if run.name != "bf16":
            _print(run.name, *kernel_table(run))
            if run.held:
                _print(f"{run.name}, tensors held at its peak", *memory_table(run))
    _print("totals", *totals_table(shown))
    for note in (*shown.notes, *(note for run in shown.runs for note in run.notes)):
        print(note)


def kernel_table(run: InspectedRun) -> tuple[Sequence[str], Rows]:
    """Return (heads, rows), a row per kernel. A head that begins with "<" is of a column of text."""
    heads = ["<graph", "<what", "<in", "read MB", "written MB", "predicted us"]
    pays, compiled = any(k.pays_from for k in run.kernels), any(k.compiled for k in run.kernels)
    heads += ["pays from M"] if pays else []
    heads += ["load bits", "store bits", "registers", "spilled B"] if compiled else []
    return heads, [(*_row(k), *([k.pays_from] if pays else []), *(_facts(k) if compiled else [])) for k in run.kernels]


def _row(k: Kernel) -> tuple[str, ...]:
    return (
        k.graph, k.what, k.modules, f"{k.bytes_read / MEGABYTE:.2f}", f"{k.bytes_written / MEGABYTE:.2f}",
        f"{k.seconds * 1e6:.1f}",
    )  # fmt: skip


def _facts(k: Kernel) -> tuple[str, ...]:
    c = k.compiled
    return (_widths(c.loads), _widths(c.stores), str(c.registers), str(c.spilled)) if c else ("",) * 4


def _widths(bits: Sequence[int]) -> str:
    return "/".join(map(str, bits))


SMALL_SHARE = 0.01
"""Tensors of one kind that take less than this share of the peak are not rows of their own in `memory_table`."""


def memory_table(run: InspectedRun) -> tuple[Sequence[str], Rows]:
    """Return (heads, rows) of the tensors held when the step needs the most memory: a row per kind, largest first."""
    kinds: dict[tuple[str, str, tuple[int, ...]], list[Held]] = {}
    for held in run.held:
        kinds.setdefault((held.graph, held.dtype, held.shape), []).append(held)
    by_size = sorted(kinds.items(), key=lambda kind: -sum(held.bytes for held in kind[1]))
    large = [
        (kind, tensors)
        for kind, tensors in by_size
        if sum(held.bytes for held in tensors) >= SMALL_SHARE * run.peak_bytes
    ]
    rows = [
        (
            graph,
            dtype,
            str(list(shape)),
            tensors[0].modules,
            str(len(tensors)),
            _megabytes(tensors),
        )
        for (graph, dtype, shape), tensors in large
    ]
    rest = [held for _, tensors in by_size[len(large) :] for held in tensors]
    return ("<made in", "<dtype", "<shape", "<in", "tensors", "MB"), [
        *rows,
        ("others", "", "", "", str(len(rest)), _megabytes(rest)),
    ]


def _megabytes(held: Sequence[Held]) -> str:
    return f"{sum(tensor.bytes for tensor in held) / MEGABYTE:.1f}"


def totals_table(inspection: Inspection) -> tuple[Sequence[str], Rows]:
    """Return (heads, rows), a row per run."""
    heads = (
        "<", "GEMM MB", "rest MB", "GEMMs", "Triton launches", "other launches", "saved for backward MB",
        "peak MB", "predicted ms", "GEMMs ms", "predicted speedup",
    )  # fmt: skip
    bf16 = inspection.run("bf16").seconds
    return heads, [_total(run, bf16) for run in inspection.runs]


def _total(run: InspectedRun, bf16: float) -> tuple[str, ...]:
    gemms = run.of("gemm")
    return (
        run.name, f"{run.gemm_bytes / MEGABYTE:.0f}", f"{run.rest_bytes / MEGABYTE:.0f}", str(len(gemms)),
        str(run.launches), str(run.extern_launches), *_memory(run), f"{run.seconds * 1e3:.3f}",
        f"{sum(k.seconds for k in gemms) * 1e3:.3f}", f"{bf16 / run.seconds:.2f}",
    )  # fmt: skip


def _memory(run: InspectedRun) -> tuple[str, str]:
    """Return the megabytes saved for the backward, and at the peak."""
    digits = 0 if run.bytes_saved >= 100 * MEGABYTE else 2
    peak = f"{run.peak_bytes / MEGABYTE:.{digits}f}" if run.peak_bytes else "unknown"
    return f"{run.bytes_saved / MEGABYTE:.{digits}f}", peak


def show_memory(inspection: Inspection) -> None:
    """Print what each run saves for the backward, and the most memory that a step holds."""
    rows: Rows = [(run.name, *_memory(run)) for run in inspection.runs]
    title = (
        f"memory of a training step on {inspection.target}, predicted by compiling it, without parameters and inputs"
    )
    _print(title, ("<", "saved for the backward MB", "peak MB"), rows)
    for note in inspection.notes:
        print(note)


def text_table(heads: Sequence[str], rows: Rows) -> str:
    """Format rows as text, with two spaces between columns and numbers aligned to the right."""
    right = {i for i, head in enumerate(heads) if not head.startswith("<")}
    return "\n".join(aligned([[head.removeprefix("<") for head in heads], *rows], right))


def _print(title: str, heads: Sequence[str], rows: Rows) -> None:
    console = terminal()
    if console is None:
        print(f"\n{title}\n{text_table(heads, rows)}")
        return
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head.removeprefix("<"), justify="left" if head.startswith("<") else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
