"""Write elementwise ops as Triton code for one tile of a matmul's result, by Inductor's own lowerings.

The ops come as a graph whose first inputs are products [M, N]: one, or two of one matmul, such as gate and up.
Inductor lowers each op to a function of an index, as for its own kernels; calling these functions with the row and the
column of a tile's elements writes the code. So the code computes what Inductor's kernel after the matmul would compute,
and nothing here knows the name of an op.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fp8pass._torch import (
    GraphLowering,
    InductorKernel,
    Pointwise,
    PointwiseSubgraphLowering,
    SubgraphLoweringException,
    TritonCSE,
    TritonOverrides,
    Virtualized,
    inductor_ops,
)

PRODUCT = "product"
"""With a number, the variable of a product in the code: f32, rounded to the dtype that the matmul returns."""
_ROW, _COLUMN = sympy.symbols("row column", integer=True, nonnegative=True)


class CannotFuse(Exception):
    """An epilogue can't be generated; the message says why."""


@dataclass(frozen=True)
class Read:
    """A variable of the code: the element `row * r + column * c + offset` of an input, for row r and column c.

    An input is numbered as in the graph; products, which come first, are not read. dtype: of the input.
    """

    variable: str
    input: int
    dtype: torch.dtype
    row: int
    column: int
    offset: int


@dataclass(frozen=True)
class Result:
    """One output of the graph: the lines that compute it, after those of the outputs before it, and its variable."""

    lines: tuple[str, ...]
    variable: str


@dataclass(frozen=True)
class Epilogue:
    """Triton code for one tile."""

    reads: tuple[Read, ...]
    results: tuple[Result, ...]


def written(module: fx.GraphModule, products: int) -> Epilogue:
    """Return the code of a graph of elementwise ops on [M, N], and on what broadcasts to it.

    products: how many of its inputs are products. All have `meta["val"]`. Raises CannotFuse if an op is not elementwise
    for Inductor, or if an input is read at an address that is not a sum of multiples of row and column.
    """
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    lowering, code = GraphLowering(module), _Code(inputs, products)
    lowering.current_device = torch.device("cuda")  # for which Inductor writes Triton code
    with Virtualized.set_graph_handler(lowering):
        nodes: Any = _Nodes(module, lowering)
        with Virtualized.set_graph_handler(nodes):
            try:
                nodes.run(*(_boxed(number, value) for number, value in enumerate(inputs)))
            except SubgraphLoweringException as error:
                raise CannotFuse(f"{lowering.current_node.target} is not an elementwise op for Inductor") from error
            with code:
                results = tuple(code.result(box) for box in nodes.graph_outputs)
    return Epilogue(tuple(code.reads), results)


def calls_functions(epilogue: Epilogue) -> bool:
    """Return whether the code computes more than sums, products, comparisons and casts: exp, erf or tanh, say."""
    return any(_FUNCTION.search(line) for result in epilogue.results for line in result.lines)


_FUNCTION = re.compile(r"libdevice\.|tl\.sigmoid|tl_math\.(?!abs)")


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

    def __init__(self, inputs: Sequence[Tensor], products: int) -> None:
        super().__init__(increase_kernel_count=False)
        self.cse: Any = TritonCSE()
        self.inputs = inputs
        self.products = products
        self.reads: list[Read] = []
        self.loaded: dict[tuple[str, sympy.Expr], Any] = {}

    def result(self, box: Any) -> Result:
        """Write the code of one output."""
        before = len(self.compute.getvalue().splitlines())
        variable = str(box.make_loader()([_ROW, _COLUMN]))
        return Result(tuple(self.compute.getvalue().splitlines()[before:]), variable)

    def load(self, name: str, index: sympy.Expr) -> Any:
        """Return the variable of an input's element, which is float32 for all floating-point types but float64."""
        if (name, index) not in self.loaded:
            self.loaded[name, index] = self._variable(int(name), index)
        return self.loaded[name, index]

    def _variable(self, number: int, index: sympy.Expr) -> Any:
        dtype = self.inputs[number].dtype
        narrow = dtype.is_floating_point and dtype.itemsize < 4
        computed = torch.float32 if narrow else dtype
        row, column = (index.coeff(symbol) for symbol in (_ROW, _COLUMN))
        offset = sympy.expand(index - row * _ROW - column * _COLUMN)
        if not all(x.is_Integer for x in (row, column, offset)):
            raise CannotFuse(f"it reads an input at {index}, which is not a multiple of row and column")
        shape = ("BM" if row else 1, "BN" if column else 1)
        name = f"{PRODUCT}{number}" if number < self.products else f"x{len(self.reads)}"
        variable = self.cse.namedvar(name, dtype=computed, shape=shape)
        if number >= self.products:
            self.reads.append(Read(name, number, dtype, int(row), int(column), int(offset)))
        return variable
