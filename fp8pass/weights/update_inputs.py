"""The inputs that passes add to the graph of an update, and what they read in a call of it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8pass.base._torch import unset_fake_temporarily
from fp8pass.quant.moments import Fp8Moment
from fp8pass.states.slots import InstanceState
from fp8pass.weights.freshness import Copies
from fp8pass.weights.weight_bounds import UNKNOWN, bound_of_parts
from fp8pass.weights.weight_copy import WeightCopy


@dataclass(frozen=True)
class UpdateCall:
    """A call of an update. weights, states: those that `UpdateKey.writes` and `weight_slots` describe.

    bounds: for each of the states with weights whose amax is predicted, by its index. moments: those that are stored in
    FP8. updates: i32[1], the number of updates, and seeds: i32[n], the numbers of the tensors that are rounded
    stochastically; None if none is. counts: i64[2], the number of updates, and of skipped ones; None if no update is
    skipped.
    """

    weights: Sequence[WeightCopy]
    states: Sequence[InstanceState]
    bounds: Mapping[int, Bounds]
    moments: Sequence[Fp8Moment]
    updates: Tensor | None
    seeds: Tensor | None
    counts: Tensor | None

    @functools.cached_property
    def device(self) -> torch.device:
        """The device of the state that the update reads."""
        tensors = [*(w.scales for w in self.weights[:1]), *(m.stored[0] for m in self.moments[:1]), self.updates]
        return next(x.device for x in tensors if x is not None)


@dataclass(frozen=True)
class UpdateInput:
    """An input of an update. value: returns the tensor that a call passes.

    is_fixed: True if that is the same tensor in all calls with the same weights.
    """

    name: str
    value: Callable[[UpdateCall], Tensor]
    is_fixed: bool = False

    def example(self, call: UpdateCall) -> Tensor:
        """Return an empty tensor like the one that the call passes."""
        with unset_fake_temporarily():  # the call has real tensors
            x = self.value(call)
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


class Bounds:
    """The bounds of the weights of one instance state whose amaxes are predicted: see `ops.predicted_scales`."""

    def __init__(self, weights: Sequence[WeightCopy]) -> None:
        # weak references: Dynamo keeps the graph, and the graph these bounds, longer than the model may live
        self._weights = [weakref.ref(w) for w in weights]
        self._copies = Copies(weights)
        self._now: list[list[float]] = []
        with torch.inference_mode(False):
            self.tensor = torch.zeros(3, len(weights), device=weights[0].scales.device)

    def current(self) -> Tensor:
        """Return f32[3, n], with the bounds of the next update, for weights whose amax before it is known."""
        weights = [w for ref in self._weights if (w := ref()) is not None]
        are_of_now = all(known.is_of_now() for known in self._copies.freshness())
        bounds = [bound_of_parts(w.parts) if are_of_now or w.is_of_now() else UNKNOWN for w in weights]
        now = [[b.grows for b in bounds], [b.moves for b in bounds]]
        if now != self._now:  # a copy to the device synchronizes: only where a learning rate, for example, has changed
            self._now = now
            self.tensor[:2].copy_(torch.tensor(now))
        return self.tensor
