"""Divide the graph of an update into strands: the computations of one parameter, which meet those of others in scalars.

An optimizer treats each parameter by itself: it reads the parameter, its gradient and its moments, and numbers that all
parameters share, such as a learning rate or the norm of all gradients. A strand has the first, the rest is shared. Each
node gets a time: strands run at odd times, what they share runs at even ones, so that a norm of all gradients is after
the strands' sums of squares and before their updates. Only what writes and reads the same memory, or reads a result,
is ordered.

An op on lists (`_foreach_`) is several elements, one for each tensor.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from networkx.utils import UnionFind
from torch import Tensor, fx

from fp8pass.base._torch import MODE_CHANGES, HigherOrderOperator, set_grad_enabled
from fp8pass.passes.common.equal_structure import storage_of
from fp8pass.passes.common.matmul_calls import mutates
from fp8pass.quant import ops

SHARED = -1
"""The owner of what no strand owns."""


class Undivided(Exception):
    """Raised for an update that can't be divided. Its message is the reason."""


class Value(NamedTuple):
    """A tensor of the graph: an input, an attribute, or a result. place: of a result of an op on lists."""

    node: fx.Node
    place: int = -1


@dataclass
class Element:
    """A node, or what an op on lists does to one of its tensors. result: what it returns.

    reads, rows, writes: the tensors that it reads whole, those of which it reads one row, with the dimension that rows
    lie along, and those that it writes. time: see above.
    """

    result: Value
    reads: list[Value]
    rows: dict[Value, int]
    writes: list[Value]
    owner: int = SHARED
    time: int = 0
    before: list[Element] = field(default_factory=list)
    """The elements that must run before this one."""


