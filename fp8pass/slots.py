"""Delayed-scaling state: who owns it, where it lives, how it is saved.

A compiled graph has T slots, one per quantized tensor, named by module path and role (`layers.0.mlp.up.weight`). Dynamo
reuses one compiled graph for every instance of a class, so a graph owns no state: it takes the state tensors as inputs,
and `StateRegistry.of` picks them at each call by the identity of the tensors that the instance owns.

`state(model)` gathers whatever belongs to a module's tensors, under the names that they have in that module.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass import scaling
from fp8pass.errors import Fp8Error
from fp8pass.ops import SlotTensors
from fp8pass.recipes import DelayedScaling

log = logging.getLogger(__name__)

Entry = dict[str, Tensor]
PARTS = ("scale", "amax_history", "amax")
"""What an `Entry`, the state of one slot, consists of: f32[], f32[H] and f32[]."""

_clock = itertools.count(1)


@dataclass(frozen=True)
class SlotTable:
    """The slots of one compiled graph: what its state looks like, for whichever instance.

    names: T slots, those of forward tensors first; n_forward: F; fp8_max: largest value of each slot's format.
    owned: paths, relative to the graph's root, of the inputs that belong to the instance: parameters, or else buffers.
    anchors: for each slot the position in `owned` of the parameter that it goes with, or -1 if it goes with none.
    places: the user's line of each slot's matmul, "" if the slot is of a parameter itself.
    training: whether the graph records at all.
    """

    names: tuple[str, ...]
    n_forward: int
    fp8_max: tuple[float, ...]
    recipe: DelayedScaling
    device: torch.device
    owned: tuple[str, ...]
    anchors: tuple[int, ...]
    places: tuple[str, ...]
    training: bool

    def new_tensors(self) -> SlotTensors:
        """State without history: see `SlotTensors`."""
        total, forward, device = len(self.names), self.n_forward, self.device
        return SlotTensors(
            scale=torch.zeros(total, device=device),
            amax_history=torch.zeros(self.recipe.amax_history_len, total, device=device),
            amax_forward=torch.full((forward,), scaling.NOTHING, device=device),
            amax_backward=torch.full((total - forward,), scaling.NOTHING, device=device),
            held=torch.zeros(total, dtype=torch.bool, device=device),
        )


@dataclass(eq=False)
class SlotGroup:
    """The state of one instance for one slot table."""

    table: SlotTable
    owned: tuple[weakref.ref[Tensor], ...]
    tensors: SlotTensors
    relatives: weakref.WeakSet[SlotGroup] = field(default_factory=weakref.WeakSet)
    """Groups of other graphs that hold some of the same slots: of evaluation, or of a second entry point."""
    used: int = 0
    """When this group's graph was last called in training, by `_clock`."""
    seen: int = 0
    """The newest `used` of a relative that this group has taken in."""
    warm: bool = False
    """No slot is cold; once true, the device is not asked again."""
    cold_steps: int = 0

    def keys(self) -> list[tuple[Any, ...]]:
        """What identifies each slot, whatever graph it is in.

        A parameter is one tensor wherever it is used. What it is multiplied with is another tensor at another line of
        the user's: two halves of a forward may call one layer on very different inputs.
        """
        table, ids = self.table, tuple(map(id, self.owned_tensors()))
        rows = zip(table.names, table.anchors, table.places, strict=True)
        return [
            (table.recipe, place, ids[anchor], name.rpartition(".")[2])
            if anchor >= 0
            else (table.recipe, place, ids, name)
            for name, anchor, place in rows
        ]

    def owned_tensors(self) -> list[Tensor | None]:
        """The instance's tensors, None where they are gone."""
        return [ref() for ref in self.owned]

    def alive(self) -> bool:
        """Whether the instance that this is the state of still exists."""
        return all(ref() is not None for ref in self.owned)

    def cold(self) -> list[str]:
        """The slots that will have no scale in the step that begins now. Waits for the device."""
        amax = self.amax()
        cold = (self.tensors.scale == 0) & ~(torch.isfinite(amax) & (amax > 0))
        names = [name for name, is_cold in zip(self.table.names, cold.tolist(), strict=True) if is_cold]
        self.warm = not names
        self.cold_steps += bool(names)
        return names

    def amax(self) -> Tensor:
        """The running amax of all slots, a copy: f32[T]."""
        return torch.cat([self.tensors.amax_forward, self.tensors.amax_backward])

    def begin(self) -> None:
        """Before every call: bring in what other graphs have learnt since about the slots they share with this one."""
        newer = [r for r in self.relatives if r.used > self.seen]
        for other in sorted(newer, key=lambda r: r.used):
            self._take(other)
            self.seen = other.used
            self.warm &= other.warm
        if self.table.training:
            self.used = self.seen = next(_clock)

    @torch.no_grad()
    def _take(self, other: SlotGroup) -> None:
        """Copy scale and history of the common slots; a running amax moves over to the one that will roll it."""
        theirs = {key: i for i, key in enumerate(other.keys())}
        pairs = [(i, theirs[key]) for i, key in enumerate(self.keys()) if key in theirs]
        mine_, theirs_ = torch.tensor(pairs, device=self.table.device).unbind(1)
        self.tensors.scale[mine_] = other.tensors.scale[theirs_]
        self.tensors.amax_history[:, mine_] = other.tensors.amax_history[:, theirs_]
        if self.table.training:
            amax, their_amax = self.amax(), other.amax()
            amax[mine_] = torch.maximum(amax[mine_], their_amax[theirs_])
            their_amax[theirs_] = scaling.NOTHING
            self._set_amax(amax)
            other._set_amax(their_amax)

    def _set_amax(self, amax: Tensor) -> None:
        self.tensors.amax_forward.copy_(amax[: self.table.n_forward])
        self.tensors.amax_backward.copy_(amax[self.table.n_forward :])

    def read(self) -> dict[str, Entry]:
        """The entries of all slots, copied."""
        t, amax = self.tensors, self.amax()
        columns = zip(self.table.names, t.scale.clone(), t.amax_history.t().clone(), amax, strict=True)
        return {name: dict(zip(PARTS, parts, strict=True)) for name, *parts in columns}

    @torch.no_grad()
    def write(self, entries: Mapping[str, Entry]) -> None:
        """Set slots. A history of another length keeps its newest entries, and the scale then follows from them."""
        t, amax = self.tensors, self.amax()
        for slot, name in enumerate(self.table.names):
            if name in entries:
                scale, history, amax[slot] = (entries[name][part].to(t.scale.device) for part in PARTS)
                if len(history) != len(t.amax_history):
                    history = _resized(history, len(t.amax_history))
                    scale = self._scale_of(history, slot, scale)
                t.scale[slot], t.amax_history[:, slot] = scale, history
        self._set_amax(amax)
        self.warm, self.cold_steps = False, 0

    def _scale_of(self, history: Tensor, slot: int, keep: Tensor) -> Tensor:
        recipe = self.table.recipe
        amax = scaling.amax_of_history(history.unsqueeze(1), recipe.amax_compute_algo)[0]
        return scaling.scale_from_amax(amax, self.table.fp8_max[slot], keep, recipe.margin)


