"""Say where the elements of a matrix lie in what it is computed from, for a range of its columns.

Attention's heads lie apart from each other; the two halves of a head change places when it is rotated; queries, keys
and values stand side by side. At the columns of one range, and of one half, each element comes from one place: which
part of a cat is read is known without an index, and addresses are sums of multiples of row, column and their quotients.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from fp8pass.base._torch import FloorDiv, Identity, ModularIndexing, OpsValue, ValueRanges, WrapperHandler, bound_sympy

ROW, COLUMN, PAIR, WITHIN = sympy.symbols("row column pair within", integer=True, nonnegative=True)
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")
}


class CannotFuse(Exception):
    """An epilogue can't be generated; the message says why."""


@dataclass(frozen=True)
class Columns:
    """A range of columns of a matrix.

    half: 0; or half of the width of a head, if the range holds whole heads and a kernel computes the two halves of
    each at once: its columns, half as many, are those of the first halves, and those of the second ones lie `half`
    further right.
    """

    start: int
    size: int
    half: int = 0

    @property
    def parts(self) -> int:
        """The number of elements that a kernel computes for each of its columns."""
        return 2 if self.half else 1

    @property
    def first(self) -> int:
        """The kernel's column at which the range starts."""
        return self.start // self.parts

    def place(self, part: int) -> tuple[sympy.Expr, sympy.Expr]:
        """Return the row and the column of the matrix that a kernel's row and column are for one of the parts."""
        if not self.half:
            return ROW, self.start + COLUMN
        return ROW, self.start + 2 * self.half * PAIR + self.half * part + WITHIN

    def sizes(self, rows: int) -> dict[sympy.Symbol, int]:
        """Return the symbols of places, and how many values each takes."""
        if not self.half:
            return {ROW: rows, COLUMN: self.size}
        return {ROW: rows, PAIR: self.size // (2 * self.half), WITHIN: self.half}


@dataclass(frozen=True)
class AddressStep:
    """A part of an address: `step` elements for each whole `every` rows or columns of the kernel. dim: of which."""

    dim: str
    every: int
    step: int


@dataclass(frozen=True)
class Address:
    """Where an element lies: `row * r + column * c + offset`, and further steps."""

    row: int
    column: int
    offset: int
    steps: tuple[AddressStep, ...] = ()


def address(index: sympy.Expr, columns: Columns | None = None) -> Address:
    """Return an index, of the symbols of places, as a function of the kernel's row and column. Raises CannotFuse."""
    multiples: dict[tuple[str, int], int] = {}
    offset = 0
    for term in sympy.Add.make_args(sympy.expand(index)):
        factor, atom = term.as_coeff_Mul()
        if atom == 1:
            offset += int(factor)
            continue
        if not factor.is_Integer:
            raise CannotFuse(f"it reads an input at {index}")
        for key, times in _multiples(atom, columns.half if columns else 0).items():
            multiples[key] = multiples.get(key, 0) + int(factor) * times
    first = columns.first if columns else 0
    for (dim, every), step in multiples.items():
        if dim == "column":
            # COLUMN counts from the first column of the range: a quotient of it is the difference of two quotients only
            # if the divisor divides `first`
            if first % every and step:
                raise CannotFuse(f"columns from {first} on are not whole multiples of {every}")
            offset -= first // every * step
    steps = (AddressStep(dim, every, step) for (dim, every), step in sorted(multiples.items()) if every > 1 and step)
    return Address(multiples.get(("row", 1), 0), multiples.get(("column", 1), 0), offset, tuple(steps))


def simplified(index: Any, sizes: Mapping[sympy.Symbol, int], by: Callable[..., sympy.Expr]) -> sympy.Expr:
    """Return an index in its simplest form. sizes: of its symbols. by: Inductor's function of both."""
    # marks against expansion, which could make it wider, are in the way
    bare = sympy.sympify(index).replace(Identity, lambda inner: inner)
    if not sizes:
        return bare

    def quotient(base: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr:
        ends = bound_sympy(base, ranges_of(sizes))  # torch 2.11 leaves a quotient that is always 0
        return sympy.Integer(0) if ends.lower >= 0 and ends.upper < divisor else FloorDiv(base, divisor)

    return by(bare, sizes).replace(FloorDiv, quotient)


def ranges_of(sizes: Mapping[sympy.Symbol, int]) -> dict[sympy.Symbol, Any]:
    """Return the values that symbols take."""
    return {symbol: ValueRanges(0, size - 1) for symbol, size in sizes.items()}


def _multiples(atom: sympy.Expr, half: int) -> dict[tuple[str, int], int]:
    """Return a symbol, a quotient or a remainder as multiples of quotients of row or column: by (dim, divisor)."""
    base, divisor, modulus = atom, 1, 0
    if isinstance(atom, FloorDiv):
        base, divisor = atom.args
    elif isinstance(atom, ModularIndexing):
        base, divisor, modulus = atom.args
    if base == WITHIN:
        if (divisor, modulus) != (1, 0):
            raise CannotFuse(f"it reads an input at a multiple of {atom}")
        return {("column", 1): 1, ("column", half): -half}  # column % half
    dim, unit = {ROW: ("row", 1), COLUMN: ("column", 1), PAIR: ("column", half)}.get(base, ("", 0))
    if not unit or not all(sympy.sympify(n).is_Integer for n in (divisor, modulus)):
        raise CannotFuse(f"it reads an input at a multiple of {atom}")
    # (x // d) % m = x // d - m * (x // (d * m))
    whole = {(dim, unit * int(divisor)): 1}
    return whole | ({(dim, unit * int(divisor * modulus)): -int(modulus)} if modulus else {})


@dataclass(frozen=True)
class _Index:
    """The value of an index, or of an integer constant."""

    expr: sympy.Expr
    dtype: torch.dtype


class AtPlaces(WrapperHandler):
    """Writes ops at places whose comparisons have one outcome: what is not chosen there is not written, nor read."""

    def __init__(self, inner: Any, simplify: Callable[[sympy.Expr], sympy.Expr], sizes: Mapping[sympy.Symbol, int]):
        super().__init__(inner)
        self.simplify = simplify
        self.ranges = ranges_of(sizes)

    def index_expr(self, expr: Any, dtype: torch.dtype) -> Any:
        """Return what an index is."""
        return _Index(self.simplify(expr), dtype)

    def constant(self, value: Any, dtype: torch.dtype) -> Any:
        """Return an integer as an index may be compared with it, and write any other number."""
        if isinstance(value, int) and not isinstance(value, bool) and not dtype.is_floating_point:
            return _Index(sympy.Integer(value), dtype)
        return self._inner.constant(value, dtype)

    def masked(self, mask: Any, body: Callable[[], Any], other: Any) -> Any:
        """Return what is read where the mask holds, or what stands for it elsewhere; None if that is an integer."""
        if not isinstance(mask, bool):
            raise CannotFuse("what it reads depends on data")
        if mask:
            value = body()
            return value.value if isinstance(value, OpsValue) else value
        return self._inner.constant(float(other), torch.float32) if isinstance(other, float) else None

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        """Return the value that is chosen, if that is known."""
        if isinstance(condition, bool):
            return a if condition else b
        return self._default("where", (condition, a, b), {})

    def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in _COMPARISONS and all(isinstance(a, _Index) for a in args):
            return self._compared(name, *args)
        if name in ("and_", "logical_and") and any(isinstance(a, bool) for a in args):
            return False if False in args else next((a for a in args if a is not True), True)
        return getattr(self._inner, name)(*map(self._written, args), **kwargs)

    def _compared(self, name: str, a: _Index, b: _Index) -> bool:
        """Return the outcome of a comparison, which must be the same at all places."""
        apart = bound_sympy(self.simplify(sympy.expand(a.expr - b.expr)), self.ranges)
        # what holds at both ends of the difference's range holds in between, except that eq and ne change at 0
        outcomes = {bool(_COMPARISONS[name](end, 0)) for end in (apart.lower, apart.upper)}
        crosses = name in ("eq", "ne") and apart.lower < 0 < apart.upper
        if len(outcomes) > 1 or crosses:
            raise CannotFuse(f"{name}({a.expr}, {b.expr}) holds at some columns and not at others")
        return outcomes.pop()

    def _written(self, x: Any) -> Any:
        if isinstance(x, _Index):
            if not x.expr.is_Integer:
                raise CannotFuse(f"it computes with the index {x.expr}")
            return self._inner.constant(int(x.expr), x.dtype)
        if x is None or isinstance(x, bool):
            raise CannotFuse("what it reads is computed with a condition on the index")
        return x


def cut(starts: Iterable[int], n: int, half: int) -> Sequence[Columns]:
    """Return the ranges between the columns at which another one starts, of a matrix of n columns."""
    at = sorted({0, n, *starts})
    return [Columns(start, stop - start, half) for start, stop in itertools.pairwise(at)]