class Strands:
    """The elements of a graph, each with its owner and its time.

    elements: in the graph's order. strands: those of each strand, by its number. end: the last time. Raises Undivided
    for a graph that can't be divided.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._attributes: dict[str, fx.Node] = {}
        self._same: dict[Value, Value] = {}
        """{the result of an op in place: the tensor that it has written}."""
        self._groups = UnionFind()
        """The large tensors that are computed from each other."""
        self._roots: dict[Value, frozenset[Value]] = {}
        self._scalars: dict[Value, bool] = {}
        self.elements = [e for node in graph.nodes for e in self._elements(node)]
        self._find_owners()
        self._order()
        self.strands: dict[int, list[Element]] = {}
        for e in self.elements:
            if e.owner != SHARED:
                self.strands.setdefault(e.owner, []).append(e)

    def value(self, node: fx.Node) -> Value:
        """Return the tensor that a node stands for; there are several nodes for some."""
        if node.op == "get_attr":
            node = self._attributes.setdefault(str(node.target), node)
        value = Value(node)
        if node.target is operator.getitem and is_on_lists(source := node.args[0]):
            value = Value(source, int(node.args[1]))  # type: ignore[arg-type]
        return self._same.get(value, value)

    # Elements

    def _elements(self, node: fx.Node) -> Iterator[Element]:
        # an update computes no gradients, wherever it is
        if node.op in ("placeholder", "get_attr", "output") or node.target is set_grad_enabled:
            return
        if (
            not node.op.startswith("call_")
            or isinstance(node.target, HigherOrderOperator)
            or node.target in MODE_CHANGES
        ):
            raise Undivided(f"{node} calls {node.target}")
        if node.target is operator.getitem and is_on_lists(node.args[0]):
            return
        if not is_on_lists(node):
            yield self._element(node, -1)
            return
        if any(user.target is not operator.getitem for user in node.users):
            raise Undivided(f"{node} hands on a list of tensors as a whole")
        for i, item in enumerate(next(a for a in node.args if isinstance(a, (list, tuple)))):
            if item is not None:
                yield self._element(node, i)

    def _element(self, node: fx.Node, index: int) -> Element:
        args, kwargs = arguments(node, index)
        named = _by_name(node, args, kwargs)
        rows_of: dict[str, int] = getattr(node.target, "rows_of", {})
        rows = {v: dim for name, dim in rows_of.items() for v in self._values(named[name])}
        written = [v for x in _written(node, args, named) for v in self._values(x)]
        reads = [v for v in self._values((args, kwargs)) if v not in rows]
        result = Value(node, index)
        if written and not hasattr(node.target, "writes"):  # torch's ops in place return what they have written
            self._same[result] = written[0]
        elif _is_new(result, reads):
            self._roots[result] = frozenset({result})
        else:
            self._roots[result] = frozenset().union(*map(self.roots, reads))
        return Element(result, reads, rows, written)

    def _values(self, arguments: Any) -> list[Value]:
        found = list[Value]()
        fx.map_arg(arguments, lambda node: found.append(self.value(node)))
        return list(dict.fromkeys(found))

    def is_in_place(self, e: Element) -> bool:
        """Return whether the result of an element is the tensor that it has written."""
        return e.result in self._same

    def roots(self, value: Value) -> frozenset[Value]:
        """Return the tensors whose memory a value may be."""
        return self._roots.get(value, frozenset({value}))

    # Owners

    def _find_owners(self) -> None:
        numbers = self._numbers()
        for e in self.elements:
            at = next((self._groups[v] for v in filter(self._is_large, e.reads)), None)
            e.owner = SHARED if at is None else numbers.get(at, SHARED)
        owners = self._readers_of_numbers()
        makers = {e.result: e for e in self.elements}
        for e in self.elements:
            if is_by_row(e.result.node):
                of = {makers[v].owner for v in e.reads if v in makers}
                e.owner = of.pop() if len(of) == 1 else SHARED
            elif e.owner == SHARED and _may_be_owned(e) and all(map(self._is_scalar, e.reads)):
                e.owner = self._owner_of_number(e, owners)

    def _numbers(self) -> dict[Value, int]:
        """Return the number of each strand, by the root of what it computes: joins all large tensors that meet."""
        for e in self.elements:
            self._groups.union(*(self._same.get(v, v) for v in (*e.reads, e.result) if self._is_large(v)))
        # a strand has a tensor of Dynamo's; others, such as the amaxes of a state, are shared
        numbers: dict[Value, int] = {}
        for v in (v for e in self.elements for v in (*e.reads, *e.writes)):
            if _is_of_dynamo(v) and not self._is_scalar(v):
                numbers.setdefault(self._groups[v], len(numbers))
        return numbers

    def _readers_of_numbers(self) -> dict[Value, int]:
        """Return {number that a single strand reads, such as the step of Adam: that strand}."""
        reached: dict[Value, set[int]] = {}
        for e in self.elements:
            for v in filter(self._is_scalar, e.reads if e.owner != SHARED else ()):
                reached.setdefault(v, set()).add(e.owner)
        for e in reversed(self.elements):
            if e.owner != SHARED or e.rows:
                continue
            result = self._same.get(e.result, e.result)
            into: set[int] = set().union(*(reached.get(v, set()) for v in (result, *e.writes)))
            is_number = all(map(self._is_scalar, e.reads)) and not _takes_a_list(e.result.node)
            for v in e.reads:
                reached.setdefault(v, set()).update(into if is_number else {SHARED})
        return {v: next(iter(to)) for v, to in reached.items() if len(to) == 1 and SHARED not in to}

    def _owner_of_number(self, e: Element, owners: dict[Value, int]) -> int:
        """Return the strand that a number belongs to, and note it in `owners`; SHARED if it belongs to none."""
        # what nobody reads, such as a copy to restore, belongs to what it writes or reads
        for values in ([self._same.get(e.result, e.result)], e.writes, e.reads):
            of = {owners[v] for v in values if v in owners}
            if len(of) == 1:
                owners[e.result] = of.pop()
                return owners[e.result]
        return SHARED

    def _is_large(self, value: Value) -> bool:
        return not self._is_scalar(value) and not _is_vector(value)

    def _is_scalar(self, value: Value) -> bool:
        if value not in self._scalars:
            self._scalars[value] = self._has_no_dimension(value)
        return self._scalars[value]

    def _has_no_dimension(self, value: Value) -> bool:
        if value.node.target in _SCALARS:
            return True
        example = example_of(value)
        if isinstance(example, Tensor):
            return example.dim() == 0
        if value.node.op in ("placeholder", "get_attr"):
            return not isinstance(example, Tensor) and example is not None
        if value.node.target in _VECTORS or value.node.target is ops.decode_moment:
            return False
        reads = self._values(arguments(value.node, value.place))
        return all(map(self._is_scalar, reads))

    # Times

    def _order(self) -> None:
        accesses = _Accesses()
        for e in self.elements:
            read = {root for v in (*e.reads, *e.rows) for root in self.roots(v)}
            accesses.add(e, read, {root for v in e.writes for root in self.roots(v)})
        for e in self.elements:
            e.time = max((b.time + _apart(b, e) for b in e.before), default=int(e.owner != SHARED))
        last = max((e.time for e in self.elements if e.owner != SHARED), default=1)
        # as late as possible: what one parameter computes before and after a norm runs after it, in one kernel
        latest = {id(e): last + (e.owner == SHARED) for e in self.elements}
        for e in reversed(self.elements):
            e.time = latest[id(e)]
            for b in e.before:
                latest[id(b)] = min(latest[id(b)], e.time - _apart(b, e))
        self.end = last + 1


class _Accesses:
    """Who has made each value, and has last written and since read each memory, by its root."""

    def __init__(self) -> None:
        self._made: dict[Value, Element] = {}
        self._writers: dict[Value, Element] = {}
        self._readers: dict[Value, list[Element]] = {}
        self._of_rows: dict[Value, list[Element]] = {}
        """The elements that have written a row of it."""

    def add(self, e: Element, read: Set[Value], written: Set[Value]) -> None:
        """Set what must run before the next element. read, written: the roots of what it reads and writes."""
        before = [self._made[v] for v in (*e.reads, *e.rows) if v in self._made]
        before += [reader for root in written for reader in self._readers.get(root, ()) if reader is not e]
        if is_by_row(e.result.node):  # each has its own row: they need no order
            before += [self._writers[root] for root in written if root in self._writers]
            others = (row for root in written for row in self._of_rows.get(root, ()))
            before += [row for row in others if row.result.node != e.result.node]
            for root in written:
                self._of_rows.setdefault(root, []).append(e)
        else:
            before += [row for root in (*read, *written) for row in self._of_rows.get(root, ())]
            before += [self._writers[root] for root in (*read, *written) if root in self._writers]
            for root in written:
                self._writers[root], self._readers[root] = e, []
            for root in read - written:
                self._readers.setdefault(root, []).append(e)
            self._made[e.result] = e
        e.before = list({id(b): b for b in before}.values())


def _may_be_owned(e: Element) -> bool:
    return not e.rows and not _takes_a_list(e.result.node)


def _apart(before: Element, after: Element) -> int:
    """Return how many times lie between two elements of which one runs before the other."""
    if before.owner == after.owner:
        return 0
    return 1 if SHARED in (before.owner, after.owner) else 2


def is_on_lists(node: Any) -> bool:
    """Return whether a node is an op on lists of tensors, which treats each by itself."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    return is_by_row(node) or getattr(node.target, "__name__", "").startswith("_foreach_")


