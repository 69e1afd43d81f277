"""Write the Triton kernel of an FP8 matmul with a generated epilogue.

Persistent: a program computes one tile after the other, and on GPUs with TMA the next tile's operands arrive while the
epilogue of one runs. Each tile is computed as `_scaled_mm` does, up to the order of its sums: the product in float32,
both scales, the bias, rounded to the dtype that the matmul would return.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fp8pass.base._torch import TRITON_IMPORTS, PyCodeCache, triton_type
from fp8pass.passes.kernels.fused_plan import Output, Plan, Tile
from fp8pass.passes.kernels.triton_epilogue import PRODUCT, Read

NAME = "scaled_mm_fused"
"""The kernel's name; Inductor appends a number."""
_KINDS = {"rows": "store", "columns": "store transposed", "amax": "the tile's amax", "sums": "the sums of columns"}
GROUP = 8
"""Tiles of this many rows of tiles follow each other, column by column, so that they share operands in the L2 cache."""


def kernel_of(plan: Plan) -> Any:
    """Return the kernel, a `triton.JITFunction` with one configuration; the same one for the same source.

    Its attribute `plan` is the plan.
    """
    kernel = getattr(PyCodeCache.load(source_of(plan)), NAME)
    kernel.plan = plan
    return kernel


def source_of(plan: Plan) -> str:
    """Return the source of the kernel, a Python module."""
    body = [*_descriptors(plan), *_constants(plan), *_loop(plan)]
    choice = f"triton.Config({{}}, num_warps={plan.tile.warps}, num_stages={plan.tile.stages})"
    head = ["", f"@triton.autotune([{choice}], [])", "@triton.jit", f"def {NAME}({', '.join(_parameters(plan))}):"]
    lines = [*head, *(f"    {line}" for line in body)]
    return TRITON_IMPORTS + "\n".join(lines) + "\n"


def _parameters(plan: Plan) -> list[str]:
    return [*plan.parameters, *(["m"] if plan.matmul.symbolic else [])]


def by_tma(read: Read, plan: Plan) -> bool:
    """Return whether the epilogue's input is read as a block of a matrix, by TMA: contiguous rows, at 16 bytes."""
    aligned = read.row * read.dtype.itemsize % 16 == 0 and read.offset * read.dtype.itemsize % 16 == 0
    return plan.tma and read.column == 1 and read.row >= plan.matmul.n and aligned and read.dtype != torch.bool


def _descriptors(plan: Plan) -> Iterator[str]:
    """Write what TMA needs to know of operands, inputs and outputs."""
    if not plan.tma:
        return
    m, t = plan.matmul, plan.tile
    yield _descriptor("a", "a", [m.rows, m.k], m.strides[0], [t.rows, t.depth])
    yield _descriptor("b", "b", [m.n * m.products, m.k], m.strides[1], [t.columns, t.depth])
    block = [t.rows, t.width]
    for read in plan.epilogue.reads:
        if by_tma(read, plan):
            before = read.offset // read.row
            rows = f"{m.rows} + {before}" if before else m.rows
            yield _descriptor(read.variable, f"in{read.input}", [rows, read.row], read.row, block)
    for i, output in enumerate(plan.outputs):
        if _stores_by_tma(output, plan):
            height, width = plan.shape(output)
            by_rows = output.kind == "rows"
            shape = [m.rows if by_rows else height, width]
            yield _descriptor(f"out{i}", f"out{i}", shape, width, block if by_rows else block[::-1])


def _descriptor(name: str, tensor: str, shape: Sequence[int | str], stride: int, block: list[int]) -> str:
    sizes = ", ".join(map(str, shape))
    return f"{name}_blocks = tl.make_tensor_descriptor({tensor}, [{sizes}], [{stride}, 1], {block})"