def _resized(history: Tensor, length: int) -> Tensor:
    return torch.cat([history[:length], history.new_zeros(max(0, length - len(history)))])


class StateRegistry:
    """All state of the process. One lock: backends may be called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._groups: list[SlotGroup] = []
        self._of: dict[tuple[int, ...], tuple[SlotTable, SlotGroup]] = {}
        self._states: weakref.WeakKeyDictionary[nn.Module, State] = weakref.WeakKeyDictionary()

    def of(self, table: SlotTable, owned: Sequence[Tensor]) -> SlotGroup:
        """The state of the instance that owns these tensors, for a graph with this table."""
        key = (id(table), *map(id, owned))
        found = self._of.get(key)
        if found is None or not _same(found[1], owned):
            with self._lock:
                found = self._of[key] = (table, self._find(table, owned) or self._create(table, owned))
        return found[1]

    def _find(self, table: SlotTable, owned: Sequence[Tensor]) -> SlotGroup | None:
        """The group of another compilation of the same code, for another batch size say."""
        return next((g for g in self._groups if _same(g, owned) and g.table == table), None)

    def _create(self, table: SlotTable, owned: Sequence[Tensor]) -> SlotGroup:
        self._groups = [g for g in self._groups if g.alive()]
        self._of = {key: (t, g) for key, (t, g) in self._of.items() if g.alive()}
        with torch.no_grad(), torch.inference_mode(False):
            group = SlotGroup(table, tuple(map(weakref.ref, owned)), table.new_tensors())
        keys = set(group.keys())
        for other in self._groups:
            if keys & set(other.keys()):
                group.relatives.add(other)
                other.relatives.add(group)
        self._groups.append(group)
        for state in list(self._states.values()):
            state._restore(group)
        return group

    def groups(self) -> list[SlotGroup]:
        """All groups whose instances still exist, oldest first."""
        with self._lock:
            return [g for g in self._groups if g.alive()]

    def state(self, module: nn.Module) -> State:
        """The one State of a module."""
        with self._lock:
            return self._states.setdefault(module, State(module))


def _same(group: SlotGroup, owned: Sequence[Tensor]) -> bool:
    return len(group.owned) == len(owned) and all(r() is t for r, t in zip(group.owned, owned, strict=True))


registry = StateRegistry()


class State:
    """The delayed-scaling state of a module, by slot name. Stateful: `state_dict()`, `load_state_dict()`.

    Each slot, `layers.0.mlp.up.weight` say, has three plain tensors: `....scale` f32[] (0 until the slot has seen
    data), `....amax_history` f32[H], newest first, and `....amax` f32[], what the running step has recorded (-1:
    nothing).
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._unclaimed: dict[str, Entry] = {}

    @property
    def slots(self) -> list[str]:
        """The names of all slots, sorted."""
        return sorted(self._entries())

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors, copied: `{slot}.scale`, `{slot}.amax_history`, `{slot}.amax`. Loads with weights_only=True."""
        return {f"{name}.{part}": entry[part] for name, entry in sorted(self._entries().items()) for part in PARTS}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned, before or after the first call of the compiled module.

        Raises Fp8Error for keys that are no slot's, for slots that are incomplete, and for slots that the module has
        and the saved state has not; once the module has been trained, also the other way round. A history of another
        length keeps its newest entries.
        """
        entries = _entries_of(state_dict)
        located = self._located()
        known = {name for _, names in located for name in names}
        missing, extra = sorted(known - set(entries)), sorted(set(entries) - known)
        if missing or (extra and any(group.table.training for group, _ in located)):
            raise Fp8Error(
                f"the saved FP8 state does not fit this model. Missing slots: {missing}. Unexpected slots: {extra}. "
                "Load it into the model and recipe that it was saved from."
            )
        self._unclaimed = {name: entries[name] for name in extra}
        for group, names in located:
            group.write({inner: entries[name] for name, inner in names.items()})

    def _located(self) -> list[tuple[SlotGroup, dict[str, str]]]:
        """The groups that belong to this module, oldest first, with {name in this module: name in the group}.

        Where two graphs give different slots one name, as two halves of a forward may, the later one's are numbered.
        """
        taken: dict[str, Any] = {}
        located = []
        for group in registry.groups():
            inner = self._names(group)
            if inner:
                keys = dict(zip(group.table.names, group.keys(), strict=True))
                located.append((group, {_free_name(name, keys[n], taken): n for n, name in inner.items()}))
        return located

    def _names(self, group: SlotGroup) -> dict[str, str]:
        """{name in the group: name in this module} of the group's slots that belong to this module.

        A slot that goes with a parameter is named after the parameter; the others follow most of the parameters.
        """
        module = self._module()
        paths: dict[int, list[str]] = {}
        if module is not None:
            tensors = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
            for path, tensor in itertools.chain(*tensors):
                paths.setdefault(id(tensor), []).append(path)
        renames = [
            _rename(relative, paths[id(mine)]) if id(mine) in paths else None
            for mine, relative in zip(group.owned_tensors(), group.table.owned, strict=True)
        ]
        votes = Counter(filter(None, renames))
        if not votes:
            return {}
        usual = votes.most_common(1)[0][0]
        slots = zip(group.table.names, group.table.anchors, strict=True)
        pairs = ((name, usual if anchor < 0 else renames[anchor]) for name, anchor in slots)
        return {name: rename(name) for name, rename in pairs if rename and name.startswith(rename.drop)}

    @torch.no_grad()
    def _entries(self) -> dict[str, Entry]:
        """Of a slot that several graphs have, the entry of the one trained last; evaluation only ever reads."""
        entries = dict(self._unclaimed)
        for group, names in sorted(self._located(), key=lambda pair: (pair[0].table.training, pair[0].used)):
            read = group.read()
            entries.update({name: read[inner] for name, inner in names.items()})
        return entries

    def _restore(self, group: SlotGroup) -> None:
        """Give a group that is made after `load_state_dict` what was loaded for it."""
        if not self._unclaimed:
            return
        for located, names in self._located():
            if located is group:
                absent = [name for name in names if name not in self._unclaimed]
                if absent:
                    log.warning(
                        "the loaded FP8 state has nothing for %s; they begin without history", ", ".join(absent)
                    )
                group.write({inner: self._unclaimed[n] for n, inner in names.items() if n in self._unclaimed})
                if group.table.training:
                    self._unclaimed = {n: e for n, e in self._unclaimed.items() if n not in names}


