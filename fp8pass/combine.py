"""Small kernels of a graph that do not depend on each other become one launch.

What FP8 adds to a graph beside its large kernels is many tiny ones: the last stage of each amax, the scales of each
slot, the roll of the history. Inductor can combine kernels ("combo kernels"), and takes whatever stands at the same
depth of the graph, large or small. Here only small ones are combined, as late as possible: when a large kernel needs
one of them, with all others that are ready by then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from fp8pass._torch import ForeachKernelSchedulerNode, FusedSchedulerNode, SchedulerNode

SMALL = 1 << 20
"""Bytes that a kernel may read and write to count as small: less than what an H100 moves in the time of a launch."""
NEVER = 1 << 62
MOST = 64
"""Kernels in one launch."""


class Node(Protocol):
    """What is asked of Inductor's scheduler nodes. ancestors: names of all operations that come before."""

    ancestors: Any

    def get_operation_names(self) -> Any:
        """The names of its own operations."""


def groups(nodes: Sequence[Node], small: Sequence[bool]) -> list[list[Node]]:
    """Which of the small nodes run together: as few groups as can be, each node in the last one that is in time.

    Late, because what a small node waits for is held in memory: the weights of a whole model, quantized, else.
    """
    return _Grouping(nodes, small).groups()


class _Grouping:
    """Depths count large nodes: of a large node, those on the longest way to it. Nodes are known by position."""

    def __init__(self, nodes: Sequence[Node], small: Sequence[bool]) -> None:
        self.nodes = nodes
        of = {name: i for i, n in enumerate(nodes) for name in n.get_operation_names()}
        self.before: list[set[int]] = []
        """Of each node all that come before it. Inductor's sets do not know what was fused with an ancestor later."""
        for i, node in enumerate(nodes):
            near = {of[name] for name in node.ancestors if of.get(name, i) < i}
            self.before.append(near.union(*(self.before[j] for j in near)))
        self.small = [i for i, is_small in enumerate(small) if is_small]
        depths: dict[int, int] = {}
        for i in (i for i, is_small in enumerate(small) if not is_small):
            depths[i] = 1 + max((depths[j] for j in self.before[i] if j in depths), default=-1)
        self.ready = {i: max((depths[j] for j in self.before[i] if j in depths), default=-1) for i in self.small}
        """The depth of the deepest large node that it waits for."""
        self.needed = {i: min((d for j, d in depths.items() if i in self.before[j]), default=NEVER) for i in self.small}
        """The depth of the first large node that waits for it."""

    def groups(self) -> list[list[Node]]:
        group_of, times = self._as_early_as_possible()
        for i in reversed(self.small):
            last = min((group_of[j] for j in self.small if i in self.before[j]), default=len(times)) - 1
            group_of[i] = max(g for g in range(group_of[i], last + 1) if times[g] <= self.needed[i])
        found: list[list[Node]] = [[] for _ in times]
        for i in self.small:
            found[group_of[i]].append(self.nodes[i])
        return found

    def _as_early_as_possible(self) -> tuple[dict[int, int], list[int]]:
        """By small node its group, and by group the depth of the large nodes that it must come before."""
        group_of: dict[int, int] = {}
        times: list[int] = []
        small = set(self.small)
        while waiting := [i for i in self.small if i not in group_of]:
            free = [i for i in waiting if (self.before[i] & small).issubset(group_of)]
            now = min(self.needed[i] for i in free)
            group_of |= {i: len(times) for i in free if self.ready[i] < now}
            times.append(now)
        return group_of, times


def _groups(scheduler: Any) -> list[list[Any]]:
    """For Inductor."""
    nodes = scheduler.nodes
    mixed = {name for n in nodes if _mixes_orders(n) for name in n.get_buffer_names()}
    found = groups(nodes, [_is_small(n) and not mixed & set(n.used_buffer_names()) for n in nodes])
    return [group[i : i + MOST] for group in found for i in range(0, len(group), MOST)]


def _mixes_orders(node: Any) -> bool:
    """Whether this is a kernel whose sums are completed outside of it; what reads them must follow it directly."""
    return type(node).__name__ == "FusedMixOrderReductions"


def _is_small(node: Any) -> bool:
    if type(node) not in (SchedulerNode, FusedSchedulerNode) or node.is_template() or not node.is_gpu():
        return False
    return bool(node.get_read_write_buffers_sizes() <= SMALL)


@contextlib.contextmanager
def combining() -> Iterator[None]:
    """Within it, Inductor groups kernels our way."""
    own = ForeachKernelSchedulerNode.group_algorithm_for_combo_kernels
    ForeachKernelSchedulerNode.set_group_algorithm_for_combo_kernels(_groups)
    try:
        yield
    finally:
        ForeachKernelSchedulerNode.set_group_algorithm_for_combo_kernels(own)
