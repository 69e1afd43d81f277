"""The delayed-scaling state of a module, saved and loaded by slot name: what `fp8pass.state(model)` returns.

Collects the slots that belong to a module's tensors from all compiled graphs, under their names in that module.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8pass.base import scaling
from fp8pass.base.errors import Fp8Error
from fp8pass.base.fields import nearest
from fp8pass.base.module_tensors import ids_of, named_tensors
from fp8pass.base.names import MATMULS, parts_of, without_wrappers
from fp8pass.gpu.here import in_use
from fp8pass.gpu.here import load as load_target
from fp8pass.gpu.machine_file import from_json, to_json
from fp8pass.gpu.target import Target
from fp8pass.options.unmatched import names_of
from fp8pass.states.amax_reduction import finish
from fp8pass.states.slots import PARTS, Entry, InstanceState, registry

if TYPE_CHECKING:  # a caller that has a Metadata has imported this already
    from torch.distributed.checkpoint.metadata import Metadata

log = logging.getLogger(__name__)

RECIPE, STEPS, TARGET = "recipe", "steps", "target"
"""Keys of a state dict that do not belong to a slot."""
# torch.distributed.checkpoint loads into tensors whose size is known before the text is
_RECIPE_BYTES, _TARGET_BYTES = 512, 1024
AND = " and "
_WHAT = "pass what `fp8pass.state(model).state_dict()` returned"


@dataclass
class _Loaded:
    """The state that `load_state_dict` got; graphs that are compiled later are restored from it."""

    entries: dict[str, Entry]
    recipe: str
    strict: bool
    steps: int


class State:
    """The delayed-scaling state of a module, by slot name. Stateful: `state_dict()`, `load_state_dict()`.

    Each slot, such as `layers.0.mlp.up.weight`, has three plain tensors: `....scale` f32[] (0 until the slot has seen
    data), `....amax_history` f32[H], newest first, and `....amax` f32[], the running amax of the current step (-1:
    nothing recorded). The state dict also has `steps` i64[], the training steps so far, `recipe` u8[512], the recipe's
    text, and on GPUs `target` u8[1024], the GPU figures that decided what runs in FP8: a run that loads the
    state before its first call decides by these, unless the option `target` or `machine` names others.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._loaded = _Loaded({}, "", True, 0)
        self._steps = 0

    @property
    def module(self) -> nn.Module | None:
        """The module that the state belongs to; None once the module is gone."""
        return self._module()

    @property
    def slots(self) -> list[str]:
        """The names of all slots, sorted."""
        return sorted(self._entries())

    @property
    def recipe(self) -> str:
        """The text of the recipes that the state belongs to, without the length of histories; "" if not known."""
        return self._recipe()

    @property
    def steps(self) -> int:
        """The number of training steps that the module has begun, including the steps before a load."""
        return max((self._steps, *(state.tracker.step for state in self._states())))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as plain tensors, which `torch.load` loads with weights_only=True.

        `torch.distributed.checkpoint.load` fills the returned tensors in place: before the first call, pass it
        `as_saved(...)` instead.

        Returns:
            Copies of the tensors, of fixed sizes: see `State`. {} before the first call.
        """
        finish()  # a reduction under way writes its result to the slots only now
        entries = sorted(self._entries().items())
        slots = {f"{name}.{part}": entry[part] for name, entry in entries for part in PARTS}
        if not slots and not self.steps:  # as before the first call: a checkpoint then gets no keys of FP8
            return {}
        state_dict = {**slots, STEPS: torch.tensor(self.steps), RECIPE: as_tensor(self._recipe())}
        if target := self._target():
            state_dict[TARGET] = as_tensor(target, _TARGET_BYTES)
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> None:
        """Restore a state that `state_dict` returned, before or after the first call of the compiled module.

        A history of another length keeps its newest entries. Checks that need the module's slots are made at the first
        call if the module has not been called yet. Slots that the first step does not use are kept, because a later
        step may use them, and named in a warning after that step.

        Args:
            state_dict: Tensors by name, as `state_dict` returns them.
            strict: If False, the slots that fit are loaded and the others named in a warning; under another recipe,
                scales are recomputed from the histories.

        Raises:
            Fp8Error: If keys do not belong to a slot, slots are incomplete or of wrong sizes, or values are such as
                training never leaves (NaN, for example). With `strict` also if the state lacks slots of the module, has
                slots of layers that the module lacks (once the module has been trained: any slots that the module
                lacks), or was saved under another recipe. The message lists the keys, slots or values.
        """
        finish()  # an all-reduce of amaxes under way would otherwise write its result over the loaded state
        entries = entries_of(state_dict)
        saved = as_text(state_dict[RECIPE]) if RECIPE in state_dict else ""
        steps = int(state_dict[STEPS]) if STEPS in state_dict else 0
        check_values(entries, steps, freezes=not saved or "on_nonfinite='freeze'" in saved)
        if not state_dict:
            log.warning(
                "an empty FP8 state is loaded; if one was saved with torch.distributed.checkpoint, load "
                "fp8pass.state(model).as_saved(metadata), or call the model once, with gradients, before that"
            )
        located = self._located()
        slots = {name for _, names in located for name in names}
        entries = _regrouped(entries, slots)
        missing, extra = sorted(slots - set(entries)), sorted(set(entries) - slots)
        trained = any(state.table.training for state, _ in located)
        module = self._module()
        unknown = _unknown(entries, module) if module is not None and not trained else ""
        if strict:
            if unknown:
                raise Fp8Error(
                    f"the saved FP8 state has slots of layers that {type(module).__name__} does not have: {unknown}. "
                    "Load it into the model that it was saved from, or load the part that fits, with strict=False."
                )
            check_recipe(saved, self._own_recipe())
            if missing or (extra and trained):
                raise Fp8Error(
                    f"the saved FP8 state does not fit this model. Missing slots: {missing}. Unexpected slots: {extra}."
                    " Load it into the model and recipe that it was saved from, or the part that fits, with "
                    "strict=False."
                )
        elif missing or (extra and trained):
            log.warning("the loaded FP8 state lacks %s; its slots %s are left out", missing, extra)
            entries = {name: entry for name, entry in entries.items() if name in slots or not trained}
        elif unknown:
            log.warning(
                "the loaded FP8 state has slots of layers that the model does not have, which are left out: %s", unknown
            )
        # only now, after all checks: a load that raises leaves the target, the counts and the slots as they were
        if TARGET in state_dict:
            load_target(_target_in(as_text(state_dict[TARGET])))
        self._steps = steps
        for state in self._states():
            state.tracker.reset_to(self._steps)
        self._loaded = _Loaded(entries, saved, strict, self._steps)
        for state, names in located:
            self._write(state, names, entries, saved)
        _newly_loaded.add(self)

    def begin_with(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load another state's `state_dict`, not strictly, before the module itself has any state."""
        self._steps = int(state_dict[STEPS])
        saved = as_text(state_dict[RECIPE])
        self._loaded = _Loaded(entries_of(state_dict), saved, strict=False, steps=self._steps)

    def warn_of_unused(self, state: InstanceState) -> None:
        """Warn of loaded slots that the first step after the load did not use; they are kept, as a later step may."""
        if state.tracker.steps <= self._steps or not any(state is s for s in self._states()):
            return
        _newly_loaded.discard(self)
        used = {name for _, names in self._located() for name in names}
        if unused := sorted(set(self._loaded.entries) - used):
            log.warning(
                "the loaded FP8 state has slots that the first step did not use: %s. They are kept for later steps; if "
                "a filter or a recipe now leaves these layers out, they have no effect",
                ", ".join(unused),
            )

    def __reduce_ex__(self, _: Any) -> Any:
        """Raise TypeError with the call that saves the state: a State belongs to its module."""
        raise TypeError(
            "a State belongs to its module, and can't be copied or pickled: save fp8pass.state(model).state_dict(), a "
            "dict of tensors, and load that with fp8pass.state(model).load_state_dict(...)"
        )

    def as_saved(self, metadata: Metadata, key: str = "fp8", strict: bool = True) -> SavedState:
        """Return an object that `torch.distributed.checkpoint.load` can load this state into before the first call.

        Before the first call this state does not know its slots; the checkpoint's metadata names them. Saved histories
        may have another length.

        Args:
            metadata: The checkpoint's metadata, as its reader's `read_metadata()` returns it.
            key: The key that the state was saved under, the names of nested dicts joined by dots.
            strict: As in `load_state_dict`.

        Returns:
            A `SavedState` with tensors of the saved sizes, which loads them into this state.

        Raises:
            Fp8Error: If no state was saved under `key`.
        """
        sizes = metadata.state_dict_metadata
        prefix = f"{key}."
        if f"{prefix}{RECIPE}" not in sizes:
            raise Fp8Error(f"the checkpoint has no FP8 state under {key!r}; pass the key that it was saved under")
        empty = {
            name.removeprefix(prefix): torch.empty(size.size, dtype=size.properties.dtype)  # type: ignore[union-attr]
            for name, size in sizes.items()
            if name.startswith(prefix)
        }
        return SavedState(self, empty, strict)

    def _write(self, state: InstanceState, names: Mapping[str, str], entries: Mapping[str, Entry], saved: str) -> None:
        by_inner = {inner: entries[name] for name, inner in names.items() if name in entries}
        # scales that another recipe computed, with another margin for example, do not fit this one; histories do
        state.write(by_inner, anew=bool(saved) and not _is_among(recipe_text([state]), saved))

    def _target(self) -> str:
        """Return the text of the target that was last compiled for, on the GPU of the module; "" if there is none."""
        module = self._module()
        tensors = [] if module is None else [x for _, x in named_tensors(module)]
        target = in_use(tensors[0].device) if tensors else None
        return "" if target is None else to_json(target)

    def _recipe(self) -> str:
        return self._own_recipe() or self._loaded.recipe

    def _own_recipe(self) -> str:
        """Return the text of the recipes that the module is trained with; "" if they are not known yet."""
        return recipe_text(self._states())

    def _states(self) -> list[InstanceState]:
        """Return all instance states of the module, oldest first, including those without slots."""
        module = self._module()
        ids = ids_of(module) if module is not None else set()
        states = (s for s in registry.states() if s.table.remembers)
        return [s for s in states if any(id(t) in ids for t in s.owned_tensors())]

    def _located(self) -> list[tuple[InstanceState, dict[str, str]]]:
        """Return the instance states with slots, oldest first, each with {name in this module: name in the graph}.

        If two graphs give different slots one name, as two halves of a forward may, the later graph's are numbered.
        """
        taken: dict[str, Any] = {}
        located = []
        module = self._module()
        for state in self._states():
            inner = names_in(module, state)
            if inner:
                keys = dict(zip(state.table.names, state.keys, strict=True))
                located.append((state, {_free_name(name, keys[n], taken): n for n, name in inner.items()}))
        return located

    @torch.no_grad()
    def _entries(self) -> dict[str, Entry]:
        """Return the entries by slot name; for a slot of several graphs, the entry of the graph trained last.

        Graphs of evaluation come first, because they only read.
        """
        entries = {name: {p: x.clone() for p, x in entry.items()} for name, entry in self._loaded.entries.items()}
        located = sorted(self._located(), key=lambda pair: (pair[0].table.training, pair[0].tracker.last_used_at))
        for state, names in located:
            read = state.read()
            entries.update({name: read[inner] for name, inner in names.items()})
        return entries

    def restore(self, state: InstanceState) -> None:
        """Restore the loaded entries into an instance state that was made after `load_state_dict`.

        Raises:
            Fp8Error: If the entries were loaded with `strict` and do not fit the instance state.
        """
        if any(state is s for s in self._states()):
            state.tracker.raise_to(self._steps, self._steps)
        loaded = self._loaded
        if not loaded.entries:
            return
        # one, or none if the state has no slots in this module
        for names in [names for located, names in self._located() if located is state]:
            loaded.entries = _regrouped(loaded.entries, set(names))
            several = [name for name in names if f"{name}~1" in loaded.entries or "~" in name]
            if several:
                log.warning(
                    "%s: several graphs use these slot names, and take the loaded states in the order in which they "
                    "first run: run them in the order of the run that saved them",
                    ", ".join(several),
                )
            absent = [name for name in names if name not in loaded.entries]
            # a graph that first runs in a later step, as in a phase of a schedule, had not run in the saved run either
            if loaded.strict and state.table.training and self.steps <= loaded.steps + 1:
                check_recipe(loaded.recipe, recipe_text([state]))
                if absent:
                    raise Fp8Error(
                        f"the loaded FP8 state does not fit this model. Missing slots: {absent}. Load it into the "
                        "model and recipe that it was saved from, or the part that fits, with strict=False."
                    )
            elif absent:
                log.warning("the loaded FP8 state lacks %s; they begin without history", ", ".join(absent))
            self._write(state, names, loaded.entries, loaded.recipe)


