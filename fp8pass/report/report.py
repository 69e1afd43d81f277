"""What became of every matmul, and why."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from fp8pass._torch import CompileContext, why_compiled_again
from fp8pass.graph.verdict import Gemm
from fp8pass.names import base_name, source_of
from fp8pass.report.text_table import aligned, ruled

log = logging.getLogger(__name__)


class _Rows(Protocol):
    """What `fp8pass.stats` returns."""

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return a row for each slot and step."""


@dataclass(frozen=True)
class Break:
    """A place where Dynamo ends a graph and goes on with another. source: "file.py:12"; reason: why, in a line.

    nbytes: of the tensors that the graph before it has to write to memory for whatever comes after it.
    """

    source: str
    reason: str
    nbytes: int

    def __str__(self) -> str:
        handed = f"{self.nbytes / 1e6:.1f} MB handed over" if self.nbytes else "nothing handed over"
        return f"the graph breaks at {self.source}: {self.reason} ({handed}; one graph more to call)"


@dataclass
class Recompile:
    """A frame that Dynamo compiled more than once. guards: for each time after the first, what no longer held.

    name: of the function. source: "file.py:12", the line of it where its graph begins.
    """

    name: str
    source: str
    guards: list[str]

    def __str__(self) -> str:
        times = "once" if len(self.guards) == 1 else f"{len(self.guards)} times"
        return f"{self.name} ({self.source}) was compiled again {times}: {'; '.join(dict.fromkeys(self.guards))}"


OpKind = Literal["input", "state", "amax", "quantize", "gemm", "attention", "compute", "movement", "output"]
Part = Literal["before", "forward", "backward"]


@dataclass
class Op:
    """A node of a graph that is drawn. kind: what colour it has. inputs: positions among the graph's ops.

    made_by: the pass of fp8pass that made it, "" for the user's own. gemm: position in `Report.gemms` of the matmul
    that it is. kernel: position in `Picture.kernels` of the one that it runs in.
    """

    name: str
    label: str
    kind: OpKind
    module: str
    source: str
    shape: str
    made_by: str
    inputs: list[int]
    gemm: int | None = None
    kernel: int | None = None


@dataclass
class KernelCode:
    """A kernel of generated code, or a call of ATen. code: as Inductor wrote it."""

    name: str
    code: str


@dataclass
class Picture:
    """A graph to draw. number: which of Dynamo's graphs. part: "before" is the user's own, with its backward."""

    number: int
    part: Part
    ops: list[Op]
    kernels: list[KernelCode] = field(default_factory=list)


def frame_of(module: Any) -> tuple[str, str]:
    """The function that a graph of Dynamo's begins in, and its file; "" if that is not known."""
    why = getattr(module, "compile_subgraph_reason", None)
    return (why.user_stack[0].name, why.user_stack[0].filename) if why is not None and why.user_stack else ("", "")


def break_of(module: Any) -> Break | None:
    """Where and why a graph of Dynamo's ends, if that is a break."""
    why = getattr(module, "compile_subgraph_reason", None)
    if why is None or not why.graph_break:
        return None
    results = (n.meta.get("example_value") for n in module.graph.output_node().all_input_nodes)
    nbytes = sum(x.numel() * x.element_size() for x in results if isinstance(x, torch.Tensor) and x.dim())
    return Break(last_line(why.user_stack), reason_of(why), int(nbytes))


_TORCH = str(Path(torch.__file__).parent)


def recompile_of(module: Any, earlier: set[str]) -> Recompile | None:
    """While a graph of Dynamo's is compiled: its frame and the guard that failed, if it was compiled before.

    earlier: Dynamo's numbers of what was compiled for the same purpose, to which this one's is added. What another
    backend compiled, or another call of `explain`, is no reason: that is the same function for another purpose.
    """
    said, number = why_compiled_again(), str(CompileContext.current_compile_id())
    known = said.partition(": ")[0] in earlier
    earlier.add(number)
    if not known:
        return None
    first = next((n for n in module.graph.nodes if n.op == "call_function" and n.stack_trace), None)
    name = frame_of(module)[0] or "a frame"
    return Recompile(name, "?" if first is None else source_of(first, outermost=True), [_guard(said)])


def _guard(said: str) -> str:
    """ "x.size()[0] == 4", of what Dynamo says in several lines, with the user's code behind it."""
    line = said.strip().splitlines()[0].partition("  #")[0]
    return re.sub(r"^\d+/\d+: ", "", line).strip()


