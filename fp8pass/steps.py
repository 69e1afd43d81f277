"""What a step of delayed scaling is: which calls of a compiled graph begin one, go on with one, or repeat one.

a training forward                               begins a step
in `with accumulate(module):`                    the first begins it, the others go on
without gradients                                reads the scales
activation checkpointing around compiled code    the forward begins a step; when the backward repeats it, it sees
                                                 the scales that it saw then
"""

from __future__ import annotations

import inspect
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import CellType, FrameType
from typing import Any

import torch
from torch import nn

from fp8pass._torch import CheckpointFunction, _CheckpointFrame, current_graph_task_id, top_saved_tensors_hooks
from fp8pass.scale_state import ScaleState
from fp8pass.slots import SlotGroup


@dataclass(eq=False)
class _Accumulation:
    """owned: ids of the module's tensors. begun: what the step has begun: slots, and graphs of instances."""

    owned: set[int]
    begun: set[Hashable] = field(default_factory=set)


_accumulations: list[_Accumulation] = []
_held: Counter[ScaleState] = Counter()


@contextmanager
def accumulate(module: Any) -> Iterator[None]:
    """Within it, all forwards and backwards of a module, compiled or not, are one step of delayed scaling.

    The microbatches of one optimizer step: their amaxes merge by max, and the history rolls once. Within another
    `accumulate` that covers the module it changes nothing. It holds for all threads. Raises TypeError for what is not a
    module.
    """
    module = getattr(module, "_orig_mod", module)
    if not isinstance(module, nn.Module):
        raise TypeError(f"accumulate() takes a module or a compiled module, not {type(module).__name__}")
    mine = _Accumulation({id(t) for t in itertools.chain(module.parameters(), module.buffers())})
    states = [m for m in module.modules() if isinstance(m, ScaleState)]
    with ExitStack() as stack:
        for state in states:
            stack.enter_context(_holding(state))
        _accumulations.append(mine)
        stack.callback(_accumulations.remove, mine)
        yield


@contextmanager
def _holding(state: ScaleState) -> Iterator[None]:
    if not _held[state]:
        state.begin_accumulation()
    _held[state] += 1
    try:
        yield
    finally:
        _held[state] -= 1
        if not _held[state]:
            del _held[state]
            state.end_accumulation()


def begin_step(group: SlotGroup) -> None:
    """Before a training forward: let the slots roll whose step this begins, and hold the others."""
    if not _accumulations:
        group.hold(())
        group.steps += 1
        return
    slots, graph = _covered(group)
    group.hold([of is not None and key in of.begun for key, of in slots])
    key, of = graph
    group.steps += of is None or key not in of.begun
    join_step(group)


def join_step(group: SlotGroup) -> None:
    """What is running belongs to a step that has begun: nothing of the group rolls before that ends."""
    slots, graph = _covered(group) if _accumulations else ([], (None, None))
    for key, of in (*slots, graph):
        if of is not None:
            of.begun.add(key)


_Covered = tuple[Hashable, _Accumulation | None]


def _covered(group: SlotGroup) -> tuple[list[_Covered], _Covered]:
    """Each slot, and the graph as a whole, with the outermost accumulation of a module that it belongs to."""
    ids = [id(t) for t in group.owned_tensors()]
    whole = next((a for a in _accumulations if a.owned.issuperset(ids)), None)
    anchors = zip(group.keys(), group.table.anchors, strict=True)
    slots: list[_Covered] = [
        (key, whole if anchor < 0 else next((a for a in _accumulations if ids[anchor] in a.owned), None))
        for key, anchor in anchors
    ]
    return slots, ((group.table.names, group.table.code, *ids), whole)


class Pass(Enum):
    """What a call inside a checkpointed region is."""

    FIRST = "a forward, with gradients"
    AHEAD = "the forward of a reentrant region, without gradients, which its backward will repeat with them"
    REPEATED = "run again by the backward"


@dataclass
class Region:
    """One call of `torch.utils.checkpoint.checkpoint`, what it called, and how far each repetition of it has come."""

    forwards: dict[Hashable, list[Any]] = field(default_factory=dict)
    repeated: Counter[Hashable] = field(default_factory=Counter)

    def remember(self, key: Hashable, forward: Any) -> None:
        """A call in the forward of the region. key: of the graph and the instance."""
        self.forwards.setdefault(key, []).append(forward)

    def next_forward(self, key: Hashable) -> Any:
        """What was remembered of the call that is now repeated; None if the region has seen none."""
        token = (key, current_graph_task_id())
        position = self.repeated[token]
        self.repeated[token] += 1
        forwards = self.forwards.get(key, [])
        return forwards[position] if position < len(forwards) else None


def checkpointed_region() -> tuple[Region, Pass] | None:
    """The checkpointed region that is running, and in which way; None outside of any."""
    trains, in_backward = torch.is_grad_enabled(), current_graph_task_id() != -1
    contexts = [] if trains and not in_backward else _contexts_of_stack()
    if not trains:
        # one that was entered with gradients will be repeated; its own forward has none
        ahead = None if in_backward else next((c for c in contexts if c.next_functions), None)
        return None if ahead is None else (_region_of(ahead), Pass.AHEAD)
    owner = _frame_of_hooks() or next(iter(contexts), None)
    return None if owner is None else (_region_of(owner), Pass.REPEATED if in_backward else Pass.FIRST)


def _region_of(owner: Any) -> Region:
    if not hasattr(owner, "fp8pass_region"):
        owner.fp8pass_region = Region()
    region: Region = owner.fp8pass_region
    return region


def _frame_of_hooks() -> Any:
    """Of a region with use_reentrant=False: what its hooks for saved tensors know it by."""
    hooks: Any = top_saved_tensors_hooks(False)
    if hooks is None:
        return None
    cells = getattr(inspect.unwrap(hooks[0]), "__closure__", None) or ()
    contents = (cell.cell_contents for cell in cells if cell != _EMPTY)
    found = (c() if isinstance(c, weakref.ref) else c for c in contents)
    return next((c for c in found if isinstance(c, _CheckpointFrame)), None)


_EMPTY = CellType()


_REENTRANT = (CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__)


def _contexts_of_stack() -> list[Any]:
    """Of regions with use_reentrant=True, inner ones first: the contexts of the autograd Functions that they are."""
    found = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in _REENTRANT:
            found.append(frame.f_locals["ctx"])
        frame = frame.f_back
    return found