class SavedState:
    """Empty tensors of a checkpoint's sizes, to be filled and loaded: see `State.as_saved`. Stateful, too."""

    def __init__(self, state: State, empty: dict[str, Tensor], strict: bool) -> None:
        self._state, self._empty, self._strict = state, empty, strict

    def state_dict(self) -> dict[str, Tensor]:
        """Return uninitialized tensors of the saved sizes, by key."""
        return dict(self._empty)

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load the filled tensors into the state: see `State.load_state_dict`."""
        self._state.load_state_dict(state_dict, self._strict)


def names_in(module: nn.Module | None, state: InstanceState) -> dict[str, str]:
    """Return {name in the graph: name in `module`} for the instance state's slots that belong to the module.

    A slot with a parameter is renamed as its parameter is; the others are renamed as most of the parameters are.
    """
    renames, usual = _renames(module, state)
    slots = zip(state.table.names, state.table.anchors, strict=True)
    pairs = ((name, usual if anchor < 0 else renames[anchor]) for name, anchor in slots)
    return {n: _renamed(n, rename, state) for n, rename in pairs if rename and n.startswith(rename.drop)}


def usual_name(module: nn.Module, state: InstanceState, name: str) -> str | None:
    """Return a graph's `name` as the module has it, renamed as most parameters are; None if it owns none of them."""
    _, usual = _renames(module, state)
    return None if usual is None else _renamed(name, usual, state)


