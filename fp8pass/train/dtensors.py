"""Run torch's own functions for DTensors op by op where a training step calls them, instead of compiling each alone.

Dynamo compiles functions of `torch.distributed`, and is on while a step runs. So it would begin to compile each that is
called outside of a graph. It fails where a backward calls one: at `DTensor.__tensor_unflatten__`, with which
AOTAutograd wraps gradients, or `_FromTorchTensor.backward`; and where AOTAutograd copies the graph of a backward, with
its meshes, to compile it late. On a GPU, whose backward runs in another thread, Dynamo is off there. In graphs these
functions are still compiled, as part of the functions that call them.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import torch

from fp8pass.base._torch import leave_op_by_op

_FILES = ("tensor", "device_mesh.py", "_functional_collectives", "../_library/fake_class_registry.py")
_DISTRIBUTED = Path(torch.__file__).parent / "distributed"
_OF_DTENSORS = tuple(os.path.normpath(_DISTRIBUTED / name) for name in _FILES)
"""The beginnings of the paths of files whose functions DTensors, and copies of their meshes, call."""
_steps = 0
"""Number of open `dtensors_op_by_op` contexts."""


@contextlib.contextmanager
def dtensors_op_by_op() -> Iterator[None]:
    """Run functions of DTensors that are called outside of graphs op by op within this context."""
    global _steps
    _leave_dtensors()
    _steps += 1
    try:
        yield
    finally:
        _steps -= 1


@functools.cache
def _leave_dtensors() -> None:
    """Let Dynamo ask `_is_left` of each function, from now on."""
    leave_op_by_op(_is_left)


def _is_left(code: CodeType) -> bool:
    return _steps > 0 and code.co_filename.startswith(_OF_DTENSORS)
