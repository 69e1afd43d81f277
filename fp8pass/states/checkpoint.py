"""`fp8pass.state(model)`: the delayed-scaling state of a module, saved and loaded by slot name.

Gathers whatever belongs to a module's tensors, in whichever graphs, under the names that it has in that module.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8pass import scaling
from fp8pass._torch import running_modules, unset_fake_temporarily
from fp8pass.errors import Fp8Error, warn_once
from fp8pass.fields import nearest
from fp8pass.module_tensors import ids_of, named_tensors, unwrapped
from fp8pass.names import MATMULS, parts_of, without_wrappers
from fp8pass.options.unmatched import names_of
from fp8pass.states.amax_reduction import finish
from fp8pass.states.slots import PARTS, Entry, SlotGroup, registry

if TYPE_CHECKING:  # whoever has some has imported it already
    from torch.distributed.checkpoint.metadata import Metadata

log = logging.getLogger(__name__)

RECIPE, STEPS = "recipe", "steps"
"""Keys of a state dict that belong to no slot."""
_RECIPE_BYTES = 512
AND = " and "
_WHAT = "pass what `fp8pass.state(model).state_dict()` returned"


@dataclass
class _Loaded:
    """What `load_state_dict` got; graphs that are made later take theirs from it."""

    entries: dict[str, Entry]
    recipe: str
    strict: bool
    steps: int


class State:
    """The delayed-scaling state of a module, by slot name. Stateful: `state_dict()`, `load_state_dict()`.

    Each slot, `layers.0.mlp.up.weight` say, has three plain tensors: `....scale` f32[] (0 until the slot has seen
    data), `....amax_history` f32[H], newest first, and `....amax` f32[], what the running step has recorded (-1:
    nothing). With them are saved `steps` i64[], the training steps so far, and `recipe` u8[512], its text.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._loaded = _Loaded({}, "", True, 0)
        self._steps = 0

    @property
    def module(self) -> nn.Module | None:
        """Whose state it is; None once that is gone."""
        return self._module()

    @property
    def slots(self) -> list[str]:
        """The names of all slots, sorted."""
        return sorted(self._entries())

    @property
    def steps(self) -> int:
        """The training steps that the module has begun, those before a load included."""
        return max((self._steps, *(group.tracker.step for group in self._groups())))

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors of fixed sizes, copied; {} before the first call. Loads with weights_only=True.

        `torch.distributed.checkpoint.load` fills what this returns: before the first call, give it `as_saved`.
        """
        finish()
        entries = sorted(self._entries().items())
        slots = {f"{name}.{part}": entry[part] for name, entry in entries for part in PARTS}
        if not slots and not self.steps:
            return {}
        return {**slots, STEPS: torch.tensor(self.steps), RECIPE: _as_tensor(self._recipe())}

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> None:
        """Restore what `state_dict` returned, before or after the first call of the compiled module.

        A history of another length keeps its newest entries. Raises Fp8Error, listing them, for keys that belong to no
        slot, for incomplete or wrong-sized slots, and for numbers that no training leaves: NaN, say. With `strict` also
        for slots of the module that the state lacks; for slots of layers that the module lacks, and once it has been
        trained for all slots that it lacks; and for a state of another recipe. What is not known before the first call
        is checked then; slots that the first step does not use are a warning after it, for a later step may. Without
        `strict` what fits is loaded, the rest is named in a warning, and where the recipe is another one scales are
        computed anew from the histories.
        """
        finish()  # what is on its way would come after what is loaded
        entries = _entries_of(state_dict)
        saved = _as_text(state_dict[RECIPE]) if RECIPE in state_dict else ""
        steps = int(state_dict[STEPS]) if STEPS in state_dict else 0
        _check_values(entries, steps, freezes=not saved or "on_nonfinite='freeze'" in saved)
        if not state_dict:
            log.warning(
                "an empty FP8 state is loaded; if one was saved with torch.distributed.checkpoint, load "
                "fp8pass.state(model).as_saved(metadata), or call the model once, with gradients, before that"
            )
        located = self._located()
        known = {name for _, names in located for name in names}
        entries = _regrouped(entries, known)
        missing, extra = sorted(known - set(entries)), sorted(set(entries) - known)
        trained = any(group.table.training for group, _ in located)
        module = self._module()
        unknown = _unknown(entries, module) if module is not None and not trained else ""
        if strict:
            if unknown:
                raise Fp8Error(
                    f"the saved FP8 state has slots of what {type(module).__name__} does not have: {unknown}. Load it "
                    "into the model that it was saved from, or with strict=False, what fits of it."
                )
            _check_recipe(saved, self._own_recipe())
            if missing or (extra and trained):
                raise Fp8Error(
                    f"the saved FP8 state does not fit this model. Missing slots: {missing}. Unexpected slots: {extra}."
                    " Load it into the model and recipe that it was saved from, or with strict=False, what fits of it."
                )
        elif missing or (extra and trained):
            log.warning("the loaded FP8 state has nothing for %s; of what it has, %s is left out", missing, extra)
            entries = {name: entry for name, entry in entries.items() if name in known or not trained}
        elif unknown:
            log.warning(
                "the loaded FP8 state has slots of what the model does not have, which are left out: %s", unknown
            )
        self._steps = steps
        for group in self._groups():
            group.tracker.reset_to(self._steps)
        self._loaded = _Loaded(entries, saved, strict, self._steps)
        for group, names in located:
            self._write(group, names, entries, saved)
        _unjudged.add(self)

    def begin_with(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take what another state's `state_dict` returned, before the module has any of its own."""
        self._steps = int(state_dict[STEPS])
        saved = _as_text(state_dict[RECIPE])
        self._loaded = _Loaded(_entries_of(state_dict), saved, strict=False, steps=self._steps)

    def judge(self, group: SlotGroup) -> None:
        """Once a step is over since the load: warn of slots that it did not use. A later one may, so they are kept."""
        if group.tracker.steps <= self._steps or not any(group is g for g in self._groups()):
            return
        _unjudged.discard(self)
        used = {name for _, names in self._located() for name in names}
        if unused := sorted(set(self._loaded.entries) - used):
            log.warning(
                "the loaded FP8 state has slots that the first step did not use: %s. They are kept for later steps; if "
                "a filter or a recipe now leaves these layers out, they have no effect",
                ", ".join(unused),
            )

    def __reduce_ex__(self, _: Any) -> Any:
        """Say what to save, or copy: this belongs to the module that is there."""
        raise TypeError(
            "a State belongs to its module, and can't be copied or pickled: save fp8pass.state(model).state_dict(), a "
            "dict of tensors, and load that with fp8pass.state(model).load_state_dict(...)"
        )

    def as_saved(self, metadata: Metadata, key: str = "fp8", strict: bool = True) -> Saved:
        """What `torch.distributed.checkpoint.load` takes for this state also before the first call.

        metadata: of the checkpoint, as its reader's `read_metadata()` returns it; it names the slots, which this state
        does not know yet. key: where the state was saved, the names of nested dicts joined by dots. Histories may have
        another length. Raises Fp8Error if no state was saved there.
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
        return Saved(self, empty, strict)

    def _write(self, group: SlotGroup, names: Mapping[str, str], entries: Mapping[str, Entry], saved: str) -> None:
        found = {inner: entries[name] for name, inner in names.items() if name in entries}
        group.write(found, anew=bool(saved) and not _is_among(_recipe_text([group]), saved))

    def _recipe(self) -> str:
        return self._own_recipe() or self._loaded.recipe

    def _own_recipe(self) -> str:
        """The text of the recipes that the module is trained with; "" if that is not known yet."""
        return _recipe_text(self._groups())

    def _groups(self) -> list[SlotGroup]:
        """All groups of the module, oldest first, those without slots included."""
        module = self._module()
        mine = ids_of(module) if module is not None else set()
        groups = (g for g in registry.groups() if g.table.remembers)
        return [g for g in groups if any(id(t) in mine for t in g.owned_tensors())]

    def _located(self) -> list[tuple[SlotGroup, dict[str, str]]]:
        """The groups that belong to this module, oldest first, with {name in this module: name in the group}.

        Where two graphs give different slots one name, as two halves of a forward may, the later one's are numbered.
        """
        taken: dict[str, Any] = {}
        located = []
        module = self._module()
        for group in self._groups():
            inner = names_in(module, group)
            if inner:
                keys = dict(zip(group.table.names, group.keys(), strict=True))
                located.append((group, {_free_name(name, keys[n], taken): n for n, name in inner.items()}))
        return located

    @torch.no_grad()
    def _entries(self) -> dict[str, Entry]:
        """Of a slot that several graphs have, the entry of the one trained last; evaluation only ever reads."""
        entries = {name: {p: x.clone() for p, x in entry.items()} for name, entry in self._loaded.entries.items()}
        located = sorted(self._located(), key=lambda of: (of[0].table.training, of[0].tracker.last_used_at))
        for group, names in located:
            read = group.read()
            entries.update({name: read[inner] for name, inner in names.items()})
        return entries

    def restore(self, group: SlotGroup) -> None:
        """Give a group that is made after `load_state_dict` what was loaded for it.

        Raises Fp8Error if that was to be strict, and does not fit.
        """
        if any(group is g for g in self._groups()):
            group.tracker.raise_to(self._steps, self._steps)
        loaded = self._loaded
        if not loaded.entries:
            return
        for names in [names for located, names in self._located() if located is group]:
            loaded.entries = _regrouped(loaded.entries, set(names))
            several = [name for name in names if f"{name}~1" in loaded.entries or "~" in name]
            if several:
                log.warning(
                    "%s: several graphs give these slots one name, and take the loaded states in the order in which "
                    "they run first; let that be the order of the run that saved them",
                    ", ".join(several),
                )
            absent = [name for name in names if name not in loaded.entries]
            # what begins in a later step, as a phase of a schedule may, the saved run had not begun either
            if loaded.strict and group.table.training and self.steps <= loaded.steps + 1:
                _check_recipe(loaded.recipe, _recipe_text([group]))
                if absent:
                    raise Fp8Error(
                        f"the loaded FP8 state does not fit this model. Missing slots: {absent}. Load it into the "
                        "model and recipe that it was saved from, or with strict=False, what fits of it."
                    )
            elif absent:
                log.warning("the loaded FP8 state has nothing for %s; they begin without history", ", ".join(absent))
            self._write(group, names, loaded.entries, loaded.recipe)


class Saved:
    """What a checkpoint has of a state, to be filled and loaded: see `State.as_saved`. Stateful, too."""

    def __init__(self, state: State, empty: dict[str, Tensor], strict: bool) -> None:
        self._state, self._empty, self._strict = state, empty, strict

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors of the saved sizes, with nothing in them yet."""
        return dict(self._empty)

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load them into the state."""
        self._state.load_state_dict(state_dict, self._strict)


def names_in(module: nn.Module | None, group: SlotGroup) -> dict[str, str]:
    """{name in the group: name in `module`} of the group's slots that belong to the module.

    A slot that goes with a parameter is named after the parameter; the others follow most of the parameters.
    """
    renames, usual = _renames(module, group)
    slots = zip(group.table.names, group.table.anchors, strict=True)
    pairs = ((name, usual if anchor < 0 else renames[anchor]) for name, anchor in slots)
    return {n: _renamed(n, rename, group) for n, rename in pairs if rename and n.startswith(rename.drop)}


def usual_name(module: nn.Module, group: SlotGroup, name: str) -> str | None:
    """What the module calls something of a graph; None if nothing of the graph belongs to it."""
    _, usual = _renames(module, group)
    return None if usual is None else _renamed(name, usual, group)


def _renamed(name: str, rename: _Rename, group: SlotGroup) -> str:
    """Return what the module calls something of a graph.

    In a graph whose root has a parameter "weight", as that of a compiled `nn.Linear`, slots are called "weight.input";
    in a larger module they are called as there, "head.input".
    """
    is_part = rename.add and not rename.drop
    return rename(name.removeprefix("weight.") if is_part and "weight" in group.table.owned else name)


def _renames(module: nn.Module | None, group: SlotGroup) -> tuple[list[_Rename | None], _Rename | None]:
    """For each of the instance's tensors what makes of its name in the graph that in the module; and for most."""
    paths: dict[int, list[str]] = {}
    if module is not None:
        for path, tensor in named_tensors(module):
            paths.setdefault(id(tensor), []).append(without_wrappers(path))
    renames = [
        _rename(relative, paths[id(mine)]) if id(mine) in paths else None
        for mine, relative in zip(group.owned_tensors(), group.table.owned, strict=True)
    ]
    votes = Counter(filter(None, renames))
    return renames, votes.most_common(1)[0][0] if votes else None


