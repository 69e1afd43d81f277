"""Delayed scaling on many ranks: one MAX all-reduce per step gives all ranks the same amaxes, and so the same scales.

before  backward ends         each rank has recorded the amaxes of its own part of the batch, or of the tensor
        all_reduce(MAX)       reduces all slots of all graphs in one vector, while the optimizer runs
after   next forward          copies the result to the slots, and rolls their histories, equally on every rank

Amaxes are sent as the bits of float32 in int32, which sort as the floats do: -1, which means no amax, below 0,
and NaN above infinity, so that it does not matter how a backend computes the maximum with NaN. All ranks agree on the
layout of the vector in the first step. Until then no rank knows that the others have the same slots, or that they take
part at all, so they meet in the store of the process group, which has a timeout. A rank whose slots change later says
so in the header of the vector.

The vector holds the slots of the graphs that ran, in the order in which they ran, not of all graphs that exist: when
Python frees an unused model, and whether a rank keeps one, differs between ranks. Slots stay in the vector until all
ranks have freed them.

If not all ranks call a collective, it pairs with a different collective of the others. So no collective depends on what
only one rank knows: each rank takes part at the end of each backward, even if its graphs have no slots. A forward,
which one rank may run alone for inspection, starts no collective: amaxes that it records without a backward go into the
reduction of the next step.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8pass.base import scaling
from fp8pass.base._torch import (
    Store,
    before_eager_optimizers,
    current_graph_task_id,
    ddp_joins,
    pipeline_call,
    queue_callback,
    store_of,
    timeout_of,
)
from fp8pass.base.errors import Fp8Error, gone_on_after
from fp8pass.options.config import Reduction
from fp8pass.states.slots import InstanceState, registry

log = logging.getLogger(__name__)

HEADER = 2
"""Elements before the amaxes: 1 if this rank's slots have changed, otherwise 0; and the same negated.

After the reduction: 1 if the slots of any rank have changed; and -1 if those of all ranks have."""
WARN_AFTER = 30
"""Seconds that a rank waits for the others in the first step before it logs a warning."""
SHOWN = 8
"""Ranks that a message names."""


@dataclass
class _Pending:
    """A reduction that has started. parts: for each part of the vector, the tensor that receives it, or None."""

    work: Any
    vector: Tensor
    parts: Sequence[Tensor | None]
    sizes: Sequence[int]


@dataclass(frozen=True)
class _PartOfVector:
    """A graph's slots in the vector. row: the description that ranks compare; size: their number of amaxes."""

    state: weakref.ref[InstanceState]
    row: list[Any]
    size: int

    def is_there(self) -> bool:
        """Return whether this rank still has the instance."""
        state = self.state()
        return state is not None and state.alive()


