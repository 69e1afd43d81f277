"""Recompile a graph without the part of fp8pass that failed, and report the fault, so that training continues.

a pass raises, or leaves an illegal graph     recompile without that pass
torch fails on functions of layers            recompile the graph in one piece
FP8 needs the pass, or it is not known        recompile with all matmuls declined by the rule `internal`
that fails too                                recompile as torch does without fp8pass; an error in that is torch's or
                                              the user's, and is raised unchanged
a backward fails after its forward has run    recompile without the pass; if that is impossible, run the backward op by
                                              op, and from the next call on the whole graph as torch compiles it

Each attempt starts from Dynamo's graph, which no pass modifies, and keeps nothing of a failed attempt. Errors that are
meant for the user (`Fp8Error`) are not faults. Under `strict`, `on_fault="raise"` and in trials of `fp8pass.bisect`, a
fault is raised.
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
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import fx

from fp8pass.base import collector
from fp8pass.base._torch import RestartAnalysis, SkipFrame, functorch_config, timeout_of, unset_fake_temporarily
from fp8pass.base.errors import Fault, Fp8Error, faults_of, first_line, gone_on_after, warn
from fp8pass.base.frames import with_room
from fp8pass.dump.writer import Dump
from fp8pass.graph.attempt import FIRST, FUNCTIONS, LOWERING, NEEDED, Attempt
from fp8pass.options import overrides
from fp8pass.options.config import Config, Reduction
from fp8pass.report.drawing import drawn
from fp8pass.report.report import Report, publish, tentative
from fp8pass.states.amax_reduction import NotCome, tell_all

log = logging.getLogger(__name__)

T = TypeVar("T")
WHOLE = ("keep_strides",)
"""Passes without which a backward does not fit a forward that was compiled with them."""
Compile = Callable[[Attempt, Dump], T]


@dataclass(frozen=True)
class Failure:
    """A fault: its attempt, the part that failed, and the dump that reproduces it, None if no dump was written."""

    attempt: Attempt
    place: str
    error: BaseException
    graph: str
    dump: Dump | None

    def __str__(self) -> str:
        said = f"{type(self.error).__name__}: {first_line(self.error)}".rstrip(".")
        if self.place in (LOWERING, FUNCTIONS):
            return f"torch could not compile what fp8pass made of {self.graph} ({said})"
        return f"fp8pass failed in its pass {self.place} on {self.graph} ({said})"

    def reason(self) -> str:
        """Return the reason with which matmuls are declined."""
        return f"a fault of fp8pass: {self}; please report it with {self.file()}"

    def file(self) -> str:
        """Return the file or folder that reproduces the fault."""
        return str(self.dump.failed or self.dump.folder) if self.dump else "this message: no dump could be written"


def raises(config: Config) -> bool:
    """Return whether a fault is raised as an error."""
    return config.strict or config.on_fault == "raise" or overrides.current() is not None


def fall_back(
    compile_with: Compile[T],
    config: Config,
    dump_of: Callable[[Config, str], Dump],
    first: Attempt = FIRST,
    has_collectives: Callable[[], bool] = bool,
) -> tuple[T, Attempt]:
    """Compile a graph; after a fault, recompile it without the failed part. Return the result and its attempt.

    dump_of: creates the dump of an attempt, from a configuration and a word that distinguishes the dumps of one graph.
    has_collectives: returns True if the graph has collectives, so that all ranks must leave out the same parts; asked
    after a fault. Raises Fp8Error if they differ, errors meant for the user, and errors of torch on the graph without
    fp8pass.
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
            failed = error  # handled outside of the block: later errors then do not get this one as their context
        failure = _failure(attempt, failed, config, dump, dump_of, compile_with)
        attempt = attempt.after(failure.place, failure.reason())
        failures.append((failure, _outcome(failure, attempt)))
    if failures and has_collectives():
        _agree([failure for failure, _ in failures], config)
    for failure, outcome in failures:
        tell(failure, outcome)
        if failure.place in (LOWERING, FUNCTIONS):
            _reproduce(compile_with, failure)
    return compiled, attempt