def _recipe_text(groups: Sequence[SlotGroup]) -> str:
    """The recipes of groups, but for the length of their histories, which may change."""
    recipes = (g.table.delayed for g in groups if g.table.names)
    return AND.join(sorted({repr(replace(recipe, amax_history_len=1024)) for recipe in recipes}))


def _check_recipe(saved: str, own: str) -> None:
    if saved and own and not _is_among(own, saved):
        raise Fp8Error(
            f"the FP8 state was saved under {saved}, and this model is trained with {own}. Load it with strict=False "
            "to keep its histories and compute scales anew, or train with the recipe that it was saved under."
        )


def _is_among(own: str, saved: str) -> bool:
    """Return whether all recipes of one text are in the other, which may have been cut."""
    cut = len(saved.encode()) >= _RECIPE_BYTES - 1
    return cut or set(own.split(AND)) <= set(saved.split(AND))


def _as_tensor(text: str) -> Tensor:
    """u8[512]."""
    return torch.tensor(list(text.encode()[:_RECIPE_BYTES].ljust(_RECIPE_BYTES, b"\0")), dtype=torch.uint8)


def _as_text(recipe: Tensor) -> str:
    return bytes(recipe.tolist()).rstrip(b"\0").decode(errors="ignore")


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
    """Return the slots of a state dict. Raises Fp8Error for what can't be one."""
    if not isinstance(state_dict, Mapping) or not all(isinstance(value, Tensor) for value in state_dict.values()):
        raise Fp8Error(f"the FP8 state to load is not a dict of tensors, but {_kind_of(state_dict)}; {_WHAT}")
    entries: dict[str, Entry] = {}
    for key, value in state_dict.items():
        name, _, part = key.rpartition(".")
        if key in (RECIPE, STEPS):
            continue
        if part not in PARTS:
            raise Fp8Error(f"{key!r} is no FP8 state: keys end in {', '.join(PARTS)}; {_WHAT}")
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


