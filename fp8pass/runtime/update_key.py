"""What a graph that updates parameters is compiled for: what else it writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fp8pass.quant.moments import MomentKind
from fp8pass.recipes import DelayedScaling

Place = int | str
"""Of a tensor in a graph of Dynamo's: the position of an input, or the name of an attribute."""


@dataclass(frozen=True)
class Write:
    """A weight's FP8 copy. parts: where its parameters are in the graph, None for one that is not.

    state: which of the states its scale is in; index: where among its W. transposed: see `Fp8Weight`.
    """

    parts: tuple[Place | None, ...]
    state: int
    index: int
    transposed: bool


@dataclass(frozen=True)
class State:
    """The state of a group of weights: see `SlotTensors`. first: F; count: W."""

    recipe: DelayedScaling
    first: int
    count: int

    def inputs(self, skips: bool) -> tuple[str, ...]:
        """The names of the tensors that an update takes; if it may be skipped, all amaxes of the step."""
        of_weights = ("scale", "amax_history", "amax_weights", "made") if self.count else ()
        return (*of_weights, *(("amax_forward", "amax_backward") if skips else ()))


@dataclass(frozen=True)
class Moment:
    """A moment that is kept in FP8. dtype: as the optimizer knows it."""

    place: Place
    kind: MomentKind
    dtype: torch.dtype


@dataclass(frozen=True)
class UpdateKey:
    """All of it. keeps: what stays as it is if a gradient is not finite; if empty, nothing."""

    states: tuple[State, ...]
    writes: tuple[Write, ...]
    keeps: tuple[Place, ...]
    moments: tuple[Moment, ...]


def attribute(module: torch.nn.Module | None, name: str) -> Any:
    """What a `get_attr` node of that target gives."""
    for part in name.split("."):
        module = getattr(module, part, None)
    return module
