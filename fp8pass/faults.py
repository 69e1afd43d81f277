"""A fault of fp8pass never stops a run: the graph is compiled again without what failed, and everybody is told.

a pass raises, or leaves an illegal graph     the graph is compiled again without that pass
one that FP8 needs, or nobody knows which     again, with all its matmuls declined by the rule `internal`
that fails too                                again, as torch compiles it without fp8pass: what that raises is torch's
                                              own error, or the user's, and is raised as it is
a backward, whose forward has run already     again without the pass; or else op by op, and from the next call on the
                                              whole graph as torch compiles it

Each attempt begins with Dynamo's graph, which nobody edits, and nothing is kept of one that failed. Errors that are
meant for the user (`Fp8Error`) are not faults. `strict`, `on_fault="raise"` and trials of `fp8pass.bisect` raise.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import fx

from fp8pass._torch import RestartAnalysis, SkipFrame, functorch_config, timeout_of, unset_fake_temporarily
from fp8pass.dump.writer import Dump
from fp8pass.errors import Fault, Fp8Error, faults_of, first_line, gone_on_after, warn
from fp8pass.options import overrides
from fp8pass.options.config import Config, Reduction
from fp8pass.report.graph_view import drawn
from fp8pass.report.report import Report, publish, tentative
from fp8pass.states.amax_reduction import NotCome, tell_all

log = logging.getLogger(__name__)

T = TypeVar("T")
Form = Literal["fp8", "declined", "plain"]
"""In FP8; with all matmuls listed and declined; as torch compiles it, with nothing of fp8pass."""
NEEDED = ("annotate", "list_matmuls", "scaled_mm")
"""Passes without which no matmul of the recipe's runs in FP8."""
LOWERING = "lowering"
"""The place of a fault of which nobody knows the pass: AOTAutograd or Inductor fails on what fp8pass made."""


@dataclass(frozen=True)
class Attempt:
    """How a graph is compiled. without: the passes that are left out. reason: why its matmuls are declined."""

    form: Form = "fp8"
    without: frozenset[str] = frozenset()
    reason: str = ""

    def runs(self, name: str) -> bool:
        """Return whether a pass, or another part that has a name, takes part."""
        return name not in self.without

    def after(self, place: str, reason: str) -> Attempt:
        """Return what to try next, after a fault in a pass, or at LOWERING."""
        known = place != LOWERING and self.runs(place)
        if self.form == "fp8" and (not known or place in NEEDED):
            return Attempt("declined", self.without | ({place} if known else set()), reason)
        return replace(self, without=self.without | {place}) if known else Attempt("plain")


FIRST = Attempt()
Compile = Callable[[Attempt, Dump], T]


@dataclass(frozen=True)
class Failure:
    """A fault: where, of which attempt, and the dump that reproduces it; None if none could be written."""

    attempt: Attempt
    place: str
    error: BaseException
    graph: str
    dump: Dump | None

    def __str__(self) -> str:
        said = f"{type(self.error).__name__}: {first_line(self.error)}".rstrip(".")
        if self.place == LOWERING:
            return f"torch could not compile what fp8pass made of {self.graph} ({said})"
        return f"fp8pass failed in its pass {self.place} on {self.graph} ({said})"

    def reason(self) -> str:
        """Return what a matmul was declined for."""
        return f"a fault of fp8pass: {self}; please report it with {self.file()}"

    def file(self) -> str:
        """Return the file, or else the folder, that reproduces it."""
        return str(self.dump.failed or self.dump.folder) if self.dump else "this message: no dump could be written"


def raises(config: Config) -> bool:
    """Return whether a fault ends the compilation."""
    return config.strict or config.on_fault == "raise" or overrides.current() is not None