def _check_values(entries: Mapping[str, Entry], steps: int, freezes: bool) -> None:
    """Raise Fp8Error for numbers that no training leaves. freezes: amaxes that are not finite may be in a history."""
    wrong = [f"{STEPS} {steps}"] if steps < 0 else []
    for name, entry in entries.items():
        for part, x in entry.items():
            is_right = ~(x < 0) if freezes and part != "scale" else (x >= 0) & x.isfinite()
            if part == "amax":
                is_right |= x == scaling.NOTHING
            wrong += [f"{name}.{part} {number}" for number in x[~is_right].flatten()[:1].tolist()]
    if wrong:
        shown = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise Fp8Error(
            f"wrong numbers in the saved FP8 state: {shown}; scales and amaxes are finite and 0 or more, an amax that "
            "is not there is -1, and only on_nonfinite='freeze' leaves NaN and inf in amaxes. Load another checkpoint"
        )


def _unknown(entries: Mapping[str, Entry], module: nn.Module) -> str:
    """Return what says of which slots the module has no layer, with the nearest that it has; "" if there is none."""
    names = names_of(module)
    layers = {slot: [part.rpartition(".")[0] for part in parts_of(slot)] for slot in entries}
    absent = [slot for slot, of in layers.items() if not all(x in names or x.rpartition(".")[2] in MATMULS for x in of)]
    told = [f"{slot}{nearest(layers[slot][0], names)}" for slot in absent[:3]]
    return "; ".join(told) + (f"; and {len(absent) - 3} more" if len(absent) > 3 else "")


