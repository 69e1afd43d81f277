"""Collect verdicts on matmuls, graph breaks and recompilations in a `Report`."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import sympy
import torch

from fp8pass.base._torch import CompileContext, why_compiled_again
from fp8pass.base.names import TORCH, is_users_file, location_of, source_of
from fp8pass.graph.prediction import in_words
from fp8pass.graph.sizes import Size, VaryingSize
from fp8pass.graph.verdict import Gemm, SavedTensor
from fp8pass.report.text_table import aligned, ruled

log = logging.getLogger(__name__)


class _Rows(Protocol):
    """The type of the result of `fp8pass.stats`."""

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return a row for each slot and step."""


@dataclass(frozen=True)
class Break:
    """A graph break: Dynamo ends a graph and continues with another one.

    source: "file.py:12". reason: in one line. nbytes: size in bytes of the graph's output tensors, which it must write
    to memory for the code after the break.
    """

    source: str
    reason: str
    nbytes: int

    def __str__(self) -> str:
        passed_on = f"{self.nbytes / 1e6:.1f} MB passed on" if self.nbytes else "no tensors passed on"
        return f"the graph breaks at {self.source}: {self.reason} ({passed_on}; one more graph to call)"


@dataclass
class Recompile:
    """A frame that Dynamo compiled more than once.

    name: of the function. source: "file.py:12", the line where its graph begins. guards: the guard that failed, for
    each recompilation.
    """

    name: str
    source: str
    guards: list[str]

    def __str__(self) -> str:
        times = "once" if len(self.guards) == 1 else f"{len(self.guards)} times"
        return f"{self.name} ({self.source}) was compiled again {times}: {'; '.join(dict.fromkeys(self.guards))}"


@dataclass
class Timing:
    """The seconds that it took to compile a graph, or a function of a graph that some of its layers share.

    what: the graph and, if it calls functions, the layers that call this one. passes: the passes of fp8pass from the
    joint graph on. inductor: lowering, generating code, and compiling kernels. tracing: everything else, which is
    AOTAutograd's, and taking graphs from torch's caches. A backward that is compiled when it first runs counts from
    then on.
    """

    what: str
    passes: float = 0.0
    inductor: float = 0.0
    tracing: float = 0.0

    @property
    def total(self) -> float:
        """All seconds."""
        return self.passes + self.inductor + self.tracing

    @contextmanager
    def counting(self, part: Literal["passes", "inductor", "tracing"]) -> Iterator[None]:
        """Add the seconds of this context to a part, without those that contexts within it add to others."""
        # what contexts within it add to `total` is subtracted by this
        started = time.perf_counter() - self.total
        try:
            yield
        finally:
            setattr(self, part, getattr(self, part) + time.perf_counter() - self.total - started)

    def __str__(self) -> str:
        parts = f"{self.passes:.1f} s in passes, {self.inductor:.1f} s in Inductor"
        return f"{self.what}, compiled in {self.total:.1f} s: {parts}"


OpKind = Literal["input", "state", "amax", "quantize", "gemm", "attention", "compute", "movement", "output"]
Part = Literal["before", "forward", "backward"]


@dataclass
class DrawnOp:
    """A node of a drawn graph.

    kind: selects its colour. inputs: indices into the graph's ops. made_by: the pass of fp8pass that created it, "" for
    the user's nodes. gemms: for a matmul, the indices in `Report.gemms` of its verdicts, one for each layer that calls
    the function. kernel: index of its kernel in `Picture.kernels`.
    """

    name: str
    label: str
    kind: OpKind
    module: str
    source: str
    shape: str
    made_by: str
    inputs: list[int]
    gemms: list[int] = field(default_factory=list)
    kernel: int | None = None


@dataclass
class KernelCode:
    """A kernel of generated code, or a call of ATen. code: the text that Inductor wrote."""

    name: str
    code: str


@dataclass
class Picture:
    """A graph to draw.

    number: counts the graphs of Dynamo, and the functions of those whose equal layers are compiled once. part: "before"
    is the user's joint graph, without fp8pass. title: the layers that call the function.
    """

    number: int
    part: Part
    ops: list[DrawnOp]
    kernels: list[KernelCode] = field(default_factory=list)
    title: str = ""


def frame_of(module: Any) -> tuple[str, str]:
    """Return the name of the function in which a graph of Dynamo begins, and its file; "" if unknown."""
    why = getattr(module, "compile_subgraph_reason", None)
    return (why.user_stack[0].name, why.user_stack[0].filename) if why is not None and why.user_stack else ("", "")


