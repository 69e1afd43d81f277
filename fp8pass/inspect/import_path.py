"""Import the models and functions that the `fp8pass` command takes as "module:function"."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8pass.base.errors import Fp8Error


def named(spec: str) -> Callable[..., Any]:
    """Return the function that "module:function" names.

    Adds the current directory to `sys.path`, so that the module, and its later imports, may be there. Raises Fp8Error
    if `spec` has another form, can't be imported, or is not callable.
    """
    module, _, name = spec.partition(":")
    if not module or not name:
        raise Fp8Error(f"{spec!r} does not name a model or function: write module:function")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Fp8Error(f"{spec} can't be imported: {error}") from error
    if not callable(function):
        raise Fp8Error(f"{spec} is not callable: write module:function")
    return function  # type: ignore[no-any-return]


def built(spec: str) -> tuple[Any, ...]:
    """Call the factory that `spec` names, without arguments, and return its (model or function, *inputs).

    Raises Fp8Error if it can't be imported, or returns anything else.
    """
    result = named(spec)()
    if not isinstance(result, tuple) or not result or not callable(result[0]):
        raise Fp8Error(
            f"{spec} returned {type(result).__name__}: write a function that returns a tuple (model, *inputs)"
        )
    return result
