"""Write the Triton kernel that quantizes tensors tile by tile, in both orientations, with the ops before the quantize.

A program computes one tile and ends: the GPU has other programs load their tiles meanwhile. Each element is computed
once, in the layout in which it is read. Where something is stored transposed, a thread computes four rows, one below
the other, and packs their results into 32 bits: shared memory then turns around a quarter as many numbers, none of them
byte by byte, and sums of columns begin within the thread. A tile leaves one number for its amax, and one for each
column that is summed.

Inductor's loop over a reduction can't be had so: it keeps a partial result for each element of a tile in registers,
walks from tile to tile with a barrier between them, and Triton computes some ops a second time in the other layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fp8pass.base._torch import TRITON_IMPORTS, PyCodeCache, triton_type
from fp8pass.base.node_meta import MADE_BY
from fp8pass.passes.kernels.element_addresses import AddressStep
from fp8pass.passes.kernels.fast_functions import fast
from fp8pass.passes.kernels.fused_plan import Output
from fp8pass.passes.kernels.matmul_source import computed, of_bits
from fp8pass.passes.kernels.triton_epilogue import Read, TritonEpilogue

NAME = "quantize_in_tiles"
"""The kernel's name; Inductor appends a number."""
SIDE = 64
"""The least rows and columns of a tile. A kernel leaves one amax for each SIDE by SIDE elements, whatever its tile."""
ROWS_IN_A_WORD = 4
"""Rows of which a thread packs the FP8 numbers of a column into 32 bits, to store them transposed."""
GROUP = 8
"""Tiles of this many rows of tiles follow each other, column by column: their transposed results lie side by side."""


@dataclass(frozen=True)
class Choice:
    """A configuration, of which Inductor's autotuner takes the fastest: the sizes of a tile, and its warps."""

    rows: int
    columns: int
    warps: int


LIGHT: tuple[Choice, ...] = (Choice(64, 64, 4), Choice(128, 64, 8))
HEAVY: tuple[Choice, ...] = (Choice(64, 64, 4), Choice(64, 64, 8))
AMAXES: tuple[Choice, ...] = (Choice(64, 64, 8), Choice(128, 128, 32))
"""The choices for kernels that read one matrix; for those that read several and so need more registers; and for those
of them that only take amaxes of rows and columns.

The rows and columns of all tiles fill whole sectors of memory in either orientation, and none spills registers. The
first one is what runs where the choice is fixed.
"""


BLOCK = 128
"""Elements of a block in each direction in which it has more than one."""


def in_blocks(sizes: Iterable[tuple[int, int]]) -> tuple[Choice, ...]:
    """Return the choices for a kernel that quantizes in blocks of these rows and columns: a tile holds whole blocks."""
    rows, columns = (max(SIDE, *size) for size in zip(*sizes, strict=True))
    return tuple(Choice(rows, columns, warps) for warps in ((16, 32) if rows == columns else (4, 8)))


@dataclass(frozen=True)
class KernelOp:
    """Describes a node that a kernel replaces, without the node itself, which would keep its graph in memory."""

    target: Any
    meta: dict[str, Any]

    @classmethod
    def of(cls, node: fx.Node) -> KernelOp:
        """Keep what says which of the user's functions a node belongs to."""
        return cls(node.target, {key: node.meta[key] for key in SOURCES if key in node.meta})


SOURCES = (MADE_BY, "partitioner_tag", "fwd_source_fn_stack", "from_node", "original_aten")
"""Keys of metadata that say which function a node comes from."""


@dataclass(frozen=True)
class ResultBlocks:
    """Blocks of elements of one result, each of which has a scale that is computed from its amax.

    result: the number of the result. rows, columns: of a block: a tile has as many, or the block has one. code: the
    ops from an amax to the scale and to other numbers that are written.
    """

    result: int
    rows: int
    columns: int
    code: TritonEpilogue


