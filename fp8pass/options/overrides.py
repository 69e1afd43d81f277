"""Overrides of a trial of `fp8pass.bisect`: which matmuls run in FP8, how, and by which passes.

They take precedence over the program's options. There is at most one trial, and it holds for the whole process, since
backwards are compiled in autograd's threads. During a trial torch's caches of graphs are not used, and every graph that
is compiled reports its matmuls to the trial.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import fx

from fp8pass.base.names import source_of
from fp8pass.options.config import Config
from fp8pass.recipes import KINDS, Kind, Recipe, Role

Way = Literal["configured", "eager", "reference"]
"""Ways to run graphs: by the program's options; op by op after all passes; op by op as annotated, with no pass."""
REQUIRED = (
    "expand_quantizers", "list_matmuls", "keep_strides", "take_states", "read_moments", "skip_nonfinite",
    "write_moments", "write_weights",
)  # fmt: skip
"""Passes that always run: they change nothing and other passes need them, or they add the inputs that updates need."""


@dataclass(frozen=True)
class Unit:
    """A part of a program that can be in FP8 or not: one matmul, a tensor of `save_fp8`, or the optimizers' moments.

    Units are equal in every run of the program, in whatever order graphs are compiled. kind: which of the three matmuls
    of a call it is; or "saved", see `Saved`; or "moments", with all other fields empty. name: as in reports. source:
    "file.py:12". trace: all lines of the user's code that lead there. ordinal: number of the call among those with this
    name and trace in one graph, from 0.
    """

    kind: Kind | Literal["moments", "saved"]
    name: str = ""
    source: str = ""
    trace: str = ""
    ordinal: int = 0

    def __str__(self) -> str:
        if self.kind == "moments":
            return "the optimizer's moments"
        if self.kind == "saved":
            return f"{self.name} at {self.source or '?'}, saved for the backward"
        times = f", its call {self.ordinal + 1} there" if self.ordinal else ""
        return f"{self.kind} of {self.name or 'a matmul'} at {self.source or '?'}{times}"


MOMENTS = Unit("moments")
Operand = tuple[Unit, Role]


@dataclass
class Trial:
    """The overrides of one trial, and records of the graphs that were compiled in it.

    units: the units that run in FP8; None: as the program's options say. instead: recipes for operands that replace the
    configured ones; None leaves an operand in high precision. way: see `Way`. passes: names of the passes that run on
    graphs made from the annotated graph; None for all. without: names of passes that do not run on Dynamo's graph.
    weight_cache: whether FP8 copies of weights may be used.

    Records: seen: the units of the compiled graphs, with their recipes. graphs: how many were compiled. lowerings: the
    configured ones. applied: names of passes that changed something. cached: whether weights have FP8 copies.
    """

    units: Collection[Unit] | None = None
    instead: Mapping[Operand, Recipe | None] = field(default_factory=dict)
    way: Way = "configured"
    passes: Collection[str] | None = None
    without: Collection[str] = ()
    weight_cache: bool = True
    seen: dict[Unit, Recipe | None] = field(default_factory=dict)
    graphs: int = 0
    lowerings: set[str] = field(default_factory=set)
    applied: set[str] = field(default_factory=set)
    cached: bool = False

    def configured(self, config: Config) -> Config:
        """Return the options for a graph that is compiled in this trial, made from its configured options."""
        self.graphs += 1
        self.lowerings.add(config.lowering)
        self.cached |= config.caches_weights
        config = replace(config, strict=False)  # a matmul that the trial leaves out is not an error
        if config.optimizer_state != "off":
            self.seen[MOMENTS] = None
            config = replace(config, optimizer_state=config.optimizer_state if self.has(MOMENTS) else "off")
        if self.way != "configured":
            config = replace(config, lowering="eager")
        if self.way == "reference" or not self.weight_cache:
            config = replace(config, weight_cache="off")
        if self.units is not None and not self.units:  # the graph as it would be without fp8pass
            config = replace(config, recipe=None)
        return config

    def has(self, unit: Unit) -> bool:
        """Return whether the unit runs in FP8."""
        return self.units is None or unit in self.units

    def runs(self, name: str, part: str) -> bool:
        """Return whether a pass runs on a graph. part: kind of the graph, as in dumps: "dynamo" for Dynamo's."""
        if part == "dynamo":
            return name not in self.without
        return self.passes is None or name in self.passes or name in REQUIRED

    def see(self, unit: Unit, recipe: Recipe) -> bool:
        """Record a matmul that the recipe selects, and return whether it runs in FP8."""
        self.seen.setdefault(unit, recipe)
        return self.has(unit)


_trial: Trial | None = None


def current() -> Trial | None:
    """Return the current trial; None if there is none."""
    return _trial


@contextmanager
def trying(trial: Trial) -> Iterator[None]:
    """Apply the trial to all compilations within the context."""
    global _trial
    assert _trial is None, "a bisection within a bisection"
    _trial = trial
    try:
        yield
    finally:
        _trial = None


def units_of(node: fx.Node, name: str, calls: Counter[Any]) -> dict[Kind, Unit]:
    """Return the units of the three matmuls of a call in Dynamo's graph. calls: counts of calls by (name, trace)."""
    lines = (node.meta.get("stack_trace") or "").splitlines()
    trace = "\n".join(line.strip() for line in lines if line.lstrip().startswith('File "'))  # without columns
    ordinal = calls[name, trace]
    calls[name, trace] += 1
    return {kind: Unit(kind, name, source_of(node), trace, ordinal) for kind in KINDS}