def break_of(module: Any) -> Break | None:
    """Return the graph break that ends a graph of Dynamo, or None if it ends without a break."""
    why = getattr(module, "compile_subgraph_reason", None)
    if why is None or not why.graph_break:  # False where the function returns
        return None
    results = (n.meta.get("example_value") for n in module.graph.output_node().all_input_nodes)
    nbytes = sum(x.numel() * x.element_size() for x in results if isinstance(x, torch.Tensor) and x.dim())
    return Break(last_line(why.user_stack), reason_of(why), int(nbytes))


def recompile_of(module: Any, earlier: set[str]) -> Recompile | None:
    """Return the frame and the failed guard of the current compilation, or None if it is not a recompilation.

    earlier: Dynamo's compile ids of earlier compilations of the same caller; the current id is added. Compilations of
    other backends, or of other calls of `explain`, do not count: they compiled the function for another purpose.
    """
    said, number = why_compiled_again(), str(CompileContext.current_compile_id())
    # Dynamo's message begins with the id of the compilation whose guard failed: "0/0: x.size()[0] == 4".
    is_known = said.partition(": ")[0] in earlier
    earlier.add(number)
    if not is_known:
        return None
    first = next((n for n in module.graph.nodes if n.op == "call_function" and n.stack_trace), None)
    name = frame_of(module)[0] or "a frame"
    return Recompile(name, "?" if first is None else source_of(first, outermost=True), [_guard(said)])


def _guard(said: str) -> str:
    """Return the guard, such as "x.size()[0] == 4", from Dynamo's message of several lines with the user's code."""
    line = said.strip().splitlines()[0].partition("  #")[0]
    return re.sub(r"^\d+/\d+: ", "", line).strip()


def last_line(stack: Any) -> str:
    """Return the user's innermost line of a stack, as "file.py:12"; "?" if the stack is empty."""
    # Dynamo's stacks of a break go through torch's files too, such as an optimizer's.
    users = [f for f in stack if is_users_file(f.filename)] or list(stack)
    return location_of(users[-1].filename, users[-1].lineno) if users else "?"


def reason_of(why: Any) -> str:
    """Return the reason of a graph break in one line; for backward() and the optimizer without Dynamo's advice."""
    if "Tensor.backward()" in why.reason:
        return "backward(), which was compiled with its forward"
    if why.user_stack and why.user_stack[-1].filename.startswith(str(Path(TORCH, "optim"))):
        return "the optimizer, whose update is a separate graph"
    return str(why.reason).strip().splitlines()[0]


