"""The output of `fp8pass demo`: progress, as a bar in a terminal and as lines elsewhere, and the plot."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

EVERY = 10.0
"""Seconds between two lines of progress outside of a terminal."""

say = functools.partial(print, flush=True)
"""Prints a line and flushes, so that a pipe's reader sees it at once."""


@contextlib.contextmanager
def phase(title: str, steps: range = range(0)) -> Iterator[Callable[[int, str], None]]:
    """Show progress within the context, and print how long it took.

    steps: the range of counted steps; empty if none are counted. Yields a function that takes the number of steps done
    and the last losses.
    """
    started = time.perf_counter()
    shown = _bar if sys.stdout is not None and sys.stdout.isatty() else _lines
    with shown(title, steps) as show:
        yield show
    say(f"{title}: {time.perf_counter() - started:.0f} s")


@contextlib.contextmanager
def _bar(title: str, steps: range) -> Iterator[Callable[[int, str], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as TimeLeftColumn

    text, losses = TextColumn("{task.description}"), TextColumn("{task.fields[losses]}")
    counted = (MofNCompleteColumn(), TimeLeftColumn(), TextColumn("left"), losses)
    with Progress(text, BarColumn(), *(counted if steps else [TimeElapsedColumn()]), transient=True) as progress:
        task = progress.add_task(title, total=steps.stop or None, completed=steps.start, losses="")
        yield lambda done, losses: progress.update(task, completed=done, losses=losses)


@contextlib.contextmanager
def _lines(title: str, steps: range) -> Iterator[Callable[[int, str], None]]:
    started, latest, ended = time.perf_counter(), (steps.start, ""), threading.Event()

    def show(done: int, losses: str) -> None:
        nonlocal latest
        latest = done, losses

    def repeat() -> None:  # a thread, because compiling says nothing for a minute
        while not ended.wait(EVERY):
            say(f"  {_state(time.perf_counter() - started, *latest, steps)}")

    say(f"{title} ...")
    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield show
    finally:
        ended.set()
        thread.join()


def _state(seconds: float, done: int, losses: str, steps: range) -> str:
    """Return the line of progress after some seconds."""
    if done == steps.start:
        return f"{seconds:.0f} s"
    left = seconds / (done - steps.start) * (steps.stop - done)
    return f"step {done} of {steps.stop}   {losses}   {left:.0f} s left"


@dataclass
class Curve:
    """The training losses of one model, in nats per byte, and its validation loss; NaN if it has none."""

    name: str
    losses: list[float]
    validation: float = math.nan

    @property
    def label(self) -> str:
        """The curve's text in the legend."""
        return self.name if math.isnan(self.validation) else f"{self.name} (validation {self.validation:.4f})"


def plot(curves: list[Curve], path: Path) -> None:
    """Draw loss curves as a PNG. Raises OSError if the file can't be written, and leaves an old one unchanged."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for curve, style in zip(curves, ("-", "--"), strict=True):
        axes.plot(curve.losses, style, label=curve.label, linewidth=1.2)
    axes.set(
        xlabel="step", ylabel="training loss, nats per byte", title="Byte-level GPT on the Python standard library"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        with replacing(path) as part:
            figure.savefig(part, dpi=120, format="png")
    finally:
        pyplot.close(figure)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file to write, which replaces `path` if the context succeeds, and is removed if not."""
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
