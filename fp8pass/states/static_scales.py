"""The scales of a static recipe become those of the states that its graphs call."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from fp8pass.base.errors import Fp8Error
from fp8pass.recipes import StaticScaling
from fp8pass.states.slots import InstanceState

calibrated: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The models that `fp8pass.calibrate` has measured in this process: their names are those of the scales."""


def fill(state: InstanceState) -> None:
    """Set the scales of a new state of a static recipe. Raises Fp8Error if some of its tensors have no scale."""
    recipe = state.table.recipe
    if not isinstance(recipe, StaticScaling):
        return
    names = _names(state, recipe)
    scales = {name: recipe.scale_of(name) for name in names}
    absent = [name for name, scale in scales.items() if scale is None]
    if absent:
        raise Fp8Error(
            f"no scales were calibrated for {', '.join(absent)}. Calibrate the compiled model, with inputs that "
            "reach them; if its parts are compiled one by one, calibrate in this process, which then knows their names."
        )
    state.tensors.scale.copy_(torch.tensor([scales[name] for name in names]))


def _names(state: InstanceState, recipe: StaticScaling) -> list[str]:
    """Return the names of the state's slots in the model that was calibrated."""
    from fp8pass.states.checkpoint import names_in  # here: a run without static scales need not load the file

    for module in calibrated:
        names = names_in(module, state)
        if len(names) == len(state.table.names) and all(map(recipe.scale_of, names.values())):
            return [names[inner] for inner in state.table.names]
    return list(state.table.names)