def _regrouped(entries: dict[str, Entry], wanted: Set[str]) -> dict[str, Entry]:
    """The entries under the names that are wanted, where layers were separate and are merged now, or the reverse.

    A merged slot has seen whatever its parts have; a part, as far as is known, what the merged slot has.
    """
    merged = {part: name for name in entries for part in parts_of(name) if part != name}
    found: dict[str, Entry] = {}
    used: set[str] = set()
    for name in sorted(wanted - set(entries)):
        parts = parts_of(name)
        sources = [part for part in (*parts, merged.get(name)) if part in entries]
        if not name.rpartition(".")[2].startswith("input") and name not in merged and len(sources) < len(parts):
            continue  # what is not known of a part may be the largest; the input is the same for all, and saved once
        if sources:
            found[name] = _together([entries[source] for source in sources])
            used.update(sources)
    if found:
        log.warning("the loaded FP8 state has %s; %s begin with that", ", ".join(sorted(used)), ", ".join(found))
    return {**{name: entry for name, entry in entries.items() if name not in used}, **found}


def _together(entries: Sequence[Entry]) -> Entry:
    """The state of a tensor that consists of several."""
    histories = [entry["amax_history"] for entry in entries]
    length = max(map(len, histories))
    scales = torch.stack([entry["scale"] for entry in entries])
    return {
        "scale": scales[scales > 0].min() if (scales > 0).any() else torch.zeros(()),
        "amax_history": torch.stack([scaling.resized_history(h, length) for h in histories]).amax(0),
        "amax": torch.stack([entry["amax"] for entry in entries]).amax(),
    }


