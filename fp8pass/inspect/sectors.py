"""Count the bytes that memory moves needlessly: for sectors of 32 bytes of which a kernel reads or writes only a part.

Reads the source of Inductor's Triton kernels. A tile is contiguous in memory as far as it extends along the dimension
that an index counts in steps of one: "x0 + 4096*r0_1" along x0, XBLOCK elements, or the row's length if that is less.
Where no variable counts so, nothing is counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

SECTOR = 32
LEAST = 1 << 20
"""Accesses of fewer elements are left out."""
_ACCESS = re.compile(r"tl\.(load|store)\((\w+) \+ \((.*?)\), ")
_WRAPPED = re.compile(r"\(\(([^()%]*)\) % \d+\)")
_VARIABLE = re.compile(r"\b([xyz]|r\d(?=_))_?(\d+)\b")
_ITEMSIZE = {"*bf16": 2, "*fp16": 2, "*fp32": 4, "*fp64": 8, "*i16": 2, "*i32": 4, "*i64": 8}
"""Bytes of an element by the type of the argument; all other types have one byte."""


def in_vain(source: str, signature: Mapping[str, str], blocks: Mapping[str, int], numels: Mapping[str, int]) -> int:
    """Return the bytes moved needlessly in one launch.

    signature: types of the arguments. blocks, numels: sizes of tiles and of dimensions: {"XBLOCK": 64}, {"xnumel": 32}.
    A sector that is written in part is read and written whole.
    """
    blocks = {**{name: int(size) for name, size in re.findall(r"(\w+BLOCK): tl\.constexpr = (\d+)", source)}, **blocks}
    total = 0
    for kind, pointer, index in _ACCESS.findall(_WRAPPED.sub(r"\1", source)):
        size, variables = _ITEMSIZE.get(signature.get(pointer, ""), 1), _VARIABLE.findall(index)
        elements = math.prod(_numel(name, variables, source, numels) for name in {name for name, _ in variables})
        run = max(_runs(index, source, blocks), default=SECTOR)
        if elements >= LEAST and run * size < SECTOR:
            total += elements * ((1 + (kind == "store")) * SECTOR // run - size)
    return total


def _numel(dimension: str, variables: list[tuple[str, str]], source: str, numels: Mapping[str, int]) -> int:
    """Return how many values the variables of a dimension take: "x1 = xindex // 4096" takes a 4096th of them."""
    numel = numels.get(f"{dimension}_numel" if dimension[0] == "r" else f"{dimension}numel", 1)
    divisors = [_divisor(_named(*v), source) for v in variables if v[0] == dimension]
    return numel // min(divisors)


def _named(dimension: str, number: str) -> str:
    return f"{dimension}_{number}" if dimension[0] == "r" else dimension + number


def _divisor(variable: str, source: str) -> int:
    match = re.search(rf"^\s+{variable} = .*// ?(\d+)", source, re.MULTILINE)
    return int(match[1]) if match else 1


def _runs(index: str, source: str, blocks: Mapping[str, int]) -> Iterator[int]:
    """Yield the number of contiguous elements of a tile for each variable that counts in steps of one."""
    depth, terms = 0, [""]
    for character in index:
        depth += (character == "(") - (character == ")")
        if character == "+" and not depth:
            terms.append("")
        else:
            terms[-1] += character
    for term in terms:
        if not (variable := _VARIABLE.fullmatch(term.strip(" ()"))):
            continue
        name = variable[1]
        block = blocks.get(f"{name.upper()}_BLOCK" if name[0] == "r" else f"{name.upper()}BLOCK", 1)
        yield _run(variable[0], source, block)


def _run(variable: str, source: str, block: int) -> int:
    """Return how many consecutive values a variable takes in a tile: "x0 = (xindex % 4096)" takes 4096 at most."""
    if (divisor := _divisor(variable, source)) > 1:
        return max(1, block // divisor)
    defined = re.search(rf"^\s+{variable} = (.*)$", source, re.MULTILINE)
    if defined and (modulus := re.search(r"% ?(\d+)", defined[1])):
        return min(block, int(modulus[1]))
    return block