@dataclass
class Report:
    """The verdicts on the matmuls of one or more compiled graphs, in graph order, and what Dynamo did."""

    gemms: list[Gemm] = field(default_factory=list)
    """The matmuls, and `convolutions`."""
    saved: list[SavedTensor] = field(default_factory=list)
    """The tensors that `save_fp8` selects, saved for the backward in FP8 or, with a reason, as they are."""
    graphs: int = 0
    notes: list[str] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    recompiles: list[Recompile] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """The internal errors of fp8pass and what it did about each, one sentence each: see `faults.py`."""
    error: str = ""
    """The error that ended compilation, or ""; with an error, the report holds what was known until then."""
    pictures: Sequence[Picture] = field(default_factory=list)
    """The graphs, for `to_html`; only reports of `explain` have them."""
    timings: list[Timing] = field(default_factory=list, compare=False)
    """The seconds that compiling each graph took, or each of its functions, for `seconds`; `explain` compiles nothing.
    The text leaves them out, so that the same compilation gives the same text."""

    def add(self, other: Report) -> None:
        """Append the contents of another report, without repeating notes, faults and breaks."""
        self.gemms += other.gemms
        self.saved += other.saved
        self.graphs += other.graphs
        self.timings += other.timings
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
        """The matmuls, and convolutions, that stay in high precision, each with its `reason`."""
        return [g for g in self.gemms if g.status == "declined"]

    @property
    def convolutions(self) -> list[Gemm]:
        """The convolutions that are not matmuls: those that the rule "convolution" leaves out.

        Each has the sizes of a matmul with as many FLOPs, for each of its groups.
        """
        return [g for g in self.gemms if g.rule == CONVOLUTION]

    @property
    def matmuls(self) -> list[Gemm]:
        """All of `gemms` but `convolutions`."""
        return [g for g in self.gemms if g.rule != CONVOLUTION]

    def reasons(self) -> Counter[str]:
        """Count how often each reason declined a matmul."""
        return Counter(g.reason for g in self.declined)

    def rules(self) -> Counter[str]:
        """Count how often each rule declined a matmul; shorter than `reasons`, which name nodes and numbers."""
        return Counter(g.rule for g in self.declined)

    @property
    def flops(self) -> Size:
        """The FLOPs of all matmuls; see `Gemm.flops`."""
        return sum(g.flops for g in self.matmuls)

    @property
    def all_flops(self) -> Size:
        """The FLOPs of all matmuls and convolutions."""
        return sum(g.flops for g in self.gemms)

    @property
    def fp8_flops(self) -> Size:
        """The FLOPs of the matmuls that run in FP8."""
        return sum(g.flops for g in self.rewritten)

    @property
    def fp8_share(self) -> float | None:
        """`fp8_flops` divided by `flops`, at the sizes of the calls that were compiled; None without matmuls."""
        return self._fp8_share_of(self.matmuls)

    def _fp8_share_of(self, gemms: Sequence[Gemm]) -> float | None:
        total = sum(g.in_call(g.flops) for g in gemms)
        return sum(g.in_call(g.flops) for g in self.rewritten) / total if total else None

    def seconds(self) -> str:
        """Return a table of `timings`, the slowest first: the seconds of each function that was compiled, and of all.

        Seconds are those of a clock on the wall. "" if nothing was compiled.
        """
        if not self.timings:
            return ""
        rows = [(t.what, (t.tracing, t.passes, t.inductor, t.total)) for t in self.timings]
        rows.sort(key=lambda row: -row[1][-1])
        total = tuple(map(sum, zip(*(of for _, of in rows), strict=True)))
        cells = [[what, *(f"{s:.1f}" for s in of)] for what, of in (*rows, (f"{len(rows)} functions", total))]
        heads = ["compiled", "AOTAutograd s", "passes s", "Inductor s", "all s"]
        return "\n".join(ruled(aligned([heads, *cells], range(1, 5))))

    @property
    def sizes(self) -> list[VaryingSize]:
        """The sizes that vary from call to call, by the symbols that stand for them in matmuls."""
        return list(dict.fromkeys(size for g in self.gemms for size in g.sizes))

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, dicts, numbers and strings: all but pictures and timings, and the sums of FLOPs.

        Expressions of sizes that vary are text.
        """
        plain = asdict(replace(self, pictures=[], timings=[]))
        del plain["pictures"], plain["timings"]
        sums = {"flops": self.flops, "fp8_flops": self.fp8_flops, "all_flops": self.all_flops}
        plain_dict: dict[str, Any] = _plain({**plain, **sums})
        return plain_dict

    def to_html(self, path: str | Path, numerics: _Rows | Sequence[Mapping[str, Any]] | None = None) -> Path:
        """Write the report as one page that needs no network: summary, table, graphs, kernels.

        Args:
            path: The file to write.
            numerics: The result of `fp8pass.stats`, or rows {"slot", "step", "amax", "scale", "underflow",
                "saturation", "sqnr", "kurtosis"}; all but the first two may be missing or None. The page shows a chart
                for each.
                underflow, saturation: shares of elements, 0 to 1; sqnr: in dB.

        Returns:
            The path.

        Raises:
            ValueError: If a row has no slot or step.
        """
        from fp8pass.report.html import page

        path = Path(path)
        rows = numerics if numerics is None or isinstance(numerics, Sequence) else numerics.to_dicts()
        path.write_text(page(self, rows), encoding="utf-8")
        return path

    def show(self) -> None:
        """Print the report: on a terminal as a table in colours if rich is installed, otherwise as `print` does."""
        from fp8pass.report.report_table import show

        show(self)

    def summary(self) -> str:
        """Return one line: the matmuls in FP8, their shares of FLOPs, and the number that each rule declined."""
        of_matmuls, of_all = self._fp8_share_of(self.matmuls), self._fp8_share_of(self.gemms)
        share = f", {of_matmuls:.0%} of matmul FLOPs" if of_matmuls is not None else ""
        if of_all is not None and self.convolutions:
            share += f", {of_all:.0%} of those of matmuls and convolutions"
        graphs = f"{self.graphs} graph{'' if self.graphs == 1 else 's'}"
        counted = ", ".join(f"{n} {rule}" for rule, n in self.rules().most_common())
        declined = f"; declined: {counted}" if counted else ""
        faults = f"; {len(self.faults)} fault{'' if len(self.faults) == 1 else 's'} of fp8pass" if self.faults else ""
        return f"{len(self.rewritten)} of {len(self.matmuls)} matmuls in FP8{share} ({graphs}){declined}{faults}"

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table's rows, headings first. A declined matmul has the number of its reason in `footnotes`."""
        reasons = self._numbered()
        rows = [_HEADER, *(_row(g, reasons) for g in self.gemms)]
        if all(g.predicted_speedup is None for g in self.gemms):
            rows = [(*row[:_PREDICTED], *row[_PREDICTED + 2 :]) for row in rows]
        return rows

    def footnotes(self) -> list[str]:
        """Return the lines below the table, in groups after empty lines: sizes, reasons, notes, `saved`, the rest."""
        reasons = [f"[{i}] {reason}" for reason, i in self._numbered().items()]
        notes = dict.fromkeys(f"note: {g.note}" for g in self.gemms if g.note)
        if any(g.recomputed for g in self.gemms):
            notes[f"note: {RECOMPUTED}"] = None
        sizes = list(map(str, self.sizes))
        saved = [saved_summary(self.saved), *map(str, self.saved)] if self.saved else []
        failed = [f"compilation ended here: {self.error}"] if self.error else []
        last = [*map(str, self.breaks), *map(str, self.recompiles), *self.notes, *self.faults, *failed, self.summary()]
        return [line for group in (sizes, reasons, list(notes), saved, last) if group for line in ("", *group)]

    def _numbered(self) -> dict[str, int]:
        return {reason: i for i, (reason, _) in enumerate(self.reasons().most_common(), 1)}

    def __str__(self) -> str:
        return "\n".join([*ruled(aligned(self.rows())), *self.footnotes()])


