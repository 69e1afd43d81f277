"""Write the Triton kernel that quantizes tensors tile by tile, in both orientations, with the ops before the quantize.

A program computes one tile and ends: the GPU has other programs load their tiles meanwhile. Each element is computed
once, in the layout in which it is read; what is stored transposed is turned around as FP8, in shared memory. A tile
leaves one number for its amax, and one for each column that is summed.

Inductor's loop over a reduction can't be had so: it keeps a partial result for each element of a tile in registers,
walks from tile to tile with a barrier between them, and Triton computes some ops a second time in the other layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from fp8pass._torch import TRITON_IMPORTS, PyCodeCache, triton_type
from fp8pass.fused.epilogue import Epilogue, Read
from fp8pass.fused.plan import Output
from fp8pass.fused.source import computed, of_bits
from fp8pass.node_meta import MADE_BY

NAME = "quantize_in_tiles"
"""The kernel's name; Inductor appends a number."""
SIDE = 64
"""The least rows and columns of a tile. A kernel leaves one amax for each SIDE by SIDE elements, whatever its tile."""
GROUP = 8
"""Tiles of this many rows of tiles follow each other, column by column: their transposed results lie side by side."""


@dataclass(frozen=True)
class Choice:
    """A configuration, of which Inductor's autotuner takes the fastest: the sizes of a tile, and its warps."""

    rows: int
    columns: int
    warps: int


LIGHT: tuple[Choice, ...] = (Choice(64, 64, 4), Choice(128, 64, 8))
HEAVY: tuple[Choice, ...] = (Choice(64, 64, 8), Choice(64, 64, 4), Choice(64, 64, 16))
"""The choices for kernels that read one matrix, and for those that read several and so need more registers.

The rows and columns of all tiles fill whole sectors of memory in either orientation, and none spills registers. The
first one is what runs where the choice is fixed.
"""


@dataclass(frozen=True)
class Op:
    """Describes a node that a kernel replaces, without the node itself, which would keep its graph in memory."""

    target: Any
    meta: dict[str, Any]

    @classmethod
    def of(cls, node: fx.Node) -> Op:
        """Keep what says which of the user's functions a node belongs to."""
        return cls(node.target, {key: node.meta[key] for key in SOURCES if key in node.meta})


SOURCES = (MADE_BY, "partitioner_tag", "fwd_source_fn_stack", "from_node", "original_aten")
"""Keys of metadata that say which function a node comes from."""


