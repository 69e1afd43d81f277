"""FP8 copies of weights, kept from one optimizer step to the next, so that forwards need not quantize the weights.

A copy holds the values that the next forward would compute: the current weight, quantized with the scale that the next
step begins with. An update compiled with fp8pass writes the copy together with the weight (`update_graph.py`). Any
other change of a weight bumps its version counter or moves it to other memory: then the weight is quantized again
before the copy is used. The same happens in steps that no update has prepared, because their scale may be another one.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor

from fp8pass import scaling
from fp8pass._torch import before_eager_optimizers
from fp8pass.graph.annotation import CachedWeightInput
from fp8pass.quant import ops
from fp8pass.quant.sharded import amax_over, groups_of, part_of
from fp8pass.recipes import scale_of
from fp8pass.runtime.weight_bounds import predicts
from fp8pass.states.slots import InstanceState


class Fp8Weight:
    """The FP8 copy of a weight f[N, K]: one parameter, or several concatenated along dim 0. All graphs share it.

    Of a weight that is divided among ranks, each rank copies its part, f[N, K], with a scale that all ranks share.
    x_q: f8[N, K]. x_t: f8[K, N], or None while no graph needs it. state, index: the state of the graph that was called
    last, and the column of its `SlotTensors.weight_copy_scales` with the copy's scale_inv and the amax of the weight
    that was quantized.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._parts = tuple(map(weakref.ref, parts))
        self._made_of: Any = None
        before_eager_optimizers(_invalidate_before_step)
        local = list(map(part_of, parts))
        first = local[0]
        shape = sum(p.shape[0] for p in local), first.shape[1]
        # a tensor made in inference mode can't be written in place outside of it
        with torch.inference_mode(False), torch.no_grad():
            self.x_q = torch.empty(shape, dtype=scaling.E4M3, device=first.device)
        self.x_t: Tensor | None = None
        rows = [p.shape[0] for p in local]
        self._places = [(sum(rows[:i]), n) for i, n in enumerate(rows)]
        self.copies = [self.x_q.narrow(0, *place) for place in self._places]
        self.transposes: list[Tensor] = []
        self.state: InstanceState | None = None
        self.index = -1
        self._steps_stale = 0
        """Number of steps begun since the step that the copy was made for."""
        self._unchanged = 0
        """Number of steps begun since the weight was changed."""
        self._changes = 0
        self._from_first_step = False
        """True if the first graph that read the copy began the history of its slot, too."""
        self._was_written = False
        """True if a compiled update has written the copy since the last call of `end_step`."""
        self.requantized = 0
        """Number of calls of `requantize`, which quantizes the weight outside of compiled updates."""
        self.expected = 1
        """Number of these calls that were unavoidable: no compiled update ran, or the slot had no scale yet."""

    @property
    def parts(self) -> list[Tensor]:
        """The parameters that the weight consists of."""
        parts = [ref() for ref in self._parts]
        assert all(p is not None for p in parts), "the parameters are gone"
        return parts  # type: ignore[return-value]

    def is_of(self, parts: Sequence[Tensor]) -> bool:
        """Return whether this is the copy of `parts`, and not of freed parameters that had their ids."""
        return all(ref() is p for ref, p in zip(self._parts, parts, strict=True))

    def has_part(self, ids: Set[int]) -> bool:
        """Return whether a parameter of the weight has one of these ids."""
        return any(id(ref()) in ids for ref in self._parts)

    @property
    def is_divided(self) -> bool:
        """True if other ranks have other parts of the weight."""
        return any(map(groups_of, self.parts))

    @property
    def knows_next_scale(self) -> bool:
        """True if an update knows the scale of the next step, and so can write the copy.

        False for a divided weight whose ranks share amaxes once in several steps: some have recorded others before.
        """
        reduces = None if self.state is None else self.state.reduces
        return not self.is_divided or reduces is None or reduces.interval == 1

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the copies take besides the weight itself."""
        return sum(x.nbytes for x in (self.x_q, self.x_t) if x is not None)

    def inputs(self, transposed: bool) -> list[Tensor]:
        """Return the inputs of a graph that reads the copy: `x_q`, and `x_t` if wanted."""
        return [self.x_q, self.x_t] if transposed and self.x_t is not None else [self.x_q]

    def transpose(self) -> None:
        """Allocate the transposed copy. Both copies are stale afterwards."""
        with torch.inference_mode(False), torch.no_grad():
            self.x_t = torch.empty(self.x_q.shape[::-1], dtype=scaling.E4M3, device=self.x_q.device)
        self.transposes = [self.x_t.narrow(1, *place) for place in self._places]
        self.invalidate()

    def use_in(self, state: InstanceState, index: int) -> None:
        """Prepare for a call of this state's graph: copy `weight_copy_scales` from the state that was used last."""
        if self.state is None:
            self._from_first_step = state.tracker.step <= 1
        elif self.state is not state:
            with torch.no_grad():
                state.tensors.weight_copy_scales[:, index].copy_(self.state.tensors.weight_copy_scales[:, self.index])
        self.state, self.index = state, index

    def begin_step(self) -> None:
        """Count a step that begins, reads the copy and rolls its history."""
        self._steps_stale += 1
        self._unchanged += 1

    def is_fresh(self) -> bool:
        """Return whether the copy is of the current weight, with the scale of the step that has begun or of the next.

        A step that no update prepared has the same scale if the whole history is amaxes of the current weight.
        """
        return self.is_of_now() and (self.is_predicted or self._steps_stale <= 0 or self._scale_stays())

    @property
    def is_predicted(self) -> bool:
        """True if the scale is computed from a predicted amax, or from the amax itself, and not from a history."""
        return predicts(self.parts)

    def is_of_now(self) -> bool:
        """Return whether the copy, and the amax beside its scale, are of the weight as it is."""
        return self._made_of is not None and self._made_of == self._version_key()

    def _scale_stays(self) -> bool:
        """Return whether the history is known to hold only amaxes of the current weight, so that its scale stays."""
        assert self.state is not None
        recipe = self.state.table.delayed
        if recipe.reads_old_scale:
            return False
        # a history that began with this copy holds zeros and this one amax: "max" and "most_recent" pass over the
        # zeros, a callable may not
        is_only_amax = self._from_first_step and self._changes == 1 and self.state.loads == 0
        always = is_only_amax and isinstance(recipe.amax_compute_algo, str)
        # H steps fill the history, and the amax of a step enters it when the next step begins
        return always or self._unchanged > recipe.amax_history_len + 1

    def _made(self) -> None:
        self._made_of = self._version_key()
        self._unchanged = 0
        self._changes += 1

    def written(self) -> None:
        """Note that a compiled update has written the copy; it stays stale if its slot had no scale yet."""
        assert self.state is not None
        has_scale = self.state.has_scale(self.state.table.n_forward + self.index)
        self._made()
        self._steps_stale = -1  # 0 from the beginning of the next step on, whose scale the copy has
        self._was_written = True
        if not has_scale and not self.is_predicted:
            self.invalidate()
            self.expected += 1

    def end_step(self) -> None:
        """End a training step: invalidate the copy unless the compiled update rewrote it."""
        if not self._was_written:
            self.invalidate()
        self._was_written = False

    def invalidate(self) -> None:
        """Mark the copy as stale: `requantize` runs before its next use."""
        self._made_of = None

    def _version_key(self) -> Any:
        assert self.state is not None
        parts = [p for ref in self._parts if (p := ref()) is not None]
        # a DTensor, and the tensor with its part, count their versions separately
        versions = [(p._version, part_of(p)._version, part_of(p).data_ptr()) for p in parts]
        return versions, self.state.table.recipe, self.state.loads

    def requantize(self, begins: bool = True) -> None:
        """Quantize the weight again, eagerly. begins: for the step that has just begun; otherwise for the next step."""
        state = self.state
        assert state is not None
        recipe, t = state.table.delayed, state.tensors
        with torch.inference_mode(False), torch.no_grad():
            parts = [part_of(p).detach() for p in self.parts]
            groups = dict.fromkeys(group for p in self.parts for group in groups_of(p))
            # the graph that begins a step rolls histories when it runs, after this, and has the next scales
            scales = ops.next_scales(recipe, state.table.n_forward, t.scale, t.amax_history, t.amax_weights)
            amax = torch.stack([scaling.amax(p) for p in parts]).amax()
            own = scale_of(recipe, amax_over(amax, tuple(groups)), scaling.fp8_max(scaling.E4M3))
            scales = torch.where((scales == 0) | self.is_predicted, own, scales)
            ops.write_weight(scales, self.index, parts, self.copies, self.transposes)
            amaxes = [amax if i == self.index else None for i in range(len(scales))]
            ops.write_weight_copy_scales(t.weight_copy_scales, scales, amaxes)
        if self.is_of_now():  # the weight is as it was: no update ran that could have written the copy
            self.expected += 1
        else:
            self._made()
        self._steps_stale = 0 if begins else -1
        self.requantized += 1


