"""State of delayed and static scaling: which instance owns which tensors. `checkpoint.py` saves them.

A compiled graph has T slots, one per quantized tensor, named by module path and role (`layers.0.mlp.up.weight`). Dynamo
reuses one compiled graph for every instance of a class, so a graph owns no state: it takes the state tensors as inputs,
and `StateRegistry.of` picks them at each call by the identity of the tensors that the instance owns.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fp8pass.base import scaling
from fp8pass.options.config import Reduction
from fp8pass.quant import ops
from fp8pass.quant.ops import SlotTensors
from fp8pass.recipes import DelayedScaling, StaticScaling, next_scale_of
from fp8pass.states.reduction_state import ReductionState
from fp8pass.states.step_tracker import StepTracker

SlotKind = Literal["forward", "weight", "gradient"]
"""Slots of tensors quantized in the forward, of weights whose FP8 copies are cached, of gradients: in this order."""
Entry = dict[str, Tensor]
PARTS = ("scale", "amax_history", "amax")
"""The keys of an `Entry`, the state of one slot: f32[], f32[H] and f32[]."""


@dataclass(frozen=True)
class SlotTable:
    """The slots of one compiled graph: the layout of its state, the same for every instance.

    names: the T slots, in order: F forward tensors, W weights whose FP8 copies are cached, then gradients. n_forward:
    F; n_weights: W; fp8_max: the largest value of each slot's format.
    owned: paths, relative to the graph's root, of the inputs that belong to the instance: its parameters, or its
    buffers if it has no parameters.
    anchors: for each slot, the position in `owned` of the parameter that it goes with; -1 if it goes with none.
    source_lines: for each slot, the user's source line of its matmul; "" if the slot belongs to a parameter itself.
    training: True if the graph records amaxes. records: for each slot, True if the graph records its amax; a slot that
    is not recorded never gets a history.
    code: identifies the compiled code in a table without slots. reduces: how ranks share the amaxes; None if they do
    not share them.
    """

    names: tuple[str, ...]
    n_forward: int
    fp8_max: tuple[float, ...]
    recipe: DelayedScaling | StaticScaling
    device: torch.device
    owned: tuple[str, ...]
    anchors: tuple[int, ...]
    source_lines: tuple[str, ...]
    training: bool
    records: tuple[bool, ...] = ()
    code: str = ""
    n_weights: int = 0
    reduces: Reduction | None = None

    @classmethod
    def counter(cls, owned: tuple[str, ...], code: str) -> SlotTable:
        """Return a table without slots, whose states only count steps."""
        return cls((), 0, (), DelayedScaling(), torch.device("cpu"), owned, (), (), training=True, code=code)

    @property
    def delayed(self) -> DelayedScaling:
        """The recipe of a table of delayed scaling."""
        assert isinstance(self.recipe, DelayedScaling), self.recipe
        return self.recipe

    @property
    def remembers(self) -> bool:
        """True if the slots have an amax history; False if they only have a scale."""
        return isinstance(self.recipe, DelayedScaling)

    @functools.cached_property
    def limits(self) -> tuple[tuple[float, int], ...]:
        """The largest values of the slots' formats, and how many slots in a row have each."""
        return tuple((limit, len(list(slots))) for limit, slots in itertools.groupby(self.fp8_max))

    def kind_of(self, slot: int) -> SlotKind:
        """Return the kind of the slot at a position."""
        if slot < self.n_forward:
            return "forward"
        return "weight" if slot < self.n_forward + self.n_weights else "gradient"

    def new_tensors(self) -> SlotTensors:
        """Return the tensors of a state without history: see `SlotTensors`."""
        return SlotTensors(*map(self.new_tensor, SlotTensors._fields))

    def new_tensor(self, name: str) -> Tensor:
        """Return one of the tensors of a state without history. name: a field of `SlotTensors`."""
        total, forward, weights = len(self.names), self.n_forward, self.n_weights
        shapes = {
            "scale": (total,),
            "amax_history": (self.delayed.amax_history_len if self.remembers else 0, total),
            "amax_forward": (forward,),
            "amax_backward": (total - forward - weights,),
            "held": (total,),
            "amax_weights": (weights,),
            "weight_copy_scales": (2, weights),
        }
        is_amax = name in ("amax_forward", "amax_backward", "amax_weights")
        value, dtype = scaling.NOTHING if is_amax else 0, torch.bool if name == "held" else torch.float32
        return torch.full(shapes[name], value, dtype=dtype, device=self.device)


