"""A trial of `fp8pass.bisect`: what of a program runs in FP8, how, and by which passes, whatever its own options say.

There is at most one, and it holds for the whole process: backwards are compiled in threads of autograd's. While there
is one, torch's caches of graphs are not used, and every graph that is compiled says which matmuls it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import fx

from fp8pass.names import source_of
from fp8pass.options.config import Config
from fp8pass.recipes import KINDS, Kind, Recipe, Role

Way = Literal["configured", "eager", "reference"]
"""How graphs run: as the program's options say; op by op, behind all passes; or as annotated, with no pass at all."""
REQUIRED = ("list_matmuls", "take_states", "read_moments", "skip_nonfinite", "write_moments", "write_weights")
"""Passes that change nothing and that others build upon, and those that give an update the inputs it is called with."""


@dataclass(frozen=True)
class Unit:
    """Something of a program that may run in FP8, and may not: one matmul, or what an optimizer keeps.

    kind: "moments" of the optimizers, whose other fields are empty; or which of the three matmuls of a call it is.
    name: as in reports. source: "file.py:12". trace: all lines of the user's that lead there. ordinal: of the calls of
    this name and trace in one graph. The same in every run of the program, in whatever order graphs are compiled.
    """

    kind: Kind | Literal["moments"]
    name: str = ""
    source: str = ""
    trace: str = ""
    ordinal: int = 0

    def __str__(self) -> str:
        if self.kind == "moments":
            return "the optimizer's moments"
        times = f", its call {self.ordinal + 1} there" if self.ordinal else ""
        return f"{self.kind} of {self.name or 'a matmul'} at {self.source or '?'}{times}"


MOMENTS = Unit("moments")
Operand = tuple[Unit, Role]


@dataclass
class Trial:
    """units: all that runs in FP8; None: what the program's options say. instead: how operands are quantized that are
    not to be as configured, None for not at all. passes: those that run on what becomes of the annotated graph; None:
    all. without: those that do not run on Dynamo's graph. weight_cache: whether it may be used.

    Of the graphs that were compiled, seen: their units, with the recipes; applied: the passes that did something;
    cached: whether they have FP8 copies.
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
        """The options of a graph that is compiled in this trial."""
        self.graphs += 1
        self.lowerings.add(config.lowering)
        self.cached |= config.caches_weights
        config = replace(config, strict=False)  # what the trial leaves out is no error
        if config.optimizer_state == "fp8":
            self.seen[MOMENTS] = None
            config = replace(config, optimizer_state="fp8" if self.has(MOMENTS) else "off")
        if self.way != "configured":
            config = replace(config, lowering="eager")
        if self.way == "reference" or not self.weight_cache:
            config = replace(config, weight_cache="off")
        if self.units is not None and not self.units:  # the graph as it would be without fp8pass
            config = replace(config, recipe=None)
        return config

    def has(self, unit: Unit) -> bool:
        """Whether it runs in FP8."""
        return self.units is None or unit in self.units

    def runs(self, name: str, part: str) -> bool:
        """Whether a pass runs on a graph, of which `part` says whose it is, as in dumps."""
        if part == "dynamo":
            return name not in self.without
        return self.passes is None or name in self.passes or name in REQUIRED

    def see(self, unit: Unit, recipe: Recipe) -> bool:
        """Take note of a matmul that the recipe wants; returns whether it runs in FP8."""
        self.seen.setdefault(unit, recipe)
        return self.has(unit)


_trial: Trial | None = None


def current() -> Trial | None:
    """The trial that is under way, if any."""
    return _trial


@contextmanager
def trying(trial: Trial) -> Iterator[None]:
    """Within it, whatever is compiled is compiled as the trial says."""
    global _trial
    assert _trial is None, "a bisection within a bisection"
    _trial = trial
    try:
        yield
    finally:
        _trial = None


def units_of(node: fx.Node, name: str, calls: Counter[Any]) -> dict[Kind, Unit]:
    """The identities of the matmuls of a call in Dynamo's graph. calls: counts calls, by name and trace."""
    lines = (node.meta.get("stack_trace") or "").splitlines()
    trace = "\n".join(line.strip() for line in lines if line.lstrip().startswith('File "'))  # without columns
    ordinal = calls[name, trace]
    calls[name, trace] += 1
    return {kind: Unit(kind, name, source_of(node), trace, ordinal) for kind in KINDS}
