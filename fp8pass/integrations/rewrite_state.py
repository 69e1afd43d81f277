"""The state of a rewritten graph: tensors that it takes as inputs, and returns with their new values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass.base._torch import pytree
from fp8pass.base.errors import Fp8Error
from fp8pass.base.fields import nearest
from fp8pass.passes.traced.quantize_traced import STATE
from fp8pass.recipes import StaticScaling
from fp8pass.states.checkpoint import (
    RECIPE,
    STEPS,
    as_tensor,
    as_text,
    check_recipe,
    check_values,
    entries_of,
    recipe_text,
)
from fp8pass.states.slots import PARTS, InstanceState, SlotTable, new_state


class RewriteState:
    """The state of a graph that `fp8pass.rewrite` returned. A `Stateful`: `state_dict()`, `load_state_dict()`.

    For each recipe with delayed scaling, whose T slots are `slots`, the graph takes three tensors after all other
    inputs, and returns their new values after all other outputs: `scale` f32[T], 0 for a slot that has seen no data;
    `amax_history` f32[H, T], newest at row 0; and `amax` f32[T], the amaxes of this step, which the next one rolls into
    the history, or -1. Between two steps, ranks may reduce `amax` by its maximum. With static scaling there is one
    tensor, `scales` f32[2, T], which does not change; with other recipes there is none.
    """

    def __init__(
        self,
        tables: Sequence[SlotTable],
        in_structure: Callable[[Sequence[Any]], Any],
        make_first: Callable[[], fx.GraphModule],
    ) -> None:
        self._states = [_new(table) for table in tables]
        self._in_structure = in_structure
        self._make_first = make_first
        self._first: fx.GraphModule | None = None
        self.steps = 0
        """The number of steps that `run` has taken, including those before a load."""

    @property
    def slots(self) -> list[str]:
        """The names of all quantized tensors with state, such as `layers.0.up.weight`, in the order of the tensors."""
        return [name for state in self._states for name in state.table.names]

    @property
    def names(self) -> list[str]:
        """The names of the state inputs in order, which are also the order of the new values among the outputs."""
        suffixes = [f"_{i}" if i else "" for i in range(len(self._states))]
        parts = [STATE if state.table.remembers else ("scales",) for state in self._states]
        return [part + suffix for inputs, suffix in zip(parts, suffixes, strict=True) for part in inputs]

    @property
    def tensors(self) -> list[Tensor]:
        """The current values of the state inputs."""
        return [x for state in self._states for x in _inputs(state)]

    @tensors.setter
    def tensors(self, new: Sequence[Tensor]) -> None:
        if len(new) != len(self.names):
            raise Fp8Error(f"the graph has {len(self.names)} state tensors, {', '.join(self.names)}; got {len(new)}")
        left = list(new)
        for state in self._states:
            if not state.table.remembers:
                del left[:1]
                continue
            scale, amax_history, amax = left[:3]
            del left[:3]
            state.take(scale.detach(), amax_history.detach(), amax.detach())

    @property
    def first(self) -> fx.GraphModule:
        """The graph for a step in which a slot has no scale yet, as in the first one. It is called as the other one.

        It scales a tensor without history by the tensor's own amax, and multiplies in high precision. The other graph
        would use the scale 1.
        """
        if self._first is None:
            self._first = self._make_first()
        return self._first

    def is_cold(self) -> bool:
        """Return whether a slot has no scale in the next step. Synchronizes with the device, until none is cold."""
        return any(not state.warm and bool(state.cold()) for state in self._states if state.table.training)

    @torch.no_grad()
    def run(self, gm: Callable[..., Any], *args: Any) -> Any:
        """Run the graph for a step with the current state, and keep the new state. Autograd records nothing.

        Args:
            gm: The graph that `fp8pass.rewrite` returned, or what another compiler has made of it. In a step that
                begins with a slot without a scale, `first` runs instead.
            *args: What the graph that was traced is called with.

        Returns:
            What that graph returns.
        """
        run = self.first if self.is_cold() else gm
        results = run(*pytree.tree_leaves(args), *self.tensors)
        count = len(results) - len(self.names)
        self.tensors = results[count:]
        self.steps += 1
        return self._in_structure(results[:count])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as plain tensors, in the form of `fp8pass.state(model).state_dict()`."""
        entries = {name: entry for s in self._delayed() for name, entry in s.read().items()}
        if not entries:
            return {}
        slots = {f"{name}.{part}": entries[name][part] for name in sorted(entries) for part in PARTS}
        return {**slots, STEPS: torch.tensor(self.steps), RECIPE: as_tensor(recipe_text(self._delayed()))}

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> None:
        """Load a state that `state_dict`, or that of `fp8pass.state(model)`, has returned.

        A graph without a backward has no slots for gradients, and takes the others from a state of training.

        Args:
            state_dict: Tensors by name.
            strict: If False, the slots that fit are loaded, and under another recipe scales are recomputed.

        Raises:
            Fp8Error: If names, sizes or values are not those of a state, if slots of the graph are missing, if the
                graph trains and lacks slots of the state, or if the state was saved under another recipe.
        """
        entries = entries_of(state_dict)
        saved = as_text(state_dict[RECIPE]) if RECIPE in state_dict else ""
        steps = int(state_dict[STEPS]) if STEPS in state_dict else 0
        check_values(entries, steps, freezes=not saved or "on_nonfinite='freeze'" in saved)
        if strict:
            check_recipe(saved, recipe_text(self._delayed()))
            self._check_slots(entries)
        for state in self._delayed():
            state.write(entries, anew=bool(saved) and saved != recipe_text(self._delayed()) and not strict)
        self.steps = steps

    def _check_slots(self, entries: Mapping[str, Any]) -> None:
        slots = {name for state in self._delayed() for name in state.table.names}
        if missing := sorted(slots - entries.keys()):
            raise Fp8Error(
                f"the state lacks slots of the graph: {_some(missing)}"
                f"{nearest(missing[0], entries)}. Give the inputs the names of the saved model, by names=, or load it "
                "with strict=False"
            )
        trains = any(state.table.training for state in self._states)
        if trains and (unknown := sorted(entries.keys() - slots)):
            raise Fp8Error(
                f"the state has slots that the graph lacks: {_some(unknown)}"
                f"{nearest(unknown[0], slots)}. Load it with strict=False to leave them out"
            )

    def _delayed(self) -> list[InstanceState]:
        return [state for state in self._states if state.table.remembers]


def _new(table: SlotTable) -> InstanceState:
    state = new_state(table, [])
    if isinstance(table.recipe, StaticScaling):
        scales = [table.recipe.scale_of(name) for name in table.names]
        state.tensors.scale.copy_(torch.tensor(scales))
    return state


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _inputs(state: InstanceState) -> list[Tensor]:
    tensors = state.tensors
    if not state.table.remembers:
        return [state.fixed_scales()]
    return [tensors.scale, tensors.amax_history, tensors.amax_forward]