def _stores_by_tma(output: Output, plan: Plan) -> bool:
    """Return whether an output is stored in whole blocks, which must not reach into the next of several parts."""
    if not plan.tma or output.kind not in ("rows", "columns"):
        return False
    fits = len(output.results) == 1 or plan.matmul.n % plan.tile.columns == 0
    return fits and plan.shape(output)[1] * output.dtype.itemsize % 16 == 0


def _constants(plan: Plan) -> Iterator[str]:
    """Write what is the same for all tiles."""
    if plan.matmul.scales == "tensorwise":
        yield "scale = tl.load(scale_a) * tl.load(scale_b)"
    for read in plan.epilogue.reads:
        if not read.row and not read.column:
            yield f"{read.variable} = {computed(f'tl.load(in{read.input} + {read.offset})', read.dtype)}"
    if plan.matmul.symbolic:
        yield f"down = tl.cdiv(m, {plan.tile.rows})"
    yield from (f"most{i}_{number} = 0" for i, number in _kept_amaxes(plan))


def _kept_amaxes(plan: Plan) -> Iterator[tuple[int, int]]:
    """Yield the amaxes that a program takes of all its tiles: (output, number among its amaxes)."""
    for i, output in enumerate(plan.outputs):
        if output.kind == "amax" and plan.matmul.symbolic:  # otherwise there is one for each tile
            yield from ((i, number) for number in range(len(output.results) * plan.tile.parts))


def _loop(plan: Plan) -> Iterator[str]:
    (tiles, across), t = plan.tiles(), plan.tile
    down = "down" if plan.matmul.symbolic else str(tiles)
    yield f"# {plan.programs} programs compute the {down} by {across} tiles, one after the other"
    # with two products, a flat loop was slower on an H100
    flatten = ", flatten=True" if plan.tma and plan.matmul.products == 1 else ""
    total = f"down * {across}" if plan.matmul.symbolic else str(tiles * across)
    yield f"for tile in tl.range(tl.program_id(0), {total}, {plan.programs}{flatten}):"
    for line in (*_place(down, across, t), *_products(plan), *_epilogue(plan)):
        yield f"    {line}"
    for i, number in _kept_amaxes(plan):
        address = f"out{i} + {plan.programs * number} + tl.program_id(0)"
        yield f"tl.store({address}, {of_bits(f'most{i}_{number}', plan.outputs[i])})"


def _place(down: str, across: int, tile: Tile) -> Iterator[str]:
    yield f"# {GROUP} rows of tiles first, column by column: they read the same operands"
    yield f"first = tile // {GROUP * across} * {GROUP}"
    yield f"height = tl.minimum({down} - first, {GROUP})"
    yield f"i = (first + tile % {GROUP * across} % height) * {tile.rows}"
    yield f"j = tile % {GROUP * across} // height * {tile.columns}"
    yield f"row = i + tl.arange(0, {tile.rows})[:, None]"
    yield f"column = j + tl.arange(0, {tile.columns})[None, :]"


def _products(plan: Plan) -> Iterator[str]:
    """Write the loop over the summed dimension, and the products as the matmul would return them."""
    m, t = plan.matmul, plan.tile
    numbers = range(m.products)
    for i in numbers:
        yield f"total{i} = tl.zeros(({t.rows}, {t.columns}), tl.float32)"
    yield f"for k in range({-(-m.k // t.depth)}):"
    for line in (*_operand_a(plan), *(line for i in numbers for line in _operand_b(plan, i))):
        yield f"    {line}"
    for i in numbers:
        # without fast accumulation, sums over more than one block are added outside the tensor cores, in float32
        yield (
            f"    total{i} = tl.dot(a_block, b_block{i}, total{i})"
            if m.fast
            else (f"    total{i} += tl.dot(a_block, b_block{i})")
        )
    if m.scales == "rowwise":
        yield f"row_scale = tl.load(scale_a + row{_mask(plan, 'row')})"


