"""Run a training step repeatedly to find the matmul, operand, recipe or pass that makes it fail: `fp8pass.bisect`.

The runs, in order:

    as configured                must fail, or there is nothing to find
    without fp8pass              must pass, or FP8 is not the cause
    the annotated graph, eagerly fails: FP8 numerics are the cause; passes: a later stage is. Then runs op by op after
                                 all passes (without Inductor), without FP8 copies of weights, and up to some pass
    fewer and fewer matmuls      by halves (Junker, QuickXplain, 2004): at most 2 log2(n) runs for one culprit among n;
                                 if that finds no failing set, by delta debugging (Zeller and Hildebrandt, Simplifying
                                 and Isolating Failure-Inducing Input, 2002)
    all but the culprits         must pass, or there is another culprit
    one operand changed          to high precision, or to another recipe

Every run begins with the same models, optimizers and random numbers, and recompiles everything.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fp8pass.base._torch import pytree
from fp8pass.base.errors import Fp8Error
from fp8pass.base.fields import called_with, whole
from fp8pass.base.names import parts_of
from fp8pass.compiler import order
from fp8pass.inspect.snapshot import Snapshot
from fp8pass.options.overrides import Trial, Unit, trying
from fp8pass.recipes import FACTORS, DelayedScaling, DynamicScaling, Recipe, Role, RowwiseScaling

log = logging.getLogger("fp8pass.bisect")

Outcome = Literal["passes", "fails", "unclear"]
Verdict = Literal["numbers", "pass", "compiler", "weight_cache", "not fp8", "passes", "unclear"]
MAX_SETS, MAX_TOGETHER = 8, 4
"""The most sets of culprits to search for, and the most matmuls in a set whose operands are tried one by one."""
_OPTIONAL = ("inline_composites", "write_matmuls", "merge_siblings")
"""The passes on Dynamo's graph that FP8 does not need."""


@dataclass(frozen=True)
class TrialRun:
    """One run of the step.

    what: a description of the configuration; outcome: "unclear" if the step failed differently from the first run;
    detail: the error or failed check; seconds: duration of the run, compilation included.
    """

    number: int
    what: str
    outcome: Outcome
    seconds: float
    detail: str = ""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"run {self.number}, {self.seconds:.1f} s: {self.what}: {self.outcome}{detail}"