def _invalidate_before_step(optimizer: torch.optim.Optimizer) -> None:
    """Mark the copies of an optimizer's weights as stale, before each eager step of the optimizer.

    Some third-party optimizers write into `p.data`, which does not bump the version counter of `p`.
    """
    if len(_weights):
        for weight in weights_of([p for group in optimizer.param_groups for p in group["params"]]):
            weight.invalidate()


# weak: the states whose graphs read a copy hold it (`InstanceState.cached`)
_weights: weakref.WeakValueDictionary[Any, Fp8Weight] = weakref.WeakValueDictionary()
_made = itertools.count()
_newest = next(_made)


def cached_weights(
    cached: Sequence[CachedWeightInput], args: Sequence[Any], states: Sequence[InstanceState], repeats: bool = False
) -> list[Tensor]:
    """Return the inputs of a graph that are FP8 copies of weights, after refreshing the stale copies.

    repeats: the backward recomputes a forward (activation checkpointing), so no step begins.
    """
    inputs: list[Tensor] = []
    for c in cached:
        weight = _of(c, [args[i] for i in c.positions], states[c.table])
        begins = not repeats and not states[c.table].holds(c.slot)
        if begins:
            weight.begin_step()
        if not weight.is_fresh():
            weight.requantize(begins)
        inputs += weight.inputs(c.transposed)
    return inputs