def _renamed(name: str, rename: _Rename, state: InstanceState) -> str:
    """Return the name in the module for `name` in a graph.

    In a graph whose root has a parameter "weight", as a compiled `nn.Linear` has, slots are named "weight.input"; in a
    larger module they are named as in its own graphs, "head.input".
    """
    is_part = rename.add and not rename.drop
    return rename(name.removeprefix("weight.") if is_part and "weight" in state.table.owned else name)


def _renames(module: nn.Module | None, state: InstanceState) -> tuple[list[_Rename | None], _Rename | None]:
    """Return for each of the instance's tensors the rename from graph to module, and the most common rename.

    A tensor that the module does not have gets None; so does the most common rename if the module has none of them.
    """
    paths: dict[int, list[str]] = {}
    if module is not None:
        for path, tensor in named_tensors(module):
            paths.setdefault(id(tensor), []).append(without_wrappers(path))
    renames = [
        _rename(relative, paths[id(tensor)]) if id(tensor) in paths else None
        for tensor, relative in zip(state.owned_tensors(), state.table.owned, strict=True)
    ]
    votes = Counter(filter(None, renames))
    return renames, votes.most_common(1)[0][0] if votes else None


def recipe_text(states: Sequence[InstanceState]) -> str:
    """Return the text of the instance states' recipes without the length of their histories, which may change."""
    recipes = (s.table.delayed for s in states if s.table.names)
    return AND.join(
        sorted({repr(replace(recipe, amax_history_len=type(recipe).amax_history_len)) for recipe in recipes})
    )


