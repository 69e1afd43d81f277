"""Make functions of the strands of an update, one for all that are equal: equal parameters are compiled once.

before   p_0.lerp_(g_0, 0.1);  a_0: f32[] = write_weight(scales: f32[W], 0, [p_0], [x_q_0], [x_t_0])
         p_1.lerp_(g_1, 0.1);  a_1: f32[] = write_weight(scales, 1, [p_1], [x_q_1], [x_t_1])
         write_weight_copy_scales(weight_copy_scales: f32[2, W], scales, [a_0, a_1])
after    a_0, = strands_0(g_0, p_0, x_q_0, x_t_0, scales, rows_0: i64[1])
         a_1, = strands_0(g_1, p_1, x_q_1, x_t_1, scales, rows_1: i64[1])
         strands_1(weight_copy_scales, scales, a_0, a_1)
changes  nothing, except that a sum over all parameters may be rounded otherwise

Of n equal calls each has the n-th part of the strands of each kind, as a layer of a model has. The strands that are
left over are one more function. Ops that read one row of a vector read it from the rows that their function selects.

Runs last on Dynamo's graph of an update, when all that the update does is in it.
"""

from __future__ import annotations

import inspect
import operator
from collections import ChainMap
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from fp8pass.graph.annotation import Body
from fp8pass.passes.common.equal_structure import frozen
from fp8pass.passes.common.outlining import choices_of, input_of, verdict_key
from fp8pass.passes.update.context import UpdateContext
from fp8pass.passes.update.strands import SHARED, Element, Strands, Undivided, Value, arguments, is_by_row, is_on_lists
from fp8pass.quant.sharded import part_of
from fp8pass.weights.update_inputs import UpdateCall

CALL_COST, FUNCTIONS_COST = 0.25, 12.0
"""Weigh a call, and all functions beside one whole graph, by the number of strands that take as long to compile.

Launches are not weighed. Each call has about five for small tensors and last stages of amaxes, which a whole graph has
once. By the code for an H100, the update of GPT-2 with 12 layers of width 768 has 109 launches in 12 calls, and 60 as a
whole, which takes 34 s of CPU longer to compile; of width 128, where all tensors are small, 73, and 16 as a whole.
"""


class OutlineStrands:
    """The pass over Dynamo's graph of an update."""

    name = "outline_strands"

    def run(self, graph: fx.Graph, context: UpdateContext) -> int:
        """Replace equal strands by calls of functions, where that compiles less; return the number of strands."""
        if not context.config.compiles_once:
            return 0
        try:
            outliner = _StrandOutliner(graph, context, Strands(graph))
            if outliner.number > 1:
                context.bodies = outliner.rewrite()
        except Undivided as reason:
            context.notes.append(f"an update is compiled as a whole: {reason}")
        return len(context.bodies)


