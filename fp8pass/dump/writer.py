"""Write every graph before and after every pass as executable Python, with diffs, report and times: `FP8PASS_DUMP=dir`.

    dir/run_000/index.md                                the compiled graphs in order, with times
    dir/run_000/graph_000.GPT/index.md                  the passes on this graph in order, with times
    dir/run_000/graph_000.GPT/008.joint.scaled_mm.before.py, .after.py, .diff
    dir/run_000/graph_000.GPT/019.forward.output_code.py
    dir/run_000/graph_000.GPT/report.txt

Each process creates its own folder in `dir`, so two processes never write into one. The same texts also go to torch's
structured trace, for `tlparse`, even if no folder is set.
"""

from __future__ import annotations

import copy
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
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fp8pass.base import versions
from fp8pass.base._torch import CompileContext, trace_structured
from fp8pass.base.errors import Fp8Error, first_line
from fp8pass.graph.builder import readable
from fp8pass.options.config import Config
from fp8pass.report.report import frame_of

if TYPE_CHECKING:
    from fp8pass.dump.source import Origins

log = logging.getLogger(__name__)

_numbers = itertools.count()
_LOCK = threading.RLock()
"""Held while an index is written, because several threads may compile backwards at once."""


@dataclass
class PassStep:
    """The data that a pass reports within `Dump.step`.

    module: the graph after the pass, if the pass returns a new one. examples: returns values of its inputs, used where
    the graph has no metadata. applied: number of times that the pass changed something.
    """

    module: fx.GraphModule
    examples: Callable[[], Sequence[Any]] = tuple
    applied: int = 0


class Dump:
    """The folder of one graph. Without a folder, it writes to torch's structured trace only.

    folder: None if `dump_dir` is not set. number: index of the graph in its process.
    """

    def __init__(self, folder: Path | None = None, number: int = 0, title: str = "") -> None:
        self.folder = folder
        self.number = number
        self.name = title
        self._files = itertools.count()
        self._rows: list[str] = []
        self._failed: list[Path] = []
        self._body = ""

    @functools.cached_property
    def _origins(self) -> Origins:
        from fp8pass.dump.source import Origins  # here: only a dump with a folder writes graphs as Python

        return Origins()

    @property
    def title(self) -> str:
        """The name of the graph for use in a sentence."""
        return f"graph {self.number}, {self.name}"

    @property
    def failed(self) -> Path | None:
        """The file with the input graph of the pass that failed last."""
        return self._failed[-1] if self._failed else None

    @classmethod
    def of(cls, config: Config, name: str, kind: str = "") -> Dump:
        """Create the dump of a graph that is about to be compiled. name: see `name_of`. kind: appended to the name.

        Raises Fp8Error if `config.dump_dir` is not writable.
        """
        number, title = next(_numbers), ".".join(filter(None, (name, kind)))
        if not config.dump_dir:
            return cls(None, number, title)
        # The process is an argument because the function is cached: a forked process gets its own folder.
        folder = _run_folder(config.dump_dir, os.getpid()) / f"graph_{number:03d}.{title}"
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, number, title)

    def of_body(self, name: str, module: fx.GraphModule, examples: Sequence[Any]) -> Dump:
        """Return the dump, in the same folder, of a function that the graph calls. examples: values of its inputs."""
        body = copy.copy(self)
        body._body = name
        vars(body).pop("_origins", None)  # its inputs are others
        if self.folder is not None:
            body._origins.learn(module, examples)
        return body

    @contextmanager
    def step(
        self, part: str, name: str, module: fx.GraphModule, examples: Callable[[], Sequence[Any]] = tuple
    ) -> Iterator[PassStep]:
        """Write the graph before and after the pass that runs in this context.

        part: "dynamo", "joint", "forward" or "backward".
        """
        step = PassStep(module, examples)
        before = self._text(part, step) if self.folder else ""
        started = time.perf_counter()
        try:
            with self.kept():
                yield step
        except Exception as error:
            self._write_step(part, name, f"{name} failed: {first_line(error)}", before)
            raise
        summary = f"applied {step.applied} times in {(time.perf_counter() - started) * 1e3:.1f} ms"
        log.debug("graph %d, %s: %s %s", self.number, part, name, summary)
        after = self._text(part, step) if self.folder else ""
        self._write_step(part, name, f"{name}: {summary}", before, after)
        if step.applied or part == "dynamo":
            self.trace(f"{part}.{name}", lambda: after or readable(step.module))

    def _in_body(self, part: str) -> str:
        return f"{self._body}.{part}" if self._body else part

    def _text(self, part: str, step: PassStep) -> str:
        from fp8pass.dump.source import runnable

        examples = step.examples()
        if part == "dynamo":
            self._origins.learn(step.module, examples)
        # Later graphs contain their backward, or are it.
        differentiable = part == "dynamo" and torch.is_grad_enabled()
        return runnable(step.module, self._origins, examples, differentiable)

    def _write_step(self, part: str, name: str, head: str, before: str, after: str | None = None) -> None:
        if self.folder is None:
            return
        stem = f"{next(self._files):03d}.{self._in_body(part)}.{name}"
        self._write(f"{stem}.before.py", f"# the graph before {head}\n{before}")
        if after is None:
            self._failed.append(self.folder / f"{stem}.before.py")
            self._add_row(f"{stem}.before.py", head)
            return
        diff = list(difflib.unified_diff(before.splitlines(True), after.splitlines(True), "before.py", "after.py"))
        self._write(f"{stem}.after.py", f"# made by {head}\n{after}")
        self._write(f"{stem}.diff", f"# made by {head}\n{''.join(diff)}")
        changed = sum(line[0] in "+-" for line in diff[2:])  # the first two lines name the files
        self._add_row(f"{stem}.after.py", f"{head}, {changed} lines differ" if changed else f"{head}, changes nothing")

    def output_code(self, part: str, code: str, seconds: float) -> None:
        """Write the code that Inductor generated for the graph of a forward or backward."""
        if self.folder is not None:
            stem = f"{next(self._files):03d}.{self._in_body(part)}"
            name, head = f"{stem}.output_code.py", f"made by Inductor in {seconds:.1f} s"
            self._write(name, f"# {head}\n{code}")
            self._add_row(name, head)

    def report(self, text: str, seconds: float) -> None:
        """Write the verdicts found until now."""
        self.trace("report", lambda: text)
        head = f"made by the passes over the joint graph in {seconds * 1e3:.1f} ms"
        self._write("report.txt", f"# {head}\n{text}\n")

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Add the name of the folder to any error raised in this context."""
        try:
            yield
        except Exception as error:
            _name_folder(error, self.folder)
            raise

    @contextmanager
    def compiling(self, summary: Callable[[], str]) -> Iterator[None]:
        """Add a line for the graph compiled in this context to the index of the run.

        summary: returns the outcome; called after the compilation.
        """
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
        """Write an artifact to torch's structured trace, if that is on (`TORCH_TRACE=dir`)."""
        described = {"name": f"fp8pass.{self.number:03d}.{name}", "encoding": "string"}
        trace_structured("artifact", metadata_fn=lambda: described, payload_fn=text)

    def _write(self, name: str, text: str) -> None:
        if self.folder is not None:
            with _writing(self.folder):
                (self.folder / name).write_text(text, encoding="utf-8")

    def _add_row(self, file: str, what: str) -> None:
        with _LOCK:
            # chr(92) is a backslash, which an f-string may not contain before Python 3.12.
            self._rows.append(f"| [{file}]({file}) | {what.replace('|', chr(92) + '|')} |\n")
            head = f"# Graph {self.number}, {self.name}\n\nreport.txt has what became of each matmul.\n\n"
            self._write("index.md", f"{head}| file | made by |\n|---|---|\n{''.join(self._rows)}")


