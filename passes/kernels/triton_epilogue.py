"""Write elementwise ops as Triton code for one tile of a matrix, by Inductor's own lowerings.

The ops come as a graph. After a matmul, its first inputs are products [M, N]: one, or two, such as gate and up.
Inductor lowers each op to a function of an index, as for its own kernels; calling these functions with the row and the
column of a tile's elements writes the code. So the code computes what Inductor's kernel would compute, moves elements
as views and cats do, and nothing here knows the name of an op, but for `cat`, of which Inductor has two lowerings.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fp8pass.base._torch import (
    GraphLowering,
    InductorKernel,
    Pointwise,
    PointwiseSubgraphLowering,
    SubgraphLoweringException,
    TritonCSE,
    TritonOverrides,
    Virtualized,
    inductor_lowering,
    inductor_ops,
)
from fp8pass.passes.kernels.element_addresses import (
    Address,
    AddressStep,
    AtPlaces,
    CannotFuse,
    Columns,
    address,
    simplified,
)

PRODUCT = "product"
"""With a number, the variable of a product in the code: f32, rounded to the dtype that the matmul returns."""


@dataclass(frozen=True)
class Read:
    """A variable of the code: the element of an input at an address, as `Address` has it.

    An input is numbered as in the graph; products, which come first, are not read. dtype: of the input.
    """

    variable: str
    input: int
    dtype: torch.dtype
    row: int
    column: int
    offset: int
    steps: tuple[AddressStep, ...] = ()

    def depends_on(self, dim: str) -> bool:
        """Return whether another "row", or another "column", reads another element."""
        near = self.row if dim == "row" else self.column
        return bool(near) or any(step.dim == dim for step in self.steps)


@dataclass(frozen=True)
class Result:
    """One output of the graph: the lines that compute it, after those of the outputs before it, and its variable."""

    lines: tuple[str, ...]
    variable: str


@dataclass(frozen=True)
class TritonEpilogue:
    """Triton code for one tile."""

    reads: tuple[Read, ...]
    results: tuple[Result, ...]


def written(module: fx.GraphModule, products: int = 0, rows: int = 1, columns: Columns | None = None) -> TritonEpilogue:
    """Return the code of a graph whose results are [M, N], of elementwise ops, or of ops that move elements.

    products: how many of its inputs are products. All have `meta["val"]`. rows, columns: M, and the columns that are
    computed, of each result one part after the other; where these are not given, all of them, and no op may move
    elements. Raises CannotFuse if an op is neither for Inductor, or if an input is read at an address that `Address`
    can't express.
    """
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    lowering = GraphLowering(module)
    lowering.current_device = torch.device("cuda")  # for which Inductor writes Triton code
    sizes = columns.sizes(rows) if columns else {}

    def simplify(index: sympy.Expr) -> sympy.Expr:
        return simplified(index, sizes, lowering.sizevars.simplify_with_ranges)

    code = _Code(inputs, products, columns, simplify)
    with Virtualized.set_graph_handler(lowering):
        nodes: Any = _Nodes(module, lowering, None, {torch.ops.aten.cat.default: _cat})
        with Virtualized.set_graph_handler(nodes):
            try:
                nodes.run(*(_boxed(number, value) for number, value in enumerate(inputs)))
                with code, Virtualized.set_ops_handler(AtPlaces(Virtualized.get_ops_handler(), simplify, sizes)):
                    results = tuple(result for box in nodes.graph_outputs for result in code.results(box))
            except SubgraphLoweringException as error:
                raise CannotFuse(f"{lowering.current_node.target} is not an elementwise op for Inductor") from error
    return TritonEpilogue(tuple(code.reads), results)


def calls_functions(epilogue: TritonEpilogue) -> bool:
    """Return whether the code computes more than sums, products, comparisons and casts, such as exp, erf or tanh."""
    return any(_FUNCTION.search(line) for result in epilogue.results for line in result.lines)


_FUNCTION = re.compile(r"libdevice\.|tl\.sigmoid|tl_math\.(?!abs)")


def _cat(inputs: Sequence[Any], dim: int = 0) -> Any:
    """Lower a cat elementwise, as Inductor does where it does not store the parts, after their promotion."""
    dtype = functools.reduce(torch.promote_types, (x.get_dtype() for x in inputs))
    join: Any = inductor_lowering.pointwise_cat
    return join([inductor_lowering.to_dtype(x, dtype) for x in inputs], dim)


class _Nodes(PointwiseSubgraphLowering):
    """Lowers the nodes of the graph, each as a function that is computed once per index.

    Without that, a value that two ops read would be computed twice, by each of its readers again twice, and so on.
    """

    def run_node(self, n: fx.Node) -> Any:
        self.root_graph.current_node = n
        result = super().run_node(n)
        if n.op != "call_function" or not hasattr(result, "make_loader"):
            return result
        load = result.make_loader()

        @functools.cache
        def once(handler: Any, index: tuple[sympy.Expr, ...]) -> Any:
            return load(index)

        return Pointwise.create(
            device=result.get_device(),
            dtype=result.get_dtype(),
            # Inductor also counts and prints the ops of a function, by handlers that return other values
            inner_fn=lambda index: once(Virtualized.get_ops_handler(), tuple(index)),
            ranges=list(result.get_size()),
        )


def _boxed(number: int, value: Tensor) -> Any:
    """Return an input for lowerings: a function that loads an element."""

    def element(index: Sequence[sympy.Expr]) -> Any:
        address = sum((i * s for i, s in zip(index, value.stride(), strict=True)), sympy.Integer(0))
        return inductor_ops.load(str(number), address)

    return Pointwise.create(
        device=value.device, dtype=value.dtype, inner_fn=element, ranges=list(map(sympy.sympify, value.shape))
    )


class _Code(InductorKernel[Any]):
    """Collects the lines that ops write, and what they load."""

    overrides: Callable[[], Any] = TritonOverrides

    def __init__(
        self,
        inputs: Sequence[Tensor],
        products: int,
        columns: Columns | None,
        simplify: Callable[[sympy.Expr], sympy.Expr],
    ) -> None:
        super().__init__(increase_kernel_count=False)
        self.cse: Any = TritonCSE()
        self.inputs = inputs
        self.products = products
        self.columns = columns
        self.simplify = simplify
        self.reads: list[Read] = []
        self.loaded: dict[tuple[str, Address], Any] = {}

    def results(self, box: Any) -> Iterator[Result]:
        """Write the code of the parts of one output."""
        columns = self.columns or Columns(0, 0)
        for part in range(columns.parts):
            before = len(self.compute.getvalue().splitlines())
            variable = str(box.make_loader()(columns.place(part)))
            yield Result(tuple(self.compute.getvalue().splitlines()[before:]), variable)

    def load(self, name: str, index: sympy.Expr) -> Any:
        """Return the variable of an input's element, which is float32 for all floating-point types but float64."""
        at = address(self.simplify(index), self.columns)
        if at.steps and self.columns is None:
            raise CannotFuse(f"it reads an input at {index}, which is not a multiple of row and column")
        if (name, at) not in self.loaded:
            self.loaded[name, at] = self._variable(int(name), at)
        return self.loaded[name, at]

    def _variable(self, number: int, at: Address) -> Any:
        dtype = self.inputs[number].dtype
        narrow = dtype.is_floating_point and dtype.itemsize < 4
        computed = torch.float32 if narrow else dtype
        name = f"{PRODUCT}{number}" if number < self.products else f"x{len(self.reads)}"
        read = Read(name, number, dtype, at.row, at.column, at.offset, at.steps)
        shape = ("BM" if read.depends_on("row") else 1, "BN" if read.depends_on("column") else 1)
        if number >= self.products:
            self.reads.append(read)
        return self.cse.namedvar(name, dtype=computed, shape=shape)