_states: weakref.WeakKeyDictionary[nn.Module, State] = weakref.WeakKeyDictionary()


_unjudged: weakref.WeakSet[State] = weakref.WeakSet()
"""Those that have been loaded, and in which no step has ended since."""


def _judge(group: SlotGroup) -> None:
    for state in list(_unjudged):
        state.judge(group)


registry.on_step.append(_judge)


def _restore(group: SlotGroup) -> None:
    for state in list(_states.values()):
        state.restore(group)


registry.on_new.append(_restore)


def state(module: Any) -> State:
    """The delayed-scaling state of a module, compiled or not, or of what a `train_step` trains; always the same object.

    Exists, and can be loaded, before the first call; of a step whose model is an argument, from then on. Raises
    TypeError for what is not a module, and for a step that trains none or several.
    """
    if callable(of_step := getattr(module, "state", None)) and not isinstance(module, nn.Module):
        return of_step()  # type: ignore[no-any-return]
    module = unwrapped(module)
    if not isinstance(module, nn.Module):
        raise TypeError(f"state() takes a module or a compiled module, not {type(module).__name__}")
    goes_along(module)
    return _state_of(module)


def _state_of(module: nn.Module) -> State:
    with registry.lock:
        return _states.setdefault(module, State(module))


COMPANION = "_fp8pass_state"
"""The attribute of a module by which its state notices that the module is copied or pickled."""


class _Companion:
    """Lies in a module's `__dict__`, and is copied with it, after its parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Companion | None:
        """Give the copy of the module a copy of its state."""
        module = self._module()
        copy = memo.get(id(module))
        if module is None or copy is None:
            return None
        with unset_fake_temporarily():
            saved = _state_of(module).state_dict()
        if saved:
            _state_of(copy).begin_with(saved)
        return _Companion(copy)

    def __reduce_ex__(self, _: Any) -> Any:
        """In a file there is None in its place, for which nobody needs fp8pass."""
        module = self._module()
        if module is not None and _state_of(module).slots:
            warn_once(
                f"fp8pass: a {type(module).__name__} is pickled without its FP8 state: save "
                "fp8pass.state(model).state_dict(), too, and load it with fp8pass.state(model).load_state_dict(...)"
            )
        return type(None), ()


def _model_goes_along(group: SlotGroup) -> None:
    """The same of the outermost module that is running, for an instance that is called for the first time."""
    mine = {id(tensor) for tensor in group.owned_tensors()}
    model = next((m for m in reversed(running_modules()) if not mine.isdisjoint(ids_of(m))), None)
    if model is not None and group.table.remembers:
        goes_along(unwrapped(model))


registry.on_new.append(_model_goes_along)


def goes_along(module: nn.Module) -> None:
    """From now on, a deep copy of a module has a copy of its state, and to pickle the module is to be told of it."""
    if vars(module).get(COMPANION) is None:
        vars(module)[COMPANION] = _Companion(module)