def name_of(module: fx.GraphModule) -> str:
    """Return a readable name of a graph: its root module's class, otherwise the file and function where it begins."""
    for node in module.graph.nodes:
        for path, kind in (node.meta.get("nn_module_stack") or {}).values():
            if path.endswith("]"):  # the root is "L['self']"; "L['self'].up" is a submodule
                return _in_file_names(kind.rpartition(".")[2] if isinstance(kind, str) else kind.__name__)
        if match := re.search(r'([^/\\]+)\.py", line \d+, in (\w+)', node.meta.get("stack_trace") or ""):
            return _in_file_names(f"{match[1]}.{match[2]}")
    return _in_file_names(frame_of(module)[0]) or "graph"


def _in_file_names(name: str) -> str:
    return re.sub(r"[^\w.]+", "_", name).strip("_.")


@functools.cache
def _run_folder(folder: str, process: int) -> Path:
    """Create the folder of this process, with an unused name, in the user's folder; return it on later calls too."""
    base = Path(folder)
    rank = f".rank{os.environ['RANK']}" if "RANK" in os.environ else ""
    with _writing(base):
        base.mkdir(parents=True, exist_ok=True)
        for number in itertools.count():
            run = base / f"run_{number:03d}{rank}"
            try:
                run.mkdir()  # fails if another process has just made it: two never get one folder
            except FileExistsError:
                continue
            (run / "index.md").write_text(_run_head(process), encoding="utf-8")
            break
    log.info("dumps go to %s; torch's caches of compiled graphs are not used, because a hit would skip the passes", run)
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
    """Raise Fp8Error if writing into the folder fails in this context."""
    try:
        yield
    except OSError as error:
        raise Fp8Error(
            f"dumps can't be written into {str(folder)!r}: {error.strerror or error}. Name a folder that can be, with "
            "FP8PASS_DUMP or dump_dir, or compile without"
        ) from error


def _name_folder(error: Exception, folder: Path | None) -> None:
    """Add the folder of the dumps to an error's text. Dynamo drops notes of errors that a backend raises."""
    if folder is not None and error.args and isinstance(error.args[0], str) and str(folder) not in error.args[0]:
        error.args = (f"{error.args[0]}\n\nThe dumps so far are in {folder}", *error.args[1:])
