"""Tell what each matmul in a `torch.autograd.Function` is, by what it multiplies and by what becomes of its result.

    y = x @ w.t()         in the forward: the output of a layer, of an input and a weight
    gx = g @ w            in the backward, g depends on an incoming gradient: grad_input, of a gradient and the weight
    gw = g.t() @ x        grad_weight, of a gradient and the input

A forward may compute gradients itself, as fused losses do chunk by chunk: there, a product that reaches a gradient
which the backward returns, along ops that are linear in it, is one. The operand that comes from an input of the
Function, by views, casts and slices, is the input or weight, and the other is the gradient. If that does not tell the
two apart, `told` is False, and both operands are quantized as an input and a weight, by scales of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from fp8pass.base.names import Names
from fp8pass.graph.annotation import SingleProduct
from fp8pass.passes.common.equal_structure import storage_of
from fp8pass.passes.common.function_graphs import FunctionGraphs
from fp8pass.passes.common.matmul_calls import MatmulSignature, argument, mutates, signature_of
from fp8pass.passes.common.patterns import reach
from fp8pass.passes.dynamo.write_matmuls import name_of
from fp8pass.recipes import Kind, Role

_VIEWS = frozenset(
    ("contiguous", "flatten", "mT", "numpy_T", "permute", "reshape", "squeeze", "t", "T", "transpose", "unflatten")
) | {"unsqueeze", "view", "view_as"}
_COPIES = frozenset(("contiguous", "flatten", "reshape"))
"""Views that may be copies."""
_CASTS = frozenset(("bfloat16", "clone", "detach", "float", "half", "to", "type", "type_as"))
_PARTS = frozenset(("chunk", "getitem", "narrow", "select", "split"))
_SUMS = frozenset(
    ("add", "add_", "cat", "concat", "copy_", "iadd", "index_add_", "isub", "mean", "neg", "setitem", "stack", "sub")
) | {"sub_", "sum"}
_SCALINGS = frozenset(("div", "div_", "imul", "itruediv", "mul", "mul_", "truediv"))
"""Linear in one operand if the other is one number."""


_OUTPUT: tuple[Role, Role] = ("input", "weight")


def products_of(graphs: FunctionGraphs, names: Names) -> dict[fx.Node, SingleProduct]:
    """Return what each matmul in a Function is."""
    return _Roles(graphs, names).products()


class _Roles:
    def __init__(self, graphs: FunctionGraphs, names: Names) -> None:
        self.graphs = graphs
        self.names = names
        self.from_gradient = set(reach(graphs.gradients, _read_by))
        self.outputs: dict[fx.Node, MatmulSignature] = {}
        """The products of the forward that are outputs of layers."""

    def products(self) -> dict[fx.Node, SingleProduct]:
        matmuls = {
            node: signature
            for module in (self.graphs.forward, self.graphs.backward)
            for node in module.graph.nodes
            if (signature := signature_of(node)) is not None and all(map(_is_tensor, _operands(node, signature)))
        }
        gradients = {node for node in matmuls if self._is_gradient(node)}
        self.outputs = {n: s for n, s in matmuls.items() if n not in gradients and not self._is_late(n)}
        return {
            node: self._gradient(node, signature)
            if node in gradients
            else SingleProduct("output", _OUTPUT, self._is_late(node))
            for node, signature in matmuls.items()
        }

    def _is_late(self, node: fx.Node) -> bool:
        return node.graph is self.graphs.backward.graph

    def _is_gradient(self, product: fx.Node) -> bool:
        """Return whether the product depends on a gradient, or becomes one."""
        return product in self.from_gradient if self._is_late(product) else self._becomes_gradient(product)

    def _becomes_gradient(self, product: fx.Node) -> bool:
        """Return whether a result of the forward reaches a gradient that the backward returns, by linear ops alone."""
        inputs_of = {outer: inner for inner, outer in self.graphs.saved.items()}

        def carried(node: fx.Node) -> Iterator[fx.Node]:
            yield from _carried(node)
            if node in inputs_of:
                yield inputs_of[node]

        return any(self._is_late(node) and self.graphs.positions(node) for node in reach([product], carried))

    def _gradient(self, node: fx.Node, signature: MatmulSignature) -> SingleProduct:
        a, b = _operands(node, signature)
        late = self._is_late(node)
        known = [(late and x not in self.from_gradient) or (not late and self._is_input(x)) for x in (a, b)]
        if known[0] == known[1]:  # a product of two gradients, for example
            return SingleProduct("output", _OUTPUT, late, told=False)
        value = a if known[0] else b
        role, forward = self._role_in_forward(value)
        kind: Kind = "grad_input" if role == "weight" else "grad_weight"
        roles: tuple[Role, Role] = (role, "grad_output") if value is a else ("grad_output", role)
        return SingleProduct(kind, roles, late, forward=forward)

    def _is_input(self, operand: fx.Node) -> bool:
        origin = self._origin(operand)
        return origin.op == "placeholder"

    def _role_in_forward(self, value: fx.Node) -> tuple[Role, fx.Node | None]:
        """Return the role that a tensor has in the first product of the forward that reads it, and that product."""
        origin = self._origin(value)
        for node, signature in self.outputs.items():
            for operand, role in zip(_operands(node, signature), _OUTPUT, strict=True):
                if self._origin(operand) is origin:
                    return role, node
        return ("weight" if self.names.is_owned(origin) else "input"), None

    def _origin(self, node: fx.Node) -> fx.Node:
        """Return the tensor of the forward that `node` comes from, by views, casts and slices."""
        while True:
            if node in self.graphs.saved:
                node = self.graphs.saved[node]
            elif node.op in ("call_function", "call_method") and name_of(node) in _VIEWS | _CASTS | _PARTS:
                node = node.all_input_nodes[0]
            else:
                return node


def without_views(node: fx.Node, reader: fx.Node) -> list[fx.Node]:
    """Return the views that lead to `node`, the last first, and then the tensor that they are views of.

    Only [node] if one of them may be a copy, and something may be written into what it copies, or into it, before
    `reader` reads it.
    """
    chain = [node]
    while chain[-1].op in ("call_function", "call_method") and name_of(chain[-1]) in _VIEWS:
        source = chain[-1].all_input_nodes[0]
        if not _is_tensor(source) or _value(source).dtype != _value(node).dtype:
            break  # `view` may also read the bits as another dtype
        chain.append(source)
    storages = {storage_of(_value(n)) for n in chain}
    copies = [n for n in chain[:-1] if name_of(n) in _COPIES]
    between = itertools.takewhile(lambda n: n is not reader, _after(copies[-1])) if copies else ()
    writing = (n for n in between if mutates(n))
    if any(_is_tensor(x) and storage_of(_value(x)) in storages for n in writing for x in n.all_input_nodes):
        return [node]
    return chain


def _after(node: fx.Node) -> Iterator[fx.Node]:
    while node.op != "root":
        yield node
        node = node.next


def _operands(node: fx.Node, signature: MatmulSignature) -> tuple[Any, Any]:
    return argument(node, signature.a), argument(node, signature.b)


def _is_tensor(x: object) -> bool:
    return isinstance(x, fx.Node) and isinstance(x.meta.get("example_value"), Tensor)


def _value(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["example_value"]
    return value


def _read_by(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what depends on a node: what reads it, and the tensors into which it is written."""
    for user in node.users:
        yield user
        if mutates(user):
            yield from _written(user)


def _carried(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what is linear in a node, with a number as the factor: results of such ops, and tensors they write into."""
    for user in node.users:
        name = name_of(user)
        by_number = name in _SCALINGS and all(_is_number(x) for x in user.args if x is not node)
        if by_number or name in _VIEWS | _CASTS | _PARTS | _SUMS:
            yield user
            if mutates(user):
                yield from _written(user)


def _written(user: fx.Node) -> Iterator[fx.Node]:
    """Yield the tensor that a call writes into, and those that it is a view of."""
    yield from reach(user.all_input_nodes[:1], _viewed)


def _viewed(node: fx.Node) -> Iterator[fx.Node]:
    if node.op in ("call_function", "call_method") and name_of(node) in _VIEWS | _PARTS:
        yield node.all_input_nodes[0]


def _is_number(factor: Any) -> bool:
    """Return whether a factor is a number, or a tensor with one element."""
    return not _is_tensor(factor) or _value(factor).dim() == 0
