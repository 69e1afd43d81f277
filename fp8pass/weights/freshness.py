"""When FP8 copies of weights were made, and of what: one object for all copies that have been through the same.

A graph reads all its weights in each step, and an update writes them. So a step notes one event for all of them, and
compares the versions and addresses of their parameters as lists: it runs no Python for each weight. Where something
happens to some weights alone, such as an edit, they part, each with what is known of it; they join again once the same
is known of all of them.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from fp8pass.quant.sharded import part_of
from fp8pass.states.slots import InstanceState

WeightCopy = Any
"""The class of `weight_copy.py`, which imports this file."""
_made = itertools.count()
_newest = next(_made)


class Freshness:
    """Tracks when the copies of some weights were made, and of what.

    state: of the graph that was called last; None if scales need none.
    A DTensor, and the tensor with its part, count their versions separately; a weight of DTensors joins no others.
    """

    def __init__(self, weight: WeightCopy, parts: Sequence[Tensor], state: InstanceState | None) -> None:
        self.state = state
        self.made_of: list[list[int]] | None = None
        """The versions and addresses of the parameters that the copies were made of; None if they are stale."""
        self.was_written = False
        """True if a compiled update has written the copies since the last call of `end_step`."""
        self.steps_stale = 0
        """Number of steps begun since the step that the copies were made for."""
        self.unchanged = 0
        """Number of steps begun since the weights were changed."""
        self.changes = 0
        """Number of times that copies were made of changed weights, at most 2: nothing asks for more."""
        self._recipe: Any = None
        self._loads = -1
        """The recipe, and the number of times that its state was loaded, when the copies were made."""
        self._divided = any(isinstance(p, DTensor) for p in parts)
        self._kin: object = object() if self._divided else None
        """Weights join only those that have the same object here."""
        self._hold([weight])

    def _hold(self, weights: Sequence[WeightCopy]) -> None:
        global _newest
        _newest = next(_made)
        ends = itertools.accumulate(len(w.part_refs) for w in weights)
        spans = ((id(w), slice(end - len(w.part_refs), end)) for w, end in zip(weights, ends, strict=True))
        self._spans = dict(spans)
        self._weights = list(map(weakref.ref, weights))
        parts = [ref() for w in weights for ref in w.part_refs]
        self.gone: list[Any] = [p for p in parts if p is None]
        """Gets the weak reference of each parameter that is freed."""
        self._parts = [weakref.ref(p, self.gone.append) for p in parts if p is not None]
        for w in weights:
            w.freshness = self

    @property
    def weights(self) -> list[WeightCopy]:
        """The weights that still exist."""
        return [w for ref in self._weights if (w := ref()) is not None]

    @property
    def parts(self) -> list[Tensor]:
        """The parameters that the weights consist of."""
        return [ref() for ref in self._parts]  # type: ignore[misc]

    @property
    def knows_next_scale(self) -> bool:
        """See `WeightCopy`."""
        return not self._divided or all(w.knows_next_scale for w in self.weights)

    # What happens to all of them

    def begin_step(self) -> None:
        """Count a step that begins, reads the copies and rolls their histories."""
        self.steps_stale += 1
        self.unchanged += 1

    def written(self) -> None:
        """Note that a compiled update has written the copies."""
        self.made()
        self.was_written = True
        self.steps_stale = -1  # 0 from the beginning of the next step on, whose scales the copies have

    def made(self) -> None:
        """Note that the copies are of the weights as they are."""
        self.made_of = self._now()
        if self.state is not None:
            self._recipe, self._loads = self.state.table.recipe, self.state.loads
        self.unchanged = 0
        self.changes = min(self.changes + 1, 2)

    def invalidate(self) -> None:
        """Mark the copies as stale."""
        self.made_of = None

    def end_step(self) -> None:
        """End a training step: invalidate the copies unless the compiled update rewrote them."""
        if not self.was_written:
            self.invalidate()
        self.was_written = False

    def is_of_now(self) -> bool:
        """Return whether all copies are of the weights as they are, with scales of the state as it is."""
        if self.made_of is None or self.gone:
            return False
        if self.state is not None:
            recipe = self.state.table.recipe
            if self._loads != self.state.loads or (self._recipe is not recipe and self._recipe != recipe):
                return False
        return self.made_of == self._now()

    def _now(self) -> list[list[int]] | None:
        if self.gone:
            return None
        parts = self.parts
        return [list(map(number, parts)) for number in (_OF_DTENSORS if self._divided else _OF_TENSORS)]

    # What happens to some of them

    def split(self, weights: Sequence[WeightCopy]) -> Freshness:
        """Return what is known of some of the weights, which join the others no more: they go other ways."""
        own = set(map(id, weights))
        self._some([w for w in self.weights if id(w) not in own])
        new = self._some(weights)
        new._kin = object()
        return new

    def apart(self) -> list[WeightCopy]:
        """Return the weights, each of which is known by itself from now on."""
        weights = self.weights
        if len(self._weights) > 1:
            for w in weights:
                self._some([w])
        return weights

    def _some(self, weights: Sequence[WeightCopy]) -> Freshness:
        new = copy.copy(self)
        new.made_of = self._made_of(weights)
        new._hold(weights)
        return new

    def _made_of(self, weights: Iterable[WeightCopy]) -> list[list[int]] | None:
        spans = [self._spans[id(w)] for w in weights]
        return None if self.made_of is None else [[n for s in spans for n in of[s]] for of in self.made_of]

    def alike(self) -> Hashable:
        """Return a value that is equal for those that can join."""
        known = self.made_of is None, self.was_written, self.steps_stale, self.unchanged, self.changes
        return (id(self._kin), id(self.state), id(self._recipe), self._loads, *known)

    @staticmethod
    def joined(several: Sequence[Freshness]) -> Freshness:
        """Return what is known of all weights of several that are alike."""
        if len(several) == 1:
            return several[0]
        new = copy.copy(several[0])
        if new.made_of is not None:
            each: Any = [f._made_of(f.weights) for f in several]
            new.made_of = [list(itertools.chain(*of)) for of in zip(*each, strict=True)]
        new._hold([w for f in several for w in f.weights])
        return new


_version = attrgetter("_version")
_OF_TENSORS = _version, Tensor.data_ptr
_OF_DTENSORS = _version, lambda p: part_of(p)._version, lambda p: part_of(p).data_ptr()


class Copies:
    """Copies to which the same things happen: those that a graph reads, or that an update writes. Held weakly."""

    def __init__(self, weights: Iterable[WeightCopy]) -> None:
        self._weights = list(map(weakref.ref, weights))
        self._found_at = -1
        self._found: list[weakref.ref[Freshness]] = []  # weak, as are the copies: it holds their state

    def freshness(self) -> list[Freshness]:
        """Return what is known of exactly these copies, of as many together as possible."""
        found = [f for ref in self._found if (f := ref()) is not None]
        is_old = self._found_at != _newest or any(f.gone for f in found)
        if is_old or (len(found) > 1 and len({f.alike() for f in found}) < len(found)):
            found = self._find()
            self._found, self._found_at = list(map(weakref.ref, found)), _newest
        return found

    def _find(self) -> list[Freshness]:
        members: dict[Freshness, list[WeightCopy]] = {}
        for w in (w for ref in self._weights if (w := ref()) is not None and not w.is_gone):
            members.setdefault(w.freshness, []).append(w)
        several: dict[Hashable, list[Freshness]] = {}
        for f, weights in members.items():
            exact = f if len(weights) == len(f.weights) else f.split(weights)
            several.setdefault(exact.alike(), []).append(exact)
        return list(map(Freshness.joined, several.values()))

    def written(self) -> None:
        """Note that a compiled update has written the copies; those whose slot had no scale yet stay stale."""
        for f in self.freshness():
            f.written()
            if f.state is not None and not f.state.warm:
                for w in f.weights:
                    w.stay_stale_without_scale()

    def end_step(self) -> None:
        """End a training step of these copies."""
        for f in self.freshness():
            f.end_step()

    def invalidate(self) -> None:
        """Mark the copies as stale."""
        for f in self.freshness():
            f.invalidate()
