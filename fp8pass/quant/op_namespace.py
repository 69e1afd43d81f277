"""`torch.ops.fp8pass`: its custom ops are registered when one is first looked up.

A program that `torch.export` saved names the ops, and loads after `import fp8pass` alone.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import FrameType
from typing import Any

import torch

_MODULES = tuple(f"fp8pass.quant.{file}" for file in ("ops", "kernel_ops", "grouped", "monitor_ops", "added_gradient"))
"""The files that define custom ops."""


class _Ops(type(torch.ops.aten)):  # type: ignore[misc]
    """A namespace of ops that imports the files with their definitions before it says that there is no such op."""

    __module__ = type(torch.ops.aten).__module__  # torch names ops by it, in what it pickles

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):  # Python and debuggers ask any module for such names
                raise
        if _defines_ops():  # torch asks before it registers an op; to import the other files would go in a circle
            raise AttributeError(name)
        for module in _MODULES:
            import_module(module)
        return super().__getattr__(name)


def _defines_ops() -> bool:
    """Return whether this thread is importing one of the files. Other threads wait until they are imported."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (frame.f_code.co_name == "<module>" and frame.f_globals["__name__"] in _MODULES):
        frame = frame.f_back
    return frame is not None


def install() -> None:
    """Make `torch.ops.fp8pass` this namespace."""
    vars(torch.ops)["fp8pass"] = _Ops("fp8pass")
