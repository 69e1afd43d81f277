"""Delayed-scaling state: who owns it, where it lives, how it is saved.

A compiled graph has T slots, one per quantized tensor, named by module path and role (`layers.0.mlp.up.weight`). Dynamo
reuses one compiled graph for every instance of a class, so a graph owns no state: it takes the state tensors as inputs,
and `StateRegistry.of` picks them at each call by the identity of the parameters that the graph is called with.

`state(model)` gathers whatever belongs to a module's parameters, under the names that they have in that module.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass import scaling
from fp8pass.errors import Fp8Error
from fp8pass.ops import SlotTensors
from fp8pass.recipes import DelayedScaling

log = logging.getLogger(__name__)

_PARTS = ("scale", "amax_history", "amax")
_clock = itertools.count(1)


@dataclass(frozen=True)
class SlotTable:
    """The slots of one compiled graph: what its state looks like, for whichever instance.

    names: T slots, those of forward tensors first; n_forward: F; fp8_max: largest value of each slot's format.
    parameters: the name of each parameter input relative to the graph's root, in input order.
    """

    names: tuple[str, ...]
    n_forward: int
    fp8_max: tuple[float, ...]
    recipe: DelayedScaling
    device: torch.device
    parameters: tuple[str, ...]

    def new_tensors(self) -> SlotTensors:
        """State without history: see `SlotTensors`."""
        total, forward, device = len(self.names), self.n_forward, self.device

        def stamps(n: int) -> Tensor:
            return torch.full((n,), -1, dtype=torch.int64, device=device)

        return SlotTensors(
            scale=torch.zeros(total, device=device),
            amax_history=torch.zeros(self.recipe.amax_history_len, total, device=device),
            step=torch.zeros((), dtype=torch.int64, device=device),
            amax_forward=torch.zeros(forward, device=device),
            stamp_forward=stamps(forward),
            amax_backward=torch.zeros(total - forward, device=device),
            stamp_backward=stamps(total - forward),
        )


@dataclass(eq=False)
class SlotGroup:
    """The state of one instance for one slot table."""

    table: SlotTable
    parameters: tuple[weakref.ref[Tensor], ...]
    owner: weakref.ref[object]
    tensors: SlotTensors
    relatives: list[SlotGroup] = field(default_factory=list)
    """Groups of other graphs that hold some of the same slots: a second entry point of the model, say."""
    last_used: int = 0
    warm: bool = False
    """All slots that see data have history, so that the compiled graph needs no first step any more."""
    cold_steps: int = 0
    cold_slots: int = -1

    def cold(self) -> list[str]:
        """Slots that were used in the last step, or never yet, and have no scale after it. Waits for the device."""
        t = self.tensors
        amax, stamp = self._pending()
        will_have = (stamp == t.step) & torch.isfinite(amax) & (amax > 0)
        missing = (t.scale == 0) & ~will_have & ((stamp == t.step) | (t.step == 0))
        return [name for name, cold in zip(self.table.names, missing.tolist(), strict=True) if cold]

    def _pending(self) -> tuple[Tensor, Tensor]:
        t = self.tensors
        return torch.cat([t.amax_forward, t.amax_backward]), torch.cat([t.stamp_forward, t.stamp_backward])

    @torch.no_grad()
    def claim(self) -> None:
        """Bring in what other graphs have learnt since about the slots that they share with this one."""
        newer = [r for r in self.relatives if r.last_used > self.last_used]
        for other in sorted(newer, key=lambda r: r.last_used):
            for name in set(self.table.names) & set(other.table.names):
                self.write(name, other.take(name), merge=True)
            self.warm &= other.warm
        self.last_used = next(_clock)

    def read(self, name: str) -> dict[str, Tensor]:
        """The entry of one slot: scale f32[], amax_history f32[H], amax f32[] (-1 where the step holds none)."""
        t, slot = self.tensors, self.table.names.index(name)
        amax, stamp = self._pending()
        pending = torch.where(stamp[slot] == t.step, amax[slot], -1.0)
        return {"scale": t.scale[slot].clone(), "amax_history": t.amax_history[:, slot].clone(), "amax": pending}

    def take(self, name: str) -> dict[str, Tensor]:
        """`read`, and forget the pending amax, which then belongs to the reader."""
        entry = self.read(name)
        _, stamp, index = self._side(self.table.names.index(name))
        stamp[index] = -1
        return entry

    def write(self, name: str, entry: Mapping[str, Tensor], merge: bool = False) -> None:
        """Set one slot's entry; `merge` keeps the larger of both pending amaxes.

        A history of another length keeps its newest entries, and the scale then follows from them.
        """
        t, slot = self.tensors, self.table.names.index(name)
        history, length = entry["amax_history"].to(t.scale.device), t.amax_history.shape[0]
        scale = entry["scale"].to(t.scale.device)
        if len(history) != length:
            history = torch.cat([history[:length], history.new_zeros(max(0, length - len(history)))])
            recipe = self.table.recipe
            amax = scaling.amax_of_history(history.unsqueeze(1), recipe.amax_compute_algo)[0]
            scale = scaling.scale_from_amax(amax, self.table.fp8_max[slot], scale, recipe.margin)
        t.scale[slot] = scale
        t.amax_history[:, slot] = history
        amax, stamp, index = self._side(slot)
        new = entry["amax"].to(t.scale.device)
        if merge:
            mine = torch.where(stamp[index] == t.step, amax[index], -1.0)
            new = torch.maximum(new, mine)
        amax[index] = new
        stamp[index] = torch.where(new < 0, t.step - 1, t.step)  # NaN counts as recorded

    def _side(self, slot: int) -> tuple[Tensor, Tensor, int]:
        t, forward = self.tensors, self.table.n_forward
        if slot < forward:
            return t.amax_forward, t.stamp_forward, slot
        return t.amax_backward, t.stamp_backward, slot - forward

    def alive(self) -> bool:
        """Whether the instance that this is the state of still exists."""
        return all(p() is not None for p in self.parameters or (self.owner,))


class StateRegistry:
    """All state of the process. One lock: backends may be called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[tuple[Any, ...], SlotGroup] = {}
        self._states: weakref.WeakSet[State] = weakref.WeakSet()

    def of(self, table: SlotTable, owner: object, parameters: Sequence[Tensor]) -> SlotGroup:
        """The state of the instance that has these parameters; of `owner`, the graph, where there are none."""
        key = (table.names, table.recipe, table.device, *(map(id, parameters) if parameters else (id(owner),)))
        group = self._groups.get(key)
        if group is not None and all(r() is p for r, p in zip(group.parameters, parameters, strict=True)):
            return group
        with self._lock:
            return self._create(key, table, owner, parameters)

    def _create(self, key: tuple[Any, ...], table: SlotTable, owner: object, parameters: Sequence[Tensor]) -> SlotGroup:
        self._groups = {k: g for k, g in self._groups.items() if g.alive()}
        with torch.no_grad(), torch.inference_mode(False):
            refs = tuple(map(weakref.ref, parameters))
            group = SlotGroup(table, refs, weakref.ref(owner), table.new_tensors())
        mine = set(map(id, parameters))
        for other in self._groups.values():
            if mine & {id(p()) for p in other.parameters} and set(table.names) & set(other.table.names):
                group.relatives.append(other)
                other.relatives.append(group)
        self._groups[key] = group
        for state in self._states:
            state._restore(group)
        return group

    def groups(self) -> list[SlotGroup]:
        """All groups whose instances still exist, oldest first."""
        with self._lock:
            return [g for g in self._groups.values() if g.alive()]

    def register(self, state: State) -> None:
        """Let `state` restore groups that are made later."""
        with self._lock:
            self._states.add(state)