def _of(c: CachedWeightInput, parts: Sequence[Tensor], state: InstanceState) -> Fp8Weight:
    weight = state.cached.get(c)
    if weight is None:
        key = (state.keys[c.slot], *map(id, parts))
        weight = _weights.get(key)
        if weight is None or not weight.is_of(parts):
            weight = _weights[key] = Fp8Weight(parts)
            _count_up()
        if c.transposed and weight.x_t is None:
            weight.transpose()
            _count_up()
        state.cached[c] = weight
    weight.use_in(state, c.slot - state.table.n_forward)
    return weight


def _count_up() -> None:
    global _newest
    _newest = next(_made)


def newest() -> int:
    """Return a number that changes when a copy is added: while it is the same, so is the result of `weights_of`."""
    return _newest


def weights_of(tensors: Sequence[Tensor]) -> list[Fp8Weight]:
    """Return the FP8 copies of weights that contain any of these tensors, in the order of their first use."""
    ids = set(map(id, tensors))
    return [w for w in list(_weights.values()) if w.has_part(ids)]


def end_step(tensors: Sequence[Tensor]) -> None:
    """End a training step of these parameters: a copy that no compiled update has written in it becomes stale."""
    for weight in weights_of(tensors):
        weight.end_step()


def cached_example(c: CachedWeightInput, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return example inputs to compile a graph with: tensors like the copies of an `Fp8Weight` of these parameters."""
    local = list(map(part_of, parts))
    rows, columns = sum(p.shape[0] for p in local), local[0].shape[1]
    shapes = [(rows, columns), (columns, rows)][: 1 + c.transposed]
    return [torch.empty(s, dtype=scaling.E4M3, device=parts[0].device) for s in shapes]