def saved_summary(saved: Sequence[SavedTensor]) -> str:
    """Return one line: how many tensors are saved in FP8, and how much less that is."""
    in_fp8 = [tensor for tensor in saved if tensor.status == "in FP8"]
    less = sum(tensor.bytes for tensor in in_fp8) / 1e6
    return f"{len(in_fp8)} of {len(saved)} tensors that save_fp8 selects are saved in FP8: {less:.1f} MB less"


CONVOLUTION = "convolution"
"""The rule that leaves out convolutions that are not matmuls."""
RECOMPUTED = "what is recomputed runs once more in the backward, for activation checkpointing: its FLOPs count twice"
_HEADER = ("matmul", "gemm", "M x K x N", "dtypes", "scaling", "predicted", "pays from M", "status", "source")
_PREDICTED = _HEADER.index("predicted")


def _row(g: Gemm, reasons: dict[str, int]) -> tuple[str, ...]:
    batches = "" if g.batches == 1 else f"{g.batches} x "
    a, b, out = g.dtypes
    status = f"{g.status} [{reasons[g.reason]}]" if g.reason else g.status
    status += ", recomputed" if g.recomputed else ""
    shape, dtypes = f"{batches}{g.M} x {g.K} x {g.N}", f"{a} @ {b} -> {out}"
    pays = in_words(g.pays_from, g.pays_of)
    return g.name or "-", g.kind, shape, dtypes, g.scaling, predicted_gain(g), pays, status, g.source


def predicted_gain(g: Gemm) -> str:
    """Return a matmul's predicted speed-up in words: "1.32x"; "0.41x to 0.97x" if a size varies; "" if not known."""
    if g.predicted_speedup is None:
        return ""
    ends = g.predicted_ends or (g.predicted_speedup,)
    return " to ".join(dict.fromkeys(f"{float(gain):.2f}x" for gain in ends))


def _plain(value: Any) -> Any:
    """Return a value with the expressions in it as text."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value] if isinstance(value, list) else tuple(map(_plain, value))
    return str(value) if isinstance(value, sympy.Basic) else value


_collector: ContextVar[Report | None] = ContextVar("fp8pass_report", default=None)
_caller_warns: ContextVar[bool] = ContextVar("fp8pass_caller_warns", default=False)


@contextmanager
def collect(warns: bool = False) -> Iterator[Report]:
    """Collect the verdicts of all graphs compiled in this context in a Report; at the end, add them to an outer one.

    warns: True if the caller warns of matmuls that do not run in FP8, instead of the compilation of each graph.
    """
    report = Report()
    token, warning = _collector.set(report), _caller_warns.set(warns or _caller_warns.get())
    try:
        yield report
    finally:
        _collector.reset(token)
        _caller_warns.reset(warning)
        if (around := _collector.get()) is not None:
            around.add(report)


def caller_warns() -> bool:
    """Return whether the verdicts of graphs that are compiled now are checked together, later."""
    return _caller_warns.get()


@contextmanager
def tentative(keeps: Callable[[BaseException], bool]) -> Iterator[None]:
    """Discard the verdicts of this context if it raises an error for which `keeps` returns False."""
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
    """Log each verdict of one graph, and add them to the Report of the enclosing `collect`."""
    for g in report.gemms:
        where = f" ({g.source})" if g.source else ""
        log.debug("%s %s [%s,%s,%s]%s: %s %s", g.name, g.kind, g.M, g.K, g.N, where, g.status, g.reason)
    if report.gemms or report.graphs:
        log.debug("%s", report.summary())  # `Dump.compiling` logs the graph's line at INFO
    into = _collector.get()
    if into is not None:
        into.add(report)