class Reducer:
    """The reductions over one process group of all slots on one device."""

    def __init__(self, what: Reduction, device: torch.device) -> None:
        self._what = what
        self._device = device
        self._number = 0
        """Number of earlier reducers with this process group and device type: the same on all ranks."""
        self._group: dist.ProcessGroup | None = None
        self._agreed: list[_PartOfVector] | None = None
        """The layout of the vector, the same on all ranks; None before the first agreement."""
        self._running: dict[InstanceState, None] = {}
        """The states that were used since the last reduction started, in that order, even if their instance is gone."""
        self._new: dict[InstanceState, bool] = {}
        """The states that were used and are not in the vector. True where a backward ran: all ranks must have those."""
        self._agreements = 0
        """Number of exchanges so far: part of their keys in the store, which keeps those of earlier exchanges."""
        self._pending: _Pending | None = None
        self._headers: tuple[Tensor, Tensor] | None = None
        self._last_header: Tensor | None = None
        """The header of the previous reduction, on the CPU or being copied there."""
        self._task = -1
        """Id of the autograd graph task that will call `_after_backward`; -1 if none will."""
        self._takes_part = False
        """True if a backward of a graph without slots ran; the same graph may have slots on other ranks."""
        self._steps = 0
        self._lock = threading.RLock()

    def is_active(self) -> bool:
        """Return whether there are other ranks."""
        return self._process_group() is not None

    def watch(self, result: Any, states: Sequence[InstanceState], may_end: bool = True) -> None:
        """Watch, after the forward of a graph with these states, for its backward, which records amaxes too.

        states: empty if the graph has no slots, though it may have some on other ranks. may_end: True if the step may
        end with this backward. Raises Fp8Error if ranks may have different numbers of batches (DDP's `join`).
        """
        if ddp_joins():
            raise Fp8Error(
                "under DistributedDataParallel.join() a rank may end before the others, who would wait for its amaxes: "
                "set reduce_amax=False, or give all ranks equally many batches"
            )
        # weak references: the hook lives as long as the autograd graph, which the user may keep longer than the model
        hook = functools.partial(self._in_backward, [weakref.ref(s) for s in states], may_end)
        outputs = differentiable(result)
        for x in outputs:
            x.register_hook(hook)  # type: ignore[no-untyped-call]
        for state in states:
            state.reduction.record(is_complete=not outputs)
        self.runs(states)

    def runs(self, states: Sequence[InstanceState]) -> None:
        """Note that graphs with these states run: they take part in the next reduction."""
        with self._lock:
            self._running.update(dict.fromkeys(states))

    # in a compiled training step, Dynamo would trace this hook as the user's code
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _in_backward(self, refs: Sequence[weakref.ref[InstanceState]], may_end: bool, _: Tensor) -> None:
        states = [state for ref in refs if (state := ref()) is not None]
        with self._lock:
            self._finish()  # or its result would overwrite the amaxes that this backward records
            self._takes_part |= not states
            for state in states:
                state.reduction.complete()
            self.runs(states)
            if may_end and self._task != (task := current_graph_task_id()):
                # once per backward: autograd runs queued callbacks after the whole graph task
                self._task = task
                queue_callback(self._after_backward)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_backward(self) -> None:
        self._task = -1
        # under no_sync the step continues: a later backward, the first outside of it, starts the reduction
        if not _postponed and not any(state.tracker.in_accumulation for state in self._running):
            self.launch()

    def launch(self) -> None:
        """Start a reduction if amaxes were recorded since the last one. All ranks must call it in the same order.

        Raises Fp8Error, on every rank, if the ranks have different slots.
        """
        with self._lock:
            news = any(state.reduction.unreduced for state in self._running) or self._takes_part
            if not news or (process_group := self._process_group()) is None:
                return
            self._finish()  # sets `_last_header`, which is read below
            self._takes_part = False
            self._add_new()
            for state in self._states():
                if not state.reduction.step_started:
                    # other ranks may have run this graph and so rolled it: the amaxes sent now are of the step after
                    state.roll()
                state.reduction.clear()
            if self._agreed is None or self._says_changed(self._last_header):
                self._agree(process_group)
            # all ranks reach this line equally often, and so reduce in the same steps
            self._steps += 1
            if self._steps % self._what.interval == 0:
                self._start(process_group)

    def _add_new(self) -> None:
        """Move the states that are not in the vector from `_running` to `_new`; clear `_running`."""
        in_vector = {part.state() for part in self._agreed or ()}
        for state in self._running:
            if state not in in_vector:
                self._new[state] = self._new.get(state, False) or state.reduction.unreduced
        self._running.clear()

    def finish(self) -> None:
        """Wait for the reduction that has started, if any, and copy its result to the slots."""
        with self._lock:
            self._finish()

    def _states(self) -> list[InstanceState]:
        return [s for s in registry.states() if s.reduces == self._what and s.table.device == self._device]

    def _process_group(self) -> dist.ProcessGroup | None:
        """Return the process group, None without other ranks; reset the reducer if the group is a new one."""
        group = self._what.process_group()
        if group is not self._group:
            # by the type of the device: its index differs between ranks
            same = (r for (_, device), r in _reducers.items() if device.type == self._device.type and r is not self)
            self._number = sum(r._group is group for r in same)
            self._group, self._agreed, self._pending, self._last_header = group, None, None, None
            self._running.clear()
            self._new.clear()
        return group

    def _start(self, process_group: dist.ProcessGroup) -> None:
        changed = bool(self._new)
        self._send(process_group, changed)
        # If all ranks have new slots, as after a change of recipe, they all know it and meet in the store now. If only
        # some have, the others read it in the header of this reduction, and all meet in the next step.
        if changed and self._all_changed():
            self._finish()
            self._agree(process_group)
            self._send(process_group, changed=False)

    @torch.no_grad()
    def _send(self, process_group: dist.ProcessGroup, changed: bool) -> None:
        """Start the reduction of the vector that ranks have agreed on."""
        assert self._agreed is not None
        parts: list[Tensor | None] = []
        sizes: list[int] = []
        for part in self._agreed:
            state = part.state()
            amaxes_of_part = [] if state is None else _amaxes(state, self._what.interval)
            # a state that this rank has freed keeps its elements: the layout changes only when all ranks agree
            parts += amaxes_of_part or [None]
            sizes += [len(x) for x in amaxes_of_part] or [part.size]
        # -1 for slots that only other ranks still have
        amaxes = [
            torch.full((n,), scaling.NOTHING, device=self._device) if x is None else x
            for x, n in zip(parts, sizes, strict=True)
        ]
        vector = torch.empty(HEADER + sum(sizes), dtype=torch.int32, device=self._device)
        values = torch.cat(amaxes) if amaxes else torch.empty(0, device=self._device)  # `cat` takes no empty list
        # abs: a NaN with its sign bit set would be a negative int32, below all amaxes
        vector[HEADER:].view(torch.float32).copy_(torch.where(values < 0, values, values.abs()))
        vector[:HEADER].copy_(self._header(changed))
        work = dist.all_reduce(vector, dist.ReduceOp.MAX, group=process_group, async_op=True)
        self._pending = _Pending(work, vector, parts, sizes)

    def _header(self, changed: bool) -> Tensor:
        """Return the header, i32[2], from the device: copying it there in each step would synchronize."""
        if self._headers is None:
            same, other = ([0, 0], [1, -1])
            self._headers = (
                torch.tensor(same, dtype=torch.int32, device=self._device),
                torch.tensor(other, dtype=torch.int32, device=self._device),
            )
        return self._headers[changed]

    @torch.no_grad()
    def _finish(self) -> None:
        if self._pending is None:
            return
        # cleared before the wait: if that raises, as after a timeout, the next call does not wait for the same work
        pending, self._pending = self._pending, None
        pending.work.wait()  # with NCCL, the current stream waits, and the host does not
        self._last_header = pending.vector[:HEADER].to("cpu", non_blocking=True)
        # a non_blocking copy to the CPU may be read only after this event: see `_says_changed`
        if self._device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        values = torch.split(pending.vector[HEADER:].view(torch.float32), list(pending.sizes))
        pairs = [(to, new) for to, new in zip(pending.parts, values, strict=True) if to is not None]
        if pairs:
            # .data: no new version of the amaxes, which autograd may have saved for a backward that is still to run
            torch._foreach_copy_([to.data for to, _ in pairs], [new for _, new in pairs])

    def _all_changed(self) -> bool:
        """Return whether all ranks have slots that are not in the vector that was sent. Waits for the reduction."""
        self._finish()
        return self._says_changed(self._last_header) and int(self._last_header[1]) == -1  # type: ignore[index]

    def _says_changed(self, header: Tensor | None) -> bool:
        """Return whether any rank set the flag in `header`; False for None.

        In `launch`, the header is of an earlier reduction, which has usually ended long before.
        """
        if header is None:
            return False
        if self._device.type == "cuda":
            self._copied.synchronize()
        return int(header[0]) == 1

    # -----------------------------------------------------------------------------------------------------------------
    # Agreement on the layout of the vector

    def _agree(self, process_group: dist.ProcessGroup) -> None:
        """Add the slots of new states to the vector, and remove those that no rank has any more.

        Raises Fp8Error, on every rank, if the ranks have trained different graphs.
        """
        before, new, self._new = self._agreed or [], self._new, {}
        answer_here = {
            "there": [part.is_there() for part in before],
            "new": [[self._row(state), is_trained] for state, is_trained in new.items()],
        }
        by_rank = self._exchanged(process_group, answer_here)
        try:
            trained_only = _trained_only([part.row for part in before], [answer["new"] for answer in by_rank])
        except Fp8Error as error:
            if gone_on_after:
                raise Fp8Error(f"{error}. On rank {dist.get_rank()}: {'; '.join(gone_on_after)}") from error
            raise
        by_part = zip(before, *(answer["there"] for answer in by_rank), strict=True)
        kept = [part for part, *there in by_part if any(there)]
        added = [state for state, is_trained in new.items() if is_trained or not trained_only]
        self._agreed = kept + [
            _PartOfVector(weakref.ref(state), self._row(state), self._size(state)) for state in added
        ]
        self._last_header = None  # the change that it announced is in the vector now

    def _exchanged(self, process_group: dist.ProcessGroup, value: Any) -> list[Any]:
        """Send `value` to all ranks, and return the values of all, by rank; one value if all sent the same."""
        self._agreements += 1
        # torch's fake backend simulates a large world in one process: no other rank answers
        if dist.get_backend(process_group) == "fake":
            return [value]
        limit = timeout_of(process_group, self._device)
        return tell_all(process_group, f"{self._device.type}/{self._number}/{self._agreements}", value, limit)

    def _row(self, state: InstanceState) -> list[Any]:
        return [list(state.table.names), repr(state.table.recipe), state.table.n_weights, state.tracker.stage]

    def _size(self, state: InstanceState) -> int:
        return sum(map(len, _amaxes(state, self._what.interval)))