def _epilogue(plan: Plan) -> Iterator[str]:
    """Write the epilogue once for each part of the tile."""
    t, numbers = plan.tile, range(plan.matmul.products)
    if t.parts > 1:
        assert t.parts == 2, "tl.split makes two"
        for i in numbers:
            # tl.split takes the last dimension, which must have size 2: the two halves of the columns become that
            # dimension
            halves = f"tl.reshape(total{i}, ({t.rows}, 2, {t.width}))"
            yield f"left{i}, right{i} = tl.split(tl.permute({halves}, (0, 2, 1)))"
    for part in range(t.parts):
        if t.parts > 1:
            if part:
                yield f"j += {t.width}"
            yield f"column = j + tl.arange(0, {t.width})[None, :]"
        for i in numbers:
            yield from _scaled(plan, i, "total" if t.parts == 1 else ("left", "right")[part])
        yield from (*_reads(plan), *_results(plan, part))


def _operand_a(plan: Plan) -> Iterator[str]:
    m, t = plan.matmul, plan.tile
    if plan.tma:
        yield f"a_block = a_blocks.load([i, k * {t.depth}])"
        return
    yield f"depth = k * {t.depth} + tl.arange(0, {t.depth})"
    address = f"a + row * {m.strides[0]} + depth[None, :]"
    yield f"a_block = tl.load({address}, mask={_filled(plan, 'row', 'None, :')}, other=0.0)"


def _operand_b(plan: Plan, number: int) -> Iterator[str]:
    m, t = plan.matmul, plan.tile
    first = f" + {m.n * number}" if number else ""
    if plan.tma:
        yield f"b_block{number} = b_blocks.load([j{first}, k * {t.depth}]).T"
        return
    address = f"b + depth[:, None] + (column{first}) * {m.strides[1]}"
    yield f"b_block{number} = tl.load({address}, mask={_filled(plan, 'column', ':, None')}, other=0.0)"


def _filled(plan: Plan, dim: str, index: str) -> str:
    """Return where a block of an operand is filled from memory; elsewhere it is 0, which adds nothing to a sum."""
    m = plan.matmul
    inside = f"({dim} < {m.rows if dim == 'row' else m.n})"
    return inside if m.k % plan.tile.depth == 0 else f"{inside} & (depth[{index}] < {m.k})"


def _scaled(plan: Plan, number: int, total: str) -> Iterator[str]:
    """Write a product as the matmul would return it. total: the name of the variables of sums."""
    m = plan.matmul
    first, scale, bias = f" + {m.n * number}" if number else "", "scale", ""
    if m.scales == "rowwise":
        yield f"column_scale{number} = tl.load(scale_b + column{first}{_mask(plan, 'column')})"
        scale = f"(row_scale * column_scale{number})"
    if m.bias:
        yield f"bias{number} = tl.load(bias + column{first}{_mask(plan, 'column')}).to(tl.float32)"
        bias = f" + bias{number}"
    yield "# the product, as the matmul would write it"
    rounded = "" if m.dtype == torch.float32 else f".to({triton_type(m.dtype)}).to(tl.float32)"
    yield f"{PRODUCT}{number} = ({total}{number} * {scale}{bias}){rounded}"


def _mask(plan: Plan, *dims: str) -> str:
    """Return the mask of a load or store, as its last argument; "" if tiles divide the result."""
    where = _inside(plan, dims)
    return f", mask={where}" if where else ""


def _inside(plan: Plan, dims: Sequence[str]) -> str:
    m, t = plan.matmul, plan.tile
    edges = {"row": (m.rows, m.symbolic or m.m % t.rows), "column": (m.n, m.n % t.columns)}
    return " & ".join(f"({d} < {edges[d][0]})" for d in dims if edges[d][1])


def computed(loaded: str, dtype: torch.dtype) -> str:
    """Return the value with which Inductor computes: float32 for narrower floating-point types."""
    narrow = dtype.is_floating_point and dtype.itemsize < 4
    return f"{loaded}.to(tl.float32)" if narrow else f"{loaded}.to(tl.int1)" if dtype == torch.bool else loaded