@dataclass(eq=False)  # hashed by identity: states are keys of dicts and members of weak sets
class InstanceState:
    """The state of one instance for one slot table: owns the tensors.

    Only this file writes the fields, except `owners`, `derived` and `counted`.
    """

    table: SlotTable
    owned: tuple[weakref.ref[Tensor], ...]
    tensors: SlotTensors
    gone: list[weakref.ref[Tensor]] = field(default_factory=list)
    """Those of `owned` whose tensors no longer exist."""
    relatives: weakref.WeakSet[InstanceState] = field(default_factory=weakref.WeakSet)
    """The states for other graphs that share slots with this one: an evaluation graph, or a second entry point."""
    neighbours: weakref.WeakSet[InstanceState] = field(default_factory=weakref.WeakSet)
    """The states for other graphs that share owned tensors with this one."""
    tracker: StepTracker = field(default_factory=StepTracker)
    """The steps that the instance has begun with the graph."""
    reduction: ReductionState = field(default_factory=ReductionState)
    """Tracks which recorded amaxes must be reduced over ranks."""
    warm: bool = False
    """True if no slot is cold (without a scale). Once True, the device is not asked again."""
    cold_names: frozenset[str] | None = None
    """The slots that were cold when the device was last asked; None if it was never asked."""
    cold_since: int | None = None
    """The first step in which a slot was found cold."""
    loads: int = 0
    """Number of times that `write` has set slots."""
    held: tuple[bool, ...] = ()
    """The value of `tensors.held`; () if all are False."""
    held_on_device: dict[tuple[bool, ...], Tensor] = field(default_factory=dict)
    """A copy on the device of each value that `held` has had."""
    recompute_buffers: SlotTensors | None = None
    """The buffers that `for_repetition` returns; None until it is called."""
    owners: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    """Modules that the tensors of the instance are known to belong to."""
    derived: dict[Hashable, Any] = field(default_factory=dict)
    """Tensors that graphs' inputs have computed from the state and the parameters; each input has its own key."""
    counted: Any = None
    """The statistics that a graph counts into, with a method `saved`; only in the state of a table without slots."""

    @property
    def reduces(self) -> Reduction | None:
        """The reduction by which ranks share the amaxes; None if they do not share them.

        A pipeline stage that only this rank has is not reduced over the default group, whose other ranks lack it.
        """
        reduces = self.table.reduces
        return None if reduces is not None and reduces.group is None and self.tracker.has_rank_of_its_own else reduces

    @functools.cached_property
    def keys(self) -> list[tuple[Any, ...]]:
        """A key for each slot that is the same in all graphs of the instance.

        A parameter is one tensor wherever it is used, so its key has no source line. The other operand of its matmul
        is a different tensor at each source line: two parts of a forward may call one layer on very different inputs.
        """
        table, ids = self.table, self.owned_ids
        # each step looks up all keys: an int is hashed at once, a recipe hashes all its fields
        recipe = _numbers.setdefault(table.recipe, len(_numbers))
        rows = zip(table.names, table.anchors, table.source_lines, strict=True)
        return [
            (recipe, line, ids[anchor], name.rpartition(".")[2]) if anchor >= 0 else (recipe, line, ids, name)
            for name, anchor, line in rows
        ]

    @functools.cached_property
    def owned_ids(self) -> tuple[int, ...]:
        """The ids of the tensors of the instance, valid while it exists."""
        return tuple(map(id, self.owned_tensors()))

    @functools.cached_property
    def graph_key(self) -> Hashable:
        """The key of a graph and its instance."""
        return (self.table.names, self.table.code, *self.owned_ids)

    @functools.cached_property
    def all_keys(self) -> frozenset[Hashable]:
        """The keys of the slots and of the graph."""
        return frozenset({*self.keys, self.graph_key})

    def owned_tensors(self) -> list[Tensor | None]:
        """Return the tensors of the instance, with None for those that no longer exist."""
        return [ref() for ref in self.owned]

    def alive(self) -> bool:
        """Return whether the instance still exists."""
        return not self.gone

    def cold(self) -> list[str]:
        """Return the names of the slots without a scale in the current step. Synchronizes with the device."""
        cold = (self._rolled_scale() == 0).tolist()
        rows = zip(self.table.names, cold, self.table.records, strict=True)
        names = [name for name, is_cold, records in rows if is_cold and records]
        self.warm, self.cold_names = not names, frozenset(names)
        if names and self.cold_since is None:
            self.cold_since = self.tracker.steps
        return names

    @torch.no_grad()
    def _rolled_scale(self) -> Tensor:
        """Return a number for each slot, f32[T], that is 0 if the slot will have no scale after the next roll.

        A recorded amax alone is not enough for a scale: the history may hold a NaN, for example.
        """
        t = self.tensors
        if not self.table.remembers:
            return t.scale
        # a held slot does not roll, so its running amax gives it no scale yet
        recipe, amax = self.table.delayed, torch.where(t.held, scaling.NOTHING, self.amax())
        # 1 for fp8_max: the scales are only compared with 0
        scale, _ = scaling.roll_history(
            t.scale, t.amax_history, amax, torch.ones_like(amax), next_scale=next_scale_of(recipe)
        )
        return scale

    def has_scale(self, slot: int) -> bool:
        """Return whether the slot is known to have a scale. Does not ask the device."""
        return self.warm or (self.cold_names is not None and self.table.names[slot] not in self.cold_names)

    @property
    def cold_steps(self) -> int:
        """Number of steps since a slot was first found cold, plus the forwards that still await a backward."""
        if self.cold_since is None:
            return 0
        return self.tracker.steps - self.cold_since + 1 + self.tracker.forwards_awaiting_backward

    def take(self, scale: Tensor, amax_history: Tensor, amax: Tensor) -> None:
        """Replace the tensors of a step, f32[T], f32[H, T], f32[T]. For tables that have only forward slots."""
        self.tensors = self.tensors._replace(scale=scale, amax_history=amax_history, amax_forward=amax)

    def assume_scales(self) -> None:
        """Assume that every slot has a scale, where there is no device to ask."""
        self.warm = True

    def relate(self, relatives: Iterable[InstanceState], neighbours: Iterable[InstanceState]) -> None:
        """Set the states that share slots (`relatives`) or owned tensors (`neighbours`) with this one."""
        self.relatives, self.neighbours = weakref.WeakSet(relatives), weakref.WeakSet(neighbours)

    def forget_copies(self) -> None:
        """Drop everything that can be computed again from the tensors."""
        self.recompute_buffers = None
        self.derived.clear()

    def hold_all(self, holds: bool) -> None:
        """Mark all slots, or none, as ones whose step continues: see `hold`."""
        if holds or self.held:
            self.hold([holds] * len(self.table.names))

    def hold(self, held: Sequence[bool]) -> None:
        """Mark the slots whose step continues, so that their history does not roll at the next call.

        held: a flag for each slot; () for none.
        """
        held = tuple(held) if any(held) else ()
        if held != self.held:
            self.held = held
            # kept on the device: a copy from pageable CPU memory synchronizes, here twice in each accumulated step
            if held not in self.held_on_device:
                flags = held or [False] * len(self.table.names)
                self.held_on_device[held] = torch.tensor(flags, device=self.table.device)
            self.tensors.held.copy_(self.held_on_device[held])

    @property
    def rolls(self) -> bool:
        """True if any slot rolls at the next call."""
        return not self.held or not all(self.held)

    def holds(self, slot: int) -> bool:
        """Return whether the step of the slot continues, so that it does not roll."""
        return bool(self.held) and self.held[slot]

    @torch.no_grad()
    def begin_trained_step(self, begin: Callable[[InstanceState], None]) -> None:
        """Roll the slots that this state, of an evaluation graph, shares with the state of the graph that trains.

        Called before a no-grad forward that belongs to a training step. begin: decides which slots roll.
        """
        newest = self._trained()
        if newest is None:
            begin(self)
            if self.table.remembers:
                self.roll()  # rolls loaded state; `begin_repeated` rolls the part that the training graph has
        else:
            begin(newest)
            *tensors, amax_weights, weight_copy_scales = newest.tensors
            # the op takes the last two only if the table has cached weights
            of_weights = (amax_weights, weight_copy_scales) if len(amax_weights) else ()
            ops.begin_step(newest.table.delayed, *tensors, *of_weights, limits=newest.table.limits)
            newest.tracker.use_elsewhere()  # later than the last sync, so that `begin` copies the rolled slots

    def begin_step(self, joins: bool = False) -> None:
        """Begin a step with this graph. joins: True if another graph of the instance has already begun it."""
        self.tracker.begin(self._trackers_around(), joins)

    def _trackers_around(self) -> list[StepTracker]:
        if not len(self.neighbours):
            return []
        with registry.lock:
            return [s.tracker for s in self.neighbours]

    def begin_repeated(self) -> None:
        """Roll before a repeated forward if it is the graph's first call, so that its step began without the graph."""
        if self.table.training and not self.tracker.last_used_at:
            self.roll()
            self.tracker.begin_repeated(self._trackers_around())

    @torch.no_grad()
    def roll(self) -> None:
        """Roll all slots without running a forward.

        Merges no amaxes of cached weights: the forward that reads the cached copies records those.
        """
        self.hold(())  # all slots roll, whatever the last forward has held
        *tensors, amax_weights, weight_copy_scales = self.tensors
        nothing = torch.full_like(weight_copy_scales, scaling.NOTHING)
        of_weights = (amax_weights, nothing) if len(amax_weights) else ()
        ops.begin_step(self.table.delayed, *tensors, *of_weights, limits=self.table.limits)

    def for_repetition(self) -> SlotTensors:
        """Return the tensors for a forward that the backward repeats: no slot rolls, and its amaxes are discarded.

        The buffers keep their addresses, because CUDA graphs would otherwise be recorded for every repetition. A graph
        that does not record saves the scales themselves for its backward, so each of its calls gets new buffers.
        """
        t = self.tensors
        if self.recompute_buffers is None or not self.table.training:
            self.recompute_buffers = t._replace(
                scale=t.scale.clone(),
                amax_forward=torch.empty_like(t.amax_forward),
                amax_weights=torch.empty_like(t.amax_weights),
                held=torch.ones_like(t.held),
            )
        self.recompute_buffers.scale.copy_(t.scale)
        for amax in (self.recompute_buffers.amax_forward, self.recompute_buffers.amax_weights):
            amax.fill_(scaling.NOTHING)
        return self.recompute_buffers

    def for_shape_inference(self) -> SlotTensors:
        """Return the tensors of `for_repetition`, for a forward whose backward must not record amaxes either."""
        # `for_repetition` keeps `amax_backward`: the backward of a repetition is the one that counts
        return self.for_repetition()._replace(
            amax_backward=torch.full_like(self.tensors.amax_backward, scaling.NOTHING)
        )

    def catch_up(self) -> bool:
        """Return whether the repeated forward first ran without gradients, and so has recorded nothing yet.

        Counts that forward as repeated.
        """
        return any(s.tracker.take_recompute() for s in (self, *self._live_relatives()))

    def _live_relatives(self) -> list[InstanceState]:
        if not len(self.relatives):
            return []
        with registry.lock:  # another thread may add a state during the iteration
            return list(self.relatives)

    def is_trained(self) -> bool:
        """Return whether no slot is cold in the graph that trains these slots."""
        trained = self._trained()
        return not self.table.remembers or (trained is not None and trained.warm)

    def _trained(self) -> InstanceState | None:
        """Return the most recently used state of a training graph that shares slots with this one."""
        return max(
            (r for r in self._live_relatives() if r.table.training), key=lambda r: r.tracker.last_used_at, default=None
        )

    def amax(self) -> Tensor:
        """Return a copy of the running amax of all slots, f32[T]."""
        return torch.cat(self._amaxes())

    def _amaxes(self) -> list[Tensor]:
        """Return the running amaxes in the order of the slots: f32[F], f32[W], f32[T-F-W]."""
        return [self.tensors.amax_forward, self.tensors.amax_weights, self.tensors.amax_backward]

    def begin(self) -> None:
        """Copy shared slots, before every call, from the states of other graphs that were used since."""
        newer = [r for r in self._live_relatives() if r.tracker.last_used_at > self.tracker.synced_at]
        # the latest one last, so that its values win
        for other in sorted(newer, key=lambda r: r.tracker.last_used_at):
            self._take(other)
            self.tracker.sync(other.tracker.last_used_at)
            self.warm &= other.warm  # a copied slot may still be cold there
            self.reduction.take(other.reduction)
        if self.table.training:
            self.tracker.use()

    @torch.no_grad()
    def _take(self, other: InstanceState) -> None:
        """Copy scale and history of the common slots, and move their running amax if this state will roll it."""
        here, there = self._common(other.keys)
        self.tensors.scale[here] = other.tensors.scale[there]
        self.tensors.amax_history[:, here] = other.tensors.amax_history[:, there]
        if self.table.training:
            amax, other_amax = self.amax(), other.amax()
            amax[here] = torch.maximum(amax[here], other_amax[there])
            # moved, not copied: the other graph would roll the same amax into a later step, too
            other_amax[there] = scaling.NOTHING
            self.set_amax(amax)
            other.set_amax(other_amax)

    def _common(self, keys: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Return the positions of the slots that are among `keys`: in this state, and in `keys`."""
        there = {key: i for i, key in enumerate(keys)}
        pairs = [(i, there[key]) for i, key in enumerate(self.keys) if key in there]
        # reshape: without pairs, the tensor has the shape [0]
        here, elsewhere = torch.tensor(pairs, device=self.table.device, dtype=torch.long).reshape(-1, 2).unbind(1)
        return here, elsewhere

    def copy_slots(self, keys: Sequence[Any], values: Tensor, into: Tensor) -> None:
        """Copy `values`, one for each of `keys`, to the positions of these slots in `into` f32[T]."""
        here, there = self._common(keys)
        into[here] = values[there]

    def set_amax(self, amax: Tensor) -> None:
        """Replace the running amax of all slots, f32[T]."""
        parts = self._amaxes()
        for part, new in zip(parts, torch.split(amax, [len(part) for part in parts]), strict=True):
            part.copy_(new)

    def fixed_scales(self) -> Tensor:
        """Return the scales of static scaling and their reciprocals, f32[2, T]: the same tensor at each call."""
        if "fixed_scales" not in self.derived:
            with torch.inference_mode(False), torch.no_grad():  # kept for calls outside of inference mode, too
                self.derived["fixed_scales"] = torch.stack([self.tensors.scale, self.tensors.scale.reciprocal()])
        scales: Tensor = self.derived["fixed_scales"]
        return scales

    def read(self) -> dict[str, Entry]:
        """Return copies of the entries of all slots."""
        t, amax = self.tensors, self.amax()
        columns = zip(self.table.names, t.scale.clone(), t.amax_history.t().clone(), amax, strict=True)
        return {name: dict(zip(PARTS, parts, strict=True)) for name, *parts in columns}

    @torch.no_grad()
    def write(self, entries: Mapping[str, Entry], anew: bool = False) -> None:
        """Set the slots that `entries` names. A history of another length keeps its newest entries.

        The scale is computed from the history if the length changed or if `anew`; otherwise it is copied.
        """
        # the tensors are written in place, not replaced: CUDA graphs hold their addresses
        t, amax = self.tensors, self.amax()
        for slot, name in enumerate(self.table.names):
            if name in entries:
                scale, history, amax[slot] = (entries[name][part].to(t.scale.device) for part in PARTS)
                if anew or len(history) != len(t.amax_history):
                    history = scaling.resized_history(history, len(t.amax_history))
                    scale = self._scale_of(history, slot, scale)
                t.scale[slot], t.amax_history[:, slot] = scale, history
        self.set_amax(amax)
        self.warm, self.cold_since, self.cold_names = False, None, None
        self.loads += 1

    def _scale_of(self, history: Tensor, slot: int, keep: Tensor) -> Tensor:
        limit = torch.full_like(history[:1], self.table.fp8_max[slot])
        return next_scale_of(self.table.delayed)(history.unsqueeze(1), keep.reshape(1), limit)[0]


_numbers: dict[DelayedScaling | StaticScaling, int] = {}
"""A number for each recipe: equal recipes have the same number."""


def new_state(table: SlotTable, owned: Sequence[Tensor]) -> InstanceState:
    """Return a state without history. owned: the tensors of its instance, which it does not keep alive."""
    # a weak reference whose tensor is freed appends itself to `gone`: so `alive` need not call them all at each call
    gone: list[weakref.ref[Tensor]] = []
    return InstanceState(table, tuple(weakref.ref(t, gone.append) for t in owned), table.new_tensors(), gone)


class StateRegistry:
    """All instance states of the process. One lock guards it: backends may be called from several threads."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.on_new: list[Callable[[InstanceState], None]] = []
        """Callbacks for every new state. If one raises, Fp8Error for example, the state is not kept."""
        self.on_step: list[Callable[[InstanceState], None]] = []
        """Callbacks for a state before each of its training forwards."""
        self.made = 0
        """The number of states that were ever made."""
        self._states: list[InstanceState] = []
        self._of: dict[tuple[int, ...], tuple[SlotTable, InstanceState]] = {}

    def of(self, table: SlotTable, owned: Sequence[Tensor]) -> InstanceState:
        """Return the state of the instance that owns these tensors, for a graph with this table."""
        key = (id(table), *map(id, owned))
        # read without the lock, once per call of a graph: a dict's lookup is atomic, and a stale entry is noticed below
        entry = self._of.get(key)
        # Python reuses the ids of freed objects: the entry keeps its table alive, and `alive` notices freed tensors
        if entry is None or not entry[1].alive():
            with self.lock:
                entry = self._of[key] = (table, self._find(table, owned) or self._create(table, owned))
        return entry[1]

    def _find(self, table: SlotTable, owned: Sequence[Tensor]) -> InstanceState | None:
        """Return the state of another compilation of the same code, as for another batch size; None if none."""
        return next((s for s in self._states if _same(s, owned) and s.table == table), None)

    def _create(self, table: SlotTable, owned: Sequence[Tensor]) -> InstanceState:
        # new objects instead of changes in place: `of` reads `_of` without the lock
        self._states = [s for s in self._states if s.alive()]
        self._of = {key: (t, s) for key, (t, s) in self._of.items() if s.alive()}
        # a tensor made in inference mode can't be written in place outside of it
        with torch.no_grad(), torch.inference_mode(False):
            state = new_state(table, owned)
        # other graphs may already have begun steps of this instance: count those before the current one here too
        state.tracker.raise_to(max(self.step_of(owned) - 1, 0), 0)
        keys, owned_ids = set(state.keys), set(map(id, owned))
        for other in self._states:
            if not owned_ids.isdisjoint(map(id, other.owned_tensors())):
                state.neighbours.add(other)
                other.neighbours.add(state)
            if keys & set(other.keys):
                state.relatives.add(other)
                other.relatives.add(state)
        self._states.append(state)
        self.made += 1
        try:
            for restore in self.on_new:
                restore(state)
        except BaseException:
            self._states.remove(state)  # the weak sets of the other states lose it when it is freed
            raise
        return state

    def step_of(self, owned: Sequence[Tensor]) -> int:
        """Return the largest number of steps that one graph has begun with some of these tensors."""
        owned_ids = set(map(id, owned))
        with self.lock:
            return max(
                (s.tracker.steps for s in self._states if any(id(t) in owned_ids for t in s.owned_tensors())), default=0
            )

    def drop(self, tables: Sequence[SlotTable]) -> None:
        """Drop the state of graphs with these tables, which will not be called again."""
        with self.lock:
            # by identity: another compilation of the same code has an equal table
            self.keep([s for s in self._states if not any(s.table is table for table in tables)])

    def keep(self, states: Sequence[InstanceState]) -> None:
        """Drop all states except these."""
        with self.lock:
            self._states, self._of = list(states), {}

    def states(self) -> list[InstanceState]:
        """Return all states whose instances still exist, oldest first."""
        with self.lock:
            return [s for s in self._states if s.alive()]


def _same(state: InstanceState, owned: Sequence[Tensor]) -> bool:
    return len(state.owned) == len(owned) and all(r() is t for r, t in zip(state.owned, owned, strict=True))


registry = StateRegistry()