def check_recipe(saved: str, current: str) -> None:
    """Raise Fp8Error if a model has a recipe that its state was not saved under. Both: a result of `recipe_text`."""
    if saved and current and not _is_among(current, saved):
        raise Fp8Error(
            f"the FP8 state was saved under {saved}, and this model is trained with {current}. Load it with "
            "strict=False to keep its histories and recompute scales, or train with the recipe that it was saved under."
        )


def _is_among(current: str, saved: str) -> bool:
    """Return whether all recipes of `current` are in `saved`; True if `saved` was cut at 512 bytes."""
    cut = len(saved.encode()) > _RECIPE_BYTES - 4  # `as_text` loses up to 3 bytes of a character that was cut
    return cut or set(current.split(AND)) <= set(saved.split(AND))


def as_tensor(text: str, size: int = _RECIPE_BYTES) -> Tensor:
    """Encode the text as u8[size]: cut, or padded with zeros."""
    return torch.tensor(list(text.encode()[:size].ljust(size, b"\0")), dtype=torch.uint8)


def as_text(encoded: Tensor) -> str:
    """Decode what `as_tensor` returned."""
    return bytes(encoded.tolist()).rstrip(b"\0").decode(errors="ignore")  # the cut may be within a character


def _target_in(text: str) -> Target:
    """Return the target that a state was saved under. Raises Fp8Error if the text does not describe one."""
    try:
        return from_json(text, f"{TARGET!r} in the saved FP8 state")
    except ValueError as error:
        raise Fp8Error(f"{error}; leave {TARGET!r} out of the state dict to decide by the GPU that is there") from None