registry = StateRegistry()
_state_of: weakref.WeakKeyDictionary[nn.Module, State] = weakref.WeakKeyDictionary()


class State:
    """The delayed-scaling state of a module, by slot name. Stateful: `state_dict()`, `load_state_dict()`.

    Each slot, `layers.0.mlp.up.weight` say, has three plain tensors: `....scale` f32[] (0 until the slot has seen
    data), `....amax_history` f32[H], newest first, and `....amax` f32[], what the running step has recorded (-1:
    nothing).
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._unclaimed: dict[str, dict[str, Tensor]] = {}
        registry.register(self)

    @property
    def slots(self) -> list[str]:
        """The names of all slots, sorted."""
        return sorted(self._entries())

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors, copied: `{slot}.scale`, `{slot}.amax_history`, `{slot}.amax`. Loads with weights_only=True."""
        return {f"{name}.{part}": entry[part] for name, entry in sorted(self._entries().items()) for part in _PARTS}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned, before or after the first call of the compiled module.

        Raises Fp8Error for keys that are no slot's, for slots that are incomplete, and, once the module has been
        compiled and called, for slots that it does not have or that are missing. A history of another length keeps its
        newest entries.
        """
        entries = _entries_of(state_dict)
        known = {name for _, name, _ in self._located()}
        if known and known != set(entries):
            missing, extra = sorted(known - set(entries)), sorted(set(entries) - known)
            raise Fp8Error(
                f"the saved FP8 state does not fit this model. Missing slots: {missing}. Unexpected slots: {extra}. "
                "Load it into the model and recipe that it was saved from."
            )
        self._unclaimed = entries
        for group in registry.groups():
            self._restore(group)

    def _located(self) -> Iterator[tuple[SlotGroup, str, str]]:
        """(group, name of the slot in this module, name in the group), the least recently used group first."""
        for group in sorted(registry.groups(), key=lambda g: g.last_used):
            prefix = self._prefix(group)
            if prefix is not None:
                for name in group.table.names:
                    if name.startswith(prefix.drop):
                        yield group, prefix(name), name

    def _prefix(self, group: SlotGroup) -> _Rename | None:
        """How the group's names read in this module; None if the group belongs to another one."""
        module = self._module()
        if module is None or not group.parameters:
            return None
        names: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        for ref, relative in zip(group.parameters, group.table.parameters, strict=True):
            for name in names.get(id(ref()), ()):
                if name == relative or name.endswith(f".{relative}"):
                    return _Rename(add=name[: len(name) - len(relative)])
                if relative.endswith(f".{name}"):
                    return _Rename(drop=relative[: len(relative) - len(name)])
        return None

    @torch.no_grad()
    def _entries(self) -> dict[str, dict[str, Tensor]]:
        entries = dict(self._unclaimed)
        entries.update({name: group.read(inner) for group, name, inner in self._located()})
        return entries

    @torch.no_grad()
    def _restore(self, group: SlotGroup) -> None:
        rename = self._prefix(group) if self._unclaimed else None
        if rename is None:
            return
        group.tensors.step.clamp_(min=1)  # the saved run had begun a step
        for inner in group.table.names:
            entry = self._unclaimed.pop(rename(inner), None)
            if entry is not None:
                group.write(inner, entry)
        group.warm, group.cold_steps, group.cold_slots = False, 0, -1


@dataclass(frozen=True)
class _Rename:
    add: str = ""
    drop: str = ""

    def __call__(self, name: str) -> str:
        return self.add + name.removeprefix(self.drop)


def _entries_of(state_dict: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    entries: dict[str, dict[str, Tensor]] = {}
    for key, value in state_dict.items():
        name, _, part = key.rpartition(".")
        if part not in _PARTS:
            raise Fp8Error(f"{key!r} is no FP8 state: keys end in {', '.join(_PARTS)}")
        entries.setdefault(name, {})[part] = value.detach().clone()
    for name, entry in entries.items():
        if set(entry) != set(_PARTS):
            raise Fp8Error(f"slot {name!r} lacks {sorted(set(_PARTS) - set(entry))}")
    return entries


def state(module: Any) -> State:
    """The delayed-scaling state of a module, compiled or not; the same object each time.

    Exists, and can be loaded, before the first call. Raises TypeError for what is not a module.
    """
    module = getattr(module, "_orig_mod", module)
    if not isinstance(module, nn.Module):
        raise TypeError(f"state() takes a module or a compiled module, not {type(module).__name__}")
    if module not in _state_of:
        _state_of[module] = State(module)
    return _state_of[module]
