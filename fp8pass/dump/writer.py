"""`FP8PASS_DUMP=dir`: every graph before and after every pass as Python that runs, with differences, report and times.

    dir/run_000/index.md                                what was compiled, in order, in how long
    dir/run_000/graph_000.GPT/index.md                  what was done to this graph, in order, in how long
    dir/run_000/graph_000.GPT/008.joint.scaled_mm.before.py, .after.py, .diff
    dir/run_000/graph_000.GPT/019.forward.output_code.py
    dir/run_000/graph_000.GPT/report.txt

A process has a folder of its own in `dir`, which it makes: two never write into one. The same texts go to torch's
structured trace, with a folder or without, for `tlparse`.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fp8pass import versions
from fp8pass._torch import CompileContext, trace_structured
from fp8pass.dump.source import Origins, runnable
from fp8pass.errors import Fp8Error, first_line
from fp8pass.graph.builder import readable
from fp8pass.options.config import Config
from fp8pass.report.report import frame_of

log = logging.getLogger(__name__)

_numbers = itertools.count()
_LOCK = threading.RLock()
"""Held while an index is written: the backwards of several graphs may be compiled at once."""


@dataclass
class Step:
    """What a pass reports of itself within `Dump.step`.

    module: the graph afterwards, if that is another one. examples: gives those of its inputs, if it does not know them.
    applied: how often the pass did something.
    """

    module: fx.GraphModule
    examples: Callable[[], Sequence[Any]] = tuple
    applied: int = 0


class Dump:
    """The folder of one graph. Without a folder, it only tells torch's trace.

    folder: None where `dump_dir` is not set. number: of the graph in its process.
    """

    def __init__(self, folder: Path | None = None, number: int = 0, title: str = "") -> None:
        self.folder = folder
        self.number = number
        self.name = title
        self._files = itertools.count()
        self._rows: list[str] = []
        self.failed: Path | None = None
        """The graph that the pass which failed last was given."""
        self._origins = Origins()

    @property
    def title(self) -> str:
        """Return what the graph is called in a sentence."""
        return f"graph {self.number}, {self.name}"

    @classmethod
    def of(cls, config: Config, module: fx.GraphModule, kind: str = "") -> Dump:
        """For a graph of Dynamo's that is about to be compiled. kind: what else to call it by.

        Raises Fp8Error if `config.dump_dir` can't be written into.
        """
        number, title = next(_numbers), ".".join(filter(None, (_name_of(module), kind)))
        if not config.dump_dir:
            return cls(None, number, title)
        folder = _run_folder(config.dump_dir, os.getpid()) / f"graph_{number:03d}.{title}"
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, number, title)

    @contextmanager
    def step(
        self, part: str, name: str, module: fx.GraphModule, examples: Callable[[], Sequence[Any]] = tuple
    ) -> Iterator[Step]:
        """Around a pass: what the graph is before and after it. part: "dynamo", "joint", "forward" or "backward"."""
        found = Step(module, examples)
        before = self._text(part, found)
        started = time.perf_counter()
        try:
            with self.kept():
                yield found
        except Exception as error:
            self._write_step(part, name, f"{name} failed: {first_line(error)}", before)
            raise
        summary = f"applied {found.applied} times in {(time.perf_counter() - started) * 1e3:.1f} ms"
        log.debug("graph %d, %s: %s %s", self.number, part, name, summary)
        after = self._text(part, found)
        self._write_step(part, name, f"{name}: {summary}", before, after)
        if found.applied or part == "dynamo":
            self.trace(f"{part}.{name}", lambda: after or readable(found.module))

    def _text(self, part: str, step: Step) -> str:
        if self.folder is None:
            return ""
        examples = step.examples()
        if part == "dynamo":
            self._origins.learn(step.module, examples)
        differentiable = part == "dynamo" and torch.is_grad_enabled()
        return runnable(step.module, self._origins, examples, differentiable)

    def _write_step(self, part: str, name: str, head: str, before: str, after: str | None = None) -> None:
        if self.folder is None:
            return
        stem = f"{next(self._files):03d}.{part}.{name}"
        self._write(f"{stem}.before.py", f"# the graph before {head}\n{before}")
        if after is None:
            self.failed = self.folder / f"{stem}.before.py"
            self._add_row(f"{stem}.before.py", head)
            return
        diff = list(difflib.unified_diff(before.splitlines(True), after.splitlines(True), "before.py", "after.py"))
        self._write(f"{stem}.after.py", f"# made by {head}\n{after}")
        self._write(f"{stem}.diff", f"# made by {head}\n{''.join(diff)}")
        changed = sum(line[0] in "+-" for line in diff[2:])
        self._add_row(f"{stem}.after.py", f"{head}, {changed} lines differ" if changed else f"{head}, changes nothing")

    def output_code(self, part: str, code: str, seconds: float) -> None:
        """What Inductor made of the graph of a forward or of a backward."""
        if self.folder is not None:
            name, head = f"{next(self._files):03d}.{part}.output_code.py", f"made by Inductor in {seconds:.1f} s"
            self._write(name, f"# {head}\n{code}")
            self._add_row(name, head)

    def report(self, text: str, seconds: float) -> None:
        """The verdicts so far."""
        self.trace("report", lambda: text)
        head = f"made by the passes over the joint graph in {seconds * 1e3:.1f} ms"
        self._write("report.txt", f"# {head}\n{text}\n")

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around what may fail: names the folder in the error."""
        try:
            yield
        except Exception as error:
            _name_folder(error, self.folder)
            raise

    @contextmanager
    def compiling(self, summary: Callable[[], str]) -> Iterator[None]:
        """Around all of it: a line in the index of the run. summary: of what became of the graph, when that is done."""
        started, outcome = time.perf_counter(), ""
        try:
            with self.kept():
                yield
            outcome = summary()
        except Exception as error:
            outcome = f"failed: {first_line(error)}"
            raise
        finally:
            seconds = time.perf_counter() - started
            log.info("%s: %s, compiled in %.1f s", self.title, outcome, seconds)
            if self.folder is not None:
                _append(self.folder.parent / "index.md", _row(f"{self.folder.name}/index.md", outcome, seconds))

    def trace(self, name: str, text: Callable[[], str]) -> None:
        """An artifact in torch's structured trace (`TORCH_TRACE=dir`), if anyone writes one."""
        described = {"name": f"fp8pass.{self.number:03d}.{name}", "encoding": "string"}
        trace_structured("artifact", metadata_fn=lambda: described, payload_fn=text)

    def _write(self, name: str, text: str) -> None:
        if self.folder is not None:
            with _writing(self.folder):
                (self.folder / name).write_text(text, encoding="utf-8")

    def _add_row(self, file: str, what: str) -> None:
        with _LOCK:
            self._rows.append(f"| [{file}]({file}) | {what.replace('|', chr(92) + '|')} |\n")
            head = f"# Graph {self.number}, {self.name}\n\nreport.txt has what became of each matmul.\n\n"
            self._write("index.md", f"{head}| file | made by |\n|---|---|\n{''.join(self._rows)}")


