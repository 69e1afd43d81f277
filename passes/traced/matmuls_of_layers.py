"""Find out which matmuls of a traced graph belong to one layer: its output, and the gradients of its two operands.

    output         y  = a @ b           two tensors that depend on no gradient
    grad_input     da = dy @ b.T        b is an operand of the output, the sum is over b's columns
    grad_weight    db = a.T @ dy        a is an operand of the output, the sum is over a's rows

A graph without autograd's records shows this by its data alone. Tensors are compared by what computes them, not by
node: views, and a forward that checkpointing repeats, are known again. Nothing is guessed where it would matter: a
matmul of the backward that fits no layer, or several layers with different recipes, is declined.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.graph.builder import is_tensor, val
from fp8pass.passes.common.patterns import ADDING_MATMULS, COPIES, MATMULS, RESHAPES, aten, constant, has_one_element
from fp8pass.passes.joint.list_matmuls import operands
from fp8pass.recipes import FACTORS, Kind, Role

VIEWS = {
    *RESHAPES,
    *COPIES,
    aten.detach.default,
    aten.expand.default,
    aten.lift_fresh_copy.default,
    aten.permute.default,
    aten.t.default,
    aten.transpose.int,
    aten._unsafe_view.default,
}
"""Ops whose result has the elements of their first argument, and no others, in any order."""
_SAME = {aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default}
"""Ops whose result is their argument."""


@dataclass
class TracedLayer:
    """A matmul of the forward, and the matmuls of its backward. repeats: equal matmuls, which checkpointing repeats."""

    output: fx.Node
    products: list[TracedProduct] = field(default_factory=list)
    repeats: list[fx.Node] = field(default_factory=list)

    @property
    def trains(self) -> bool:
        """True if the graph computes a gradient of an operand."""
        return any(p.kind != "output" for p in self.products)


@dataclass(frozen=True)
class TracedProduct:
    """One matmul. swapped: True if it computes the transpose, so that its factors are in the other order."""

    node: fx.Node
    kind: Kind
    swapped: bool = False

    @property
    def roles(self) -> tuple[Role, Role]:
        """The roles of its two factors."""
        first, second = FACTORS[self.kind]
        return (second, first) if self.swapped else (first, second)

    def is_transposed(self, position: int) -> bool:
        """Return whether a factor is the transpose of the tensor that the layer's output reads or is."""
        return self.kind == ("grad_weight", "grad_input")[position]


class Values:
    """A number for each node: equal for nodes that certainly hold the same value."""

    def __init__(self, graph: fx.Graph) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._of: dict[fx.Node, int] = {}
        for node in graph.nodes:
            self._of[node] = self._number(node)

    def of(self, node: fx.Node) -> int:
        """Return the number of a node."""
        return self._of[node]

    def _number(self, node: fx.Node) -> int:
        if node.target in _SAME and is_tensor(node.args[0]):
            return self._of[node.args[0]]
        key: Hashable = node
        if node.op == "get_attr":
            key = "get_attr", id(_attribute(node))  # one tensor may have several names
        elif node.op == "call_function" and not _is_impure(node):
            args = fx.node.map_aggregate((node.args, node.kwargs), self._known)
            key = str(node.target), repr(args)
        return self._numbers.setdefault(key, len(self._numbers))

    def _known(self, x: Any) -> Any:
        return _Number(self._of[x]) if isinstance(x, fx.Node) else x


def _attribute(node: fx.Node) -> Any:
    owner, _, name = str(node.target).rpartition(".")
    module = node.graph.owning_module
    assert module is not None
    return getattr(module.get_submodule(owner), name)


@dataclass(frozen=True)
class _Number:
    value: int


def _is_impure(node: fx.Node) -> bool:
    tags, schema = getattr(node.target, "tags", ()), getattr(node.target, "_schema", None)
    if schema is None:
        return "getitem" not in str(node.target)  # as in a control-flow operator
    return torch.Tag.nondeterministic_seeded in tags or schema.is_mutable


def base(node: fx.Node) -> fx.Node:
    """Return the tensor that a factor of a matmul is a view or a copy of."""
    while node.target in VIEWS and is_tensor(node.args[0]):
        node = node.args[0]
    return node