def _trained_only(before: list[Any], new: Sequence[Sequence[tuple[Any, bool]]]) -> bool:
    """Return whether only graphs whose backward ran may enter the vector, because the others differ between ranks.

    One rank may run a graph alone for inspection, without a backward. before: the rows in the vector; new: by rank, the
    rows that are not in it, each with a flag for whether its backward ran. Raises Fp8Error if the ranks have trained
    different graphs.
    """
    if _are_equal([[row for row, _ in rows] for rows in new]):
        return False
    if _are_equal([[row for row, is_trained in rows if is_trained] for rows in new]):
        return True
    raise Fp8Error(_difference([[*before, *(row for row, _ in rows)] for rows in new]))


def _are_equal(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


class NotCome(Fp8Error):
    """Raised if some ranks did not say in time which slots they have."""


def differentiable(result: Any) -> list[Tensor]:
    """Return the tensors among the outputs of a graph that have a backward."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    return [x for x in results if isinstance(x, Tensor) and x.grad_fn is not None]


def _amaxes(state: InstanceState, interval: int) -> list[Tensor]:
    """Return the running amaxes of a graph's slots, and the unreduced ones of the steps before, each f32[...]."""
    t = state.tensors
    # a shorter history gives fewer rows, but equally many on all ranks, whose recipes are the same
    return [t.amax_forward, t.amax_weights, t.amax_backward, *t.amax_history[: interval - 1].unbind(0)]


def tell_all(process_group: dist.ProcessGroup, name: str, value: Any, limit: timedelta) -> list[Any]:
    """Send `value` to all ranks as JSON, and return the values of all, by rank; one value if all sent the same.

    name: identifies the exchange, the same on all ranks. limit: the time that it may take. It uses the store of the
    process group, not a collective, which would hang if a rank did not take part. Raises NotCome if one does not.
    """
    text = json.dumps(value)
    digest = hashlib.sha256(text.encode()).hexdigest()
    store = store_of(process_group, f"fp8pass/{name}")
    rank, ranks = process_group.rank(), process_group.size()
    store.set(f"here/{rank}", digest)
    store.set(digest, text)  # equal texts, which most ranks have, share one key
    store.add(f"equal/{digest}", 1)
    # the last rank to come sets the one key that all ranks wait for; all have counted their texts by then
    if store.add("count", 1) == ranks:
        store.set("all", "equal" if store.add(f"equal/{digest}", 0) == ranks else "different")
    _wait(store, rank, ranks, limit.total_seconds())
    # then no rank's work grows with the number of ranks
    if store.get("all") == b"equal":
        return [value]
    # rank 0 gathers a hash per rank, so that each rank reads only the few texts that differ
    digests = [store.get(f"here/{r}").decode() for r in range(ranks)] if rank == 0 else []
    if rank == 0:
        store.set("digests", json.dumps(digests))
    digests = json.loads(store.get("digests"))
    values = {d: json.loads(text if d == digest else store.get(d)) for d in dict.fromkeys(digests)}
    return [values[d] for d in digests]


def _wait(store: Store, rank: int, ranks: int, limit: float) -> None:
    """Wait at most `limit` seconds until all ranks have arrived. Raises NotCome, which names those that have not."""
    begin = time.monotonic()
    warned = False
    while True:
        waited = time.monotonic() - begin
        try:
            # not 0: to some stores that means no timeout
            store.wait(["all"], timedelta(seconds=max(min(WARN_AFTER, limit - waited), 0.01)))
            break
        except dist.DistStoreError as error:
            absent = list(itertools.islice(_absent(store, range(ranks)), SHOWN + 1))
            # if none is absent, a rank ended after it set its key and before it was counted
            absent = absent or [r for r in range(ranks) if r != rank]
            waited = time.monotonic() - begin
            if waited >= limit:
                # a rank that comes later would find all keys, and go on to collectives that this one never calls
                store.set("gone", str(rank))
                raise NotCome(
                    f"rank {rank} has waited {waited:.0f} s for {_ranks(absent)} to say which FP8 slots they have. Do "
                    "they train the same model, compiled with fp8pass? If only some ranks do, pass their group or mesh "
                    "as amax_group, or reduce_amax=False"
                ) from error
            if not warned:
                log.warning("%.0f s in the first FP8 step: still waiting for %s", waited, _ranks(absent))
            warned = True
    if store.check(["gone"]):
        gone = store.get("gone").decode()
        raise NotCome(f"rank {gone} has waited for rank {rank} to say which FP8 slots it has, and has given up")


def _absent(store: Store, ranks: range) -> Iterator[int]:
    """Yield the ranks that have not come. Asks for many at once: each rank that waits asks the one server."""
    if store.check([f"here/{r}" for r in ranks]):
        return
    if len(ranks) == 1:
        yield ranks[0]
        return
    half = len(ranks) // 2
    yield from _absent(store, ranks[:half])
    yield from _absent(store, ranks[half:])


def _difference(layouts: Sequence[Any]) -> str:
    """Return a sentence that says how the layouts, one per rank, differ."""
    stages = [sorted({row[-1] for row in layout if row[-1] is not None}) for layout in layouts]
    if any(of_rank != stages[0] for of_rank in stages):
        return _difference_of_stages(stages)
    have: dict[str, list[int]] = {}
    for rank, layout in enumerate(layouts):
        for name in dict.fromkeys(n for names, *_ in layout for n in names):
            have.setdefault(name, []).append(rank)
    advice = (
        "Compile the same model with the same options on all ranks. Where their batches differ in size, a rank may "
        "decline a matmul for its own few rows: use equal batches, or set reduce_amax=False"
    )
    some = {name: ranks for name, ranks in have.items() if len(ranks) < len(layouts)}
    if some:
        listed = "; ".join(f"{name!r} only on {_ranks(ranks)}" for name, ranks in list(some.items())[:5])
        more = f"; and {len(some) - 5} more" if len(some) > 5 else ""
        return f"ranks have different FP8 slots, so their amaxes can't be reduced: {listed}{more}. {advice}"
    reference = layouts[0]
    for rank, layout in enumerate(layouts):
        for first, other in zip(reference, layout, strict=False):
            if first != other:
                what = f"under {first[1]} on rank 0 and under {other[1]} on rank {rank}"
                if first[1] == other[1]:
                    what = f"in another order, or in other graphs, on rank 0 than on rank {rank}"
                return f"the FP8 slots from {_first_difference(first, other)!r} on are {what}. {advice}"
    counts = ", ".join(str(len(layout)) for layout in layouts)
    last = max(layouts, key=len)[-1]
    return f"ranks have different numbers of graphs with FP8 slots ({counts}), the last with {last[0][0]!r}. {advice}"


def _difference_of_stages(stages: Sequence[Sequence[int]]) -> str:
    have: dict[int, list[int]] = {}
    for rank, of_rank in enumerate(stages):
        for stage in of_rank:
            have.setdefault(stage, []).append(rank)
    listed = "; ".join(f"stage {stage} only on {_ranks(ranks)}" for stage, ranks in sorted(have.items())[:5])
    return (
        f"ranks have different stages of a pipeline, whose amaxes can't be reduced together: {listed}. Pass the group "
        "or mesh of the ranks that share a stage as amax_group, data and tensor parallel, or set reduce_amax=False"
    )


def _first_difference(row: Any, other: Any) -> str:
    pairs = zip(row[0], other[0], strict=False)
    return str(next((a for a, b in pairs if a != b), row[0][0]))


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:SHOWN])) + (", ..." if len(ranks) > SHOWN else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


# ---------------------------------------------------------------------------------------------------------------------
# All reducers of the process


_reducers: dict[tuple[Reduction, torch.device], Reducer] = {}
_postponed = 0
"""Number of open `postponed` contexts."""


def reducer_of(reduces: Reduction, device: torch.device) -> Reducer | None:
    """Return the reducer for the slots of graphs on this device; None if there are no other ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    reducer = _reducers.get((reduces, device))
    if reducer is None:
        reducer = _reducers[reduces, device] = Reducer(reduces, device)
        before_eager_optimizers(_before_optimizer)
    return reducer if reducer.is_active() else None


def begins(state: InstanceState) -> None:
    """Before a graph rolls its slots, reduce their amaxes if no backward or optimizer has ended the step."""
    reducer = reducer_of(state.reduces, state.table.device) if state.reduces is not None else None
    if reducer is not None and state.reduction.unreduced and state.rolls:
        reducer.launch()
        reducer.finish()
    continues(state)


def continues(state: InstanceState) -> None:
    """Note that a graph runs in a step that has begun."""
    state.reduction.start_step()
    if state.reduces is not None and (reducer := reducer_of(state.reduces, state.table.device)) is not None:
        reducer.runs([state])


def take_part(result: Any, reduces: Reduction) -> None:
    """Take part, after a call of a graph without slots, in the reductions of ranks where the graph has slots."""
    call = pipeline_call()
    if call is not None and (call.microbatch is None or (reduces.group is None and call.has_rank_of_its_own)):
        return
    # outputs are on the device that its slots would be on; inputs may be on another
    device = next((x.device for x in differentiable(result)), None)
    if device is not None and (reducer := reducer_of(reduces, device)) is not None:
        reducer.watch(result, [], may_end=call is None)


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Postpone the reduction from the end of a backward to an optimizer's step or the end of this context."""
    global _postponed
    _postponed += 1
    try:
        yield
    except BaseException:
        _postponed -= 1  # and start no collective: the other ranks may never call it
        raise
    _postponed -= 1
    if not _postponed:
        launch()


def launch() -> None:
    """Start the reductions of the step, all of whose amaxes are recorded."""
    for reducer in list(_reducers.values()):
        reducer.launch()


def finish() -> None:
    """Wait for all reductions that have started, and copy their results to the slots."""
    for reducer in list(_reducers.values()):
        reducer.finish()


def _before_optimizer(_: torch.optim.Optimizer) -> None:
    launch()