def fall_back(
    compile_with: Compile[T],
    config: Config,
    dump_of: Callable[[Config, str], Dump],
    first: Attempt = FIRST,
    has_collectives: bool = False,
) -> tuple[T, Attempt]:
    """Compile a graph; after a fault, again without what failed. Return what was compiled, and how.

    dump_of: makes the dump of an attempt, for a configuration and a word that tells it from others of the graph.
    has_collectives: whether the graph has, so that all ranks must go on alike. Raises Fp8Error if they do not, what is
    meant for the user, and what torch raises on the graph as it is without fp8pass.
    """
    attempt, failures = first, list[tuple[Failure, str]]()

    def ends_here(error: BaseException) -> bool:
        return raises(config) or attempt.form == "plain" or _is_meant_for_user(error)

    while True:
        dump = dump_of(config, "again" if failures else "")
        try:
            with _tentative(keeps=ends_here):
                compiled = compile_with(attempt, dump)
            break
        except Exception as error:
            if ends_here(error):
                raise
            failed = error
        failure = _failure(attempt, failed, config, dump, dump_of, compile_with)
        attempt = attempt.after(failure.place, failure.reason())
        same = attempt.form == failure.attempt.form
        failures.append((failure, f"the graph was compiled without {failure.place}" if same else _IN_HIGH_PRECISION))
    if failures and has_collectives:
        _agree([failure for failure, _ in failures], config)
    for failure, outcome in failures:
        tell(failure, outcome)
        if failure.place == LOWERING:
            _reproduce(compile_with, failure)
    return compiled, attempt


_IN_HIGH_PRECISION = "all matmuls of the graph stay in high precision"


@contextlib.contextmanager
def left_out(place: str, config: Config, graph: str) -> Iterator[None]:
    """Within it, a fault ends nothing but the context, for what is within can be left out."""
    try:
        with faults_of(place):
            yield
    except Fault as fault:
        if raises(config):
            raise
        tell(Failure(FIRST, place, fault.__cause__ or fault, graph, None), "it was left out")


def _failure(
    attempt: Attempt,
    error: Exception,
    config: Config,
    dump: Dump,
    dump_of: Callable[[Config, str], Dump],
    compile_with: Compile[Any],
) -> Failure:
    """Return what is known of a fault, with a dump. One of Inductor's is written later, for it takes long."""
    place, cause = _place_and_cause(error)
    failure = Failure(attempt, place, cause, dump.title, dump)
    if dump.folder is not None:
        return failure
    try:
        failure = replace(failure, dump=dump_of(replace(config, dump_dir=_folder()), "fault"))
    except (Fp8Error, OSError) as unwritable:
        log.warning("no dump of a fault can be written: %s", unwritable)
        return replace(failure, dump=None)
    if place != LOWERING:
        _reproduce(compile_with, failure)
    return failure


@functools.cache
def _folder() -> str:
    """Return where dumps of faults go that nobody has named a folder for: one for the process."""
    return tempfile.mkdtemp(prefix="fp8pass-fault-")


class _Done(Exception):
    """A dump is written: nothing is kept of the compilation."""


def _reproduce(compile_with: Compile[Any], failure: Failure) -> None:
    """Fail again, with dumps."""
    if failure.dump is None:
        return
    with contextlib.suppress(Exception), _tentative(keeps=lambda _: False):
        compile_with(failure.attempt, failure.dump)
        raise _Done


@contextlib.contextmanager
def _tentative(keeps: Callable[[BaseException], bool]) -> Iterator[None]:
    """Within it, verdicts and pictures reach whoever collects them if nothing is raised, or what `keeps` is true of."""
    drawing = drawn()
    with tentative(keeps), drawing.tentative(keeps) if drawing is not None else contextlib.nullcontext():
        yield


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Return an error, and those that it comes from; Dynamo and Inductor wrap what a backend raises."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__  # type: ignore[assignment]


def _is_meant_for_user(error: BaseException) -> bool:
    """Return whether nothing of ours has failed: an error that says what to do, or Dynamo's way to begin anew."""
    first = next((e for e in _chain(error) if isinstance(e, (Fp8Error, Warning, RestartAnalysis, SkipFrame))), None)
    return first is not None and not isinstance(first, Fault)


def _place_and_cause(error: Exception) -> tuple[str, BaseException]:
    fault = next((e for e in _chain(error) if isinstance(e, Fault)), None)
    if fault is not None:
        return fault.place, fault.__cause__ or fault
    cause: BaseException = error
    while isinstance(inner := getattr(cause, "inner_exception", None), BaseException):
        cause = inner
    return LOWERING, cause


# ---------------------------------------------------------------------------------------------------------------------
# Who is told


_told: set[tuple[str, ...]] = set()


def tell(failure: Failure, outcome: str) -> None:
    """Write a fault into the report, and warn of it, once per process, pass and type of error."""
    said = f"{failure}: {outcome}. Please report it with {failure.file()} and what `fp8pass env` prints"
    publish(Report(faults=[said]))
    gone_on_after.append(said)
    log.error("%s", said)
    kind = failure.place, type(failure.error).__name__, outcome
    if kind not in _told:
        _told.add(kind)
        warn(f"{said}. Training goes on; with on_fault='raise' a fault is an error")


