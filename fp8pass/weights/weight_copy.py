"""The FP8 copy of one weight: the tensors, when they are stale, and how the weight is quantized again.

There are two kinds, by where the scale comes from: a slot of delayed scaling, or the weight itself.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence, Set

import torch
from torch import Tensor

from fp8pass.base import scaling
from fp8pass.quant import ops
from fp8pass.quant.sharded import amax_over, groups_of, part_of
from fp8pass.recipes import scale_of
from fp8pass.states.slots import InstanceState
from fp8pass.weights.freshness import Freshness
from fp8pass.weights.weight_bounds import predicts


class WeightCopy(ABC):
    """The FP8 copy of a weight f[N, K]: one parameter, or several concatenated along dim 0. All graphs share it.

    If the weight is sharded, each rank copies its own shard, f[N, K], with a scale that all ranks share.
    stored: the names of the tensors that the copy consists of: "x_q", "x_t" or both. x_q: f8[N, K]. x_t: f8[K, N]. None
    if it is not stored. state: see `Freshness`.
    """

    def __init__(self, parts: Sequence[Tensor], stored: Sequence[str], state: InstanceState | None = None) -> None:
        self.part_refs = tuple(map(weakref.ref, parts))
        self.freshness = Freshness(self, parts, state)
        """Tracks when this copy was made, and of what; other copies may share it."""
        self._rows = [part_of(p).shape[0] for p in parts]
        self.x_q: Tensor | None = None
        self.x_t: Tensor | None = None
        self.copies: list[Tensor] = []
        self.transposes: list[Tensor] = []
        self.requantized = 0
        """Number of calls of `requantize`, which quantizes the weight outside of compiled updates."""
        self.expected = 1
        """Number of these calls that were unavoidable: no compiled update ran, or the slot had no scale yet."""
        self.store(stored)

    @property
    def parts(self) -> list[Tensor]:
        """The parameters that the weight consists of."""
        parts = [ref() for ref in self.part_refs]
        assert all(p is not None for p in parts), "the parameters are gone"
        return parts  # type: ignore[return-value]

    def is_of(self, parts: Sequence[Tensor]) -> bool:
        """Return whether this is the copy of `parts`, and not of freed parameters that had their ids."""
        return all(ref() is p for ref, p in zip(self.part_refs, parts, strict=True))

    @property
    def is_gone(self) -> bool:
        """True if a parameter of the weight does not exist any more."""
        return any(ref() is None for ref in self.part_refs)

    def has_part(self, ids: Set[int]) -> bool:
        """Return whether a parameter of the weight has one of these ids."""
        return any(id(ref()) in ids for ref in self.part_refs)

    @property
    def is_divided(self) -> bool:
        """True if the weight is sharded: other ranks have other parts of it."""
        return any(map(groups_of, self.parts))

    @property
    def knows_next_scale(self) -> bool:
        """True if an update knows the scale of the next step, and so can write the copy."""
        return True

    @property
    def stored(self) -> tuple[str, ...]:
        """The names of the tensors that the copy consists of."""
        return tuple(name for name in ("x_q", "x_t") if getattr(self, name) is not None)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the copy consists of."""
        return [getattr(self, name) for name in self.stored]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the copies take besides the weight itself."""
        return sum(x.nbytes for x in self.tensors)

    @property
    @abstractmethod
    def scales(self) -> Tensor:
        """The tensor that graphs and updates find the copy's scale_inv in."""

    def store(self, names: Sequence[str]) -> bool:
        """Allocate those of `names` that are not stored yet; return whether there were any. Then all are stale."""
        new = [name for name in names if getattr(self, name) is None]
        if not new:
            return False
        first, rows = part_of(self.parts[0]), sum(self._rows)
        # a tensor made in inference mode can't be written in place outside of it
        with torch.inference_mode(False), torch.no_grad():
            for name in new:
                shape = (rows, first.shape[1]) if name == "x_q" else (first.shape[1], rows)
                setattr(self, name, torch.empty(shape, dtype=scaling.E4M3, device=first.device))
        spans = [(sum(self._rows[:i]), n) for i, n in enumerate(self._rows)]
        self.copies = [] if self.x_q is None else [self.x_q.narrow(0, *span) for span in spans]
        self.transposes = [] if self.x_t is None else [self.x_t.narrow(1, *span) for span in spans]
        self.invalidate()  # the new ones hold no values yet
        return True

    @abstractmethod
    def begin_step(self) -> None:
        """Note that a step begins which reads the copy."""

    def is_fresh(self) -> bool:
        """Return whether the next forward may read the copy."""
        return self.is_of_now()

    @property
    def is_predicted(self) -> bool:
        """True if the scale is computed from a predicted amax, or from the amax itself, and not from a history."""
        return False

    def is_of_now(self) -> bool:
        """Return whether the copy is of the weight as it is, with a scale of the state as it is."""
        return self._alone.is_of_now()

    def invalidate(self) -> None:
        """Mark the copy as stale: `requantize` runs before its next use."""
        self._alone.invalidate()

    @property
    def _alone(self) -> Freshness:
        """The `freshness` of this copy, which no other shares from now on."""
        self.freshness.apart()
        return self.freshness

    @abstractmethod
    def requantize(self, begins: bool = True) -> None:
        """Quantize the weight again, eagerly. begins: for the step that has just begun; otherwise for the next step."""