def calls_for(counts: Sequence[int]) -> int:
    """Return how many equal calls divide strands, of which there are `counts` of each kind, at the least cost."""

    def cost(calls: int) -> float:
        compiled = sum(count // calls + count % calls for count in counts)
        return compiled + (CALL_COST * calls + FUNCTIONS_COST if calls > 1 else 0)

    return min(range(1, max(counts, default=1) + 1), key=cost)


@dataclass(frozen=True)
class _Call:
    """A call of a function. elements: what it runs, strand by strand.

    reads: the values that it reads whole and does not make. rows: the numbers of the rows that it selects of vectors,
    for an op that has an element for each row, and for all others together (None). results: what it makes for others.
    """

    elements: list[Element]
    reads: list[Value]
    rows: dict[tuple[Value, fx.Node | None], tuple[int, ...]]
    results: list[Value]

    @property
    def vectors(self) -> list[Value]:
        """The values of which it reads rows."""
        return list(dict.fromkeys(v for v, _ in self.rows))


class _StrandOutliner:
    def __init__(self, graph: fx.Graph, context: UpdateContext, strands: Strands) -> None:
        module = graph.owning_module
        assert module is not None
        self.graph, self.module, self.context, self.strands = graph, module, context, strands
        self.examples = context.examples(graph)
        _check_ranks(self.examples, context)
        self.kinds: dict[Hashable, list[list[Element]]] = {}
        for elements in strands.strands.values():
            self.kinds.setdefault(self._key(elements), []).append(elements)
        self.number = calls_for([len(equal) for equal in self.kinds.values()])
        self.written = {root for e in strands.elements for v in e.writes for root in strands.roots(v)}
        """The memory that elements write, by its roots."""
        self.read_by: dict[Value, set[tuple[int, int]]] = {}
        """{value: owners and times of its readers}."""
        for e in strands.elements:
            for value in (*e.reads, *e.rows):
                self.read_by.setdefault(value, set()).add((e.owner, e.time))
        self.rows: dict[tuple[int, ...], fx.Node] = {}
        self.returned = {strands.value(n) for n in graph.output_node().all_input_nodes}

    # Match

    def _key(self, elements: Sequence[Element]) -> Hashable:
        """Return a key that is equal for strands that compute the same from their own inputs."""
        own = {e.result: i for i, e in enumerate(elements)}
        outer: dict[Value, Hashable] = {}

        def of_node(node: fx.Node) -> Hashable:
            value = self.strands.value(node)
            if value in own:
                return "own", own[value]
            return outer.setdefault(value, ("outer", len(outer), _described(self.examples.get(value.node))))

        rows = []
        for e in elements:
            node, (args, kwargs) = e.result.node, arguments(e.result.node, e.result.place)
            args = (*(None if i == _index_place(node) else a for i, a in enumerate(args)),)
            verdicts = tuple(verdict_key(self.context.choices[i]) for i in choices_of(self.module, [node]))
            rows.append((e.time, node.op, node.target, frozen(args, of_node), frozen(kwargs, of_node), verdicts))
        return tuple(rows)

    def _calls_at(self, time: int) -> Iterator[tuple[str, list[list[Element]]]]:
        """Yield a title, and the elements of each call, of the functions that run at this time."""
        if time % 2 == 0:
            yield "what parameters share", [[e for e in self.strands.elements if (e.owner, e.time) == (SHARED, time)]]
            return
        calls, rest = [list[list[Element]]() for _ in range(self.number)], list[list[Element]]()
        for equal in self.kinds.values():
            each = len(equal) // self.number
            for i, of_call in enumerate(calls):
                of_call += equal[i * each :][:each]
            rest += equal[self.number * each :]
        for group, what in ((calls, "parameters"), ([rest], "other parameters")):
            title = f"the update of {len(group[0])} {what}"
            yield title, [[e for strand in of_call for e in strand if e.time == time] for of_call in group]

    def _call_of(self, elements: list[Element]) -> _Call:
        own = {e.result for e in elements}
        reads = dict.fromkeys(v for e in elements for v in e.reads if v not in own)
        by_node: dict[fx.Node | None, list[Element]] = {}
        for e in elements:
            if e.rows:
                by_node.setdefault(_group(e), []).append(e)
        rows = {
            (v, node): tuple(_row(e) if v in e.rows else 0 for e in of_node)
            for node, of_node in by_node.items()
            for e in of_node
            for v in e.rows
        }
        here = {(e.owner, e.time) for e in elements}
        results = [e.result for e in elements if self._is_read_outside(e, here)]
        if any(self._may_be_written(v, own) for v in results):
            raise Undivided("an op reads a view that is made elsewhere")
        return _Call(elements, list(reads), rows, results)

    def _may_be_written(self, value: Value, own: Set[Value]) -> bool:
        """Return whether a result is a view of memory that others have, or write. own: what the call makes."""
        roots = self.strands.roots(value)
        return roots != {value} and bool(roots - own or roots & self.written)

    def _is_read_outside(self, e: Element, here: set[tuple[int, int]]) -> bool:
        return not self.strands.is_in_place(e) and (
            e.result in self.returned or bool(self.read_by.get(e.result, set()) - here)
        )

    def _pattern(self, call: _Call) -> Hashable:
        """Return which arguments of a call are one tensor or share memory, and which results others read."""
        numbers: dict[Any, int] = {}
        positions = {e.result: i for i, e in enumerate(call.elements)}
        reads = [
            positions.get(v, ("outer", numbers.setdefault(v, len(numbers)))) for e in call.elements for v in e.reads
        ]
        arguments = [*call.reads, *call.vectors]
        storages: dict[Any, int] = {}
        memory = [storages.setdefault(_storage(self.examples.get(v.node), v), i) for i, v in enumerate(arguments)]
        rows = [(arguments.index(v), node is None, len(numbers)) for (v, node), numbers in call.rows.items()]
        return str((reads, memory, [positions[v] for v in call.results], rows))

    # Rewrite

    def rewrite(self) -> dict[str, Body]:
        """Replace all nodes by calls of functions; return these by the names of their graphs."""
        functions = [
            (title, list(map(self._call_of, calls)))
            for time in range(self.strands.end + 1)
            for title, calls in self._calls_at(time)
            if calls[0]
        ]
        if any(len(set(map(self._pattern, calls))) > 1 for _, calls in functions):
            raise Undivided("equal parameters share memory, or numbers, in different ways")
        output, old = self.graph.output_node(), [n for n in self.graph.nodes if n.op.startswith("call")]
        made: dict[Value, fx.Node] = {}
        bodies: dict[str, Body] = {}
        for title, calls in functions:
            name, is_shared = f"strands_{len(bodies)}", len(calls) > 1
            setattr(self.module, name, _function_of(self.strands, calls[0], is_shared, self.module))
            bodies[name] = Body([title] * len(calls), [self._choices(call) for call in calls])
            for call in calls:
                rows = [self._rows(numbers) for numbers in call.rows.values()]
                with self.graph.inserting_before(output):
                    args = [made.get(v, v.node) for v in (*call.reads, *call.vectors)]
                    new = self.graph.call_module(name, (*args, *rows))
                    for i, v in enumerate(call.results):
                        made[v] = self.graph.call_function(operator.getitem, (new, i))
        output.args = fx.map_arg(output.args, lambda n: made.get(self.strands.value(n), self.strands.value(n).node))
        for node in reversed(old):
            self.graph.erase_node(node)
        return bodies

    def _choices(self, call: _Call) -> tuple[int, ...]:
        return tuple(i for e in call.elements for i in choices_of(self.module, [e.result.node]))

    def _rows(self, numbers: tuple[int, ...]) -> fx.Node:
        """Return the input i64[n] with the numbers of the rows that a call selects."""
        made: dict[torch.device, Tensor] = {}

        def value(call: UpdateCall) -> Tensor:
            if call.device not in made:
                with torch.inference_mode(False):
                    made[call.device] = torch.tensor(numbers, device=call.device)
            return made[call.device]

        if numbers not in self.rows:
            self.rows[numbers] = self.context.take(self.graph, f"rows_{len(self.rows)}", value, is_fixed=True)
        return self.rows[numbers]


def _function_of(strands: Strands, call: _Call, is_shared: bool, module: fx.GraphModule) -> fx.GraphModule:
    """Return the graph of a function, which is that of its first call. is_shared: True if there are others."""
    graph = fx.Graph()
    of = {v: _input(graph, v, is_shared) for v in (*call.reads, *call.vectors)}
    numbers = {key: _new_input(graph, f"rows_{i}") for i, key in enumerate(call.rows)}
    dims = {v: dim for e in call.elements for v, dim in e.rows.items()}
    rows = {(v, n): graph.call_function(torch.index_select, (of[v], dims[v], numbers[v, n])) for v, n in call.rows}
    place = {id(e): i for i, e in enumerate(e for e in call.elements if e.rows and _group(e) is None)}
    by_node: dict[fx.Node, list[Element]] = {}
    for e in call.elements:
        by_node.setdefault(e.result.node, []).append(e)
    for node in sorted(by_node):
        elements = by_node[node]
        group = _group(elements[0])
        args, kwargs = _arguments_of(node, elements)
        if elements[0].rows and group is None:
            args = tuple(place[id(elements[0])] if i == _index_place(node) else a for i, a in enumerate(args))
        here = ChainMap({v: rows[v, group] for v in elements[0].rows}, of)
        args, kwargs = fx.map_arg((args, kwargs), lambda n: here[strands.value(n)])  # noqa: B023
        new = graph.create_node(node.op, node.target, args, kwargs)
        new.meta = {key: value for key, value in node.meta.items() if key != "example_value"}
        for v in elements[0].writes if group is not None else ():
            graph.call_method("index_copy_", (of[v], dims[v], numbers[v, group], rows[v, group]))
        for i, e in enumerate(elements):
            if not strands.is_in_place(e) and group is None:
                of[e.result] = graph.call_function(operator.getitem, (new, i)) if is_on_lists(node) else new
    graph.output(tuple(of[v] for v in call.results))
    function = fx.GraphModule(torch.nn.Module(), graph)
    function.meta = dict(module.meta)
    function._param_name_to_source = {}  # type: ignore[assignment]  # see `outline_layers.function_of`
    return function


def _group(e: Element) -> fx.Node | None:
    """Return the op that an element is one row of; None for an op that reads one row, or none."""
    return e.result.node if is_by_row(e.result.node) else None


def _arguments_of(node: fx.Node, elements: Sequence[Element]) -> tuple[Any, Any]:
    """Return the arguments of a node; of an op on lists, those for these elements."""
    if not is_on_lists(node):
        return node.args, node.kwargs

    def some(a: Any) -> Any:
        return [a[e.result.place] for e in elements] if isinstance(a, (list, tuple)) else a

    return tuple(map(some, node.args)), {name: some(a) for name, a in node.kwargs.items()}


def _input(graph: fx.Graph, value: Value, is_shared: bool) -> fx.Node:
    """Add an input to a function, for an input or attribute of the update, or for a result of another function."""
    node, place = value
    if node.op == "placeholder":
        return input_of(graph, node, is_shared)
    return _new_input(graph, node.name if place < 0 else f"{node.name}_{place}")


def _new_input(graph: fx.Graph, name: str) -> fx.Node:
    new = graph.placeholder(name)
    new._dynamo_source = None  # AOTAutograd asks for it
    return new


def _row(e: Element) -> int:
    """Return the number of the row that an element reads."""
    if is_by_row(e.result.node):
        return e.result.place
    place = _index_place(e.result.node)
    row = e.result.node.args[place] if place < len(e.result.node.args) else e.result.node.kwargs["index"]
    assert isinstance(row, int)
    return row


def _index_place(node: fx.Node) -> int:
    """Return the position of the argument `index` of an op that reads one row; -1 for other ops."""
    if not getattr(node.target, "rows_of", {}) or is_by_row(node):
        return -1
    return list(inspect.signature(node.target).parameters).index("index")  # type: ignore[arg-type]


def _described(x: Any) -> Hashable:
    """Return a key of everything about an input that compiled code is specialized to; the same on all ranks."""
    if isinstance(x, DTensor):
        return "sharded", x.dtype, str(x.device_mesh), str(x.placements), str(x.shape), x.stride()
    if not isinstance(x, Tensor):
        return type(x).__name__, str(x)
    # as text: a comparison of symbolic sizes would add guards
    return type(x), x.dtype, x.device, str(tuple(x.shape)), str(x.stride())


def _storage(x: Any, otherwise: Hashable) -> Hashable:
    return part_of(x).untyped_storage()._cdata if isinstance(x, Tensor) else otherwise


def _check_ranks(examples: Mapping[fx.Node, Any], context: UpdateContext) -> None:
    """Raise Undivided if ranks, which must communicate in one order, may have different strands."""
    several = any(isinstance(x, DTensor) for x in examples.values())
    if several and context.key.moments and any(w.by_itself is not None for w in context.key.writes):
        raise Undivided("each rank decides by its part which moments are in FP8, and copies of weights need all ranks")