def _reads(plan: Plan) -> Iterator[str]:
    for read in plan.epilogue.reads:
        if by_tma(read, plan):
            down, across = divmod(read.offset, read.row)
            place = f"i{f' + {down}' if down else ''}, j{f' + {across}' if across else ''}"
            yield f"{read.variable} = {computed(f'{read.variable}_blocks.load([{place}])', read.dtype)}"
        elif read.row or read.column:
            yield f"{read.variable} = {computed(_load(read, plan), read.dtype)}"


def _load(read: Read, plan: Plan) -> str:
    last = read.row * plan.matmul.m + read.column * plan.matmul.n + read.offset
    # Triton computes addresses in int32 unless a term is wider
    wide = ".to(tl.int64)" if last >= 1 << 31 or plan.matmul.symbolic else ""
    terms = [f"{name}{wide} * {factor}" for name, factor in (("row", read.row), ("column", read.column)) if factor]
    dims = [name for name, factor in (("row", read.row), ("column", read.column)) if factor]
    return f"tl.load(in{read.input} + {' + '.join(terms)} + {read.offset}{_mask(plan, *dims)})"


def _results(plan: Plan, half: int) -> Iterator[str]:
    """Write each result as soon as it is computed, which keeps fewer values in registers."""
    for number, result in enumerate(plan.epilogue.results):
        if result.lines:
            yield "# the ops after the matmul"
        yield from result.lines
        for i, output in enumerate(plan.outputs):
            for part, result_number in enumerate(output.results):
                if result_number == number:
                    yield from _store(i, part, half, result.variable, plan)


def _store(i: int, part: int, half: int, value: str, plan: Plan) -> Iterator[str]:
    """Write a result as a part of an output. half: the part of the tile."""
    output, m, down, across = plan.outputs[i], plan.matmul, *plan.tiles()
    yield f"# {_KINDS[output.kind]}"
    dtype, inside, n = triton_type(output.dtype), _inside(plan, ("row", "column")), m.n * len(output.results)
    first = f" + {m.n * part}" if part else ""
    if output.kind == "amax":
        number = part * plan.tile.parts + half
        bits = f"bits{i}_{part}"
        # as integers: their maximum keeps NaN, whose bits are the largest, while tl.max of floats may drop it
        yield f"{bits} = tl.abs({value}).to(tl.int32, bitcast=True)"
        # masked loads may leave elements outside of the matrix undefined
        bits = f"tl.max({f'tl.where({inside}, {bits}, 0)' if inside else bits})"
        if m.symbolic:
            yield f"most{i}_{number} = tl.maximum(most{i}_{number}, {bits})"
        else:
            yield f"tl.store(out{i} + {down * across * number} + tile, {of_bits(bits, output)})"
    elif output.kind == "sums":
        kept = f"tl.where({inside}, {value}, 0.0)" if inside else value  # see above
        address = f"out{i} + (i // {plan.tile.rows}) * {n} + column{first}"
        yield f"tl.store({address}, tl.sum({kept}, 0)[None, :]{_mask(plan, 'column')})"
    elif _stores_by_tma(output, plan):
        place, turned = (f"i, j{first}", "") if output.kind == "rows" else (f"j{first}, i", ".T")
        yield f"out{i}_blocks.store([{place}], ({value}).to({dtype}){turned})"
    else:
        strides = (n, 1) if output.kind == "rows" else (1, m.m)
        wide = ".to(tl.int64)" if m.m * n >= 1 << 31 or m.symbolic else ""
        address = f"out{i} + row{wide} * {strides[0]} + (column{first}){wide} * {strides[1]}"
        yield f"tl.store({address}, ({value}).to({dtype}){_mask(plan, 'row', 'column')})"


def of_bits(bits: str, output: Output) -> str:
    """Return an amax from its bits. As integers, the bits of magnitudes are in the magnitudes' order, NaN last."""
    return f"({bits}).to(tl.float32, bitcast=True).to({triton_type(output.dtype)})"
