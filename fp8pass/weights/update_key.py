"""The key of a compiled update: the FP8 copies, moments and state that it writes besides the parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fp8pass.quant.moments import Format, MomentKind
from fp8pass.quant.ops import ByItself
from fp8pass.quant.sharded import Division
from fp8pass.recipes import DelayedScaling

TensorRef = int | str
"""A tensor of a Dynamo graph: the position of an input, or the name of an attribute."""


@dataclass(frozen=True)
class WeightWrite:
    """A weight's FP8 copy that the update writes.

    parts: its parameters in the graph, None for a parameter that the graph does not write. stored: "x_q",
    "x_t" or both, see `Fp8Weight`. by_itself: how it is quantized if its scale does not depend on earlier steps. If it
    does, slots: the index in `UpdateKey.weight_slots` of those that hold its scale; index: its index among their W
    weights; predicted: True if the scale is computed from a bound of what the update makes of the weight: see
    `weight_bounds.py`.
    """

    parts: tuple[TensorRef | None, ...]
    stored: tuple[str, ...]
    by_itself: ByItself | None = None
    slots: int = -1
    index: int = -1
    predicted: bool = False


@dataclass(frozen=True)
class WeightSlots:
    """The slots of the weights in one instance state: see `SlotTensors`. first: F; count: W.

    over: the name of the group whose ranks will share the amaxes of this step, if a weight is sharded, so that each
    rank measures the amax of its own shard; "" otherwise.
    """

    recipe: DelayedScaling
    first: int
    count: int
    over: str = ""

    def inputs(self, skips: bool) -> tuple[str, ...]:
        """Return the names of the state tensors that an update takes: all amaxes of the step, too, if it may skip."""
        of_weights = ("scale", "amax_history", "amax_weights", "weight_copy_scales") if self.count else ()
        return (*of_weights, *(("amax_forward", "amax_backward") if skips else ()))


@dataclass(frozen=True)
class Moment:
    """An optimizer moment stored in FP8. dtype: the dtype in which the update computes with it.

    division: how it is sharded; None if it is not.
    """

    ref: TensorRef
    stored_as: Format
    dtype: torch.dtype
    division: Division | None = None

    @property
    def kind(self) -> MomentKind:
        """ "first" or "second"."""
        return self.stored_as.kind


@dataclass(frozen=True)
class UpdateKey:
    """Everything that an update is compiled for.

    restore_if_skipped: the tensors that stay unchanged if a gradient is not finite; empty if the update does not check
    gradients. rounded: the bfloat16 tensors that are computed in float32 and rounded stochastically.
    """

    weight_slots: tuple[WeightSlots, ...]
    writes: tuple[WeightWrite, ...]
    restore_if_skipped: tuple[TensorRef, ...]
    moments: tuple[Moment, ...]
    rounded: tuple[TensorRef, ...] = ()

    @property
    def is_random(self) -> bool:
        """True if anything that the update writes is rounded stochastically."""
        return bool(self.rounded) or any(m.stored_as.stochastic for m in self.moments)


def attribute(module: torch.nn.Module | None, name: str) -> Any:
    """Return the value of a `get_attr` node with target `name`; None if there is no such attribute."""
    for part in name.split("."):
        module = getattr(module, part, None)
    return module
