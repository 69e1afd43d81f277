"""The calls of a graph's functions in order, with a slot for each value: what runs them needs no graph and no names."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx


@dataclass(frozen=True)
class Op:
    """A call of a function, or the split of a state tensor.

    function: its name. inputs: slots of the arguments. first, count: slots of the results. frees: slots of results that
    no later op reads. split: the sizes and the dimension of a split; None for a call.
    """

    function: str
    inputs: tuple[int, ...]
    first: int
    count: int
    frees: tuple[int, ...]
    split: tuple[list[int], int] | None = None


class Line(NamedTuple):
    """The ops of a graph in order. outputs: slots. attributes: the tensors that the graph's module holds, by name.

    slots: of all its values; the graph's inputs come first, then its attributes. inputs: the number of both.
    """

    ops: list[Op]
    slots: int
    inputs: int
    outputs: tuple[int, ...]
    attributes: tuple[str, ...]

    def written(self, arguments: Mapping[str, Sequence[int]]) -> list[int]:
        """Return the inputs that are written. arguments: those that each function writes, by position."""
        origin, found = {i: i for i in range(self.inputs)}, set[int]()
        for op in self.ops:
            if op.split is not None:
                of_parts = dict.fromkeys(range(op.first, op.first + op.count), origin.get(op.inputs[0]))
                origin.update((part, of) for part, of in of_parts.items() if of is not None)
            else:
                found.update(origin[op.inputs[i]] for i in arguments[op.function] if op.inputs[i] in origin)
        return sorted(found)


def line_of(graph: fx.Graph) -> Line | None:
    """Return the ops of a graph of calls; None if it has others, or returns an input, or anything twice."""
    attributes = graph.find_nodes(op="get_attr")
    slots: dict[Any, int] = {node: i for i, node in enumerate([*graph.find_nodes(op="placeholder"), *attributes])}
    inputs = used = len(slots)
    firsts: dict[Any, int] = {}
    planned: list[tuple[fx.Node, tuple[int, ...], int, int]] = []
    for node in graph.nodes:
        args: Any = node.args
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if node.target is operator.getitem and args[0] in firsts:
            slots[node] = firsts[args[0]] + args[1]
            continue
        is_split = node.target is torch.split_with_sizes
        read = args[:1] if is_split else args
        if not (is_split or node.op == "call_module") or not all(n in slots for n in read):
            return None
        indices: list[Any] = [user.args[1] for user in node.users]
        count = len(args[1]) if is_split else 1 + max(indices, default=-1)
        planned.append((node, tuple(slots[n] for n in read), used, count))
        firsts[node] = used
        used += count
    results: Any = graph.output_node().args[0]
    if not isinstance(results, tuple) or not all(n in slots for n in results):
        return None
    outputs = tuple(slots[n] for n in results)
    if len({*outputs}) < len(outputs) or min(outputs, default=inputs) < inputs:
        return None
    # inputs are kept, too: whoever calls has them until the end
    kept = {*range(inputs), *outputs}
    return Line(list(_ops(planned, kept)), used, inputs, outputs, tuple(str(n.target) for n in attributes))


def _ops(planned: Sequence[tuple[fx.Node, tuple[int, ...], int, int]], kept: Set[int]) -> Iterator[Op]:
    """Yield the ops, with the slots that each frees. kept: slots to free in none."""
    last: dict[int, int] = {}
    for i, (_, read, first, count) in enumerate(planned):
        last.update(dict.fromkeys((*read, *range(first, first + count)), i))
    for i, (node, read, first, count) in enumerate(planned):
        touched = dict.fromkeys((*read, *range(first, first + count)))
        frees = tuple(slot for slot in touched if last[slot] == i and slot not in kept)
        args: Any = node.args
        is_call = node.op == "call_module"
        yield Op(str(node.target) if is_call else "", read, first, count, frees, None if is_call else args[1:3])
