"""Read and write the file of a machine: a JSON object with the fields of `Target`, measured or published."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from fp8pass.gpu.target import Target


def load_machine(path: str | Path) -> Target:
    """Return the target that a JSON file describes: an object with the fields of `Target`; defaults are optional.

    capability is [major, minor]; numbers are in the units of `Target`, so with measured peaks `gemm_share` is 1. null
    stands for what `Target` says of None. Raises ValueError, which names the field, if one is missing or unknown or has
    an invalid value, and OSError if the file can't be read.
    """
    return from_json(Path(path).read_text(), str(path))


def from_json(text: str, source: str) -> Target:
    """Return the target that a text describes: see `load_machine`. source: where it is from, for errors."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{source} must hold one object, with the fields {', '.join(_CHECKS)}")
    for name in values:
        if name not in _CHECKS:
            raise ValueError(f"{source}: unknown field {name!r}; valid ones are {', '.join(_CHECKS)}")
    for name in (f.name for f in fields(Target) if f.default is MISSING):
        if name not in values:
            raise ValueError(f"{source}: the field {name!r} is missing")
    for name, value in values.items():
        wanted, good = _CHECKS[name]
        if not good(value):
            raise ValueError(f"{source}: {name} must be {wanted}, not {json.dumps(value)}")
    return Target(**{**values, "capability": tuple(values["capability"])})


def to_json(target: Target, indent: int | None = None) -> str:
    """Return the text of a target's file, without the fields that have their defaults."""
    given = {f.name: value for f in fields(Target) if (value := asdict(target)[f.name]) != f.default}
    return json.dumps(given, indent=indent)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def _is_share(value: Any) -> bool:
    return _is_number(value) and value <= 1


def _is_capability(value: Any) -> bool:
    return isinstance(value, list) and [type(part) for part in value] == [int, int]


_Check = tuple[str, Callable[[Any], bool]]


def _check_of(name: str, default: Any, type_name: str) -> _Check:
    """Return the check of a field of `Target`. type_name: its type, as written."""
    if name == "name":
        return "text", lambda value: isinstance(value, str)
    if name == "capability":
        return "[major, minor]", _is_capability
    wanted: _Check = ("a finite number above 0", _is_number)
    if name.endswith("_share"):
        wanted = ("a number above 0, and at most 1", _is_share)
    elif "bool" in type_name:
        wanted = ("true or false", lambda value: isinstance(value, bool))
    elif "int" in type_name:
        wanted = ("a whole number above 0", lambda value: _is_number(value) and isinstance(value, int))
    if default is not None:
        return wanted
    return f"null, or {wanted[0]}", lambda value: value is None or wanted[1](value)


_CHECKS = {f.name: _check_of(f.name, f.default, str(f.type)) for f in fields(Target)}