def _name_of(module: fx.GraphModule) -> str:
    """A readable name: the class of the module that the graph is of, or the file and function that it begins in."""
    for node in module.graph.nodes:
        for path, kind in (node.meta.get("nn_module_stack") or {}).values():
            if path.endswith("]"):  # "L['self'].up" is a module within
                return _in_file_names(kind.rpartition(".")[2] if isinstance(kind, str) else kind.__name__)
        if found := re.search(r'([^/\\]+)\.py", line \d+, in (\w+)', node.meta.get("stack_trace") or ""):
            return _in_file_names(f"{found[1]}.{found[2]}")
    return _in_file_names(frame_of(module)[0]) or "graph"


def _in_file_names(name: str) -> str:
    return re.sub(r"[^\w.]+", "_", name).strip("_.")


@functools.cache
def _run_folder(folder: str, process: int) -> Path:
    """The folder of this process within the user's. Made once, and of a new name."""
    base = Path(folder)
    rank = f".rank{os.environ['RANK']}" if "RANK" in os.environ else ""
    with _writing(base):
        base.mkdir(parents=True, exist_ok=True)
        for number in itertools.count():
            run = base / f"run_{number:03d}{rank}"
            try:
                run.mkdir()
            except FileExistsError:
                continue
            (run / "index.md").write_text(_run_head(process), encoding="utf-8")
            break
    log.info("dumps go to %s; torch's caches of compiled graphs are not used, for a hit would skip the passes", run)
    return run


def _run_head(process: int) -> str:
    command = " ".join(sys.argv[:1]) or "python"
    return (
        f"# Dumps of fp8pass {versions.__version__}, torch {torch.__version__}: {command}, process {process}\n\n"
        f"Begun {time.strftime('%Y-%m-%d %H:%M:%S')}. Torch's caches of compiled graphs are not used: a hit would skip "
        "the passes.\nThe .py files run by themselves; --help says how.\n\n"
        "| graph | compiled | what became of it | seconds |\n|---|---|---|---:|\n"
    )


def _row(link: str, outcome: str, seconds: float) -> str:
    compile_id = CompileContext.current_compile_id()
    cells = f"[{link}]({link})", f"{compile_id or ''}", outcome.replace("|", "\\|"), f"{seconds:.1f}"
    return f"| {' | '.join(cells)} |\n"


def _append(file: Path, row: str) -> None:
    with _LOCK, _writing(file.parent), file.open("a", encoding="utf-8") as stream:
        stream.write(row)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Around what writes into a folder. Raises Fp8Error if it can't."""
    try:
        yield
    except OSError as error:
        raise Fp8Error(
            f"dumps can't be written into {str(folder)!r}: {error.strerror or error}. Name a folder that can be, with "
            "FP8PASS_DUMP or dump_dir, or compile without"
        ) from error


def _name_folder(error: Exception, folder: Path | None) -> None:
    """Add to an error's text where its dumps are. Not as a note, which Dynamo drops of what a backend raises."""
    if folder is not None and error.args and isinstance(error.args[0], str) and str(folder) not in error.args[0]:
        error.args = (f"{error.args[0]}\n\nThe dumps so far are in {folder}", *error.args[1:])