@dataclass(frozen=True)
class _Rename:
    add: str = ""
    drop: str = ""

    def __call__(self, name: str) -> str:
        rest = name.removeprefix(self.drop)
        # a matmul that is named by its op, in the graph of a function that is passed a parameter
        is_apart = self.add and not self.add.endswith(".") and not rest.startswith(".")
        return f"{self.add}.{rest}" if is_apart else self.add + rest


def _rename(relative: str, paths: Sequence[str]) -> _Rename:
    """Return the rename of a parameter's name in the graph to one of its paths in the module.

    Takes the first path that ends with the name, or that the name ends with; otherwise renames the layer whole.
    """
    for path in paths:
        if path == relative or path.endswith(f".{relative}"):
            return _Rename(add=path[: len(path) - len(relative)])
        if relative.endswith(f".{path}"):
            return _Rename(drop=relative[: len(relative) - len(path)])
    stem = relative.removesuffix(".weight")
    return _Rename(drop=stem, add=paths[0].removesuffix(".weight"))


def _free_name(name: str, key: Any, taken: dict[str, Any]) -> str:
    """Return `name`, numbered if a slot with another key has taken it; take it for `key`."""
    number = 0
    while taken.setdefault(f"{name}~{number}" if number else name, key) != key:
        number += 1
    return f"{name}~{number}" if number else name


def entries_of(state_dict: Mapping[str, Tensor]) -> dict[str, Entry]:
    """Return the slots of a state dict. Raises Fp8Error if it is not the state dict of a `State`."""
    if not isinstance(state_dict, Mapping) or not all(isinstance(value, Tensor) for value in state_dict.values()):
        raise Fp8Error(f"the FP8 state to load is not a dict of tensors, but {_kind_of(state_dict)}; {_WHAT}")
    entries: dict[str, Entry] = {}
    for key, value in state_dict.items():
        name, _, part = key.rpartition(".")
        if key in (RECIPE, STEPS, TARGET):
            continue
        if part not in PARTS:
            raise Fp8Error(f"{key!r} is not FP8 state: keys end in {', '.join(PARTS)}; {_WHAT}")
        entries.setdefault(name, {})[part] = value.detach().clone()
    for name, entry in entries.items():
        if set(entry) != set(PARTS):
            raise Fp8Error(f"slot {name!r} lacks {sorted(set(PARTS) - set(entry))}; {_WHAT}")
    dims = {"scale": 0, "amax_history": 1, "amax": 0}
    wrong = [f"{n}.{p} {list(x.shape)}" for n, e in entries.items() for p, x in e.items() if x.dim() != dims[p]]
    if wrong:
        sizes = "scale and amax are f32[], a history f32[H]"
        raise Fp8Error(f"wrong sizes in the saved FP8 state: {', '.join(wrong)}; {sizes}; {_WHAT}")
    return entries


def _kind_of(x: object) -> str:
    if not isinstance(x, Mapping):
        return f"a {type(x).__name__}"
    name, value = next((name, value) for name, value in x.items() if not isinstance(value, Tensor))
    return f"has a {type(value).__name__} as {name!r}"


