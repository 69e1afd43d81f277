"""Check options: each field has a `Rule` in its metadata, and `Checked` classes hold their fields to it.

A rule returns what is kept of a value, or raises ValueError in one line: the option, the value, and what is valid.
Numbers of numpy's are as good as Python's; a bool is not a number, and a string is not a bool.
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
    """How one option is checked.

    take: called with the option's name and a value; returns what is kept of it, or raises ValueError.
    parse: called with the name of an environment variable and its text; returns a value for `take`. None: no text can
    stand for a value.
    """

    take: Callable[[str, Any], Any]
    parse: Callable[[str, str], Any] | None = None

    def __or__(self, other: None) -> Rule:
        """Return the rule that takes None, too."""
        return Rule(lambda name, value: None if value is None else self.take(name, value), self.parse)

    def parsed(self, variable: str, text: str) -> Any:
        """Return the value that an environment variable gives. Raises ValueError, which names the variable."""
        assert self.parse is not None
        return self.take(variable, self.parse(variable, text))

    @property
    def field(self) -> dict[str, Rule]:
        """The metadata of a field with this rule."""
        return {RULE: self}


class Checked:
    """A dataclass of options. Raises ValueError for unknown fields and for values that a field's rule does not take."""

    def __new__(cls, *_: Any, **given: Any) -> Any:
        """Say which field was meant, where Python would only say that there is none."""
        for name in given:
            choose(f"{cls.__name__} field", name, tuple(f.name for f in fields(cls)))  # type: ignore[arg-type]
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self)


def check_fields(options: Any) -> None:
    """Replace each field of a dataclass by what its rule keeps of it. Raises the rule's ValueError."""
    for field in fields(options):
        if (rule := field.metadata.get(RULE)) is not None:
            kept = rule.take(field.name, plain(getattr(options, field.name)))
            object.__setattr__(options, field.name, kept)


def choose(what: str, value: object, valid: tuple[str, ...]) -> None:
    """Raise ValueError, listing the valid names and the nearest one, unless `value` is one of `valid`."""
    if isinstance(value, str) and value in valid:
        return
    raise ValueError(f"unknown {what} {value!r}: choose one of {', '.join(map(repr, valid))}{nearest(value, valid)}")


def nearest(value: object, valid: Iterable[str], n: int = 1, cutoff: float = 0.6) -> str:
    """Return "; did you mean 'delayed'?" with at most n valid names that are most like a value; "" if none is.

    cutoff: 1 for the same name only, 0 for any.
    """
    near = difflib.get_close_matches(str(value), list(valid), n, cutoff)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def plain(value: Any) -> Any:
    """Return a number of numpy's as Python's, and anything else as it is."""
    is_number = type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0
    return value.item() if is_number else value


def wrong(name: str, value: object, valid: str) -> ValueError:
    """Return the error that an option has a value which is not valid."""
    return ValueError(f"{name}={value!r}: {valid}")


# ---------------------------------------------------------------------------------------------------------------------
# Rules


def _parse_flag(variable: str, text: str) -> bool:
    choose(variable, text.lower(), ("0", "1", "false", "true"))
    return text.lower() in ("1", "true")


def flag(valid: str) -> Rule:
    """Return the rule of a bool. valid: what errors say."""

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
    """Return the rule of a whole number that is at least so large. valid, too_small: what errors say."""

    def take(name: str, value: Any) -> int:
        try:
            number = None if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = None
        if number is None or number < least:
            raise wrong(name, value, valid if number is None else too_small or valid)
        return number

    return Rule(take, lambda _, text: _number(int, text))


def ratio(least: float, valid: str) -> Rule:
    """Return the rule of a number that is at least so large. valid: what errors say."""

    def take(name: str, value: Any) -> float:
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or not float(value) >= least:
            raise wrong(name, value, valid)
        return float(value)

    return Rule(take, lambda _, text: _number(float, text))


def _number(kind: Callable[[str], Any], text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        return text  # which the rule does not take


def several(valid: str) -> Rule:
    """Return the rule of name patterns: one string, or several, kept as a tuple. valid: what errors say."""

    def take(name: str, value: Any) -> tuple[str, ...]:
        if isinstance(value, str):
            return (value,)
        is_list = isinstance(value, Iterable) and not isinstance(value, (Mapping, bytes))
        found = tuple(value) if is_list else ()
        if not is_list or not all(isinstance(x, str) for x in found):
            raise wrong(name, value, valid)
        return found

    return Rule(take, lambda _, text: tuple(filter(None, map(str.strip, text.split(",")))))


def called_with(example: tuple[Any, ...], signature: str) -> Rule:
    """Return the rule of a function that can be called with such arguments. signature: how errors write them."""

    def take(name: str, value: Any) -> Any:
        if not callable(value):
            raise wrong(name, value, f"a function that is called as {name}{signature}")
        try:
            inspect.signature(value).bind(*example)
        except TypeError as error:
            raise wrong(name, value, f"a function that is called as {name}{signature}: {error}") from None
        except ValueError:
            pass  # some functions that are not written in Python do not tell
        return value

    return Rule(take)


def _path(name: str, value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)) or isinstance(path := os.fspath(value), bytes):
        raise wrong(name, value, "the path of a folder, or None")
    return path


PATH = Rule(_path, _as_it_is)