def chain(node: fx.Node) -> list[fx.Node]:
    """Return the views that lead from `base(node)` to `node`, in order."""
    nodes = []
    while node.target in VIEWS and is_tensor(node.args[0]):
        nodes.append(node)
        node = node.args[0]
    return nodes[::-1]


def backward_of(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that depend on an incoming gradient; an empty set if the graph is only a forward.

    The gradient is an input, as AOTAutograd names it; or a one, which autograd takes as the gradient of a loss.
    """
    tangents = [n for n in graph.nodes if n.op == "placeholder" and n.name.startswith("tangents")]
    if tangents:
        return _dependents(graph, tangents)
    seeds = [n for n in graph.nodes if _is_one(n)]
    backward = _dependents(graph, seeds)
    return backward if any(n.target in MATMULS for n in backward) else set()


def _is_one(node: fx.Node) -> bool:
    if node.op != "call_function" or not is_tensor(node):
        return False
    if not (has_one_element(node) and val(node).is_floating_point()):
        return False
    if node.target is aten.full_like.default:
        return bool(node.args[1] == 1)
    return node.target is aten.ones_like.default or (node.target is aten.full.default and constant(node) == 1)


def _dependents(graph: fx.Graph, seeds: list[fx.Node]) -> set[fx.Node]:
    dependents = set(seeds)
    for node in graph.nodes:
        if any(n in dependents for n in node.all_input_nodes):
            dependents.add(node)
    return dependents


class Finder:
    """Finds the layers of a graph.

    may_confuse: returns whether it doesn't matter which of several outputs in the forward a gradient belongs to.
    layers: in the order of their outputs, from `run` on; by the number of the output. reasons: for each matmul of the
    backward without a layer, why it has none.
    """

    def __init__(self, graph: fx.Graph, values: Values, may_confuse: Callable[[list[fx.Node]], bool]) -> None:
        self.values = values
        self.may_confuse = may_confuse
        self.backward = backward_of(graph)
        self.matmuls = [n for n in graph.nodes if n.target in MATMULS]
        self.layers: dict[int, TracedLayer] = {}
        self.readers: dict[tuple[int, Kind], list[TracedLayer]] = {}
        self.reasons: dict[fx.Node, str] = {}

    def run(self) -> Finder:
        """Find the layers; return itself."""
        for node in self.matmuls:
            if node not in self.backward:
                self._add_output(node)
        by_gradient: dict[int, list[fx.Node]] = {}
        for node in self.matmuls:
            if node in self.backward and (gradient := self._gradient_of(node)) is not None:
                by_gradient.setdefault(self._number(gradient), []).append(node)
        groups = list(by_gradient.values())
        for position, nodes in enumerate(groups):
            self._assign(nodes, groups[position + 1 :])
        return self

    def _number(self, factor: fx.Node) -> int:
        return self.values.of(base(factor))

    def _add_output(self, node: fx.Node) -> None:
        number = self.values.of(node)
        if number in self.layers:
            self.layers[number].repeats.append(node)
            return
        layer = self.layers[number] = TracedLayer(node, [TracedProduct(node, "output")])
        a, b = operands(node)
        if self._number(a) != self._number(b):
            self.readers.setdefault((self._number(b), "grad_input"), []).append(layer)
            self.readers.setdefault((self._number(a), "grad_weight"), []).append(layer)

    def _gradient_of(self, node: fx.Node) -> fx.Node | None:
        """Return the factor that depends on a gradient; None, and note the reason, if that is not just one of them."""
        gradients = [x for x in operands(node) if x in self.backward]
        if len(gradients) == 1:
            return gradients[0]
        self.reasons[node] = "both of its operands depend on a gradient, as in a second derivative"
        return None

    def _assign(self, nodes: list[fx.Node], later: list[list[fx.Node]]) -> None:
        """Assign matmuls that read one gradient, which belongs to one layer, or to several that are added up.

        later: the groups of matmuls that read the other gradients, which autograd computes after this one.
        """
        left = list(nodes)
        while fits := self._fits(left):
            most = max(map(len, fits.values()))
            best = [number for number, products in fits.items() if len(products) == most]
            # autograd goes back through the forward, so of several gradients the first belongs to the last layer
            is_one_each = len(best) == 1 + sum(set(best) == set(self._fits(other)) for other in later)
            if len(best) > 1 and not is_one_each and not self.may_confuse([self.layers[n].output for n in best]):
                self._note(left, f"it may belong to any of {len(best)} matmuls of the forward, whose recipes differ")
                return
            for product in fits[best[-1]]:
                self.layers[best[-1]].products.append(product)
                left.remove(product.node)
        self._note(left, "no matmul of the forward reads its other operand with matching sizes")

    def _fits(self, nodes: list[fx.Node]) -> dict[int, list[TracedProduct]]:
        """Return for each layer, by the number of its output, the products of it that the matmuls may be."""
        fits: dict[int, list[TracedProduct]] = {}
        for node in nodes:
            for layer, product in self._candidates(node):
                fitting = fits.setdefault(self.values.of(layer.output), [])
                if product.kind not in [p.kind for p in fitting]:
                    fitting.append(product)
        return dict(sorted(fits.items()))

    def _note(self, nodes: list[fx.Node], reason: str) -> None:
        self.reasons.update(dict.fromkeys(nodes, reason))

    def _candidates(self, node: fx.Node) -> Iterator[tuple[TracedLayer, TracedProduct]]:
        """Yield the layers that a matmul of the backward may belong to, in the order of the forward."""
        # of the factor that the forward has read
        position = 0 if operands(node)[1] in self.backward else 1
        for layer, product in self._alike(node, position):
            if product.kind not in {p.kind for p in layer.products}:
                yield layer, product

    def _alike(self, node: fx.Node, position: int) -> Iterator[tuple[TracedLayer, TracedProduct]]:
        """Yield the layers of which a matmul may be a gradient, if the factor at `position` is not the gradient."""
        factor = operands(node)[position]
        kinds: tuple[tuple[Kind, Role], ...] = (("grad_input", "weight"), ("grad_weight", "input"))
        for kind, role in kinds:
            product = TracedProduct(node, kind, swapped=FACTORS[kind].index(role) != position)
            for layer in self.readers.get((self._number(factor), kind), []):
                if _fits(layer.output, node, product, position, factor):
                    yield layer, product

    def disguised(self) -> tuple[fx.Node, fx.Node] | None:
        """Return a matmul of a graph without a backward that looks like a gradient, and of which matmul; or None."""
        for layer in self.layers.values() if not self.backward else ():
            for position in (0, 1):
                for other, _ in self._alike(layer.output, position):
                    if other.output < layer.output:
                        return layer.output, other.output
        return None


def _fits(output: fx.Node, node: fx.Node, product: TracedProduct, position: int, factor: fx.Node) -> bool:
    """Return whether sizes and strides are those of this product of the layer."""
    a, b = operands(output)
    read = val(b if product.kind == "grad_input" else a)
    shape, factor_shape = list(read.shape), list(val(factor).shape)
    gradient, of_output = list(val(operands(node)[1 - position]).shape), list(val(output).shape)
    if product.is_transposed(position):
        shape[-2:] = shape[:-3:-1]  # swaps the last two sizes
    if product.is_transposed(1 - position):
        of_output[-2:] = of_output[:-3:-1]
    if not (_equal(shape, factor_shape) and _equal(gradient, of_output)):
        return False
    if not _equal(shape[-1:], shape[-2:-1]):
        return True
    # of a square matrix only the strides show whether it is transposed
    strides, expected = list(read.stride()), list(val(factor).stride())
    if product.is_transposed(position):
        strides[-2:] = strides[:-3:-1]
    # a factor with other strides than either orientation is a copy, which shows nothing: it fits
    return _equal(strides, expected) or not _equal(_sorted(strides), _sorted(expected))


def _sorted(strides: list[Any]) -> list[Any]:
    """Return strides in an order of their own, also if some of them are symbolic."""
    return sorted(strides, key=str)


def _equal(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(bool(statically_known_true(x == y)) for x, y in zip(a, b, strict=True))


def bias_of(node: fx.Node) -> tuple[Any, Any, Any]:
    """Return the tensor that a matmul adds, alpha and beta; (None, 1, 1) if it adds none."""
    if node.target not in ADDING_MATMULS:
        return None, 1, 1
    return node.args[0], node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