def check_values(entries: Mapping[str, Entry], steps: int, freezes: bool) -> None:
    """Raise Fp8Error for values that training never leaves.

    freezes: on_nonfinite="freeze" is possible, so amaxes and histories may hold NaN and inf.
    """
    wrong = [f"{STEPS} {steps}"] if steps < 0 else []
    for name, entry in entries.items():
        for part, x in entry.items():
            # ~(x < 0) is true for NaN
            is_right = ~(x < 0) if freezes and part != "scale" else (x >= 0) & x.isfinite()
            if part == "amax":
                is_right |= x == scaling.NOTHING
            wrong += [f"{name}.{part} {number}" for number in x[~is_right].flatten()[:1].tolist()]
    if wrong:
        shown = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise Fp8Error(
            f"wrong values in the saved FP8 state: {shown}; scales and amaxes are finite and 0 or more, a missing amax "
            "is -1, and only on_nonfinite='freeze' leaves NaN and inf in amaxes. Load another checkpoint"
        )


def _unknown(entries: Mapping[str, Entry], module: nn.Module) -> str:
    """Return a text that lists slots whose layer the module lacks, with the nearest layer's name; "" if none do."""
    names = names_of(module)
    absent = [slot for slot in entries if not has_layers_of(slot, names)]
    listed = [f"{slot}{nearest(_layers_of(slot)[0], names)}" for slot in absent[:3]]
    return "; ".join(listed) + (f"; and {len(absent) - 3} more" if len(absent) > 3 else "")


def has_layers_of(slot: str, names: Set[str]) -> bool:
    """Return whether a module has the layers of a slot. names: those of the module, see `names_of`."""
    return all(layer in names or layer.rpartition(".")[2] in MATMULS for layer in _layers_of(slot))


def _layers_of(slot: str) -> list[str]:
    return [part.rpartition(".")[0] for part in parts_of(slot)]


def _regrouped(entries: dict[str, Entry], wanted: Set[str]) -> dict[str, Entry]:
    """Return the entries under the `wanted` names if layers that were separate are merged now, or the reverse.

    A merged slot gets the largest amaxes of its parts; a part gets the state of the merged slot, because its own is
    not known.
    """
    merged = {part: name for name in entries for part in parts_of(name) if part != name}
    regrouped: dict[str, Entry] = {}
    used: set[str] = set()
    for name in sorted(wanted - set(entries)):
        parts = parts_of(name)
        sources = [part for part in (*parts, merged.get(name)) if part in entries]
        if not name.rpartition(".")[2].startswith("input") and name not in merged and len(sources) < len(parts):
            continue  # a part that is not saved may have the largest amax; all parts have one input, saved once
        if sources:
            regrouped[name] = _together([entries[source] for source in sources])
            used.update(sources)
    if regrouped:
        log.warning("the loaded FP8 state has %s; %s begin with that", ", ".join(sorted(used)), ", ".join(regrouped))
    return {**{name: entry for name, entry in entries.items() if name not in used}, **regrouped}


def _together(entries: Sequence[Entry]) -> Entry:
    """Merge the states of several tensors into one: the smallest scale that is not 0, the largest amaxes."""
    histories = [entry["amax_history"] for entry in entries]
    length = max(map(len, histories))
    scales = torch.stack([entry["scale"] for entry in entries])
    return {
        "scale": scales[scales > 0].min() if (scales > 0).any() else torch.zeros(()),
        "amax_history": torch.stack([scaling.resized_history(h, length) for h in histories]).amax(0),
        "amax": torch.stack([entry["amax"] for entry in entries]).amax(),
    }


# a State refers weakly to its module: a strong reference from the value would keep the key alive
_of_modules: weakref.WeakKeyDictionary[nn.Module, State] = weakref.WeakKeyDictionary()

_newly_loaded: weakref.WeakSet[State] = weakref.WeakSet()
"""The `State`s that were loaded and have not ended a step since."""


def state_of(module: nn.Module) -> State:
    """Return the module's state, the same object each time."""
    with registry.lock:
        _listen()
        return _of_modules.setdefault(module, State(module))


@functools.cache
def _listen() -> None:
    """Let the registry tell of new instance states, and of steps, from now on."""
    registry.on_new.insert(0, _restore)  # first: a state gets what was loaded before others read it
    registry.on_step.append(_warn_of_unused)


def _warn_of_unused(state: InstanceState) -> None:
    for of_module in list(_newly_loaded):  # a copy: the call may remove the State
        of_module.warn_of_unused(state)


def _restore(state: InstanceState) -> None:
    for of_module in list(_of_modules.values()):
        of_module.restore(state)
