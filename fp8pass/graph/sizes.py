"""Sizes that vary from call to call: as sympy expressions, what they stand for, and what is known of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.base._torch import RelaxedUnspecConstraint, StrictMinMaxConstraint, example_of, free_unbacked_symbols

Size: TypeAlias = int | sympy.Expr
"""A size in a report: a number, or an expression of the sizes of the call, by torch's symbols for them, such as s27."""


def expression(size: Any) -> Size:
    """Return an int as it is, and a SymInt as an expression of torch's symbols; adds no guard."""
    if isinstance(size, int):
        return size
    expr = size.node.expr
    return int(expr) if expr.is_number else expr


def depends_on_data(size: Any) -> bool:
    """Return whether a size is known only when the graph runs, as that of `nonzero` is: torch has no example of it."""
    return not isinstance(size, int) and (not size.node.has_hint() or bool(free_unbacked_symbols(size)))


def is_at_least(size: Any, number: int) -> bool | None:
    """Return whether `size >= number` for all sizes that this compilation serves; None if for some. Adds no guard."""
    if statically_known_true(size >= number):
        return True
    return False if statically_known_true(size < number) else None


def alike(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Return whether two shapes, or strides, are equal for all sizes that this compilation serves. Adds no guard."""
    return len(a) == len(b) and all(bool(statically_known_true(x == y)) for x, y in zip(a, b, strict=True))


def bounds(size: Any) -> tuple[int, int | None]:
    """Return the smallest and the largest value of a size in this compilation; None if it has no largest value."""
    if isinstance(size, int):
        return size, size
    value_range = size.node.shape_env.bound_sympy(size.node.expr)
    upper = value_range.upper
    # torch's upper bound of a size that has none is an infinity of its own, or the largest int64
    endless = not upper.is_number or not upper.is_finite or upper >= 2**62
    return int(value_range.lower), None if endless else int(upper)


def value_at(size: Size | Any, largest: bool, endless: int = 1 << 20) -> int:
    """Return the smallest or largest value of a SymInt or int. endless: the value where there is no largest one."""
    low, high = bounds(size)
    return (endless if high is None else high) if largest else low


@dataclass(frozen=True)
class VaryingSize:
    """A symbol in the sizes of a report.

    symbol: torch's name, "s27". stands_for: the size of an input, "x.shape[0]". lowest, highest: the values for which
    this compilation is; highest is None if there is no largest. example: the value in the call that was compiled.
    """

    symbol: str
    stands_for: str
    lowest: int
    highest: int | None
    example: int

    def __str__(self) -> str:
        ends = f"{self.lowest:,} to {self.highest:,}" if self.highest is not None else f"from {self.lowest:,} on"
        return f"{self.symbol} is {self.stands_for}, {ends}; {self.example:,} in the call that was compiled"


def varying(sizes: Sequence[Any]) -> Iterator[VaryingSize]:
    """Yield the symbols of sizes, ints and SymInts, with what they stand for."""
    for size in sizes:
        if isinstance(size, int) or depends_on_data(size):
            continue
        env = size.node.shape_env
        for symbol in sorted(size.node.expr.free_symbols, key=str):
            example = example_of(env, symbol)
            low, high = bounds(env.create_symintnode(symbol, hint=example))
            yield VaryingSize(str(symbol), _readable(env.var_to_sources.get(symbol, ())), low, high, example)


def _readable(sources: Sequence[Any]) -> str:
    """Return what a symbol stands for, in Python: "x.shape[0]"."""
    if not sources:
        return "a size that torch does not name"
    name = re.sub(r"L\['(\w+)'\]", r"\1", sources[0].name)
    return re.sub(r"\.size\(\)\[(\d+)\]", r".shape[\1]", name)


def why_no_guard(size: Any, number: int) -> str:
    """Return why the compilation cannot be limited to the side of `size >= number` on which the example is.

    "" if it can be. Torch takes no guards once Dynamo has written those of a graph. With a range, `mark_dynamic` asks
    for one compilation of the whole range; without one, for a compilation that serves more than one size.
    """
    if depends_on_data(size):
        return "it depends on data, and is known only when the graph runs"
    env = size.node.shape_env
    if env.frozen:
        return "the guards of this graph are written already"
    for symbol, constraint in _constraints(env):
        if symbol not in size.node.expr.free_symbols:
            continue
        if isinstance(constraint, StrictMinMaxConstraint):
            return "mark_dynamic gives it a range, for which there is to be one compilation"
        if isinstance(constraint, RelaxedUnspecConstraint) and not _leaves_more(size, symbol, number):
            return "mark_dynamic asks for more sizes than the one that would be left on this side"
    return ""


def _constraints(env: Any) -> Iterator[tuple[sympy.Symbol, Any]]:
    """Yield the symbols of inputs with what the user has asked for them."""
    for tracked in env.tracked_fakes or ():
        asked = getattr(tracked.symbolic_context, "constraint_sizes", None)
        if isinstance(tracked.fake, torch.Tensor) and asked:
            shape: Sequence[Any] = tracked.fake.shape
            for size, constraint in zip(shape, asked, strict=True):
                if constraint is not None and isinstance(size, torch.SymInt):
                    for symbol in size.node.expr.free_symbols:
                        yield symbol, constraint


def _leaves_more(size: Any, symbol: sympy.Symbol, number: int) -> bool:
    """Return whether another value of the symbol is on the side of `size >= number` on which the example is."""
    env, expr = size.node.shape_env, size.node.expr
    examples = {s: example_of(env, s) for s in expr.free_symbols}
    # by the neighbours of the example: torch rejects a symbol that a guard leaves only one value
    near = (examples[symbol] + step for step in (-1, 1))
    low, _ = bounds(env.create_symintnode(symbol, hint=examples[symbol]))
    side = expr.subs(examples) >= number
    return any(value >= low and (expr.subs({**examples, symbol: value}) >= number) == side for value in near)
