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
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import FrameType
from typing import Any

import torch
from torch import nn

from fp8pass._torch import CheckpointFunction, _CheckpointFrame, current_graph_task_id, top_saved_tensors_hooks
from fp8pass.scale_state import ScaleState
from fp8pass.slots import SlotGroup


@dataclass
class _Accumulation:
    owned: set[int]
    begun: set[Hashable] = field(default_factory=set)


_accumulations: list[_Accumulation] = []


@contextmanager
def accumulate(module: Any) -> Iterator[None]:
    """Within it, all forwards and backwards of a module, compiled or not, are one step of delayed scaling.

    The microbatches of one optimizer step: their amaxes merge by max, and the history rolls once. Raises TypeError for
    what is not a module.
    """
    module = getattr(module, "_orig_mod", module)
    if not isinstance(module, nn.Module):
        raise TypeError(f"accumulate() takes a module or a compiled module, not {type(module).__name__}")
    mine = _Accumulation({id(t) for t in itertools.chain(module.parameters(), module.buffers())})
    states = [m for m in module.modules() if isinstance(m, ScaleState)]
    for state in states:
        state.begin_accumulation()
    _accumulations.append(mine)
    try:
        yield
    finally:
        _accumulations.remove(mine)
        for state in states:
            state.end_accumulation()


def begin_step(group: SlotGroup) -> None:
    """Before a training forward: let the slots roll whose step this begins, and hold the others."""
    active = [a for a in _accumulations if any(id(t) in a.owned for t in group.owned_tensors())]
    if not active:
        group.hold(())
        group.steps += 1
        return
    begun = active[0].begun
    keys = [*group.keys(), (group.table.names, *map(id, group.owned_tensors()))]
    held = [key in begun for key in keys]
    group.hold(held[:-1])
    group.steps += not held[-1]
    begun.update(keys)


class Pass(Enum):
    """How often the code inside a checkpointed region is being run."""

    FIRST = "first"
    REPEATED = "repeated"


@dataclass
class Region:
    """One call of `torch.utils.checkpoint.checkpoint`, what it called, and how far each repetition of it has come."""

    forwards: dict[Hashable, list[Any]] = field(default_factory=dict)
    repeated: dict[Hashable, int] = field(default_factory=dict)

    def remember(self, key: Hashable, forward: Any) -> None:
        """A call in the forward of the region. key: of the graph and the instance."""
        self.forwards.setdefault(key, []).append(forward)

    def next_forward(self, key: Hashable) -> Any:
        """What was remembered of the call that is now repeated; None if the region has seen none."""
        token = (key, current_graph_task_id())
        position = self.repeated.get(token, 0)
        self.repeated[token] = position + 1
        forwards = self.forwards.get(key, [])
        return forwards[position] if position < len(forwards) else None


def checkpointed_region() -> tuple[Region, Pass] | None:
    """The checkpointed region that is running, and whether its backward runs it again; None outside of any."""
    repeated = Pass.FIRST if current_graph_task_id() == -1 else Pass.REPEATED
    owner = _frame_of_hooks() or (
        _context_of_stack() if repeated is Pass.REPEATED or not torch.is_grad_enabled() else None
    )
    if owner is None:
        return None
    if not hasattr(owner, "fp8pass_region"):
        owner.fp8pass_region = Region()
    return owner.fp8pass_region, repeated


def _frame_of_hooks() -> Any:
    """Of a region with use_reentrant=False: what its hooks for saved tensors know it by."""
    hooks: Any = top_saved_tensors_hooks(False)
    if hooks is None:
        return None
    for cell in inspect.unwrap(hooks[0]).__closure__ or ():
        content = cell.cell_contents
        content = content() if isinstance(content, weakref.ref) else content
        if isinstance(content, _CheckpointFrame):
            return content
    return None


_REENTRANT = (CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__)


def _context_of_stack() -> Any:
    """Of a region with use_reentrant=True: the context of the autograd Function that it is."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in _REENTRANT:
            return frame.f_locals["ctx"]
        frame = frame.f_back
    return None