@dataclass(frozen=True)
class TilesPlan:
    """Everything that the source depends on. The kernel computes on matrices [rows, columns].

    inputs: their dtypes, in the order in which the code numbers them. piles: the inputs that consist of several
    tensors, one below the other, each with the tensors' numbers of rows. ops: what the kernel replaces.
    """

    rows: int
    columns: int
    code: Epilogue
    outputs: tuple[Output, ...]
    inputs: tuple[torch.dtype, ...]
    piles: tuple[tuple[int, tuple[int, ...]], ...]
    choices: tuple[Choice, ...]
    ops: tuple[Op, ...] = field(default=(), compare=False)

    @property
    def parameters(self) -> dict[str, torch.dtype]:
        """The names of the kernel's parameters that are tensors, in order, and their dtypes."""
        piles = dict(self.piles)
        names = {
            name: dtype
            for i, dtype in enumerate(self.inputs)
            for name in ([f"in{i}_{part}" for part in range(len(piles[i]))] if i in piles else [f"in{i}"])
        }
        return names | {f"out{i}": output.dtype for i, output in enumerate(self.outputs)}

    def shape(self, output: Output) -> list[int]:
        """Return the shape of an output."""
        m, n, down = self.rows, self.columns * len(output.results), -(-self.rows // SIDE)
        partials = down * -(-self.columns // SIDE) * len(output.results)
        return {"rows": [m, n], "columns": [n, m], "amax": [partials], "sums": [down, n]}[output.kind]

    def programs(self, choice: Choice) -> int:
        """Return the number of tiles."""
        return -(-self.rows // choice.rows) * -(-self.columns // choice.columns)


def kernel_of(plan: TilesPlan) -> Any:
    """Return the kernel, a Triton `Autotuner`; the same one for the same source. Its attribute `tiles` is the plan."""
    kernel = getattr(PyCodeCache.load(source_of(plan)), NAME)
    kernel.tiles = plan
    return kernel


def source_of(plan: TilesPlan) -> str:
    """Return the source of the kernel, a Python module."""
    choices = (
        f'triton.Config({{"ROWS": {c.rows}, "COLUMNS": {c.columns}}}, num_warps={c.warps}, num_stages=1)'
        for c in plan.choices
    )
    head = [f"@triton.autotune([{', '.join(choices)}], [])", "@triton.jit"]
    sizes = ["ROWS: tl.constexpr", "COLUMNS: tl.constexpr"]
    head.append(f"def {NAME}({', '.join([*plan.parameters, *sizes])}):")
    body = [*_place(plan), *_reads(plan), *_results(plan)]
    used = _used(body)
    return "\n".join([TRITON_IMPORTS, *used, *head, *(f"    {line}" for line in body), ""])


# Inductor's code calls NVIDIA's functions, which branch for each element, and divides for any divisor. What replaces
# them computes both branches and selects, and is within a few units of the last bit of float32: results are FP8.
_INVERSE = '''
@triton.jit
def inverse_of(x):
    """Return 1 / x for x of at least 1: a division for any x takes instructions more to scale both sides."""
    root = tl.rsqrt(x)
    return root * root

'''
_SIGMOID = '''
@triton.jit
def sigmoid_of(x):
    """Return 1 / (1 + exp(-x))."""
    return inverse_of(tl.exp(-x) + 1.0)

'''
_TANH = '''
@triton.jit
def tanh_of(x):
    """Return tanh(x) by an exponential, and near 0, where that would cancel, by two terms of the series."""
    far = 1.0 - 2.0 * inverse_of(tl.exp2(tl.abs(x) * 2.885390043258667) + 1.0)
    far = tl.where(x < 0.0, -far, far)
    return tl.where(tl.abs(x) < 0.0625, x + x * (x * x * -0.3333333333333333), far)

'''
_ERF = '''
@triton.jit
def erf_of(x):
    """Return erf(x) by the two polynomials of NVIDIA's function."""
    size = tl.abs(x)
    near = size < 1.002959966659546
    z = tl.where(near, x * x, size)
    p = tl.where(near, 8.483494457323104e-05, 1.6425845387857407e-05)
    p = p * z + tl.where(near, -0.0008213091641664505, -0.0004680210549850017)
    p = p * z + tl.where(near, 0.005213488824665546, 0.0052647641859948635)
    p = p * z + tl.where(near, -0.026868773624300957, -0.034303076565265656)
    p = p * z + tl.where(near, 0.11284004896879196, 0.1532936990261078)
    p = p * z + tl.where(near, -0.37612664699554443, 0.9163130521774292)
    p = p * z + tl.where(near, 0.12837915122509003, 0.6282998323440552)
    by = tl.where(near, x, -size)
    p = p * by + by
    far = 1.0 - tl.exp2(p)
    return tl.where(near, p, tl.where(x < 0.0, -far, far))

'''
_FUNCTIONS = {"inverse_of": _INVERSE, "sigmoid_of": _SIGMOID, "tanh_of": _TANH, "erf_of": _ERF}
_INSTEAD = {"libdevice.tanh(": "tanh_of(", "libdevice.erf(": "erf_of(", "libdevice.exp(": "tl.exp("}
_INSTEAD["tl.sigmoid("] = "sigmoid_of("
_ONE = re.compile(r"(\w+) = tl\.full\(\[\], 1\.0, tl\.float32\)")
_EXPONENTIAL = re.compile(r"(\w+) = tl\.exp\(\w+\)")
_SUM = re.compile(r"(\w+) = (\w+) \+ (\w+)")
_QUOTIENT = re.compile(r"\((\w+) / (\w+)\)")


def _fast(lines: Iterable[str]) -> Iterator[str]:
    """Write the ops with the functions above; what is divided by 1 and an exponential is multiplied by the inverse."""
    ones, exponentials, sums = set[str](), set[str](), set[str]()
    for line in lines:
        for slow, fast in _INSTEAD.items():
            line = line.replace(slow, fast)
        for pattern, found in ((_ONE, ones), (_EXPONENTIAL, exponentials)):
            if m := pattern.fullmatch(line):
                found.add(m[1])
        if (m := _SUM.fullmatch(line)) and m[2] in exponentials and m[3] in ones:
            sums.add(m[1])
        yield _QUOTIENT.sub(lambda m: f"({m[1]} * inverse_of({m[2]}))" if m[2] in sums else m[0], line)


def _used(body: Sequence[str]) -> list[str]:
    """Return the functions that the code calls, and those that they call, before them."""
    text, found = "\n".join(body), list[str]()
    for name, function in reversed(_FUNCTIONS.items()):
        if f"{name}(" in text:
            found.insert(0, function)
            text += function
    return found


def _place(plan: TilesPlan) -> Iterator[str]:
    """Write which tile a program computes."""
    down, across = f"tl.cdiv({plan.rows}, ROWS)", f"tl.cdiv({plan.columns}, COLUMNS)"
    yield "tile = tl.program_id(0)"
    yield f"across = {across}"
    yield f"first = tile // ({GROUP} * across) * {GROUP}"
    yield f"height = tl.minimum({down} - first, {GROUP})"
    yield "within = tile - first * across"
    yield "i = (first + within % height) * ROWS"
    yield "j = within // height * COLUMNS"
    yield "row = i + tl.arange(0, ROWS)[:, None]"
    yield "column = j + tl.arange(0, COLUMNS)[None, :]"


def _mask(plan: TilesPlan, *dims: str) -> str:
    """Return the mask of a load or store, as its last argument; "" if all tiles divide the matrix."""
    inside = _inside(plan, dims)
    return f", mask={inside}" if inside else ""


def _inside(plan: TilesPlan, dims: Sequence[str]) -> str:
    largest = {"row": max(c.rows for c in plan.choices), "column": max(c.columns for c in plan.choices)}
    sizes = {"row": plan.rows, "column": plan.columns}
    return " & ".join(f"({d} < {sizes[d]})" for d in dims if sizes[d] % largest[d])


def _reads(plan: TilesPlan) -> Iterator[str]:
    piles = dict(plan.piles)
    for read in plan.code.reads:
        if read.input in piles:
            yield from _of_pile(read, piles[read.input], plan)
        else:
            yield f"{read.variable} = {computed(_load(read, f'in{read.input}', 'row', plan), read.dtype)}"
    yield from _tied(plan)


def _tied(plan: TilesPlan) -> Iterator[str]:
    """Write selections that never select: the last bits of numbers that were bfloat16 are 0, as the assembler knows.

    Triton 3.6 computes what depends on one tensor again in the layout of a transposed store, to convert the tensor
    while it is narrow; it does not where two tensors would have to be converted.
    """
    wide = [r.variable for r in plan.code.reads if r.row and r.column and r.dtype == torch.bfloat16]
    for one, other in pairwise([*wide, *wide[:1]] if len(wide) > 1 else []):
        yield f"{one} = tl.where(({other}.to(tl.int32, bitcast=True) & 1) != 0, 0.0, {one})"


def _of_pile(read: Read, heights: Sequence[int], plan: TilesPlan) -> Iterator[str]:
    """Write the load of a tile from one of several tensors, of which none ends within a tile."""
    start = 0
    for part, height in enumerate(heights):
        is_last = part == len(heights) - 1
        yield "else:" if is_last else f"{'el' if part else ''}if i < {start + height}:"
        row = f"(row - {start})" if start else "row"
        yield f"    {read.variable} = {computed(_load(read, f'in{read.input}_{part}', row, plan), read.dtype)}"
        start += height


def _load(read: Read, name: str, row: str, plan: TilesPlan) -> str:
    last = read.row * plan.rows + read.column * plan.columns + read.offset
    wide = ".to(tl.int64)" if last >= 1 << 31 else ""
    terms = [
        f"{at}{wide}" if factor == 1 else f"{at}{wide} * {factor}"
        for at, factor in ((row, read.row), ("column", read.column))
        if factor
    ]
    if read.offset:
        terms.append(str(read.offset))
    dims = [dim for dim, factor in (("row", read.row), ("column", read.column)) if factor]
    return f"tl.load({' + '.join([name, *terms])}{_mask(plan, *dims)})"


def _results(plan: TilesPlan) -> Iterator[str]:
    """Write the ops, then the stores: amaxes first, which need the numbers before they are quantized."""
    yield from _fast(line for result in plan.code.results for line in result.lines)
    for kind in ("amax", "sums", "rows", "columns"):
        for i, output in enumerate(plan.outputs):
            for part, number in enumerate(output.results if output.kind == kind else ()):
                yield from _store(i, part, plan.code.results[number].variable, plan)


def _store(i: int, part: int, value: str, plan: TilesPlan) -> Iterator[str]:
    """Write a result as a part of an output."""
    output, inside = plan.outputs[i], _inside(plan, ("row", "column"))
    dtype, n = triton_type(output.dtype), plan.columns * len(output.results)
    first = f" + {plan.columns * part}" if part else ""
    if output.kind == "amax":
        yield from _store_amax(i, part, value, plan)
    elif output.kind == "sums":
        kept = f"tl.where({inside}, {value}, 0.0)" if inside else value
        yield f"above = i // {SIDE} + tl.arange(0, ROWS // {SIDE})[:, None]"
        within = " & ".join(filter(None, [_blocks_inside(plan, "row", "above"), _inside(plan, ["column"])]))
        # the first of several blocks gets the tile's sums, the others zeros
        sums = f"tl.where(above == i // {SIDE}, tl.sum({kept}, 0)[None, :], 0.0)"
        yield f"tl.store(out{i} + above * {n} + column{first}, {sums}{f', mask={within}' if within else ''})"
    else:
        strides = (n, 1) if output.kind == "rows" else (1, plan.rows)
        wide = ".to(tl.int64)" if plan.rows * n >= 1 << 31 else ""
        terms = (f"row{wide} * {strides[0]}", f"(column{first}){wide} * {strides[1]}")
        address = f"out{i} + {' + '.join(t.removesuffix(' * 1') for t in terms)}"
        yield f"tl.store({address}, ({value}).to({dtype}){_mask(plan, 'row', 'column')})"


def _store_amax(i: int, part: int, value: str, plan: TilesPlan) -> Iterator[str]:
    """Write the amax of a tile for each SIDE by SIDE elements of it: as many numbers, whatever the tile."""
    inside, across = _inside(plan, ("row", "column")), -(-plan.columns // SIDE)
    bits = f"bits{i}_{part}"
    yield f"{bits} = tl.abs({value}).to(tl.int32, bitcast=True)"
    most = of_bits(f"tl.max({f'tl.where({inside}, {bits}, 0)' if inside else bits})", plan.outputs[i])
    start = f" + {-(-plan.rows // SIDE) * across * part}" if part else ""
    yield f"down = i // {SIDE} + tl.arange(0, ROWS // {SIDE})[:, None]"
    yield f"right = j // {SIDE} + tl.arange(0, COLUMNS // {SIDE})[None, :]"
    within = " & ".join(filter(None, [_blocks_inside(plan, "row", "down"), _blocks_inside(plan, "column", "right")]))
    blocks = f"tl.full([ROWS // {SIDE}, COLUMNS // {SIDE}], 0.0, tl.float32).to({triton_type(plan.outputs[i].dtype)})"
    mask = f", mask={within}" if within else ""
    yield f"tl.store(out{i}{start} + down * {across} + right, {blocks} + {most}{mask})"


def _blocks_inside(plan: TilesPlan, dim: str, block: str) -> str:
    """Return the condition that a block of SIDE rows or columns is in the matrix; "" if it always is."""
    size = plan.rows if dim == "row" else plan.columns
    return f"({block} < {-(-size // SIDE)})" if _inside(plan, [dim]) else ""
