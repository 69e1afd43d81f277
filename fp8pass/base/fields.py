"""Check options: each field has a `Rule` in its metadata, which `Checked` classes apply to its value.

A rule returns the value to keep, or raises ValueError with one line: the option, the value, and the valid values. NumPy
numbers count as Python's; a bool is not a number, and a string is not a bool.
"""

from __future__ import annotations

import difflib
import inspect
import numbers
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

RULE = "fp8pass"
"""The key of a field's rule in its metadata."""


@dataclass(frozen=True)
class Rule:
    """The check of one option.

    take: called with the option's name and a value; returns the value to keep, or raises ValueError.
    parse: called with the name of an environment variable and its text; returns a value for `take`. None if text cannot
    express a value.
    """

    take: Callable[[str, Any], Any]
    parse: Callable[[str, str], Any] | None = None

    def __or__(self, other: None) -> Rule:
        """Return a rule that also accepts None."""
        return Rule(lambda name, value: None if value is None else self.take(name, value), self.parse)

    def parsed(self, variable: str, text: str) -> Any:
        """Return the value of an environment variable. Raises ValueError, which names the variable."""
        assert self.parse is not None
        return self.take(variable, self.parse(variable, text))

    @property
    def field(self) -> dict[str, Rule]:
        """The metadata of a field with this rule."""
        return {RULE: self}


class Checked:
    """A dataclass of options. Raises ValueError for unknown fields and for values that a field's rule refuses."""

    def __new__(cls, *_: Any, **given: Any) -> Any:
        """Raise ValueError for an unknown field, with the nearest name, which Python's TypeError would not give."""
        for name in given:
            choose(f"{cls.__name__} field", name, tuple(f.name for f in fields(cls)))  # type: ignore[arg-type]
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self)


def check_fields(options: Any) -> None:
    """Replace the value of each field of a dataclass by its rule's result. Raises the rule's ValueError."""
    for field in fields(options):
        if (rule := field.metadata.get(RULE)) is not None:
            kept = rule.take(field.name, plain(getattr(options, field.name)))
            object.__setattr__(options, field.name, kept)  # the dataclasses are frozen


def choose(what: str, value: object, valid: tuple[str, ...]) -> None:
    """Raise ValueError, listing the valid names and the nearest one, unless `value` is one of `valid`."""
    if isinstance(value, str) and value in valid:
        return
    raise ValueError(f"unknown {what} {value!r}: choose one of {', '.join(map(repr, valid))}{nearest(value, valid)}")


def nearest(value: object, valid: Iterable[str], n: int = 1, cutoff: float = 0.6) -> str:
    """Return "; did you mean 'delayed'?" with up to n valid names that are most similar to a value; "" if none is.

    cutoff: least similarity, from 0 for any name to 1 for equal names.
    """
    near = difflib.get_close_matches(str(value), list(valid), n, cutoff)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def plain(value: Any) -> Any:
    """Return a NumPy number as a Python number, and any other value unchanged."""
    is_number = type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0
    return value.item() if is_number else value


def wrong(name: str, value: object, valid: str) -> ValueError:
    """Return the error for an option with an invalid value. valid: the valid values, in words."""
    return ValueError(f"{name}={value!r}: {valid}")


# ---------------------------------------------------------------------------------------------------------------------
# Rules


def _parse_flag(variable: str, text: str) -> bool:
    choose(variable, text.lower(), ("0", "1", "false", "true"))
    return text.lower() in ("1", "true")


def flag(valid: str) -> Rule:
    """Return the rule of a bool. valid: the valid values, in the words of errors."""

    def take(name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise wrong(name, value, valid)
        return value

    return Rule(take, _parse_flag)


FLAG = flag("True or False")


def _as_it_is(_: str, text: str) -> str:
    return text


def names(*valid: str) -> Rule:
    """Return the rule of an option that is one of these names."""

    def take(name: str, value: Any) -> Any:
        choose(name, value, valid)
        return value

    return Rule(take, _as_it_is)


def whole(least: int, valid: str, too_small: str = "") -> Rule:
    """Return the rule of a whole number of at least `least`. valid, too_small: the valid values, in errors' words."""

    def take(name: str, value: Any) -> int:
        try:
            # Takes whole numbers of NumPy and of other types, and refuses 2.0.
            number = None if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = None
        if number is None or number < least:
            raise wrong(name, value, valid if number is None else too_small or valid)
        return number

    return Rule(take, lambda _, text: _number(int, text))


def ratio(least: float, valid: str) -> Rule:
    """Return the rule of a number of at least `least`. valid: the valid values, in the words of errors."""

    def take(name: str, value: Any) -> float:
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or not float(value) >= least:  # refuses NaN, too
            raise wrong(name, value, valid)
        return float(value)

    return Rule(take, lambda _, text: _number(float, text))


def _number(kind: Callable[[str], Any], text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        return text  # a string, which the rule refuses with its error


def several(valid: str) -> Rule:
    """Return the rule of name patterns: one string or several, kept as a tuple. valid: as for `flag`."""

    def take(name: str, value: Any) -> tuple[str, ...]:
        if isinstance(value, str):
            return (value,)
        is_list = isinstance(value, Iterable) and not isinstance(value, (Mapping, bytes))
        patterns = tuple(value) if is_list else ()
        if not is_list or not all(isinstance(x, str) for x in patterns):
            raise wrong(name, value, valid)
        return patterns

    return Rule(take, lambda _, text: tuple(filter(None, map(str.strip, text.split(",")))))


def called_with(example: tuple[Any, ...], signature: str) -> Rule:
    """Return the rule of a function that takes arguments like `example`. signature: how errors write these."""

    def take(name: str, value: Any) -> Any:
        if not callable(value):
            raise wrong(name, value, f"a function that is called as {name}{signature}")
        try:
            inspect.signature(value).bind(*example)
        except TypeError as error:
            raise wrong(name, value, f"a function that is called as {name}{signature}: {error}") from None
        except ValueError:
            pass  # some functions that are not written in Python have no signature
        return value

    return Rule(take)


def _path(name: str, value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)) or isinstance(path := os.fspath(value), bytes):
        raise wrong(name, value, "the path of a folder, or None")
    return path


PATH = Rule(_path, _as_it_is)