def is_by_row(node: fx.Node) -> bool:
    """Return whether a node is an op on lists that has an element for each row of vectors."""
    return getattr(node.target, "by_row", False)


def arguments(node: fx.Node, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a node; for an op on lists, those for one tensor."""
    if not is_on_lists(node):
        return node.args, dict(node.kwargs)

    def one(a: Any) -> Any:
        return a[index] if isinstance(a, (list, tuple)) else a

    return tuple(map(one, node.args)), {name: one(a) for name, a in node.kwargs.items()}


def example_of(value: Value) -> Any:
    """Return Dynamo's example of a value; None for a result of what a pass has added."""
    example = value.node.meta.get("example_value")
    return example[value.place] if isinstance(example, (list, tuple)) and value.place >= 0 else example


def _by_name(node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by the names of their parameters, for one of our ops; {} for others."""
    if not hasattr(node.target, "writes"):
        return {}
    bound = inspect.signature(node.target).bind(*args, **kwargs)  # type: ignore[arg-type]
    bound.apply_defaults()
    return bound.arguments


def _written(node: fx.Node, args: Sequence[Any], named: dict[str, Any]) -> list[Any]:
    """Return the arguments that an element writes."""
    if hasattr(node.target, "writes"):
        return [named[name] for name in node.target.writes]
    if not mutates(node):
        return []
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    into_first = name.endswith("_") or getattr(node.target, "__module__", "") == "_operator"  # such as `iadd`
    if not into_first or node.kwargs.get("out") is not None:
        raise Undivided(f"{node} writes into a tensor, and {name} does not say into which")
    return [args[0]]


def _is_new(result: Value, reads: Sequence[Value]) -> bool:
    """Return whether a result shares no memory with what was read."""
    if is_on_lists(result.node) or result.node.target == "clone" or _is_ours(result.node):
        return True
    example = example_of(result)
    known = [storage_of(example_of(v)) for v in reads]
    return storage_of(example) is not None and storage_of(example) not in known and None not in known


def _is_ours(node: fx.Node) -> bool:
    return str(getattr(node.target, "__module__", "")).startswith("fp8pass")


_SCALARS = {ops.write_weight, ops.write_moment, ops.amax_of_part, ops.any_nonfinite}
_VECTORS = {ops.next_scales, ops.amaxes_of_ranks, ops.predicted_scales, ops.scales_or_one, ops.keys_of}
_VECTORS |= {ops.next_moment_scales}


def _is_vector(value: Value) -> bool:
    """Return whether a value has an entry for each of several parameters."""
    return value.node.target in _VECTORS


def _is_of_dynamo(value: Value) -> bool:
    is_input = value.node.op in ("placeholder", "get_attr")
    return is_input and isinstance(example_of(value), Tensor)


def _takes_a_list(node: fx.Node) -> bool:
    lists = (a for a in (*node.args, *node.kwargs.values()) if isinstance(a, (list, tuple)))
    return not is_on_lists(node) and any(isinstance(x, fx.Node) for a in lists for x in a)
