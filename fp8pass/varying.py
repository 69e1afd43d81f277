"""Solve formulas of times for a size that varies: numbers that are polynomials of it, from one kink to the next."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Intervals = tuple[tuple[int, int | None], ...]
"""Integers from 1 on, as (first, last) of each interval, in ascending order; last is None if there is no last one."""

Coefficients = tuple[float, ...]
"""The coefficients of a polynomial, that of the constant first."""


@dataclass(frozen=True)
class Varying:
    """A number that depends on x > 0: between two of its kinks it is a polynomial of x.

    starts: where each polynomial begins, 0 first. It has the arithmetic that formulas of times need: sums, products and
    quotients by numbers; and `longer`.
    """

    starts: tuple[float, ...]
    pieces: tuple[Coefficients, ...]

    @staticmethod
    def polynomial(coefficients: Sequence[float]) -> Varying:
        """Return a polynomial of x, the coefficient of the constant first; (0, 1) is x itself."""
        return Varying((0.0,), (tuple(map(float, coefficients)),))

    def _at(self, x: float) -> Coefficients:
        return self.pieces[bisect_right(self.starts, x) - 1]

    def _with(self, other: Any, join: Callable[[Coefficients, Coefficients], Coefficients]) -> Varying:
        other = other if isinstance(other, Varying) else Varying.polynomial([other])
        starts = tuple(sorted({*self.starts, *other.starts}))
        return Varying(starts, tuple(join(self._at(x), other._at(x)) for x in starts))

    def __add__(self, other: Any) -> Varying:
        return self._with(other, _sum)

    def __mul__(self, other: Any) -> Varying:
        return self._with(other, _product)

    def __truediv__(self, number: float) -> Varying:
        return self._with(1 / number, _product)

    def __sub__(self, other: Any) -> Varying:
        return self._with(other * -1, _sum)

    def __rsub__(self, other: Any) -> Varying:
        return self._with(-1, _product)._with(other, _sum)

    def __radd__(self, other: Any) -> Varying:
        return self._with(other, _sum)

    def __rmul__(self, other: Any) -> Varying:
        return self._with(other, _product)

    def longer(self, other: Any) -> Varying:
        """Return the larger number at each x, with a kink where another one becomes the larger one."""
        difference = self - other
        starts = tuple(sorted({*difference.starts, *difference.roots()}))
        other = other if isinstance(other, Varying) else Varying.polynomial([other])
        inside = [2 * start + 1 if end == math.inf else (start + end) / 2 for start, end in _spans(starts)]
        pieces = (self._at(x) if _value(difference._at(x), x) >= 0 else other._at(x) for x in inside)
        return Varying(starts, tuple(pieces))

    def roots(self) -> Iterator[float]:
        """Yield the x > 0 at which the number becomes 0, or changes its sign."""
        for (start, end), piece in zip(_spans(self.starts), self.pieces, strict=True):
            yield from _roots(piece, start, end)

    def where(self, holds: Callable[[int], bool]) -> Intervals:
        """Return the integers from 1 on for which `holds`, which changes only where this number changes its sign."""
        near = {1}
        for point in (*self.starts, *self.roots()):
            # one integer more on each side: `holds` computes in floats, and may round differently
            near.update(max(1, math.floor(point) + i) for i in (-1, 0, 1, 2))
        found: list[tuple[int, int | None]] = []
        before = False
        for point in sorted(near | {point + 1 for point in near}):
            held = holds(point)
            if held and not before:
                found.append((point, None))
            elif before and not held:
                found[-1] = found[-1][0], point - 1
            before = held
        return tuple(found)


def _spans(starts: Sequence[float]) -> Iterator[tuple[float, float]]:
    return pairwise((*starts, math.inf))


def _sum(a: Coefficients, b: Coefficients) -> Coefficients:
    longest = max(len(a), len(b))
    return tuple(x + y for x, y in zip(_padded(a, longest), _padded(b, longest), strict=True))


def _padded(a: Coefficients, length: int) -> Coefficients:
    return a + (0.0,) * (length - len(a))


def _product(a: Coefficients, b: Coefficients) -> Coefficients:
    found = [0.0] * (len(a) + len(b) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            found[i + j] += x * y
    return tuple(found)


def _value(a: Coefficients, x: float) -> float:
    total = 0.0
    for coefficient in reversed(a):
        total = total * x + coefficient
    return total


def _roots(a: Coefficients, start: float, end: float) -> Iterator[float]:
    """Yield the roots of a polynomial that are not before `start`, and before `end`, which may be infinite."""
    while a and a[-1] == 0:
        a = a[:-1]
    if len(a) < 2:
        return
    if len(a) == 2:
        if start <= (root := -a[0] / a[1]) < end:
            yield root
        return
    # no root is farther from 0 (Cauchy's bound)
    end = min(end, 2 + max(abs(c / a[-1]) for c in a))
    slope = tuple(i * c for i, c in enumerate(a))[1:]
    turns = sorted({start, *_roots(slope, start, end), end})
    for low, high in pairwise(turns):  # it rises or falls in between
        if (_value(a, low) > 0) != (_value(a, high) > 0):
            yield _bisected(a, low, high)


def _bisected(a: Coefficients, low: float, high: float) -> float:
    positive = _value(a, high) > 0
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (low, middle) if (_value(a, middle) > 0) == positive else (middle, high)
    return middle