@dataclass(frozen=True)
class TilesPlan:
    """Everything that the source depends on. The kernel computes on matrices [rows, columns].

    codes: the code of each range of columns, with the column at which it starts; there are several where the matrix
    consists of unlike parts, side by side. inputs: their dtypes, in the order in which the code numbers them. piles:
    the inputs that consist of several tensors, one below the other, each with the tensors' numbers of rows. half: if
    not 0, the kernel computes two results for each row and column, of which the second stands `half` columns further
    right, as the second half of an attention head. ops: what the kernel replaces.
    """

    rows: int
    columns: int
    codes: tuple[tuple[int, TritonEpilogue], ...]
    outputs: tuple[Output, ...]
    inputs: tuple[torch.dtype, ...]
    piles: tuple[tuple[int, tuple[int, ...]], ...]
    choices: tuple[Choice, ...]
    blocks: tuple[ResultBlocks, ...] = ()
    half: int = 0
    ops: tuple[KernelOp, ...] = field(default=(), compare=False)

    @property
    def abreast(self) -> int:
        """The number of rows, one below the other, that a thread computes at once."""
        turns = any(output.kind in ("columns", "sums", "amaxes of columns") for output in self.outputs)
        return ROWS_IN_A_WORD if turns else 1

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
        across = -(-self.columns // SIDE)
        if output.kind == "numbers":
            assert output.blocks is not None
            b = self.blocks[output.blocks]
            return [n // b.columns, m] if b.rows == 1 else [m // b.rows, n // b.columns]
        return {
            "rows": [m, n],
            "columns": [n, m],
            "amax": [down * across * len(output.results)],
            "amaxes of rows": [across, m],
            "amaxes of columns": [down, n],
            "sums": [down, n],
        }[output.kind]

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
    sizes = ["ROWS: tl.constexpr", "COLUMNS: tl.constexpr"]
    head = [
        f"@triton.autotune([{', '.join(choices)}], [])",
        "@triton.jit",
        f"def {NAME}({', '.join([*plan.parameters, *sizes])}):",
    ]
    body = [*_place(plan), *_results(plan), *_scales(plan), *_stores(plan)]
    return "\n".join([TRITON_IMPORTS, OUR_FUNCTIONS, *_elements(plan), *_numbers(plan), *head, *_indented(body), ""])


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"    {line}" for line in lines)


FUNCTIONS = "abreast_of", "erf_of", "in_order", "inverse_of", "sigmoid_of", "tanh_of", "word_of"
OUR_FUNCTIONS = f"from fp8pass.passes.kernels.triton_functions import {', '.join(FUNCTIONS)}\n"


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
    yield f"row = i + tl.arange(0, ROWS // {plan.abreast})[:, None] * {plan.abreast}"
    yield "column = j + tl.arange(0, COLUMNS)[None, :]"


def _mask(plan: TilesPlan, *dims: str) -> str:
    """Return the mask of a load or store, as its last argument; "" if all tiles divide the matrix."""
    inside = _inside(plan, dims)
    return f", mask={inside}" if inside else ""


def _inside(plan: TilesPlan, dims: Sequence[str]) -> str:
    # sizes of tiles are powers of two: what the largest tile divides, all of them divide
    rows, columns = max(c.rows for c in plan.choices), max(c.columns for c in plan.choices)
    sizes = {"row": (plan.rows, rows), "rows": (plan.rows, rows), "column": (plan.columns, columns)}
    return " & ".join(f"({dim} < {size})" for dim, (size, tile) in ((d, sizes[d]) for d in dims) if size % tile)


def _results(plan: TilesPlan) -> Iterator[str]:
    """Write the loads and the ops; for ranges of columns with unlike code, those of the range that the tile is in."""
    for number, (_, code) in enumerate(plan.codes):
        lines = [*_reads(number, code, plan), *_calls(number, code, plan)]
        if len(plan.codes) == 1:
            yield from lines
        else:
            stop = plan.codes[number + 1][0] if number + 1 < len(plan.codes) else None
            yield "else:" if stop is None else f"{'el' if number else ''}if j < {stop}:"
            yield from _indented(lines)


def _reads(number: int, code: TritonEpilogue, plan: TilesPlan) -> Iterator[str]:
    """Write the loads: of each row abreast, and once of what all rows share."""
    piles = dict(plan.piles)
    for read in code.reads:
        if read.input in piles:
            yield from _of_pile(number, read, piles[read.input], plan)
        else:
            yield from _loads(number, read, f"in{read.input}", "row", plan)


def _of_pile(number: int, read: Read, heights: Sequence[int], plan: TilesPlan) -> Iterator[str]:
    """Write the load of a tile from one of several tensors, of which none ends within a tile."""
    start = 0
    for part, height in enumerate(heights):
        is_last = part == len(heights) - 1
        yield "else:" if is_last else f"{'el' if part else ''}if i < {start + height}:"
        row = f"(row - {start})" if start else "row"
        yield from _indented(_loads(number, read, f"in{read.input}_{part}", row, plan))
        start += height


def _loads(number: int, read: Read, name: str, row: str, plan: TilesPlan) -> Iterator[str]:
    for k in range(plan.abreast) if read.depends_on("row") else [0]:
        yield f"{_abreast(number, read, k)} = {computed(_load(read, name, row, k, plan), read.dtype)}"


def _abreast(number: int, read: Read, k: int) -> str:
    """Return the variable of what the k-th of the rows abreast reads, in one of the codes."""
    variable = f"c{number}_{read.variable}" if number else read.variable
    return f"{variable}_{k}" if read.depends_on("row") else variable


def _load(read: Read, name: str, row: str, k: int, plan: TilesPlan) -> str:
    sizes, at = {"row": plan.rows, "column": plan.columns}, {"row": row, "column": "column"}
    near = [AddressStep("row", 1, read.row), AddressStep("column", 1, read.column)]
    steps = [step for step in (*near, *read.steps) if step.step]
    last = read.offset + sum(abs(step.step) * (sizes[step.dim] // step.every) for step in steps)
    wide = ".to(tl.int64)" if last >= 1 << 31 else ""  # Triton's indices are int32
    terms = [_term(f"{at[step.dim]}{wide}", step) for step in steps]
    if offset := read.offset + k * read.row:
        terms.append(str(offset))
    dims = [dim for dim in sizes if read.depends_on(dim)]
    return f"tl.load({' + '.join([name, *terms])}{_mask(plan, *dims)})"


def _term(at: str, step: AddressStep) -> str:
    whole = at if step.every == 1 else f"{at} // {step.every}"
    return whole if step.step == 1 else f"{whole} * {step.step}"


def _elements(plan: TilesPlan) -> Iterator[str]:
    """Write the ops as functions, one for each range, from what one of the rows abreast reads to its results."""
    for number, (_, code) in enumerate(plan.codes):
        yield from _function(_name(number), code, fast)


def _name(number: int) -> str:
    return f"elements_{number}" if number else "elements"


def _numbers(plan: TilesPlan) -> Iterator[str]:
    """Write the ops on the amax of a block as functions."""
    for b, blocks in enumerate(plan.blocks):
        yield from _function(f"numbers_{b}", blocks.code, list)


def _function(name: str, code: TritonEpilogue, change: Callable[[list[str]], Iterable[str]]) -> Iterator[str]:
    lines = [line for result in code.results for line in result.lines]
    yield from ("@triton.jit", f"def {name}({', '.join(read.variable for read in code.reads)}):")
    yield from _indented(change(lines))
    yield f"    return {', '.join(result.variable for result in code.results)}"
    yield ""


def _calls(number: int, code: TritonEpilogue, plan: TilesPlan) -> Iterator[str]:
    for k in range(plan.abreast):
        results = [_result(r, k) for r in range(len(code.results))]
        yield f"{', '.join(results)} = {_name(number)}({', '.join(_abreast(number, read, k) for read in code.reads)})"
        # one that is the same in all rows or columns is summed, and joined with other ranges, as a tile
        yield from (f"{r} = tl.broadcast_to({r}, [ROWS // {plan.abreast}, COLUMNS])" for r in results)


def _result(number: int, k: int) -> str:
    """Return the variable of a result of the k-th of the rows abreast."""
    return f"r{number}_{k}"


def _scales(plan: TilesPlan) -> Iterator[str]:
    """Write the scale and the other numbers of each block; blocks of one row need the scale of each row abreast."""
    for b, blocks in enumerate(plan.blocks):
        values = [_result(blocks.result, k) for k in range(plan.abreast)]
        numbers = ", ".join(_number(b, number) for number in range(len(blocks.code.results)))
        yield f"{numbers} = numbers_{b}(({_amaxes(blocks, values, plan)}).to(tl.float32, bitcast=True))"
        if blocks.rows == 1:
            apart = f"abreast_of({_number(b, 0)})" if plan.abreast > 1 else _number(b, 0)
            yield f"{', '.join(f's{b}_{k}' for k in range(plan.abreast))} = {apart}"


def _amaxes(blocks: ResultBlocks, values: Sequence[str], plan: TilesPlan) -> str:
    """Return the bits of the amaxes: of each row [ROWS], of each column [1, COLUMNS], or of the tile."""
    if blocks.rows == 1:
        return _amaxes_of_rows(list(map(_bits, values)), plan)
    most = _inside_only(_largest_bits(values), plan)
    return f"tl.max({most}, 0)[None, :]" if blocks.columns == 1 else f"tl.max({most})"


def _amaxes_of_rows(bits: Sequence[str], plan: TilesPlan) -> str:
    most = [f"tl.max({_inside_only(of_row, plan)}, 1)" for of_row in bits]
    return f"in_order({', '.join(most)})" if len(most) > 1 else most[0]


def _number(b: int, number: int) -> str:
    """Return the variable of a number of blocks: the scale, number 0, or another one."""
    return f"n{b}_{number}"


def _scale(b: int, k: int, plan: TilesPlan) -> str:
    """Return the scale of blocks as what broadcasts to the k-th of the rows abreast."""
    return f"s{b}_{k}[:, None]" if plan.blocks[b].rows == 1 else _number(b, 0)


def _stores(plan: TilesPlan) -> Iterator[str]:
    for kind in _STORES:
        for i, output in enumerate(plan.outputs):
            if kind == output.kind == "amaxes of rows":
                yield from _store_amaxes_of_rows(i, plan)
                continue
            for part, number in enumerate(output.results if output.kind == kind else ()):
                values = [_result(number, k) for k in range(plan.abreast)]
                if (b := output.blocks) is not None:
                    values = [f"({v} * {_scale(b, k, plan)})" for k, v in enumerate(values)]
                yield from _STORES[kind](i, part, values, plan)


def _column(part: int, plan: TilesPlan) -> str:
    """Return the column at which a part of a result is written."""
    if plan.half:
        at = f"column // {plan.half} * {2 * plan.half} + column % {plan.half}"
        return f"{at} + {plan.half * part}" if part else at
    return f"column + {plan.columns * part}" if part else "column"


def _store_rows(i: int, part: int, values: Sequence[str], plan: TilesPlan) -> Iterator[str]:
    """Write a result as a part of the columns of a matrix that is contiguous along its rows."""
    output, width = plan.outputs[i], plan.columns * len(plan.outputs[i].results)
    wide = ".to(tl.int64)" if plan.rows * width >= 1 << 31 else ""
    for k, value in enumerate(values):
        offset = f" + {k * width}" if k else ""
        address = f"out{i} + row{wide} * {width} + {_column(part, plan)}{offset}"
        yield f"tl.store({address}, {value}.to({triton_type(output.dtype)}){_mask(plan, 'row', 'column')})"


def _store_columns(i: int, part: int, values: Sequence[str], plan: TilesPlan) -> Iterator[str]:
    """Write a result transposed, in words of four rows."""
    height = plan.rows // ROWS_IN_A_WORD
    wide = ".to(tl.int64)" if height * plan.columns * len(plan.outputs[i].results) >= 1 << 31 else ""
    word = f"word_of({', '.join(values)}, {triton_type(plan.outputs[i].dtype)})"
    words = f"out{i}.to(tl.pointer_type(tl.uint32), bitcast=True)"
    # not `row // 4`, of which Triton does not see that it is contiguous
    word_below = f"i // {ROWS_IN_A_WORD} + tl.arange(0, ROWS // {ROWS_IN_A_WORD})[:, None]"
    address = f"{words} + {word_below} + ({_column(part, plan)}){wide} * {height}"
    yield f"tl.store({address}, {word}{_mask(plan, 'row', 'column')})"


def _store_sums(i: int, part: int, values: Sequence[str], plan: TilesPlan) -> Iterator[str]:
    """Write the sums of a tile's columns."""
    yield from _store_of_columns(i, part, f"tl.sum({_inside_only(' + '.join(values), plan, '0.0')}, 0)", plan)


def _store_amaxes_of_columns(i: int, part: int, values: Sequence[str], plan: TilesPlan) -> Iterator[str]:
    most = f"tl.max({_inside_only(_largest_bits(values), plan)}, 0)"
    yield from _store_of_columns(i, part, of_bits(most, plan.outputs[i]), plan)


def _store_of_columns(i: int, part: int, numbers: str, plan: TilesPlan) -> Iterator[str]:
    """Write one number for each column, for each SIDE rows of a tile: as many numbers, whatever the tile."""
    width = plan.columns * len(plan.outputs[i].results)
    yield f"above = i // {SIDE} + tl.arange(0, ROWS // {SIDE})[:, None]"
    inside = " & ".join(filter(None, [_blocks_inside(plan, "row", "above"), _inside(plan, ["column"])]))
    # the first of several blocks gets the tile's numbers, the others zeros
    kept = f"tl.where(above == i // {SIDE}, ({numbers})[None, :], 0.0)"
    mask = f", mask={inside}" if inside else ""
    yield f"tl.store(out{i} + above * {width} + {_column(part, plan)}, {kept}{mask})"


def _store_amaxes_of_rows(i: int, plan: TilesPlan) -> Iterator[str]:
    """Write one number for each row, for each SIDE columns of a tile; the numbers of a column of tiles lie together."""
    parts = plan.outputs[i].results
    bits = [_largest_bits([_result(number, k) for number in parts]) for k in range(plan.abreast)]
    yield from (f"right = j // {SIDE} + tl.arange(0, COLUMNS // {SIDE})[None, :]", "rows = i + tl.arange(0, ROWS)")
    inside = " & ".join(filter(None, [_inside(plan, ["rows"]), _blocks_inside(plan, "column", "right")]))
    inside = inside.replace("rows", "rows[:, None]")
    most = of_bits(_amaxes_of_rows(bits, plan), plan.outputs[i])
    kept = f"tl.where(right == j // {SIDE}, {most}[:, None], 0.0)"
    yield f"tl.store(out{i} + right * {plan.rows} + rows[:, None], {kept}{f', mask={inside}' if inside else ''})"


def _store_amax(i: int, part: int, values: Sequence[str], plan: TilesPlan) -> Iterator[str]:
    """Write the amax of a tile for each SIDE by SIDE elements of it: as many numbers, whatever the tile."""
    across = -(-plan.columns // SIDE)
    most = of_bits(f"tl.max({_inside_only(_largest_bits(values), plan)})", plan.outputs[i])
    start = f" + {-(-plan.rows // SIDE) * across * part}" if part else ""
    yield f"down = i // {SIDE} + tl.arange(0, ROWS // {SIDE})[:, None]"
    yield f"right = j // {SIDE} + tl.arange(0, COLUMNS // {SIDE})[None, :]"
    inside = " & ".join(filter(None, [_blocks_inside(plan, "row", "down"), _blocks_inside(plan, "column", "right")]))
    # every block of the tile gets the tile's amax: the largest of all is the same
    blocks = f"tl.full([ROWS // {SIDE}, COLUMNS // {SIDE}], 0.0, tl.float32).to({triton_type(plan.outputs[i].dtype)})"
    mask = f", mask={inside}" if inside else ""
    yield f"tl.store(out{i}{start} + down * {across} + right, {blocks} + {most}{mask})"


def _store_numbers(i: int, part: int, values: Sequence[str], plan: TilesPlan) -> Iterator[str]:
    """Write one number for each block; those of blocks beside each other, or below each other, lie together."""
    output = plan.outputs[i]
    assert output.blocks is not None
    blocks = plan.blocks[output.blocks]
    down, across = (f"{at} // {size}" for at, size in (("i", blocks.rows), ("j", blocks.columns)))
    number = _number(output.blocks, output.number)
    if blocks.rows == 1:
        yield "rows = i + tl.arange(0, ROWS)"
        yield f"tl.store(out{i} + {across} * {plan.rows} + rows, {number}{_mask(plan, 'rows')})"
    elif blocks.columns == 1:
        yield f"tl.store(out{i} + {down} * {plan.columns} + column, {number}{_mask(plan, 'column')})"
    else:
        yield f"tl.store(out{i} + {down} * {plan.columns // blocks.columns} + {across}, {number})"


def _bits(value: str) -> str:
    return f"tl.abs({value}).to(tl.int32, bitcast=True)"


def _largest_bits(values: Sequence[str]) -> str:
    return functools.reduce(lambda a, b: f"tl.maximum({a}, {b})", map(_bits, values))


def _inside_only(values: str, plan: TilesPlan, zero: str = "0") -> str:
    """Return the values with zeros outside of the matrix."""
    inside = _inside(plan, ("row", "column"))
    return f"tl.where({inside}, {values}, {zero})" if inside else values


_STORES: dict[str, Any] = {
    "amax": _store_amax,
    "amaxes of rows": _store_amaxes_of_rows,
    "amaxes of columns": _store_amaxes_of_columns,
    "sums": _store_sums,
    "numbers": _store_numbers,
    "rows": _store_rows,
    "columns": _store_columns,
}
"""How each kind of output is written, in this order: amaxes need the numbers before they are quantized."""


def _blocks_inside(plan: TilesPlan, dim: str, block: str) -> str:
    """Return the condition that a block of SIDE rows or columns is in the matrix; "" if it always is."""
    size = plan.rows if dim == "row" else plan.columns
    return f"({block} < {-(-size // SIDE)})" if _inside(plan, [dim]) else ""