def _outcome(failure: Failure, after: Attempt) -> str:
    """Return what became of a graph: the end of a sentence about the failure."""
    if failure.place == FUNCTIONS:
        return "the graph was compiled in one piece"
    same = after.form == failure.attempt.form
    return (
        f"the graph was compiled without {failure.place}" if same else "all matmuls of the graph stay in high precision"
    )


@contextlib.contextmanager
def lowering_functions() -> Iterator[None]:
    """Raise faults at LOWERING in this context as a `Fault` at FUNCTIONS."""
    try:
        yield
    except Exception as error:
        place, cause = _place_and_cause(error)
        if place != LOWERING or _is_meant_for_user(error):
            raise
        raise Fault(FUNCTIONS, error) from cause


@contextlib.contextmanager
def left_out(place: str, config: Config, graph: str) -> Iterator[None]:
    """Report a fault in this context and continue after the context, whose work is optional."""
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
    """Return the `Failure` of an error, with its dump. Callers write the dump of a LOWERING fault later: it is slow."""
    place, cause = _place_and_cause(error)
    failure = Failure(attempt, place, cause, dump.title, dump)
    if dump.folder is not None:  # the user's options have dumped this compilation already
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
    """Create this process's folder for dumps of faults, used if the user names no folder; return it afterwards."""
    return tempfile.mkdtemp(prefix="fp8pass-fault-")


class _Done(Exception):
    """Raised after a dump is written, to discard the compilation."""


def _reproduce(compile_with: Compile[Any], failure: Failure) -> None:
    """Repeat the failed compilation, to write its dump."""
    if failure.dump is None:
        return
    with contextlib.suppress(Exception), _tentative(keeps=lambda _: False):
        compile_with(failure.attempt, failure.dump)
        raise _Done


@contextlib.contextmanager
def _tentative(keeps: Callable[[BaseException], bool]) -> Iterator[None]:
    """Discard the verdicts and pictures of this context if it raises an error for which `keeps` returns False."""
    drawing = drawn()
    with tentative(keeps), drawing.tentative(keeps) if drawing is not None else contextlib.nullcontext():
        yield


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then its causes; Dynamo and Inductor wrap errors that a backend raises."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        inner = getattr(error, "inner_exception", None)  # of Dynamo's and Inductor's errors
        error = inner or error.__cause__ or error.__context__  # type: ignore[assignment]


def _is_meant_for_user(error: BaseException) -> bool:
    """Return whether an error is not a fault: it is for the user, or Dynamo raises it to restart or skip a frame."""
    # A Warning is raised as an error if the user's filters say so.
    first = next((e for e in _chain(error) if isinstance(e, (Fp8Error, Warning, RestartAnalysis, SkipFrame))), None)
    return first is not None and not isinstance(first, Fault)


def _place_and_cause(error: Exception) -> tuple[str, BaseException]:
    """Return the name of the part of fp8pass that failed, LOWERING if it is not known, and the error that it raised."""
    fault = next((e for e in _chain(error) if isinstance(e, Fault)), None)
    if fault is not None:
        return fault.place, fault.__cause__ or fault
    cause: BaseException = error
    while isinstance(inner := getattr(cause, "inner_exception", None), BaseException):
        cause = inner
    return LOWERING, cause


# ---------------------------------------------------------------------------------------------------------------------
# Reporting a fault


_told: set[tuple[str, ...]] = set()


def tell(failure: Failure, outcome: str) -> None:
    """Add a fault to the report, and warn of it once per process, pass, type of error and outcome."""
    said = f"{failure}: {outcome}. Please report it with {failure.file()} and what `fp8pass env` prints"
    publish(Report(faults=[said]))
    gone_on_after.append(said)
    log.error("%s", said)
    kind = failure.place, type(failure.error).__name__, outcome
    if kind not in _told:
        _told.add(kind)
        warn(f"{said}. Training continues; with on_fault='raise' a fault is an error")


