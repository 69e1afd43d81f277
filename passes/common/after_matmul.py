"""Find the elementwise ops after a matmul that its kernel can compute tile by tile, and what they end in.

A matmul's result is a matrix [M, N], or two side by side, as gate and up are. The ops after it may have M as one
dimension or as several, and read other matrices, rows, columns and numbers.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.base._torch import hint_of
from fp8pass.graph.builder import is_tensor, val
from fp8pass.passes.common.block_scales import BlockScales
from fp8pass.passes.common.patterns import (
    CASTS,
    CONSTANTS,
    RESHAPES,
    SPLITS,
    VIEWS,
    as_node,
    aten,
    first,
    is_elementwise,
    prims,
    reach,
    through,
)
from fp8pass.passes.common.transposed_copies import TransposedCopy as Transposed
from fp8pass.passes.common.transposed_copies import is_amax, of_amax, readers_nearby, transposed
from fp8pass.quant.kernel_ops import QUANTIZE

_RANDOM = {prims.inductor_random.default, prims.inductor_randint.default}
_LOOKED_THROUGH = {*RESHAPES, aten.cat.default, aten.abs.default, aten.amax.default}
"""Ops between an elementwise op and what ends it: quantizes of a cat, and amaxes."""


@dataclass(frozen=True)
class Products:
    """The result of a matmul: one matrix [M, N], or two. parts: the nodes of these. m: may be symbolic."""

    matmul: fx.Node
    parts: tuple[fx.Node, ...]
    m: int | torch.SymInt
    n: int
    _fitting: dict[fx.Node, bool] = field(default_factory=dict, compare=False, repr=False)

    def holds(self, x: object) -> bool:
        """Return whether `x` is a matrix [M, N], with M as one dimension or as several."""
        if not is_tensor(x) or not val(x).shape:
            return False
        return _same(val(x).shape[-1], self.n) and _same(val(x).numel(), self.m * self.n)

    def layout(self, reader: fx.Node, node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return (shape, strides) of what `reader`, an elementwise op, reads, seen as what broadcasts to [M, N].

        A symbolic M is there as its hint. None if it can't be seen so, or is on another device.
        """
        if not is_tensor(node) or val(node).device != val(self.matmul).device:
            return None
        shape, strides = val(node).shape, val(node).stride()
        if _same(val(node).numel(), 1):
            return (), ()
        if not _same(shape[-1], 1) and not _same(shape[-1], self.n):
            return None
        if all(_same(size, 1) for size in shape[:-1]):
            layout = (1, self.n), (0, strides[-1])
        else:
            apart = all(
                _same(shape[i], 1) or _same(strides[i], strides[i + 1] * shape[i + 1]) for i in range(len(shape) - 2)
            )
            # a reshape is computed in the shape of what it reads; a tensor that is read as it is stands for both
            computes = first(reader) if reader.target in RESHAPES and reader is not node else reader
            leading = val(computes).shape[:-1]
            same_rows = len(shape) == len(leading) + 1 and all(map(_same, shape[:-1], leading))
            if not apart or not same_rows:
                return None
            layout = (hint_of(self.m), shape[-1]), (strides[-2], strides[-1])
        return layout if all(isinstance(x, int) for numbers in layout for x in numbers) else None

    def as_matrix(self, reader: fx.Node, node: fx.Node) -> Tensor:
        """Return a tensor as `layout` describes it."""
        layout = self.layout(reader, node)
        assert layout is not None
        return val(node).new_empty_strided(*layout)

    def fits(self, node: fx.Node) -> bool:
        """Return whether `node` is elementwise on matrices, and reads only what can be read tile by tile."""
        if node not in self._fitting:
            self._fitting[node] = self._fits(node)
        return self._fitting[node]

    def _fits(self, node: fx.Node) -> bool:
        tags = getattr(node.target, "tags", ())
        computes = node.target in RESHAPES | CASTS or torch.Tag.pointwise in tags
        if node.op != "call_function" or not computes or not self.holds(node) or not is_elementwise(node):
            return False
        if any(map(is_random, (node, *node.all_input_nodes))):  # random values would have to be stored to be read
            return False
        if node.target in RESHAPES and not self.holds(first(node)):
            return False
        return all(self.layout(node, i) is not None for i in node.all_input_nodes)


def _same(a: Any, b: Any) -> bool:
    """Return whether two sizes are known to be equal, without adding a guard on symbolic ones."""
    return bool(statically_known_true(a == b))