@dataclass
class Culprit:
    """A matmul, a tensor that is saved in FP8, or the moments of an optimizer.

    name, kind, source: as in `Gemm`, or as in `Saved` with kind "saved"; or kind is "moments".

    scaling: the name of its recipe. operands: each of them makes the check pass if it alone stays in high precision.
    better: {operand: "dynamic" or "rowwise"}, for those of `operands` with which the check also passes under that
    recipe.
    """

    unit: Unit
    scaling: str
    operands: list[Role] = field(default_factory=list)
    better: dict[Role, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the module or parameter that it belongs to."""
        return self.unit.name

    @property
    def kind(self) -> str:
        """One of "output", "grad_input", "grad_weight", "saved", "moments"."""
        return self.unit.kind

    @property
    def source(self) -> str:
        """The user's line, "file.py:12"."""
        return self.unit.source

    def __str__(self) -> str:
        lines = [f"{self.unit}" + (f", {self.scaling}" if self.scaling else "")]
        for role in self.operands:
            also = f", and with {self.better[role]} scaling too" if role in self.better else ""
            lines.append(f"its operand {role} is at fault: with it in high precision the check passes{also}")
        return "; ".join(lines)


@dataclass
class Bisection:
    """The result of `fp8pass.bisect`; `str` and `print` give it as text.

    verdict: "numbers" (FP8 numerics: see `culprits`), "pass" (see `pass_name`), "compiler" (AOTAutograd or Inductor
    computes something else than the annotated graph), "weight_cache" (the FP8 copies of weights), "not fp8" (the step
    fails without fp8pass too), "passes" (the step does not fail), "unclear". culprits: sets of matmuls; each set fails
    with nothing else in FP8, and no smaller part of it does. cured: True if the step passed with everything in FP8
    except the modules of these matmuls. matmuls: number of matmuls that run in FP8 as configured. repeated: True if
    the culprits failed again, compiled as configured; None if that was not tried.
    """

    verdict: Verdict = "unclear"
    culprits: list[list[Culprit]] = field(default_factory=list)
    pass_name: str = ""
    matmuls: int = 0
    cured: bool = False
    repeated: bool | None = None
    remedy: dict[str, str] = field(default_factory=dict)
    """{name pattern: recipe}. The check passed with these entries first in `recipe` and everything else in FP8."""
    runs: list[TrialRun] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def filter(self) -> list[str]:
        """Name patterns for `Config.filter` that leave out the modules of all culprits."""
        units = [c.unit for group in self.culprits for c in group if c.kind in FACTORS and c.name]
        names = (part.removesuffix(".output") for u in units for part in parts_of(f"{u.name}.output"))
        return list(dict.fromkeys(names))

    def __str__(self) -> str:
        seconds = sum(run.seconds for run in self.runs)
        story = [_HEADLINES[self.verdict].format(matmuls=self.matmuls, culprit=self.pass_name)]
        for i, group in enumerate(self.culprits):
            cause = "the cause" if self.verdict == "numbers" else "it shows in"
            which = (f"{cause} too, independently" if i else cause) + (", only together" if len(group) > 1 else "")
            story += [f"  {which}:", *(f"    {line}" for c in group for line in str(c).split("; "))]
        story += ["", *self._advice(), *self.notes] if self._advice() or self.notes else []
        return "\n".join([*story, "", *map(str, self.runs), f"{len(self.runs)} runs in {seconds:.0f} s"])

    def _advice(self) -> list[str]:
        advice = []
        if self.verdict == "pass":
            advice.append(f"Please report that the pass {self.pass_name} is wrong, with what FP8PASS_DUMP=dir writes.")
        if self.verdict == "compiler":
            advice.append("Please report it, with what FP8PASS_DUMP=dir writes.")
        if self.verdict == "weight_cache":
            advice.append("Please report it. To go on: weight_cache='off'.")
        if self.remedy:
            advice.append(f"To go on: recipe={{{_items(self.remedy)}, '*': ...}}, with which the check passed;")
        if self.filter:
            seen = "with which the check passed" if self.cured else "which may not be enough"
            advice.append(f"{'or' if self.remedy else 'To go on:'} filter={self.filter}, {seen}.")
        if saved := [c.name for group in self.culprits for c in group if c.kind == "saved"]:
            advice.append(f"To go on: save_fp8=False, or name patterns that do not match {' and '.join(saved)}.")
        if any(c.kind == "moments" for group in self.culprits for c in group):
            advice.append("To go on: optimizer_state='off'.")
        if self.repeated is False:
            advice.append(
                "The culprits did not fail when run again: the step is not deterministic, or it changes something that "
                "is not restored between runs (see fp8pass.bisect). Do not trust this result until that is fixed."
            )
        return advice


_HEADLINES: dict[str, str] = {
    "numbers": "FP8 precision is the cause: the annotated graph fails too, run eagerly, without passes or compiler.\n"
    "Of {matmuls} matmuls that run in FP8:",
    "pass": "The pass {culprit} is the cause, not FP8 precision: the check fails from this pass on.",
    "compiler": "{culprit} is the cause, not FP8 precision: the annotated graph passes, run eagerly.",
    "weight_cache": "The FP8 copies of weights (weight_cache) are the cause: without them the check passes.",
    "not fp8": "The check fails without fp8pass too: FP8 is not the cause.",
    "passes": "The check passes with everything in FP8, as configured: there is nothing to find.",
    "unclear": "Could not tell whether FP8 precision, a pass or Inductor is the cause. Of {matmuls} matmuls:",
}


def _items(options: dict[str, str]) -> str:
    return ", ".join(f"{name!r}: {value!r}" for name, value in options.items())


STEP = called_with((), "()")
CHECK = called_with((None,), "(what step returned) -> bool")
MAX_RUNS = whole(3, "a number of runs, 3 or more", "the first two runs only show whether FP8 is the cause")


def bisect(step: Callable[[], Any], check: Callable[[Any], Any] | None = None, *, max_runs: int = 100) -> Bisection:
    """Find the smallest set of matmuls, or the pass, that makes a training step fail.

    The output, grad_input and grad_weight matmuls of a layer count separately. A matmul is identified by module path,
    the user's lines and a number, so graph breaks and recompilation do not change its identity. Modules that are
    compiled one by one and share compiled code count as one: the culprit is then in any of them. Quantize-dequantize
    that you wrote yourself belongs to the model and stays in all runs. Works in one process only: with several, each
    rank would decide separately. The logger "fp8pass.bisect" logs every run at INFO.

    Args:
        step: Function without arguments, called once per run. It trains some steps with models compiled by fp8pass,
            and returns a result for `check`. It may create its model and optimizer each time, or use existing ones:
            the objects that it reaches through its closure, the globals that it names, and their attributes are
            restored before every run and at the end (`Snapshot` lists which). It must itself restart anything else
            that it changes, such as an iterator.
        check: Function of the result of `step`: true if the result is correct, false or an AssertionError if not. By
            default, every number in the result must be finite. An exception that `step` raises is a failure too. A run
            that fails in another way than the first run (another type of exception) does not count as a failure, and
            is "unclear" in `Bisection.runs`. Other exceptions of `check` are raised.
        max_runs: The number of runs, at least 3, after which the search stops with the smallest set so far.

    Returns:
        A `Bisection`: the verdict, the culprits, and all runs.

    Raises:
        Fp8Error: If the step compiles nothing with fp8pass.
        ValueError: If `max_runs` is below 3, or if `step` or `check` is not such a function.
    """
    STEP.take("step", step)
    (CHECK | None).take("check", check)
    MAX_RUNS.take("max_runs", max_runs)
    return _Bisector(step, check or all_finite, max_runs).run()


def all_finite(result: Any) -> bool:
    """Return whether no number in tensors, lists, tuples and dicts is NaN or infinite."""
    leaves = pytree.tree_leaves(result)
    tensors = (x for x in leaves if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()))
    return all(math.isfinite(x) for x in leaves if isinstance(x, float)) and all(
        bool(torch.isfinite(x.float()).all()) for x in tensors
    )


