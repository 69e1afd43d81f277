"""Hold a step of delayed scaling open between two events of a training loop."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Any

from fp8pass.states.steps import accumulate

_of_models: weakref.WeakKeyDictionary[Any, weakref.ref[OpenStep]] = weakref.WeakKeyDictionary()
"""The latest step of each module. A loop that ended by an error may have left it open."""


class OpenStep:
    """A step that begins at one call and ends at another, for loops that are not ours to wrap in a context."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self.is_open = False

    def begin(self, model: Any) -> None:
        """Begin a step of a module, unless one is under way."""
        if not self.is_open:
            left = _of_models.get(model)
            if left is not None and (step := left()) is not None:
                step.end()
            _of_models[model] = weakref.ref(self)  # not the step: it ends when the loop that opened it is gone
            self._open.enter_context(accumulate(model))
            self.is_open = True

    def end(self) -> None:
        """End the step under way, if there is one."""
        self._open.close()
        self.is_open = False