def is_random(node: fx.Node) -> bool:
    """Return whether an op draws numbers: another call of it would return others."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or node.target in _RANDOM


def products_of(matmul: fx.Node) -> Iterator[Products]:
    """Yield the ways to see the result of a matmul: as two halves, if ops read these, and as one matrix."""
    m, n = val(matmul).shape
    halves = [h for view in _views(matmul) for h in _halves(view)]
    by_place = dict(halves)
    # if several nodes read one half, each would have to be a product: then the result counts as one matrix
    if sorted(by_place) == [0, 1] and len(halves) == 2:
        yield Products(matmul, (by_place[0], by_place[1]), m, n // 2)
    yield Products(matmul, (matmul,), m, n)


def _views(matmul: fx.Node) -> list[fx.Node]:
    return list(reach([matmul], lambda n: (u for u in n.users if u.target in RESHAPES)))


def _halves(view: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    """Yield the halves of the last dimension that are read, each with its number."""
    n, last = val(view).shape[-1], val(view).dim() - 1
    for user in view.users:
        if user.target in SPLITS and (user.args[2] if len(user.args) > 2 else 0) in (-1, last):
            for part in user.users:
                if part.target is operator.getitem and val(part).shape[-1] * 2 == n:
                    yield int(part.args[1]), part  # type: ignore[arg-type]
        is_half = val(user).shape[-1:] == (n // 2,) if is_tensor(user) else False
        if is_half and user.target is aten.slice.Tensor and user.args[1] == last and user.args[2] in (0, n // 2):
            yield int(user.args[2] != 0), user


@dataclass
class TileEpilogue:
    """The ops that the kernel of a matmul can compute after its product, and the tensors that it then writes.

    nodes: elementwise ops, in the graph's order, with those of other quantized tensors that are computed from what the
    kernel reads anyway. after: those that can be computed from the products. quantizes: of results, or of results that
    are concatenated along their last dimension.
    """

    products: Products
    after: dict[fx.Node, None]
    nodes: list[fx.Node] = field(default_factory=list)
    quantizes: list[fx.Node] = field(default_factory=list)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """The transposed copies, each with the quantize that it copies."""
    amaxes: list[fx.Node] = field(default_factory=list)
    sums: list[fx.Node] = field(default_factory=list)
    blocks: dict[fx.Node, BlockScales] = field(default_factory=dict)
    """How those of the quantizes are scaled that have a scale for each block."""
    kept: fx.Node | None = None
    """The matmul, or a later tensor, if something else reads it in high precision."""

    @property
    def matmul(self) -> fx.Node:
        """The matmul."""
        return self.products.matmul

    @property
    def replaced(self) -> set[fx.Node]:
        """The nodes that the kernel's outputs replace."""
        of_blocks = (n for b in self.blocks.values() for n in (b.stored, *b.kept))
        return {*self.quantizes, *self.copies, *self.amaxes, *self.sums, *of_blocks}

    @property
    def ends(self) -> list[fx.Node]:
        """The results that are quantized, and those whose amaxes and sums are taken."""
        ends = *map(self.quantized, self.quantizes), *map(of_amax, self.amaxes), *map(first, self.sums)
        return [p for x in ends for p in self.parts(x)]

    @property
    def inputs(self) -> list[fx.Node]:
        """The tensors that the kernel reads after its product: those of the nodes first, then scales."""
        read = [node for _, node in self.reads()]
        return list(dict.fromkeys([*read, *self.scales.values()]))

    @property
    def scales(self) -> dict[fx.Node, fx.Node]:
        """The quantizes whose scales the kernel reads, with these."""
        return {q: as_node(q.args[1]) for q in self.quantizes if q not in self.blocks}

    def quantized(self, x_q: fx.Node) -> fx.Node:
        """Return the tensor that a quantize reads, as the kernel's matrix."""
        return self.blocks[x_q].x if x_q in self.blocks else first(x_q)

    def reads(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Yield each op and tensor that the op reads, which the kernel has not computed."""
        inside = {*self.products.parts, *self.nodes}
        yield from ((n, i) for n in self.nodes for i in n.all_input_nodes if i not in inside)

    def parts(self, x: fx.Node) -> list[fx.Node]:
        """Return the results of which `x` consists: itself, or the parts of a cat; [] if the kernel has them not."""
        computed = {*self.after, *self.nodes}
        x = through(x, RESHAPES) if x not in computed else x
        if x in computed:
            return [x]
        joined: list[fx.Node] = x.args[0] if x.target is aten.cat.default else []  # type: ignore[assignment]
        last = bool(joined) and (x.args[1] if len(x.args) > 1 else 0) in (-1, val(x).dim() - 1)
        return list(joined) if last and all(p in computed for p in joined) else []

    def is_turned(self, t: Transposed) -> bool:
        """Return whether a copy turns the kernel's matrix around, and not another one, as a flattened one."""
        return t.columns == self.products.n * len(self.parts(self.quantized(t.x_q)))

    def as_matrix(self, reader: fx.Node, node: fx.Node) -> Tensor:
        """Return a tensor that `reader` reads, as a matrix or what broadcasts to it."""
        return self.products.as_matrix(reader, node)

    def arrange(self, graph: fx.Graph, made: dict[fx.Node, fx.Node]) -> None:
        """Add to the kernel's graph the matrices that are computed from tensors in another order."""

    def closed(self) -> set[fx.Node]:
        """Return the nodes that nothing outside of the kernel needs, once its outputs replace others."""
        nodes = {*self.products.parts, *self.nodes, *self.replaced}
        todo = list(nodes)
        while todo:
            for node in todo.pop().all_input_nodes:
                if node not in nodes and node.op == "call_function" and all(u in nodes for u in node.users):
                    nodes.add(node)
                    todo += [node] if node is not self.matmul else []  # the kernel reads its operands
        return nodes

    def add(self, nodes: Iterable[fx.Node]) -> None:
        """Add elementwise ops."""
        self.nodes = sorted({*self.nodes, *nodes} - {*self.products.parts})


def epilogue_of(products: Products) -> TileEpilogue | None:
    """Return what the kernel can compute after the products, if that ends in a quantize, or in one other tensor."""
    e = TileEpilogue(products, _elementwise_after(products))
    near = reach(e.after, lambda n: n.users, lambda n: n in e.after or n.target in _LOOKED_THROUGH)
    e.quantizes = [n for n in near if n.target is QUANTIZE and e.parts(first(n)) and _is_known(n.args[1], e.matmul)]
    if e.quantizes:
        e.amaxes = [n for n in near if is_amax(n) and e.parts(of_amax(n))]
        if isinstance(products.m, int):  # the sums of each tile are as many as there are tiles
            e.sums = [n for n in near if is_column_sum(n) and e.parts(first(n))]
    e.add(_computing(e, e.ends or _last(e)))
    _add_what_inputs_are_computed_from(e)
    if e.quantizes:
        _add_companions(e)
    # after the companions, which may have transposed copies; before `_kept`, since copies are outputs, not readers
    e.copies = {t.copy: t.x_q for t in turned(e) if e.is_turned(t)}
    e.kept = _kept(e)
    needed = _computing(e, [*e.ends, *([e.kept] if e.kept is not None else [])])
    e.nodes = [n for n in e.nodes if n in needed]
    gains = e.quantizes or (e.kept not in (None, products.matmul) and _saves_reads(e))
    return e if gains else None


def turned(e: TileEpilogue) -> list[Transposed]:
    """Return the transposed copies of what the kernel quantizes."""
    views = reach(e.quantizes, lambda n: n.users, lambda n: n.target in VIEWS)
    return [t for t in map(transposed, views) if t is not None and t.x_q in e.quantizes]


def depends(node: fx.Node, on: fx.Node) -> bool:
    """Return whether `node` is computed from `on`, or is it. Looks only at the nodes between them in the graph."""
    return on in reach([node], lambda n: (i for i in n.all_input_nodes if not i < on))


def _is_known(scale: object, matmul: fx.Node) -> bool:
    """Return whether a scale is one number that does not depend on the matmul."""
    return is_tensor(scale) and val(scale).numel() == 1 and not depends(scale, matmul)


def _computing(e: TileEpilogue, ends: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """Return the ops of the kernel that compute these nodes."""
    inside = {*e.after, *e.nodes}
    return reach(ends, lambda n: (i for i in n.all_input_nodes if i in inside))


def _saves_reads(e: TileEpilogue) -> bool:
    """Return whether the ops read a matrix, as a sum with a residual does, that no kernel after the matmul reads again.

    For example, the backward of a norm reads its input twice: for the gradient of its weight, and for its own.
    """
    assert e.kept is not None
    matrices = [n for n in e.inputs if e.products.holds(n)]
    readers = [u for n in matrices for u in n.users if u.op != "output" and u is not e.kept]
    return bool(matrices) and not any(depends(u, e.kept) for u in readers)


def _last(e: TileEpilogue) -> list[fx.Node]:
    """Return the ops after the products whose result is read by others, if there is anything to compute for them."""
    if all(n.target in RESHAPES | CASTS for n in e.after if n not in e.products.parts):
        return []
    return [n for n in e.after if n not in e.products.parts and any(u not in e.after for u in n.users)]


def _elementwise_after(products: Products) -> dict[fx.Node, None]:
    """Return the products and the ops on them, which may also read tensors that do not depend on the matmul."""
    inside, met = dict.fromkeys(products.parts), set[fx.Node]()
    todo = [u for part in products.parts for u in part.users]
    heapq.heapify(todo)  # in the graph's order, so that what a node reads comes before it
    while todo:
        node = heapq.heappop(todo)
        if node in met or node in inside:
            continue
        met.add(node)
        outside = (i for i in node.all_input_nodes if i not in inside)
        if products.fits(node) and not any(depends(i, products.matmul) for i in outside):
            inside[node] = None
            for user in node.users:
                heapq.heappush(todo, user)
    return inside


def is_column_sum(node: fx.Node) -> bool:
    """Return whether `node` sums a tensor over all dimensions but the last, in float32 or less."""
    if node.target is not aten.sum.dim_IntList or len(node.args) < 2 or val(node).dtype == torch.float64:
        return False
    x, dims = val(first(node)), cast("list[int]", node.args[1] or [])
    return sorted(d % x.dim() for d in dims) == list(range(x.dim() - 1))


def _add_what_inputs_are_computed_from(e: TileEpilogue) -> None:
    """Compute inputs in the kernel that cost no further reads there: constants, and functions of one other tensor."""
    computed = set[fx.Node]()
    while True:
        # again after each round: the inputs of ops that were added may be computed in the kernel as well
        sources = {n: computed_from(n, e.products) for n in e.inputs}
        computed |= {leaf for _, leaves in sources.values() if len(leaves) <= 1 for leaf in leaves}
        taken = [n for n, (chain, leaves) in sources.items() if chain and (len(leaves) <= 1 or leaves <= computed)]
        if not taken:
            return
        e.add(n for x in taken for n in sources[x][0])


def computed_from(node: fx.Node, products: Products) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the elementwise ops that compute `node`, itself among them, and the matrices that they read.

    No ops, and the node itself, if it is not computed elementwise.
    """
    if node.target in CONSTANTS:
        return {node}, set()
    if not products.fits(node):
        return set(), {node} if products.holds(node) else set()
    met = reach([node], lambda n: n.all_input_nodes, products.fits)
    chain = {n for n in met if products.fits(n) or n.target in CONSTANTS}
    return chain, {n for n in met if n not in chain and products.holds(n)}


def _add_companions(e: TileEpilogue) -> None:
    """Add quantized tensors that are computed from what the kernel reads anyway."""
    matrices = {n for n in e.inputs if e.products.holds(n)}
    near = reach(matrices, lambda n: n.users, e.products.fits)
    for node in sorted(n for n in near if n.target is QUANTIZE and n not in e.quantizes and e.products.fits(n)):
        chain, leaves = computed_from(first(node), e.products)
        if not leaves or not leaves <= matrices or not _is_known(node.args[1], e.matmul):
            continue
        amaxes = [n for x in chain for n in readers_nearby(x) if is_amax(n) and of_amax(n) is x]
        waits = any(depends(node, on) for on in (e.matmul, *e.replaced))
        needed = [u for n in (node, *amaxes) for u in n.users]
        if waits or any(depends(n, u) for n in (e.matmul, *e.inputs, node) for u in needed):
            continue  # the kernel would wait for itself
        e.quantizes.append(node)
        e.amaxes += amaxes
        e.add(chain)


def _kept(e: TileEpilogue) -> fx.Node | None:
    """Return the tensor that the kernel must write in high precision, because something else reads it; None if none.

    That is the last one from which everything can be computed that is read; often the matmul's result.
    """
    parts, computed = e.products.parts, {*e.products.parts, *e.nodes}
    of_products = reach(parts, lambda n: (u for u in n.users if u in computed))
    closed = e.closed()
    left = [n for n in dict.fromkeys([*of_products, e.matmul]) if not closed.issuperset(n.users)]
    if not left:
        return None

    def holds_all(kept: fx.Node) -> bool:
        read_elsewhere = [n for n in left if n is not kept]
        met = reach(
            read_elsewhere, lambda n: (i for i in n.all_input_nodes if i in of_products), lambda n: n is not kept
        )
        return not any(part in met for part in (*parts, e.matmul)) and (kept in met or kept in left)

    narrow = (n for n in reversed(e.nodes) if n in of_products and val(n).element_size() == 2)
    return next((n for n in narrow if holds_all(n)), e.matmul)