_meetings = itertools.count()


def _agree(failures: list[Failure], config: Config) -> None:
    """Make sure that all ranks have compiled a graph again for the same reason, for else their collectives differ.

    Slots need no such meeting: ranks compare theirs in the first step. Raises Fp8Error, on those that have, if not.
    """
    group = Reduction(config.amax_group).process_group()
    if group is None or dist.get_backend(group) == "fake":
        return
    device = torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")
    places = [[f.place, f.graph.partition(", ")[2]] for f in failures]  # ranks may number graphs differently
    try:
        by_rank = tell_all(group, f"fault/{next(_meetings)}", places, timeout_of(group, device))
    except NotCome as error:
        raise Fp8Error(
            f"{failures[0]}, on this rank and not on others, which would wait for collectives that do not come. Please "
            f"report it with {failures[0].file()}"
        ) from error
    if any(told != places for told in by_rank):
        raise Fp8Error(_difference(by_rank))


def _difference(layouts: Any) -> str:
    listed = "; ".join(
        f"rank {rank}: {', '.join(' on '.join(row) for row in rows)}" for rank, rows in enumerate(layouts)
    )
    return f"ranks have compiled graphs again after different faults of fp8pass, so they can't go on together: {listed}"


# ---------------------------------------------------------------------------------------------------------------------
# Backwards, which torch compiles when they run first


class Later:
    """Compiles the backward of a graph, perhaps when its forward has run.

    compile_with, attempt: of the whole graph. exchange: takes what is to run in its place from the next call on.
    """

    def __init__(
        self,
        compile_with: Compile[Any],
        attempt: Attempt,
        config: Config,
        dump: Dump,
        dump_of: Callable[[Config, str], Dump],
        exchange: Callable[[Any], None],
    ) -> None:
        self._compile_with = compile_with
        self._attempt = attempt
        self._config = config
        self._dump = dump
        self._dump_of = dump_of
        self._exchange = exchange
        self.has_run = False
        """Whether all of the graph is compiled but its backward."""

    def lower(
        self,
        module: fx.GraphModule,
        lower: Callable[[fx.GraphModule, Attempt], Any],
        op_by_op: Callable[[fx.GraphModule], Any],
    ) -> Any:
        """Lower the graph of a backward; after a fault without what failed.

        Raises what torch raises on the backward without fp8pass.
        """
        attempt = self._attempt
        if raises(self._config) or attempt.form == "plain":
            return lower(module, attempt)
        spare = _copy(module)
        while True:
            try:
                return lower(module, attempt)
            except Exception as error:
                if _is_meant_for_user(error):
                    raise
                failed = error
            place, _ = _place_and_cause(failed)
            if place == LOWERING or place in NEEDED or not attempt.runs(place):
                break
            failure = self._failure(failed)
            tell(failure, f"its backward was compiled again without {place}")
            attempt, module = attempt.after(place, ""), _copy(spare)
        if not self.has_run:
            raise failed
        self._fall_back(failed)
        return op_by_op(spare)

    def _failure(self, error: Exception) -> Failure:
        return _failure(self._attempt, error, self._config, self._dump, self._dump_of, self._early)

    def _early(self, attempt: Attempt, dump: Dump) -> Any:
        """Compile the whole graph, and its backward at once."""
        early = {"force_non_lazy_backward_lowering": True, "donated_buffer": False}
        with functorch_config.patch(early):
            return self._compile_with(attempt, dump)

    def _fall_back(self, failed: Exception) -> None:
        """Have the whole graph compiled as torch does, from the next call on."""
        failure = self._failure(failed)
        plain = self._early(Attempt("plain"), self._dump_of(self._config, "again"))
        if Reduction(self._config.amax_group).process_group() is None:
            self._exchange(plain)
            outcome = "its backward ran op by op, and from now on all its matmuls stay in high precision"
        else:
            outcome = "its backward runs op by op"  # other ranks go on in FP8, and with the same collectives
        tell(failure, outcome)
        if failure.place == LOWERING:
            _reproduce(self._early, failure)


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    with unset_fake_temporarily():  # constants are real tensors
        return copy.deepcopy(module)