def last_line(stack: Any) -> str:
    """The user's innermost line, "file.py:12"; "?" without any."""
    own = [f for f in stack if not f.filename.startswith(_TORCH)] or list(stack)
    return f"{base_name(own[-1].filename)}:{own[-1].lineno}" if own else "?"


def reason_of(why: Any) -> str:
    """In a line; of the two breaks that every step has, without Dynamo's advice."""
    if "Tensor.backward()" in why.reason:
        return "backward(), which was compiled with its forward"
    if why.user_stack and why.user_stack[-1].filename.startswith(str(Path(_TORCH) / "optim")):
        return "the optimizer, whose update is a graph of its own"
    return str(why.reason).strip().splitlines()[0]


@dataclass
class Report:
    """The matmuls of one or more compiled graphs, in graph order."""

    gemms: list[Gemm] = field(default_factory=list)
    graphs: int = 0
    notes: list[str] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    recompiles: list[Recompile] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Where fp8pass itself failed, a sentence each, and what it has done about it: see `faults.py`."""
    error: str = ""
    """What ended compilation, if something did: then the rest is what was known by then."""
    pictures: list[Picture] = field(default_factory=list)
    """The graphs, for `to_html`; of what `explain` returns."""

    def add(self, other: Report) -> None:
        """Append what another report has."""
        self.gemms += other.gemms
        self.graphs += other.graphs
        self.notes += [note for note in other.notes if note not in self.notes]
        self.faults += [fault for fault in other.faults if fault not in self.faults]
        self.breaks += [b for b in other.breaks if b not in self.breaks]
        for recompile in other.recompiles:
            same = next((r for r in self.recompiles if (r.name, r.source) == (recompile.name, recompile.source)), None)
            if same is None:
                self.recompiles.append(replace(recompile, guards=list(recompile.guards)))
            else:
                same.guards += recompile.guards
        self.error = self.error or other.error

    @property
    def rewritten(self) -> list[Gemm]:
        """The matmuls that run in FP8."""
        return [g for g in self.gemms if g.status == "rewritten"]

    @property
    def declined(self) -> list[Gemm]:
        """The matmuls that stay in high precision, each with its `reason`."""
        return [g for g in self.gemms if g.status == "declined"]

    def reasons(self) -> Counter[str]:
        """How often each reason declined a matmul."""
        return Counter(g.reason for g in self.declined)

    def rules(self) -> Counter[str]:
        """How often each condition failed: shorter than `reasons`, which name nodes and numbers."""
        return Counter(g.rule for g in self.declined)

    @property
    def flops(self) -> int:
        """Of all matmuls; see `Gemm.flops`."""
        return sum(g.flops for g in self.gemms)

    @property
    def fp8_flops(self) -> int:
        """Of those that run in FP8."""
        return sum(g.flops for g in self.rewritten)

    def to_dict(self) -> dict[str, Any]:
        """All of it but the pictures as plain lists, dicts, numbers and strings; with `flops` and `fp8_flops`."""
        plain = asdict(replace(self, pictures=[]))
        del plain["pictures"]
        return {**plain, "flops": self.flops, "fp8_flops": self.fp8_flops}

    def to_html(self, path: str | Path, numerics: _Rows | Sequence[Mapping[str, Any]] | None = None) -> Path:
        """Write it as one page that needs no network: summary, table, graphs, kernels. Returns the path.

        numerics: what `fp8pass.stats` returns, or rows {"slot", "step", "amax", "scale", "underflow", "saturation",
        "sqnr"}, of which all but the first two may be missing or None: a chart for each. underflow, saturation: shares
        of elements, 0 to 1; sqnr: in dB.
        Raises ValueError for a row without slot or step.
        """
        from fp8pass.report.html import page

        path = Path(path)
        rows = numerics if numerics is None or isinstance(numerics, Sequence) else numerics.to_dicts()
        path.write_text(page(self, rows), encoding="utf-8")
        return path

    def show(self) -> None:
        """Print it: on a terminal as a table in colours, if rich is installed, elsewhere as `print` does."""
        from fp8pass.report.table import show

        show(self)

    def summary(self) -> str:
        """One line: how many matmuls, how much of the arithmetic, run in FP8, and how many each rule declined."""
        share = f", {self.fp8_flops / self.flops:.0%} of matmul FLOPs" if self.flops else ""
        graphs = f"{self.graphs} graph{'' if self.graphs == 1 else 's'}"
        counted = ", ".join(f"{n} {rule}" for rule, n in self.rules().most_common())
        declined = f"; declined: {counted}" if counted else ""
        faults = f"; {len(self.faults)} fault{'' if len(self.faults) == 1 else 's'} of fp8pass" if self.faults else ""
        return f"{len(self.rewritten)} of {len(self.gemms)} matmuls in FP8{share} ({graphs}){declined}{faults}"

    def rows(self) -> list[tuple[str, ...]]:
        """The table, with a first row of heads. What declined a matmul is a number, of `footnotes`."""
        reasons = self._numbered()
        rows = [_HEADER, *(_row(g, reasons) for g in self.gemms)]
        if all(g.predicted_speedup is None for g in self.gemms):
            rows = [(*row[:_PREDICTED], *row[_PREDICTED + 1 :]) for row in rows]
        return rows

    def footnotes(self) -> list[str]:
        """What stands below the table: reasons, notes, breaks, and the summary last. An empty line parts groups."""
        reasons = [f"[{i}] {reason}" for reason, i in self._numbered().items()]
        notes = dict.fromkeys(f"note: {g.note}" for g in self.gemms if g.note)
        if any(g.recomputed for g in self.gemms):
            notes[f"note: {RECOMPUTED}"] = None
        failed = [f"compilation ended here: {self.error}"] if self.error else []
        last = [*map(str, self.breaks), *map(str, self.recompiles), *self.notes, *self.faults, *failed, self.summary()]
        return [line for group in (reasons, list(notes), last) if group for line in ("", *group)]

    def _numbered(self) -> dict[str, int]:
        return {reason: i for i, (reason, _) in enumerate(self.reasons().most_common(), 1)}

    def __str__(self) -> str:
        return "\n".join([*ruled(aligned(self.rows())), *self.footnotes()])


RECOMPUTED = "what is recomputed runs once more in the backward, for activation checkpointing: its FLOPs count twice"
_HEADER = ("matmul", "gemm", "M x K x N", "dtypes", "scaling", "predicted", "status", "source")
_PREDICTED = _HEADER.index("predicted")


def _row(g: Gemm, reasons: dict[str, int]) -> tuple[str, ...]:
    batches = "" if g.batches == 1 else f"{g.batches} x "
    a, b, out = g.dtypes
    status = f"{g.status} [{reasons[g.reason]}]" if g.reason else g.status
    status += ", recomputed" if g.recomputed else ""
    shape, dtypes = f"{batches}{g.M} x {g.K} x {g.N}", f"{a} @ {b} -> {out}"
    predicted = "" if g.predicted_speedup is None else f"{g.predicted_speedup:.2f}x"
    return g.name or "-", g.kind, shape, dtypes, g.scaling, predicted, status, g.source


_collector: ContextVar[Report | None] = ContextVar("fp8pass_report", default=None)


@contextmanager
def collect() -> Iterator[Report]:
    """Within it, the verdicts of everything that is compiled go into one Report; and then into that around it."""
    report = Report()
    token = _collector.set(report)
    try:
        yield report
    finally:
        _collector.reset(token)
        if (around := _collector.get()) is not None:
            around.add(report)


@contextmanager
def tentative(keeps: Callable[[BaseException], bool]) -> Iterator[None]:
    """Within it, verdicts reach whoever collects them if nothing is raised, or an error that `keeps` is true of."""
    around, report = _collector.get(), Report()
    token = _collector.set(report)
    stays = True
    try:
        yield
    except BaseException as error:
        stays = keeps(error)
        raise
    finally:
        _collector.reset(token)
        if around is not None and stays:
            around.add(report)


def publish(report: Report) -> None:
    """Log each verdict of one graph, and hand them to whoever collects."""
    for g in report.gemms:
        where = f" ({g.source})" if g.source else ""
        log.debug("%s %s [%s,%s,%s]%s: %s %s", g.name, g.kind, g.M, g.K, g.N, where, g.status, g.reason)
    log.debug("%s", report.summary())  # the line of the whole graph is that of `Dump.compiling`
    into = _collector.get()
    if into is not None:
        into.add(report)
