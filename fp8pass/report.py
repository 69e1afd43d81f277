"""What became of every matmul, and why."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from fp8pass.recipes import Kind

log = logging.getLogger(__name__)

Status = Literal["rewritten", "declined"]


@dataclass
class Gemm:
    """One matmul of a compiled graph: `kind` of a [M, K] by a [K, N] product, repeated `batches` times.

    name: the module or parameter it belongs to, "" if none. M, K, N are ints, or text where they are symbolic.
    dtypes: (first operand, second operand, output), as the kernel sees them. scaling: the recipe's name, "user" for
    quantize-dequantize that the user wrote, "" if declined. reason: "" if rewritten.
    """

    kind: Kind
    name: str
    M: int | str
    K: int | str
    N: int | str
    dtypes: tuple[str, str, str]
    source: str
    batches: int | str = 1
    scaling: str = ""
    status: Status = "declined"
    rule: str = ""
    """The condition that failed, in a few words: what reasons are counted by."""
    reason: str = ""
    near_miss: bool = False
    """Declined although an operand comes from FP8, and for one reason only, as far as was looked."""
    quantized: bool = False
    """Declined although both operands come from FP8."""
    note: str = ""
    """Rewritten, and what was expected in its kernel and stayed outside, with the reason."""
    fast_accum: bool = False
    """Whether its kernel may add up in less than float32."""
    choice: int | None = None
    """Which call of the annotated graph it comes from."""
    predicted_speedup: float | None = None
    """Of that call's matmuls together, with all quantization, on the target; a prediction. None on CPU without one."""

    @property
    def flops(self) -> int:
        """2*M*K*N over all batches; 0 where a size is symbolic."""
        sizes = (self.batches, self.M, self.K, self.N)
        product = 2
        for size in sizes:
            product *= size if isinstance(size, int) else 0
        return product


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


def frame_of(module: Any) -> tuple[str, str]:
    """The function that a graph of Dynamo's begins in, and its file; "" if that is not known."""
    why = getattr(module, "compile_subgraph_reason", None)
    return (why.user_stack[0].name, why.user_stack[0].filename) if why is not None and why.user_stack else ("", "")


def break_of(module: Any) -> Break | None:
    """Where and why a graph of Dynamo's ends, if that is a break."""
    why = getattr(module, "compile_subgraph_reason", None)
    if why is None or not why.graph_break:
        return None
    own = [f for f in why.user_stack if not f.filename.startswith(_TORCH)] or list(why.user_stack)
    source = f"{own[-1].filename.replace(chr(92), '/').rsplit('/', 1)[-1]}:{own[-1].lineno}" if own else "?"
    results = (n.meta.get("example_value") for n in module.graph.output_node().all_input_nodes)
    nbytes = sum(x.numel() * x.element_size() for x in results if isinstance(x, torch.Tensor) and x.dim())
    return Break(source, _reason(why), int(nbytes))


_TORCH = str(Path(torch.__file__).parent)


def _reason(why: Any) -> str:
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

    def add(self, other: Report) -> None:
        """Append what another report has."""
        self.gemms += other.gemms
        self.graphs += other.graphs
        self.notes += [note for note in other.notes if note not in self.notes]
        self.breaks += [b for b in other.breaks if b not in self.breaks]

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

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain lists, dicts, numbers and strings."""
        return asdict(self)

    def summary(self) -> str:
        """One line: how many matmuls, how much of the arithmetic, run in FP8, and how many each rule declined."""
        total = sum(g.flops for g in self.gemms)
        share = f", {sum(g.flops for g in self.rewritten) / total:.0%} of matmul FLOPs" if total else ""
        graphs = f"{self.graphs} graph{'' if self.graphs == 1 else 's'}"
        counted = ", ".join(f"{n} {rule}" for rule, n in self.rules().most_common())
        declined = f"; declined: {counted}" if counted else ""
        return f"{len(self.rewritten)} of {len(self.gemms)} matmuls in FP8{share} ({graphs}){declined}"

    def __str__(self) -> str:
        reasons = {reason: i for i, (reason, _) in enumerate(self.reasons().most_common(), 1)}
        rows = [_HEADER, *(_row(g, reasons) for g in self.gemms)]
        if all(g.predicted_speedup is None for g in self.gemms):
            rows = [(*row[:_PREDICTED], *row[_PREDICTED + 1 :]) for row in rows]
        lines = _align(rows)
        lines.insert(1, "-" * max(map(len, lines)))
        if reasons:
            lines += ["", *(f"[{i}] {reason}" for reason, i in reasons.items())]
        notes = dict.fromkeys(f"note: {g.note}" for g in self.gemms if g.note)
        if notes:
            lines += ["", *notes]
        return "\n".join([*lines, "", *map(str, self.breaks), *self.notes, self.summary()])


_HEADER = ("matmul", "gemm", "M x K x N", "dtypes", "scaling", "predicted", "status", "source")
_PREDICTED = _HEADER.index("predicted")


def _row(g: Gemm, reasons: dict[str, int]) -> tuple[str, ...]:
    batches = "" if g.batches == 1 else f"{g.batches} x "
    a, b, out = g.dtypes
    status = f"{g.status} [{reasons[g.reason]}]" if g.reason else g.status
    shape, dtypes = f"{batches}{g.M} x {g.K} x {g.N}", f"{a} @ {b} -> {out}"
    predicted = "" if g.predicted_speedup is None else f"{g.predicted_speedup:.2f}x"
    return g.name or "-", g.kind, shape, dtypes, g.scaling, predicted, status, g.source


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


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


def publish(report: Report) -> None:
    """Log each verdict of one graph, and hand them to whoever collects."""
    for g in report.gemms:
        where = f" ({g.source})" if g.source else ""
        log.debug("%s %s [%s,%s,%s]%s: %s %s", g.name, g.kind, g.M, g.K, g.N, where, g.status, g.reason)
    log.debug("%s", report.summary())  # the line of the whole graph is that of `Dump.compiling`
    into = _collector.get()
    if into is not None:
        into.add(report)