class _Bisector:
    def __init__(self, step: Callable[[], Any], check: Callable[[Any], Any], max_runs: int) -> None:
        self.step = step
        self.check = check
        self.max_runs = max_runs
        self.found = Bisection()
        self.failure = ""
        """The failure as configured: "" if the check fails, or the type name of the exception."""
        self.known: dict[Any, Outcome] = {}
        self.how: dict[str, Any] = {}
        """The options that all trials share: way, passes, weight_cache."""
        self.units: dict[Unit, Recipe | None] = {}

    def run(self) -> Bisection:
        """Run the whole search, and restore the user's objects at the end."""
        self.snapshot = Snapshot([self.step, self.check])
        try:
            self._find()
        finally:
            self.snapshot.restore()
        log.info("%s", str(self.found).partition("\n")[0])
        return self.found

    # Runs

    def _try(self, what: str, again: bool = False, **options: Any) -> Outcome:
        """Run the step in a trial, or return the known outcome of an equal trial; "unclear" after `max_runs` runs."""
        trial = Trial(**{**self.how, **options})
        # A trial that names all units is the same as one with `None`, which leaves out none.
        units = None if trial.units is None or set(trial.units) == set(self.units) else frozenset(trial.units)
        passes = None if trial.passes is None else tuple(trial.passes)
        key = (units, frozenset(trial.instead.items()), trial.way, passes, trial.without, trial.weight_cache)
        if key in self.known and not again:
            return self.known[key]
        if len(self.found.runs) >= self.max_runs:
            self._note(f"Stopped after {self.max_runs} runs (max_runs): there may be smaller sets, and more.")
            return "unclear"
        started = time.perf_counter()
        outcome, detail = self._outcome(trial)
        self.trial = trial
        run = TrialRun(len(self.found.runs) + 1, what, outcome, time.perf_counter() - started, detail)
        self.found.runs.append(run)
        log.info("%s", run)
        self.known[key] = outcome
        return outcome

    def _outcome(self, trial: Trial) -> tuple[Outcome, str]:
        self.snapshot.restore()
        first = not self.found.runs
        try:
            with trying(trial):
                result = self.step()
        except Exception as error:
            log.debug("the step raised", exc_info=True)
            kind, detail = type(error).__name__, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        else:
            kind, detail = "", self._why_not_fine(result)
            if not detail:
                return "passes", ""
        if first:
            self.failure = kind
        return ("fails" if kind == self.failure else "unclear"), detail

    def _why_not_fine(self, result: Any) -> str:
        try:
            return "" if self.check(result) else "the check is false"
        except AssertionError as error:
            return f"the check: {str(error).partition(chr(10))[0] or 'AssertionError'}"

    def _fails(self, units: Iterable[Unit], what: str = "") -> bool:
        wanted = list(units)
        return self._try(what or f"only {_count(wanted)} in FP8", units=wanted) == "fails"

    def _note(self, text: str) -> None:
        if text not in self.found.notes:
            self.found.notes.append(text)

    # What is found, in order

    def _find(self) -> None:
        result = self.found
        outcome = self._try("everything as configured")
        if not self.trial.graphs:
            raise Fp8Error(
                "bisect: the step compiled nothing with fp8pass: it must call what torch.compile(..., "
                'backend="fp8pass") or fp8pass.train_step made, and must not have torch.compiler.disable around it'
            )
        self.units, lowerings, cached = self.trial.seen, self.trial.lowerings, self.trial.cached
        applied = self.trial.applied
        result.matmuls = sum(unit.kind in FACTORS for unit in self.units)
        if outcome != "fails":
            result.verdict = "passes"
            return
        without = self._try("without fp8pass", units=(), passes=())
        if without != "passes":
            result.verdict = "not fp8"
            return
        reference = self._try("everything in FP8, the annotated graphs run eagerly", way="reference")
        if reference == "fails":
            result.verdict, self.how = "numbers", {"way": "reference"}
            self._find_rewriting([name for name in _OPTIONAL if name in applied])
            if result.pass_name:
                return
        elif reference == "passes":
            self._find_machinery(lowerings == {"eager"}, cached)
        else:
            self._note(
                "The annotated graphs could not be run eagerly, so it is not known whether precision, a pass or "
                "Inductor is the cause."
            )
        self._find_matmuls()

    def _find_rewriting(self, names: Sequence[str]) -> None:
        """Find which of these passes on Dynamo's graph is at fault, if any; the annotated graph has their output."""
        for name in names:
            if self._try(f"the annotated graphs without {name}", without=(name,)) == "passes":
                self.found.verdict, self.found.pass_name = "pass", name
                return

    def _find_machinery(self, runs_eagerly: bool, cached: bool) -> None:
        """Find which stage after the annotated graph is at fault: AOTAutograd, a pass, weight cache, or Inductor."""
        result = self.found
        after_passes = runs_eagerly or self._try("op by op after all passes", way="eager") == "fails"
        self.how = {"way": "eager"} if after_passes else {}
        if cached and self._try("without FP8 copies of weights", weight_cache=False) == "passes":
            result.verdict = "weight_cache"
            return
        names = [p.name for p in order.JOINT] + [p.name for p in order.KERNELS]
        # With the first `good` passes the step passes, with the first `bad` it fails.
        good, bad = 0, len(names)
        if self._try("with no pass", passes=()) == "fails":
            result.verdict, result.pass_name = "compiler", "AOTAutograd" if after_passes else "Inductor"
            return
        while bad - good > 1:
            middle = (good + bad) // 2
            fails = self._try(f"with passes up to {names[middle - 1]}", passes=names[:middle]) == "fails"
            good, bad = (good, middle) if fails else (middle, bad)
        result.verdict, result.pass_name = "pass", names[bad - 1]
        other_passes = [name for name in names if name != result.pass_name]
        if self._try(f"with all passes but {result.pass_name}", passes=other_passes) != "passes":
            self._note(f"The check fails with all passes but {result.pass_name} too: others may be wrong as well.")
        if not after_passes:
            self._note("Op by op the check passes: Inductor may compile that pass's graph wrongly.")

    def _find_matmuls(self) -> None:
        """Find sets of matmuls that fail by themselves, until the remaining matmuls pass."""
        result, left = self.found, list(self.units)
        while left and len(result.culprits) < MAX_SETS and self._fails(left, self._without()):
            smallest = _smallest(left, self._fails)
            if smallest == left and len(left) > MAX_TOGETHER:
                self._note(f"No smaller set than {_count(left)} fails: many small errors seem to add up.")
            result.culprits.append([Culprit(u, r.name if (r := self.units[u]) else "") for u in smallest])
            # Without the culprits' other matmuls too, because the filter that is proposed leaves out whole modules.
            names = {u.name for u in smallest if u.kind in FACTORS}
            left = [u for u in left if u not in smallest and not (u.kind in FACTORS and u.name in names)]
        if not result.culprits:
            return
        result.cured = not left or self._try(self._without(), units=left) == "passes"
        if result.verdict in ("numbers", "unclear"):
            for together in result.culprits:
                if len(together) <= MAX_TOGETHER:
                    self._find_operands(together)
            self._find_remedy()
        first, runs = [c.unit for c in result.culprits[0]], len(result.runs)
        outcome = self._try(
            f"only {_count(first)} in FP8, as configured, again", again=True, units=first, way="configured"
        )
        # None if there were no runs left for it.
        result.repeated = outcome == "fails" if len(result.runs) > runs else None

    def _without(self) -> str:
        names = self.found.filter or [c.kind for group in self.found.culprits for c in group]
        return f"all but {' and '.join(names)} in FP8" if names else "everything in FP8"

    def _find_operands(self, together: list[Culprit]) -> None:
        units = [c.unit for c in together]
        for culprit in together:
            recipe, unit = self.units[culprit.unit], culprit.unit
            for role in _operands(unit):
                if self._try(f"its {role} in high precision", units=units, instead={(unit, role): None}) != "passes":
                    continue
                culprit.operands.append(role)
                other = _better(recipe)
                if other is None:
                    continue
                what = f"its {role} with {other.name} scaling"
                if self._try(what, units=units, instead={(unit, role): other}) == "passes":
                    culprit.better[role] = other.name

    def _find_remedy(self) -> None:
        """Find another recipe for the modules of the culprits with which the check passes."""
        culprits = [c for together in self.found.culprits for c in together]
        if not all(c.better and c.name for c in culprits):
            return
        better = {c.name: _better(self.units[c.unit]) for c in culprits}
        instead = {(u, role): better[u.name] for u in self.units if u.name in better for role in _operands(u)}
        remedy = {name: other.name for name, other in better.items() if other}
        if self._try(f"everything in FP8, {_items(remedy)}", instead=instead) == "passes":
            self.found.remedy = remedy


