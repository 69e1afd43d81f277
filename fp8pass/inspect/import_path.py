"""What the `fp8pass` command takes for a model or a function: "module:function"."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8pass.errors import Fp8Error


def named(spec: str) -> Callable[..., Any]:
    """The function of "module:function". The module may be in the current directory, and import from there later.

    Raises Fp8Error if there is no such thing, or it is no callable.
    """
    module, _, name = spec.partition(":")
    if not module or not name:
        raise Fp8Error(f"{spec!r} names no model or function: write module:function")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Fp8Error(f"{spec} can't be imported: {error}") from error
    if not callable(found):
        raise Fp8Error(f"{spec} is no callable: write module:function")
    return found  # type: ignore[no-any-return]


def built(spec: str) -> tuple[Any, ...]:
    """(model or function, *inputs): what the factory that `spec` names, called without arguments, returns."""
    found = named(spec)()
    if not isinstance(found, tuple) or not found or not callable(found[0]):
        raise Fp8Error(
            f"{spec} returned {type(found).__name__}: write a function that returns a tuple (model, *inputs)"
        )
    return found