@dataclass(frozen=True)
class _Rename:
    add: str = ""
    drop: str = ""

    def __call__(self, name: str) -> str:
        return self.add + name.removeprefix(self.drop)


def _rename(relative: str, paths: Sequence[str]) -> _Rename:
    """What makes of a parameter's name in the graph one of its paths in the module: the one that ends alike."""
    for path in paths:
        if path == relative or path.endswith(f".{relative}"):
            return _Rename(add=path[: len(path) - len(relative)])
        if relative.endswith(f".{path}"):
            return _Rename(drop=relative[: len(relative) - len(path)])
    stem = relative.removesuffix(".weight")
    return _Rename(drop=stem, add=paths[0].removesuffix(".weight"))


def _free_name(name: str, key: Any, taken: dict[str, Any]) -> str:
    number = 0
    while taken.setdefault(f"{name}~{number}" if number else name, key) != key:
        number += 1
    return f"{name}~{number}" if number else name


def _entries_of(state_dict: Mapping[str, Tensor]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for key, value in state_dict.items():
        name, _, part = key.rpartition(".")
        if part not in PARTS:
            raise Fp8Error(f"{key!r} is no FP8 state: keys end in {', '.join(PARTS)}")
        entries.setdefault(name, {})[part] = value.detach().clone()
    for name, entry in entries.items():
        if set(entry) != set(PARTS):
            raise Fp8Error(f"slot {name!r} lacks {sorted(set(PARTS) - set(entry))}")
    return entries


def state(module: Any) -> State:
    """The delayed-scaling state of a module, compiled or not; the same object each time.

    Exists, and can be loaded, before the first call. Raises TypeError for what is not a module.
    """
    module = getattr(module, "_orig_mod", module)
    if not isinstance(module, nn.Module):
        raise TypeError(f"state() takes a module or a compiled module, not {type(module).__name__}")
    return registry.state(module)
