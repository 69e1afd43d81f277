"""Write functions of elementwise ops, such as GELU, with few instructions and without branches, as Triton code.

Inductor's code calls NVIDIA's functions, which branch for each element, and divides for any divisor. What replaces them
(triton_functions.py) computes both branches and selects, and is within a few units of the last bit of float32: for
results that become FP8.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence, Set

_INSTEAD = {"libdevice.tanh(": "tanh_of(", "libdevice.erf(": "erf_of(", "libdevice.exp(": "tl.exp("}
_INSTEAD["tl.sigmoid("] = "sigmoid_of("
_CONSTANT = re.compile(r"(\w+) = tl\.full\(\[\], ([-+.e\d]+), tl\.float32\)")
_TANH_CALL = re.compile(r"(\w+) = libdevice\.tanh\((\w+)\)")
_EXPONENTIAL = re.compile(r"(\w+) = tl\.exp\(\w+\)")
_SUM = re.compile(r"(\w+) = (\w+) \+ (\w+)")
_PRODUCT = re.compile(r"(\w+) = (\w+) \* (\w+)")
_QUOTIENT = re.compile(r"\((\w+) / (\w+)\)")


def fast(lines: Sequence[str]) -> Iterator[str]:
    """Write the ops with our functions; what is divided by 1 and an exponential is multiplied by the inverse."""
    ones, exponentials, sums = _ones(lines), set[str](), set[str]()
    for line in _as_sigmoids(lines):
        for slow, instead in _INSTEAD.items():
            line = line.replace(slow, instead)
        if m := _EXPONENTIAL.fullmatch(line):
            exponentials.add(m[1])
        if (m := _SUM.fullmatch(line)) and m[2] in exponentials and m[3] in ones:
            sums.add(m[1])
        yield _QUOTIENT.sub(lambda m: f"({m[1]} * inverse_of({m[2]}))" if m[2] in sums else m[0], line)


def _as_sigmoids(lines: Sequence[str]) -> Iterator[str]:
    """Write 1 + tanh(x), as GELU has it, as 2 / (1 + exp(-2 x)), which cancels nowhere."""
    ones, halves = _ones(lines), dict[str, str]()
    for line in lines:
        if (m := _TANH_CALL.fullmatch(line)) and _is_beside_one(m[1], lines, ones):
            x, factor = _factored(m[2], lines)
            halves[m[1]] = half = f"half_{m[1]}"
            # the power of 2 is exp(-2 * x * factor), with all constants multiplied in advance
            yield f"{half} = inverse_of(tl.exp2({x} * {-2 * math.log2(math.e) * factor}) + 1.0)"
            yield f"{m[1]} = 2.0 * {half} - 1.0"  # for the square that is subtracted from 1
        elif (m := _SUM.fullmatch(line)) and m[2] in halves and m[3] in ones:
            yield f"{m[1]} = {halves[m[2]]} + {halves[m[2]]}"
        else:
            yield line


def _constants(lines: Sequence[str]) -> dict[str, float]:
    return {m[1]: float(m[2]) for line in lines if (m := _CONSTANT.fullmatch(line))}


def _ones(lines: Sequence[str]) -> set[str]:
    return {name for name, value in _constants(lines).items() if value == 1}


def _factored(name: str, lines: Sequence[str]) -> tuple[str, float]:
    """Return x and c if the variable is x * c with a constant c; otherwise the variable itself and 1."""
    constants = _constants(lines)
    products = (m for line in lines if (m := _PRODUCT.fullmatch(line)) and m[1] == name and m[3] in constants)
    return next(((m[2], constants[m[3]]) for m in products), (name, 1.0))


def _is_beside_one(tanh: str, lines: Sequence[str], ones: Set[str]) -> bool:
    """Return whether a hyperbolic tangent is only added to 1, or its square only subtracted from 1."""
    sides = [line.partition(" = ") for line in lines]
    squares = {left for left, _, right in sides if right == f"{tanh} * {tanh}"}
    right_of = {tanh: {f"{tanh} + {one}" for one in ones} | {f"{tanh} * {tanh}"}}
    right_of |= {square: {f"{one} - {square}" for one in ones} for square in squares}
    return all(
        (right or left) in allowed
        for name, allowed in right_of.items()
        for left, _, right in sides
        if re.search(rf"\b{name}\b", right or left)
    )
