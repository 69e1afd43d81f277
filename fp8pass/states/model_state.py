"""`fp8pass.state(model)`, and what becomes of the state when the model is deep-copied or pickled.

A model that trains without ever being asked for its state loads nothing of `checkpoint.py`, which has most of the code.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from fp8pass.base._torch import running_modules, unset_fake_temporarily
from fp8pass.base.errors import warn_once
from fp8pass.base.module_tensors import ids_of, unwrapped
from fp8pass.states.slots import InstanceState

if TYPE_CHECKING:
    from fp8pass.states.checkpoint import State


def state(module: Any) -> State:
    """Return the delayed-scaling state of a module, or of the model that a `train_step` trains.

    The state exists, and can be loaded, before the first call. For a step that takes its model as an argument, it
    exists from the first call on.

    Args:
        module: A module, compiled or not, or a function decorated with `train_step`.

    Returns:
        The module's state, the same object each time.

    Raises:
        TypeError: If `module` is not a module, or a step that trains no model or several.
    """
    # a train_step has a method `state`; a module may have anything else of that name
    if callable(of_step := getattr(module, "state", None)) and not isinstance(module, nn.Module):
        return of_step()  # type: ignore[no-any-return]
    module = unwrapped(module)
    if not isinstance(module, nn.Module):
        raise TypeError(f"state() takes a module or a compiled module, not {type(module).__name__}")
    goes_along(module)
    return _state_of(module)


def _state_of(module: nn.Module) -> State:
    from fp8pass.states.checkpoint import state_of

    return state_of(module)


COMPANION = "_fp8pass_state"
"""Name of a module's attribute whose value copies the state when the module is deep-copied, and warns at pickling."""


class _Companion:
    """An entry in a module's `__dict__`, which `copy.deepcopy` and pickle call when they reach it.

    By then `copy.deepcopy` has entered the copy of the module, which has no attributes yet, in its memo.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Companion | None:
        """Give the copy of the module a copy of its state."""
        module = self._module()
        copy = memo.get(id(module))
        if module is None or copy is None:  # None if this entry was copied without its module
            return None
        with unset_fake_temporarily():  # a module may be copied under a fake mode; its state is real tensors
            saved = _state_of(module).state_dict()
        if saved:
            _state_of(copy).begin_with(saved)
        return _Companion(copy)

    def __reduce_ex__(self, _: Any) -> Any:
        """Pickle as None, which loads without fp8pass; warn that the FP8 state is not pickled with the module."""
        module = self._module()
        if module is not None and _state_of(module).slots:
            warn_once(
                f"fp8pass: a {type(module).__name__} is pickled without its FP8 state: save "
                "fp8pass.state(model).state_dict(), too, and load it with fp8pass.state(model).load_state_dict(...)"
            )
        return type(None), ()


def goes_along_with_model(state: InstanceState) -> None:
    """Call `goes_along` for the outermost running module that owns tensors of the new instance state."""
    owned_ids = {id(tensor) for tensor in state.owned_tensors()}
    model = next((m for m in reversed(running_modules()) if not owned_ids.isdisjoint(ids_of(m))), None)
    if model is not None and state.table.remembers:
        goes_along(unwrapped(model))


def goes_along(module: nn.Module) -> None:
    """Make deep copies of a module copy its state, and pickling it warn that the state is not included."""
    if vars(module).get(COMPANION) is None:  # as in a module that was unpickled
        vars(module)[COMPANION] = _Companion(module)
