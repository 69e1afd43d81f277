"""FP8 copies of weights, kept from one optimizer step to the next, so that forwards need not quantize the weights.

A copy holds the values that the next forward would compute: the current weight, quantized with its own scale, or with
the delayed scale that the next step begins with (`weight_copy.py`). An update compiled with fp8pass writes the copy
together with the weight (`update_graph.py`). Any other change of a weight bumps its version counter or moves it to
other memory: then the weight is quantized again before the copy is used. With delayed scaling, the same happens in
steps that no update has prepared, because their scale may be another one.
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from fp8pass.base import scaling
from fp8pass.base._torch import before_eager_optimizers
from fp8pass.graph.inputs import Call
from fp8pass.quant import ops
from fp8pass.quant.sharded import part_of
from fp8pass.states.slots import InstanceState
from fp8pass.weights.freshness import Copies
from fp8pass.weights.weight_copy import DelayedWeight, WeightByItself, WeightCopy


def _invalidate_before_step(optimizer: Optimizer) -> None:
    """Mark the copies of an optimizer's weights as stale, before each eager step of the optimizer.

    Some third-party optimizers write into `p.data`, which does not bump the version counter of `p`.
    """
    if len(_weights):
        find = _of_optimizer.get(optimizer) or _of_optimizer.setdefault(optimizer, WeightsOf())
        find([optimizer]).invalidate()


# weak: what reads a copy holds it: a state (`InstanceState.derived`), or a graph (`CopiesOfGraph`)
_weights: weakref.WeakValueDictionary[Any, WeightCopy] = weakref.WeakValueDictionary()
_made = itertools.count()
_newest = next(_made)
Kind = TypeVar("Kind", bound=WeightCopy)


@dataclass(frozen=True)
class CachedWeight:
    """A weight whose FP8 copy a graph reads, in one to three inputs.

    positions: among Dynamo's inputs, of the parameter, or of the parameters that are concatenated along dim 0. stored:
    "x_q", "x_t" or both, see `WeightCopy`. by_itself: how the weight is quantized, a static one as if its slot were the
    only one; None under delayed scaling. table, slot: of its scale; -1 for none.
    """

    positions: tuple[int, ...]
    stored: tuple[str, ...]
    by_itself: ops.ByItself | None = None
    table: int = -1
    slot: int = -1

    def __hash__(self) -> int:
        """Return a hash that is computed once: each step looks up every weight."""
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.positions, self.stored, self.by_itself, self.table, self.slot))

    @property
    def fields(self) -> tuple[str, ...]:
        """The tensors of a `WeightCopy` that are inputs: also its scales, if these are not an input for all slots."""
        return self.stored if self.slot >= 0 else ("scales", *self.stored)

    def parts(self, call: Call) -> list[Tensor]:
        """Return the parameters that the weight consists of."""
        return [call.args[i] for i in self.positions]


@dataclass(frozen=True)
class CachedWeightInput:
    """An input of the graph that is a tensor of a weight's FP8 copy. field: its name in `WeightCopy`.

    together: the inputs of this kind that the graph has.
    """

    name: str
    weight: CachedWeight
    field: str
    together: CopiesOfGraph

    def example(self, call: Call) -> Tensor:
        """Return an empty tensor like that of a `WeightCopy` of these parameters."""
        parts = self.weight.parts(call)
        local = list(map(part_of, parts))
        rows, columns = sum(p.shape[0] for p in local), local[0].shape[1]
        like: dict[str, tuple[Sequence[int], torch.dtype]] = {
            "scales": (_shape_of_scale_inv(self.weight, local), torch.float32),
            "x_q": ((rows, columns), scaling.E4M3),
            "x_t": ((columns, rows), scaling.E4M3),
        }
        shape, dtype = like[self.field]
        return torch.empty(shape, dtype=dtype, device=parts[0].device)

    def value(self, call: Call) -> Tensor:
        """Return the tensor, after refreshing the copy if it is stale."""
        tensor: Tensor = getattr(call.once(self.weight, self._fresh), self.field)
        return tensor

    def _fresh(self, call: Call) -> WeightCopy:
        c, begins = self.weight, not call.repeats
        weight: WeightCopy
        if c.by_itself is None:
            state = call.states[c.table]
            weight = _with_slot(c, call, state)
            begins = begins and not state.holds(c.slot)
        else:
            weight = _by_itself(c, c.parts(call), call.states, self.together.by_itself)
        if begins:  # before the question whether the copy is fresh, which depends on the step
            weight.begin_step()
        if not weight.is_fresh():
            weight.requantize(begins)
        return weight


class CopiesOfGraph:
    """The copies that a graph reads. by_itself: those whose scales have no state, for each instance of the graph."""

    def __init__(self) -> None:
        self.by_itself: dict[Hashable, WeightByItself] = {}

    def values(self, inputs: Sequence[CachedWeightInput], call: Call) -> list[Tensor]:
        """Return the values of all inputs of this kind, as `CachedWeightInput.value` does of one."""
        read: _Read | None = next((r for s in call.states if (r := s.derived.get(self)) is not None), None)
        if read is not None and read.refresh(call.repeats):
            return read.tensors
        tensors = [x.value(call) for x in inputs]
        tables = {x.weight.table if x.weight.by_itself is None else -1 for x in inputs}
        if len(tables) == 1 and -1 not in tables:  # all have their scales in one state
            state = call.states[tables.pop()]
            columns = {state.derived[x.weight]: x.weight.slot - state.table.n_forward for x in inputs}
            state.derived[self] = _Read(state, columns, tensors)
        return tensors


class _Read:
    """The copies that a graph of one instance reads. columns: of the state's `weight_copy_scales`."""

    def __init__(self, state: InstanceState, columns: dict[DelayedWeight, int], tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self._columns = columns
        self._copies = Copies(columns)
        self._state = weakref.ref(state)  # which holds this

    def refresh(self, repeats: bool) -> bool:
        """Do for all weights what `CachedWeightInput.value` does for one; return False if their slots roll apart."""
        state = self._state()
        if state is None or (state.held and state.rolls):
            return False
        begins = not (repeats or state.held)
        for known in self._copies.freshness():
            if known.state is not state:
                for weight in known.weights:
                    assert isinstance(weight, DelayedWeight)
                    weight.take_scales(state, self._columns[weight])
                known.state = state
            if begins:
                known.begin_step()
            if known.steps_stale > 0 or not known.is_of_now():
                for weight in known.apart():
                    if not weight.is_fresh():
                        weight.requantize(begins)
        return True


def _with_slot(c: CachedWeight, call: Call, state: InstanceState) -> DelayedWeight:
    index = c.slot - state.table.n_forward
    weight: DelayedWeight | None = state.derived.get(c)
    if weight is None:
        parts = c.parts(call)
        key = (state.keys[c.slot], *map(id, parts))
        shared = _shared(key, parts)
        weight = shared if isinstance(shared, DelayedWeight) else DelayedWeight(parts, c.stored, state, index)
        state.derived[c] = _kept(key, weight, c)
    weight.use_in(state, index)
    return weight


def _by_itself(
    c: CachedWeight,
    parts: Sequence[Tensor],
    states: Sequence[InstanceState],
    held: MutableMapping[Hashable, WeightByItself],
) -> WeightByItself:
    held_key = (c, *map(id, parts))
    weight = held.get(held_key)
    if weight is None or not weight.is_of(parts):
        quantizer, scales = c.by_itself, _scales_of(c, parts, states)
        assert quantizer is not None
        # a static scale belongs to the key: other instances may have other ones
        fixed = () if isinstance(quantizer, ops.Dynamic | ops.Rowwise) else tuple(scales[0].tolist())
        key = (quantizer, fixed, *map(id, parts))
        shared = _shared(key, parts)
        weight = shared if isinstance(shared, WeightByItself) else WeightByItself(parts, c.stored, quantizer, scales)
        for gone in [key for key, other in held.items() if other.is_gone]:
            del held[gone]
        held[held_key] = _kept(key, weight, c)
    return weight


def _scales_of(c: CachedWeight, parts: Sequence[Tensor], states: Sequence[InstanceState]) -> Tensor:
    """Return a new tensor that a copy of this quantizer has its scales in: see `place_in_copy_scales`."""
    with torch.inference_mode(False), torch.no_grad():
        if isinstance(c.by_itself, ops.Static):
            scale = states[c.table].tensors.scale[c.slot : c.slot + 1]
            return torch.stack([scale, scale.reciprocal()])
        shape = _shape_of_scale_inv(c, parts)
        return torch.empty(shape, dtype=torch.float32, device=parts[0].device)


def _shape_of_scale_inv(c: CachedWeight, parts: Sequence[Tensor]) -> list[int]:
    if not isinstance(c.by_itself, ops.Rowwise):
        return []
    shape = [sum(p.shape[0] for p in parts), parts[0].shape[1]]
    return [1 if dim in c.by_itself.dims else n for dim, n in enumerate(shape)]


def _shared(key: Hashable, parts: Sequence[Tensor]) -> WeightCopy | None:
    """Return the copy that graphs share under a key; None if there is none, or if it is of freed parameters."""
    weight = _weights.get(key)
    return weight if weight is not None and weight.is_of(parts) else None


def _kept(key: Hashable, weight: Kind, c: CachedWeight) -> Kind:
    """Return a weight that graphs share from now on, with all tensors that the graph reads."""
    if _weights.get(key) is not weight:
        before_eager_optimizers(_invalidate_before_step)
        _weights[key] = weight
        _count_up()
    if weight.store(c.stored):
        _count_up()
    return weight


def _count_up() -> None:
    global _newest
    _newest = next(_made)


def newest() -> int:
    """Return a number that changes when a copy is added: while it is the same, so is the result of `weights_of`."""
    return _newest


def weights_of(tensors: Sequence[Tensor]) -> list[WeightCopy]:
    """Return the FP8 copies of weights that contain any of these tensors, in the order of their first use."""
    ids = set(map(id, tensors))
    return [w for w in list(_weights.values()) if w.has_part(ids)]


def updated(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """Return an iterator over the parameters of optimizers that runs no Python for each."""
    return itertools.chain.from_iterable(group["params"] for o in optimizers for group in o.param_groups)


def trained(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """Return an iterator over the parameters of optimizers that require a gradient."""
    return filter(attrgetter("requires_grad"), updated(optimizers))


class WeightsOf:
    """Finds the copies of weights that optimizers update, and keeps them until there are others.

    parameters: returns those that count, of the optimizers.
    """

    def __init__(self, parameters: Callable[[Iterable[Optimizer]], Iterable[Tensor]] = updated) -> None:
        self._parameters = parameters
        self._newest = -1
        self._ids: list[int | None] = []
        """The ids of the parameters, and None at the end."""
        self._found = Copies(())

    def __call__(self, optimizers: Iterable[Optimizer]) -> Copies:
        """Return the copies that `weights_of` returns."""
        # each step compares all parameters, so it makes no list of them
        ids = itertools.chain(map(id, self._parameters(optimizers)), (None,))
        if self._newest != newest() or not all(map(operator.eq, ids, self._ids)):
            found = list(self._parameters(optimizers))
            self._newest, self._ids = newest(), [*map(id, found), None]
            self._found = Copies(weights_of(found))
        return self._found


_of_optimizer: weakref.WeakKeyDictionary[Optimizer, WeightsOf] = weakref.WeakKeyDictionary()