def _better(recipe: Recipe | None) -> Recipe | None:
    """Return the recipe to try for an operand that fails: dynamic instead of delayed, rowwise instead of dynamic."""
    if isinstance(recipe, DelayedScaling):
        return DynamicScaling(fp8_format=recipe.fp8_format)
    return RowwiseScaling() if isinstance(recipe, DynamicScaling) else None


def _operands(unit: Unit) -> tuple[Role, ...]:
    """Return the operands of a matmul; () for other units."""
    return () if unit.kind == "moments" or unit.kind == "saved" else FACTORS[unit.kind]


def _count(units: Sequence[Unit]) -> str:
    """Return a short description of the units, of which there is at least one."""
    if len(units) == 1:
        return str(units[0])
    first, last = ("the optimizer's moments" if u.kind == "moments" else u.name or "-" for u in (units[0], units[-1]))
    what = "matmuls" if all(u.kind != "saved" for u in units) else "matmuls and tensors"
    return f"{len(units)} {what}, of {first}" + (f" to {last}," if first != last else ",")


def _smallest(units: list[Unit], fails: Callable[[list[Unit]], bool]) -> list[Unit]:
    """Return a subset that fails, and that passes if any single unit is removed. `units` are known to fail.

    Uses divide and conquer, which requires that every superset of a failing set fails. If its result does not fail
    (errors may cancel each other), uses delta debugging, which takes more runs.
    """
    failing = set(_conquered([], units, False, fails))
    smallest = [u for u in units if u in failing]
    return smallest if fails(smallest) else _debugged(units, fails)