_meetings = itertools.count()
"""Numbers the exchanges of `_agree`, in the same order on all ranks that take part."""


def _agree(failures: list[Failure], config: Config) -> None:
    """Raise Fp8Error unless all ranks recompiled a graph after the same faults: their collectives would differ.

    Only ranks that recompiled call this; they raise. Slots need no such check: ranks compare them in the first step.
    """
    group = Reduction(config.amax_group).process_group()
    if group is None or dist.get_backend(group) == "fake":  # one process stands for all ranks
        return
    # only for the timeout: the exchange goes through the store, whatever the device
    device = torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")
    places = [[f.place, f.graph.partition(", ")[2]] for f in failures]  # ranks may number graphs differently
    try:
        by_rank = tell_all(group, f"fault/{next(_meetings)}", places, timeout_of(group, device))
    except NotCome as error:
        raise Fp8Error(
            f"{failures[0]}, on this rank and not on others, which would wait for collectives that do not come. Please "
            f"report it with {failures[0].file()}"
        ) from error
    if any(places_there != places for places_there in by_rank):
        raise Fp8Error(_difference(by_rank))


def _difference(layouts: Any) -> str:
    listed = "; ".join(
        f"rank {rank}: {', '.join(' on '.join(row) for row in rows)}" for rank, rows in enumerate(layouts)
    )
    return f"ranks have recompiled graphs after different faults of fp8pass, so they can't continue together: {listed}"


# ---------------------------------------------------------------------------------------------------------------------
# Backwards, which torch compiles when they run first


class Later:
    """Compiles the backward of a graph, possibly after its forward has run.

    compile_with, attempt: of the whole graph. exchange: receives the callable that replaces the whole graph from the
    next call on.
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
        """True if all of the graph but its backward is compiled."""

    @with_room
    @collector.paused()
    def lower(
        self,
        module: fx.GraphModule,
        lower: Callable[[fx.GraphModule, Attempt], Any],
        op_by_op: Callable[[fx.GraphModule], Any],
    ) -> Any:
        """Lower the graph of a backward; after a fault, without the pass that failed, or op by op.

        Raises the error unchanged if it is meant for the user, if faults are raised, or if the forward has not run yet;
        also raises errors of torch on the graph without fp8pass.
        """
        attempt = self._attempt
        if raises(self._config) or attempt.form == "plain":
            return lower(module, attempt)
        spare = _copy(module)  # a failed attempt may have changed `module`
        while True:
            try:
                return lower(module, attempt)
            except Exception as error:
                if _is_meant_for_user(error):
                    raise
                failed = error
            place, _ = _place_and_cause(failed)
            if place == LOWERING or place in (*NEEDED, *WHOLE) or not attempt.runs(place):
                break
            failure = self._failure(failed)
            tell(failure, f"its backward was compiled again without {place}")
            attempt, module = attempt.after(place, ""), _copy(spare)
        if not self.has_run:
            raise failed  # `fall_back` then compiles the whole graph with another attempt
        self._fall_back(failed)
        return op_by_op(spare)

    def _failure(self, error: Exception) -> Failure:
        return _failure(self._attempt, error, self._config, self._dump, self._dump_of, self._early)

    def _early(self, attempt: Attempt, dump: Dump) -> Any:
        """Compile the whole graph with its backward at once, instead of at the backward's first call."""
        # By default AOTAutograd compiles a backward at its first call, unless symbolic sizes are saved for it.
        early = {"force_non_lazy_backward_lowering": True, "donated_buffer": False}
        with functorch_config.patch(early):
            return self._compile_with(attempt, dump)

    def _fall_back(self, failed: Exception) -> None:
        """Compile the whole graph as torch does, for all later calls; with an amax group, keep the graph in FP8."""
        failure = self._failure(failed)
        # with its backward: later calls run it outside of `fall_back`
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
    with unset_fake_temporarily():  # constants are real tensors, and must not become fake copies
        return copy.deepcopy(module)