class WeightByItself(WeightCopy):
    """A copy that depends on the weight alone. quantizer: how it is quantized. scales: see `ops.cached_operand`."""

    def __init__(self, parts: Sequence[Tensor], stored: Sequence[str], quantizer: ops.ByItself, scales: Tensor) -> None:
        super().__init__(parts, stored)
        self.quantizer = quantizer
        self._scales = scales

    @property
    def scales(self) -> Tensor:
        """The tensor that graphs and updates find the copy's scale_inv in."""
        return self._scales

    def begin_step(self) -> None:
        """Do nothing: the copy has no history."""

    def requantize(self, begins: bool = True) -> None:
        """Quantize the weight again, eagerly."""
        with torch.inference_mode(False), torch.no_grad():
            parts = [part_of(p).detach() for p in self.parts]
            ops.write_weight_by_itself(self.quantizer, parts, self.scales, self.copies, self.transposes)
        self._alone.made()
        self.requantized += 1


class DelayedWeight(WeightCopy):
    """A copy whose scale has a slot of delayed scaling.

    state, index: the state of the graph that was called last, and the column of its `SlotTensors.weight_copy_scales`
    with the copy's scale_inv and the amax of the weight that was quantized.
    """

    def __init__(self, parts: Sequence[Tensor], stored: Sequence[str], state: InstanceState, index: int) -> None:
        super().__init__(parts, stored, state)
        self.index = index
        self._from_first_step = state.tracker.step <= 1
        """True if the first graph that read the copy began the history of its slot, too."""

    @property
    def state(self) -> InstanceState:
        """The state of the graph that was called last."""
        assert self.freshness.state is not None
        return self.freshness.state

    @property
    def scales(self) -> Tensor:
        """The tensor that graphs and updates find the copy's scale_inv in, with those of other weights."""
        return self.state.tensors.weight_copy_scales

    def use_in(self, state: InstanceState, index: int) -> None:
        """Prepare for a call of this state's graph: copy `weight_copy_scales` from the state that was used last."""
        if self.state is not state:
            self.take_scales(state, index)
            self._alone.state = state
        self.index = index

    @torch.no_grad()
    def take_scales(self, state: InstanceState, index: int) -> None:
        """Copy `weight_copy_scales` to the column `index` of a state, which is that of the weight from now on."""
        state.tensors.weight_copy_scales[:, index].copy_(self.scales[:, self.index])
        self.index = index

    def begin_step(self) -> None:
        """Count a step that begins, reads the copy and rolls its history."""
        self._alone.begin_step()

    def is_fresh(self) -> bool:
        """Return whether the copy is of the current weight, with the scale of the step that has begun or of the next.

        A step that no update prepared has the same scale if the whole history is amaxes of the current weight.
        """
        return self.is_of_now() and (self.freshness.steps_stale <= 0 or self.is_predicted or self._scale_stays())

    @property
    def is_predicted(self) -> bool:
        """True if the scale is computed from a predicted amax, or from the amax itself, and not from a history."""
        return predicts(self.parts)

    @property
    def knows_next_scale(self) -> bool:
        """False for a sharded weight whose ranks share amaxes once in several steps: until then their scales differ."""
        reduces = self.state.reduces
        return reduces is None or reduces.interval == 1 or not self.is_divided

    def _scale_stays(self) -> bool:
        """Return whether the history is known to hold only amaxes of the current weight, so that its scale stays."""
        recipe = self.state.table.delayed
        if recipe.reads_old_scale:
            return False
        # a history that began with this copy holds zeros and this one amax: "max" and "most_recent" pass over the
        # zeros, a callable may not
        is_only_amax = self._from_first_step and self.freshness.changes == 1 and self.state.loads == 0
        always = is_only_amax and isinstance(recipe.amax_compute_algo, str)
        # H steps fill the history, and the amax of a step enters it when the next step begins
        return always or self.freshness.unchanged > recipe.amax_history_len + 1

    def stay_stale_without_scale(self) -> None:
        """Invalidate a copy that has just been written if its slot had no scale yet."""
        if not self.state.has_scale(self.state.table.n_forward + self.index) and not self.is_predicted:
            self.invalidate()
            self.expected += 1

    def requantize(self, begins: bool = True) -> None:
        """Quantize the weight again, eagerly. begins: for the step that has just begun; otherwise for the next step."""
        state = self.state
        recipe, t = state.table.delayed, state.tensors
        with torch.inference_mode(False), torch.no_grad():
            parts = [part_of(p).detach() for p in self.parts]
            # the graph that begins a step rolls histories when it runs, after this, and has the next scales
            slot, only = state.table.n_forward + self.index, slice(self.index, self.index + 1)
            scale = ops.next_scales(recipe, slot, t.scale, t.amax_history, t.amax_weights[only])
            amax = torch.stack([scaling.amax(p) for p in parts]).amax()
            groups = dict.fromkeys(group for p in self.parts for group in groups_of(p))
            scale_now = scale_of(recipe, amax_over(amax, tuple(groups)), scaling.fp8_max(scaling.E4M3))
            scale = torch.where((scale == 0) | self.is_predicted, scale_now, scale)
            ops.write_weight(scale, 0, parts, self.copies, self.transposes)
            ops.write_weight_copy_scales(t.weight_copy_scales[:, only], scale, [amax])
        if self.is_of_now():  # the weight is as it was: no update ran that could have written the copy
            self.expected += 1
        else:
            self._alone.made()
        self._alone.steps_stale = 0 if begins else -1
        self.requantized += 1