def _conquered(with_: list[Unit], units: list[Unit], may_fail: bool, fails: Callable[[list[Unit]], bool]) -> list[Unit]:
    """Return the part of `units` that makes `with_` fail. may_fail: True if `with_` may fail by itself."""
    if may_fail and fails(with_):
        return []
    if len(units) == 1:
        return units
    left, right = units[: len(units) // 2], units[len(units) // 2 :]
    # QuickXplain: what of the right half is needed beside all of the left one, then what of the left half beside that
    of_right = _conquered(with_ + left, right, True, fails)
    return _conquered(with_ + of_right, left, bool(of_right), fails) + of_right


def _debugged(units: list[Unit], fails: Callable[[list[Unit]], bool]) -> list[Unit]:
    parts = 2
    while len(units) > 1:
        edges = [len(units) * i // parts for i in range(parts + 1)]
        chunks = [units[a:b] for a, b in itertools.pairwise(edges)]
        # ddmin: a chunk that fails by itself; then the rest without a chunk; then smaller chunks
        smaller = next((c for c in chunks if fails(c)), None)
        if smaller is not None:
            units, parts = smaller, 2
            continue
        # of two parts, each is the other's rest
        rests = ([u for u in units if u not in c] for c in chunks) if parts > 2 else iter(())
        rest = next((r for r in rests if fails(r)), None)
        if rest is not None:
            units, parts = rest, max(parts - 1, 2)  # ddmin keeps the size of the parts
        elif parts < len(units):
            parts = min(2 * parts, len(units))
        else:
            break
    return units
