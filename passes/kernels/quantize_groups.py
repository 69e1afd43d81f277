"""Find the groups of quantizes that one kernel computes, and write it: what `quantize_kernels` calls; see there."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, fx

from fp8pass.base._torch import is_deterministic, triton_kernel_wrapper_functional
from fp8pass.graph.builder import Builder, is_tensor, multiplies, val
from fp8pass.graph.other_libraries import runs_elsewhere
from fp8pass.graph.pass_base import KernelsContext
from fp8pass.passes.common.after_matmul import Products, TileEpilogue, computed_from, depends, is_column_sum, turned
from fp8pass.passes.common.block_scales import BlockScales, block_scales
from fp8pass.passes.common.kernel_outputs import (
    Made,
    erase_unread,
    module_of,
    outputs_of,
    replace_by_kernel,
    results_of,
)
from fp8pass.passes.common.patterns import (
    RESHAPES,
    VIEWS,
    as_node,
    aten,
    first,
    has_one_element,
    move_before,
    reach,
    readers,
    through,
)
from fp8pass.passes.common.reordered_matrices import Arranged, arranged
from fp8pass.passes.common.transposed_copies import (
    comes_of_row_reduction,
    is_amax,
    is_count,
    is_made_of,
    is_pile,
    of_amax,
    readers_nearby,
)
from fp8pass.passes.kernels.element_addresses import CannotFuse, Columns, cut
from fp8pass.passes.kernels.fused_plan import Output
from fp8pass.passes.kernels.tiles_source import (
    AMAXES,
    BLOCK,
    HEAVY,
    LIGHT,
    ROWS_IN_A_WORD,
    Choice,
    KernelOp,
    ResultBlocks,
    TilesPlan,
    in_blocks,
    kernel_of,
)
from fp8pass.passes.kernels.triton_epilogue import TritonEpilogue as Code
from fp8pass.passes.kernels.triton_epilogue import written
from fp8pass.quant.kernel_ops import QUANTIZE, WRITE

log = logging.getLogger(__name__)

MOST_READS = 2
"""Most matrices of which an op may be computed that others read too: they compute it again, and read no more by it."""
_LOOKED_THROUGH = {*RESHAPES, aten.permute.default, aten.cat.default}
"""Ops between a matrix and its quantize: the matrix in blocks, or with others beside it."""


@dataclass
class Group(TileEpilogue):
    """The ops and quantizes that one kernel computes. after: the tensors that are quantized as they are.

    arranged: the matrices that the kernel computes from tensors in another order.
    """

    arranged: dict[fx.Node, Arranged] = field(default_factory=dict)

    def reads(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Yield each op and tensor in memory that the op reads; a tensor that is quantized as it is stands for both."""
        for reader, node in self.matrix_reads():
            yield from self.arranged[node].reads if node in self.arranged else [(reader, node)]

    def matrix_reads(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Yield each op on matrices and what it reads."""
        yield from ((node, node) for node in self.after)
        yield from super().reads()

    @property
    def computes(self) -> list[fx.Node]:
        """The ops that the kernel computes, and those by which it moves elements."""
        return [*self.nodes, *(n for a in self.arranged.values() for n in a.nodes)]

    @property
    def turns(self) -> bool:
        """Return whether the kernel stores something transposed."""
        return bool(self.copies) or any(b.is_turned for b in self.blocks.values())

    @property
    def is_tensorwise(self) -> bool:
        """Return whether all tensors are quantized with one scale each."""
        return all(has_one_element(as_node(q.args[1])) for q in self.quantizes)

    def stored(self, x_q: fx.Node) -> fx.Node:
        """Return a quantized tensor as it is in memory."""
        return self.blocks[x_q].stored if x_q in self.blocks else x_q

    def as_matrix(self, reader: fx.Node, node: fx.Node) -> Tensor:
        """Return a tensor that `reader` reads, as a matrix, or as it is if the op moves elements."""
        moves = any(reader in a.nodes for a in self.arranged.values())
        return val(node) if moves else super().as_matrix(reader, node)

    def arrange(self, graph: fx.Graph, made: dict[fx.Node, fx.Node]) -> None:
        """Copy the ops that compute matrices from tensors in another order."""
        for x, a in self.arranged.items():
            copies: dict[fx.Node, fx.Node] = dict(made)
            for node in a.nodes:
                copies[node] = graph.node_copy(node, copies.__getitem__)
            made[x] = graph.call_function(aten.reshape.default, (copies[x], [self.products.m, self.products.n]))

    def heights(self, node: fx.Node) -> tuple[int, ...]:
        """Return the rows of the tensors that lie one below the other in a matrix, where the kernel reads each."""
        return _heights(node) if node in self.matrices and node not in self.arranged and is_pile(node) else ()

    def tensors(self) -> list[fx.Node]:
        """Return the kernel's arguments for its inputs."""
        parts = ((list(n.args[0]) if self.heights(n) else [n]) for n in self.inputs)  # type: ignore[arg-type]
        return [tensor for matrices in parts for tensor in matrices]

    @property
    def matrices(self) -> dict[fx.Node, None]:
        """The matrices that the kernel reads, or computes from tensors in another order, as keys: in order."""
        return dict.fromkeys(n for _, n in self.matrix_reads() if self.products.holds(n))


@dataclass(frozen=True)
class GroupMatch:
    """A group with the outputs of its kernel, and what the kernel computes for them, in order."""

    group: Group
    made: list[Made]
    results: list[tuple[fx.Node, fx.Node | None]]


def rewrite_groups(graph: fx.Graph, large: Sequence[fx.Node], context: KernelsContext, made_by: str) -> int:
    """Rewrite every group that `why_not` has no reason against; return the number of quantizes in them.

    large: the quantizes that may be in groups. made_by: the name of the pass.
    """
    groups = {n: g for n in large if (g := _group_of(n)) is not None}
    if not groups:
        return 0
    build, applied = context.builder(graph, made_by), 0
    # those that read most first: they take in those that read no others
    for x_q in sorted(groups, key=lambda q: -len(groups[q].matrices)):
        if not x_q._erased and (m := match(x_q)) is not None:  # erased: a group before it took it in
            applied += _apply(build, m)
    return applied


def _apply(build: Builder, m: GroupMatch) -> int:
    """Rewrite a match, unless there is a reason against it; return the number of quantizes that its kernel computes."""
    try:
        plans = list(_plans(m))
    except CannotFuse as error:
        if m.group.arranged:
            m.group.arranged.clear()  # Inductor may move the elements, and the kernel quantize
            return _apply(build, m)
        log.debug("%s is left to Inductor: %s", m.group.quantizes[0], error)
        return 0
    for kernel, plan in plans:
        rewrite(build, kernel, plan)
    return len(m.group.quantizes)


def _plans(m: GroupMatch) -> Iterator[tuple[GroupMatch, TilesPlan]]:
    """Yield the kernels of a match, in the order in which they run. Raises CannotFuse if there is a reason against."""
    if reason := why_not(m):
        raise CannotFuse(reason)
    for kernel in (amaxes_before(m.group), m):
        if kernel is not None:
            yield kernel, plan_of(kernel)


def match(x_q: fx.Node) -> GroupMatch | None:
    """Return what one kernel can compute that quantizes this tensor; None if none of ours can."""
    if (group := _group_of(x_q)) is None:
        return None
    fits = group.products.fits
    near = reach(group.matrices, lambda n: n.users, lambda n: fits(n) or n.target in _LOOKED_THROUGH)
    for other in [n for n in near if n.target is QUANTIZE and n.users and n is not x_q]:
        if (blocks := block_scales(other)) is not None and not _is_tiled(blocks):
            continue
        joined = _group_of(x_q, [*group.quantizes, other])
        if joined is not None and joined.matrices == group.matrices and _is_orderly(joined, joined.replaced):
            group = joined
    made = list(outputs_of(group))
    return GroupMatch(group, made, results_of(group, made))


def _group_of(x_q: fx.Node, quantizes: Sequence[fx.Node] = ()) -> Group | None:
    """Return the group of these quantizes, on matrices as `x_q` quantizes them; None if one kernel can't compute it."""
    quantizes = list(quantizes) or [x_q]
    blocks = {q: b for q in quantizes if (b := block_scales(q)) is not None}
    parts = _parts(blocks[x_q].x if x_q in blocks else first(x_q))
    size, n = val(parts[0]).numel(), int(val(parts[0]).shape[-1])
    group = Group(Products(parts[0], (), size // n, n), {}, quantizes=quantizes, blocks=blocks)
    if not all(_is_scale(scale, q, group.products) for q, scale in group.scales.items()):
        return None
    if any(len(_parts(b.x)) > 1 for b in blocks.values()):
        return None
    for q in group.quantizes:
        for part in _parts(group.quantized(q)):
            if not group.products.holds(part):
                return None
            is_read = part in group.after or _is_read(part, q, group)
            chain = set() if is_read else computed_from(part, group.products)[0]
            group.add(chain)
            if part not in chain:
                group.after[part] = None
    if not all(map(group.parts, map(group.quantized, group.quantizes))):
        return None
    group.arranged = {x: a for x in group.matrices if not is_pile(x) and (a := _worth_arranging(x)) is not None}
    _add_reductions(group)
    copies = turned(group)
    if not all(map(group.is_turned, copies)):
        return None
    group.copies = {t.copy: t.x_q for t in copies}
    return group


def _worth_arranging(x: fx.Node) -> Arranged | None:
    """Return how a matrix is computed from tensors in another order, if these are in memory, but for small parts."""
    a = arranged(x)
    return a if a is not None and all(map(_is_in_memory, filter(a.is_large, a.tensors))) else None


def _is_tiled(blocks: BlockScales) -> bool:
    """Return whether a tile holds whole blocks of this size."""
    return {blocks.rows, blocks.columns} in ({1, BLOCK}, {BLOCK})


def _is_read(x: fx.Node, x_q: fx.Node, group: Group) -> bool:
    """Return whether the kernel reads what it quantizes, and leaves it to Inductor to compute that: a norm.

    Inductor's kernel that takes statistics of rows can't quantize in blocks of columns, and not before it has seen all
    rows, if the scale depends on them; it must write the tensor.
    """
    if not comes_of_row_reduction(x):
        return False
    if x_q in group.blocks:
        return group.blocks[x_q].is_turned
    scale = group.scales[x_q]
    is_of_rows = val(scale).shape[-1:] == (1,) and not has_one_element(scale)
    return not is_of_rows and depends(scale, x)


def _is_scale(scale: fx.Node, x_q: fx.Node, products: Products) -> bool:
    """Return whether a scale is one number, one for each row, or one for each column."""
    return not products.holds(scale) and products.layout(x_q, scale) is not None


def _parts(x: fx.Node) -> list[fx.Node]:
    """Return the tensors of equal width that `x` concatenates along rows; `[x]` for others, or if one is arranged."""
    if x.target is aten.cat.default and len(x.args) > 1 and x.args[1] in (-1, val(x).dim() - 1):
        parts: list[fx.Node] = list(x.args[0])  # type: ignore[arg-type]
        if len({val(p).shape for p in parts}) == 1 and not any(map(arranged, parts)):
            return parts
    return [x]


def _add_reductions(group: Group) -> None:
    """Add the amaxes and sums of columns of what is quantized, but no amax that a scale of the kernel is made of."""
    xs = dict.fromkeys(map(group.quantized, group.quantizes))
    of_parts = dict.fromkeys(p for x in xs for p in group.parts(x))
    near = dict.fromkeys(n for x in {**xs, **of_parts} for n in readers_nearby(x))
    scales = group.scales.values()
    amaxes = [n for n in near if is_amax(n) and of_amax(n) in {**xs, **of_parts}]
    group.amaxes = [n for n in amaxes if not any(is_made_of(scale, n) for scale in scales)]
    group.sums = [n for n in near if is_column_sum(n) and first(n) in {**xs, **of_parts}]


def amaxes_before(group: Group) -> GroupMatch | None:
    """Return the amaxes of rows and of columns that the group's scales are made of, if one kernel can take them all."""
    xs = dict.fromkeys(p for q in group.quantizes for p in group.parts(group.quantized(q)))
    kinds = {n: kind for x in xs for n in readers_nearby(x) if (kind := _amaxes_kind(n, x))}
    amaxes = [n for n in kinds if any(depends(scale, n) for scale in group.scales.values())]
    turns = "amaxes of columns" in map(kinds.__getitem__, amaxes)
    # amaxes of columns are taken of ROWS_IN_A_WORD rows at once
    if len(amaxes) < 2 or (turns and group.products.m % ROWS_IN_A_WORD):
        return None
    before = Group(group.products, dict(group.after))
    computed = [x for x in map(_measured, amaxes) if x not in group.after]
    before.add(n for x in computed for n in computed_from(x, group.products)[0])
    before.arranged = {x: a for x, a in group.arranged.items() if x in before.matrices}
    if not _is_orderly(before, set(amaxes)):
        return None
    made = [Made(kinds[n], (_measured(n),), n, val(n).dtype) for n in amaxes]
    return GroupMatch(before, made, results_of(before, made))


def _measured(amaxes: fx.Node) -> fx.Node:
    """Return the tensor whose amaxes these are."""
    return first(first(amaxes))


def _amaxes_kind(node: fx.Node, x: fx.Node) -> str:
    """Return the kind of output that `node` is as amaxes of a matrix `x`; "" if it is not one."""
    if node.target is not aten.amax.default or len(node.args) < 2:
        return ""
    if first(node).target is not aten.abs.default or first(first(node)) is not x:
        return ""
    last, dims = val(x).dim() - 1, tuple(d % val(x).dim() for d in cast("list[int]", node.args[1]))
    return {(last,): "amaxes of rows", tuple(range(last)): "amaxes of columns"}.get(dims, "")


def _is_orderly(group: Group, made: Set[fx.Node]) -> bool:
    """Return whether a kernel that computes the group's ops reads nothing that depends on what it makes."""
    after = [*made, *(u for n in made for u in n.users if u not in made)]
    return not any(depends(n, on) for n in group.inputs for on in after)


# ---------------------------------------------------------------------------------------------------------------------
# Check: only refuses.


def why_not(m: GroupMatch) -> str:
    """Return the reason why Inductor's kernel is better, or a kernel of ours wrong; "" if there is none."""
    group = m.group
    if not (group.nodes or group.turns or group.amaxes or group.arranged):
        return "there is nothing to compute but the quantize"
    # for blocks of what is arranged otherwise in memory, Inductor takes two kernels, each in another order of loops
    if not (group.turns or group.is_tensorwise or (group.blocks and group.arranged)):
        return "Inductor quantizes rows in the kernel that takes their amaxes"
    if unlike := [b for b in group.blocks.values() if not _is_tiled(b)]:
        return f"the blocks are {unlike[0].rows}x{unlike[0].columns}"
    if apart := [x for x in map(group.stored, group.quantizes) if not val(x).is_contiguous()]:
        return f"the rows of {apart[0]} do not lie as in a matrix"
    if (group.turns or group.sums) and group.products.m % ROWS_IN_A_WORD:
        return f"{group.products.m} rows are not a multiple of {ROWS_IN_A_WORD}"
    for x in map(group.quantized, group.quantizes):
        if comes_of_row_reduction(x) and x not in group.after:
            return f"{x} is computed from a reduction along rows"
        if any(map(is_count, readers_nearby(x))):
            return f"the saturation of {x} is counted"
    if any(val(n).dtype == torch.float64 for n in (*group.computes, *group.inputs) if is_tensor(n)):
        return "it computes in float64"
    of_arranged = {t for a in group.arranged.values() for t in a.tensors if val(t).dim()}
    for node in (*(n for _, n in group.matrix_reads()), *group.scales.values()):
        if node in of_arranged:
            return f"{node} is read in two orders, one of them as a matrix"
    for node in (n for n in group.matrices if n not in group.arranged):
        if not _is_in_memory(node) and not _is_worth_writing(node, group):
            return f"{node} is computed by a kernel that can quantize it too"
        if not _can_be_read(node, group):
            return f"the rows of {node} do not lie as in a matrix"
    if any(u.target in (aten.copy_.default, aten.copy.default, WRITE) for n in group.replaced for u in n.users):
        return "the result is written in place"
    if reader := _other_reader(group):
        return f"{reader} reads what the kernel computes"
    for write in _overwriting(group):
        if any(depends(n, write) for n in group.inputs):
            return f"{write} overwrites what the kernel reads"
    return "" if _is_orderly(group, group.replaced) else "the kernel would wait for itself"


def _is_in_memory(node: fx.Node) -> bool:
    """Return whether a tensor lies in memory for sure: a graph's input, or a view of one, or of a library's result."""
    if is_pile(node):
        return _heights(node) != ()
    node = through(node, VIEWS)
    in_library = multiplies(node) or runs_elsewhere(node) or node.target is triton_kernel_wrapper_functional
    return node.op == "placeholder" or in_library


def _is_worth_writing(x: fx.Node, group: Group) -> bool:
    """Return whether it pays to let Inductor write a tensor that is quantized as it is, and to read it.

    A norm, whose kernel does not quantize in blocks of columns; and with several scales what is copied into the
    matrix's order, as attention's heads: a kernel that arranges, takes amaxes and quantizes is slower than two.
    """
    is_copied = not group.is_tensorwise and through(x, RESHAPES).target is aten.clone.default
    return x in group.after and (is_copied or comes_of_row_reduction(x))


def _can_be_read(node: fx.Node, group: Group) -> bool:
    if is_pile(node):
        return bool(_heights(node))
    if (layout := group.products.layout(node, node)) is None:
        return False
    strides = layout[1]
    # rows that begin at multiples of 16 bytes can be loaded 16 bytes at a time
    return strides[-1] == 1 and strides[0] * val(node).element_size() % 16 == 0


def _heights(pile: fx.Node) -> tuple[int, ...]:
    """Return the rows of the tensors that lie one below the other in a cat; () if one ends within a tile."""
    parts: list[fx.Node] = list(pile.args[0])  # type: ignore[arg-type]
    heights = tuple(val(p).numel() // val(p).shape[-1] for p in parts)
    return heights if not any(height % max(c.rows for c in (*LIGHT, *HEAVY)) for height in heights) else ()


def _overwriting(group: Group) -> list[fx.Node]:
    """Return the ops that write into memory that the kernel reads: it must run before them."""
    bases = [through(n, VIEWS) for n in group.tensors()]
    views = reach(bases, lambda n: n.users, lambda n: n.target in VIEWS)
    return [u for v in views for u in v.users if u.target in (aten.copy_.default, WRITE) and first(u) is v]


def _other_reader(group: Group) -> fx.Node | None:
    """Return an op outside of the kernel that would have to read more than now; None if there is none.

    What computes a scale reads the matrices before the kernel does, and by itself, whatever the kernel is.
    """
    closed = group.closed()
    for node in group.nodes:
        outside = [u for u in node.users if u not in closed and not any(depends(i, u) for i in group.inputs)]
        if outside and (not group.turns or _reads(node, group) > MOST_READS or any(map(_needs_memory, outside))):
            return outside[0]
    return None


def _reads(node: fx.Node, group: Group) -> int:
    return len(computed_from(node, group.products)[1])


def _needs_memory(user: fx.Node) -> bool:
    """Return whether an op, or one that reads a view that the op takes, reads tensors in memory."""
    return any(
        u.op == "output" or multiplies(u) or u.target is triton_kernel_wrapper_functional
        for u in (user, *readers(user, lambda n: n.target in VIEWS))
    )


# ---------------------------------------------------------------------------------------------------------------------
# Rewrite: only builds.


def plan_of(m: GroupMatch) -> TilesPlan:
    """Return the plan of the kernel. Raises CannotFuse if an op can't be generated."""
    group, module = m.group, module_of(m.group, m.results)
    rows, choices = group.products.m, _choices(m.group)
    assert isinstance(rows, int)
    ranges, codes = _codes(m, module, choices)
    half = ranges[0].half
    blocks = tuple(_blocks(b, m) for b in group.blocks.values())
    outputs = tuple(_output(o, m, ranges[0].parts) for o in m.made)
    piles = tuple((i, heights) for i, n in enumerate(group.inputs) if (heights := group.heights(n)))
    dtypes = tuple(val(n).dtype for n in group.inputs)
    ops = map(KernelOp.of, sorted((*group.computes, *group.replaced)))
    at = tuple((part.first, code) for part, code in zip(ranges, codes, strict=True))
    columns = group.products.n // ranges[0].parts
    return TilesPlan(rows, columns, at, outputs, dtypes, piles, choices, blocks, half, tuple(ops))


def _codes(m: GroupMatch, module: fx.GraphModule, choices: Sequence[Choice]) -> tuple[Sequence[Columns], list[Code]]:
    """Return the ranges of columns with code of their own, and their code. Raises CannotFuse."""
    arranged, width = m.group.arranged.values(), max(choice.columns for choice in choices)
    starts, heads = {s for a in arranged for s in a.starts}, {h for a in arranged for h in a.heads}

    def of(half: int) -> tuple[Sequence[Columns], list[Code]]:
        ranges = cut(starts, m.group.products.n, half)
        return ranges, [_code(module, columns, m.group, width) for columns in ranges]

    try:
        return of(0)
    except CannotFuse:
        halves = {head // 2 for head in heads if head % 2 == 0}
        # the code for halves computes two results for each column: blocks and results side by side have no form for
        # that
        if len(halves) != 1 or m.group.blocks or any(len(o.results) > 1 for o in m.made):
            raise
    return of(halves.pop())


def _code(module: fx.GraphModule, columns: Columns, group: Group, width: int) -> Code:
    """Return the code of a range of columns. Raises CannotFuse if no kernel of ours reads well what it reads."""
    if columns.half and columns.size % (2 * columns.half):
        raise CannotFuse(f"{columns.size} columns from {columns.start} on are not whole heads")
    if columns.first % width:
        raise CannotFuse(f"columns start at {columns.start}, within a tile")
    assert isinstance(group.products.m, int)
    code = written(module, 0, group.products.m, columns)
    for read in code.reads:
        every = {step.every for step in read.steps if step.dim == "row"}
        if any(n % ROWS_IN_A_WORD for n in every):
            raise CannotFuse(f"the rows of {group.inputs[read.input]} are not evenly spaced by {ROWS_IN_A_WORD}")
        if read.depends_on("row") and read.depends_on("column") and read.column != 1:
            raise CannotFuse(f"the rows of {group.inputs[read.input]} do not lie as in a matrix")
    return code


def _choices(group: Group) -> tuple[Choice, ...]:
    if group.blocks:
        choices = in_blocks((b.rows, b.columns) for b in group.blocks.values())
    elif len(group.matrices) == 1 and not group.arranged:
        choices = LIGHT
    else:
        choices = HEAVY if group.quantizes or group.arranged else AMAXES
    # sums depend on how a tile is divided among threads
    return choices[:1] if group.sums and is_deterministic() else choices


def _blocks(b: BlockScales, m: GroupMatch) -> ResultBlocks:
    (x,) = m.group.parts(b.x)
    return ResultBlocks(m.results.index((x, None)), b.rows, b.columns, written(b.module()))


def _output(o: Made, m: GroupMatch, parts: int) -> Output:
    results = tuple(parts * m.results.index(result) + part for result in o.results for part in range(parts))
    if o.blocks is None:
        return Output(o.kind, results, o.dtype)
    which = list(m.group.blocks).index(o.blocks.x_q)
    number = 1 + o.blocks.kept.index(o.instead_of) if o.kind == "numbers" else 0  # the scale is number 0
    return Output(o.kind, results, o.dtype, blocks=which, number=number)


def rewrite(build: Builder, m: GroupMatch, plan: TilesPlan) -> None:
    """Call the kernel, and let readers of what it computes read its outputs."""
    group, dead = m.group, m.group.closed()
    # before the ops that overwrite what the kernel reads, too
    at = min([*_overwriting(group), *(user for o in m.made for user in o.instead_of.users)])
    inputs = group.tensors()
    at = move_before(at, inputs)
    # new nodes get the metadata of the node that they replace, and with it the user's source line
    build.like = m.made[0].instead_of
    kernel = kernel_of(plan), list(map(plan.programs, plan.choices))
    given = dict(zip(plan.parameters, inputs, strict=False))  # inputs are the first parameters
    replace_by_kernel(build, at, kernel, given, m.made, list(map(plan.shape, plan.outputs)))
    build.like = None
    erase_unread(build.graph, {*group.computes, *group.replaced, *dead})
