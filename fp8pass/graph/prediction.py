"""`Prediction`: what the roofline says of one matmul call, for all sizes that it may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy

from fp8pass.base._torch import example_of
from fp8pass.graph.sizes import Size, expression, value_at
from fp8pass.hardware import Target
from fp8pass.recipes import KINDS, Kind, Recipe
from fp8pass.roofline import ROWS, Intervals, Seconds, pays_from, predicted_seconds, predicted_speedup


@dataclass(frozen=True)
class Prediction:
    """The predicted times of a call of [M, K] by [K, N]: of its matmuls, up to three in training, with all quantizing.

    seconds: in high precision, and in FP8; expressions of torch's symbols if a size varies. variable: the size that
    varies, a SymInt; None if none does, or if several do that do not depend on each other. pays: where the speed-up
    reaches `min_speedup`, or 1 if that is 0, by the values of `variable`, or of M if none varies; None if it is not
    known. of: what `pays` is about, "M" or a symbol. ends: the speed-up at the smallest and the largest sizes that this
    compilation serves; None if none varies.
    """

    seconds: tuple[Seconds, Seconds]
    variable: Any = field(compare=False)  # SymInts have no hash
    pays: Intervals | None
    of: str
    ends: tuple[float, float] | None

    @property
    def speedup(self) -> Any:
        """The time in high precision divided by that in FP8: a float, or an expression."""
        return self.seconds[0] / self.seconds[1]


def needed(of_input: bool, of_weight: bool) -> tuple[Kind, ...]:
    """Return the matmuls that a call computes in training. of_input, of_weight: whether these need a gradient.

    Frozen weights, and the model's input, need none.
    """
    computed: dict[Kind, bool] = {"output": True, "grad_input": of_input, "grad_weight": of_weight}
    return tuple(kind for kind in KINDS if computed[kind])


def predict(
    target: Target | None,
    sizes: Sequence[Any],
    recipe: Recipe,
    element_size: int,
    kinds: tuple[Kind, ...],
    min_speedup: float,
    ready: bool = False,
) -> Prediction | None:
    """Predict a call. sizes: M, K and N, ints or SymInts. None without a target, or without a kernel on it.

    kinds, ready: see `overhead_seconds`.
    """
    of_call = (recipe, element_size, kinds)
    m, k, n = map(expression, sizes)
    if target is None or (seconds := predicted_seconds(target, m, k, n, *of_call, ready=ready)) is None:
        return None
    variable, solved = _solved_for(sizes, (m, k, n))
    pays = None if solved is None else pays_from(target, *solved, *of_call, min_speedup or 1.0, ready)
    ends = None
    if any(isinstance(size, sympy.Basic) for size in (m, k, n)):
        smallest, largest = (_speedup_at(target, sizes, at_most, *of_call, ready) for at_most in (False, True))
        ends = smallest, largest
    return Prediction(seconds, variable, pays, _name(variable, m, k, n), ends)


def _speedup_at(
    target: Target,
    sizes: Sequence[Any],
    largest: bool,
    recipe: Recipe,
    element_size: int,
    kinds: tuple[Kind, ...],
    ready: bool,
) -> float:
    m, k, n = (value_at(size, largest) for size in sizes)
    return float(predicted_speedup(target, m, k, n, recipe, element_size, kinds, ready=ready))


def _solved_for(sizes: Sequence[Any], exprs: tuple[Size, Size, Size]) -> tuple[Any, tuple[Size, Size, Size] | None]:
    """Return the size that varies, and M, K and N as polynomials of it; (None, None) if there is no such size.

    sizes: M, K and N, ints or SymInts. exprs: the same as expressions.
    """
    varying = {expr for expr in exprs if isinstance(expr, sympy.Basic)}
    if not varying:
        return None, (ROWS, exprs[1], exprs[2])
    if len(varying) == 1:  # it may be an expression, of several symbols too: the guard is on the expression
        size = next(size for size, expr in zip(sizes, exprs, strict=True) if expr in varying)
        m, k, n = (ROWS if expr in varying else expr for expr in exprs)
        return size, (m, k, n)
    symbols = set().union(*(size.free_symbols for size in varying))
    if len(symbols) > 1 or not all(size.is_polynomial(*symbols) for size in varying):
        return None, None
    env = next(size.node.shape_env for size in sizes if not isinstance(size, int))
    (symbol,) = symbols
    return env.create_symintnode(symbol, hint=example_of(env, symbol)), exprs


def _name(variable: Any, m: Size, k: Size, n: Size) -> str:
    only_rows = variable is None or (expression(variable) == m and isinstance(k, int) and isinstance(n, int))
    return "M" if only_rows else str(expression(variable))


def in_words(pays: Intervals | None, size: str = "M") -> str:
    """Return where a call pays, as reports have it: "1,184" for M from 1,184 on, "never", "96 to 200, 1,184"."""
    if pays is None:
        return ""
    texts = [f"{first:,}" if last is None else f"{first:,} to {last:,}" for first, last in pays]
    listed = ", ".join(texts) or "never"
    return listed if size == "M" or not pays else f"{size} = {listed}"
