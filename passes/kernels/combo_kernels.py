"""Combine small kernels of a graph that do not depend on each other into one launch.

Besides large kernels, FP8 adds many tiny ones to a graph: the last stage of each amax, the scales of each slot, the
roll of the history. Inductor can combine kernels ("combo kernels"); it groups all kernels at the same depth of the
graph, large or small, and separates elementwise kernels from reductions. Here only small kernels are combined, of both
kinds, as late as possible: when a large kernel needs one of them, with all others that are ready by then.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from fp8pass.base._torch import (
    ForeachKernelSchedulerNode,
    FusedSchedulerNode,
    SchedulerNode,
    inductor_config,
    triton_combo_kernel,
)
from fp8pass.base.errors import faults_of

SMALL_KERNEL_BYTES = 1 << 20
"""Most bytes that a small kernel reads and writes: less than an H100 moves in the time of a launch."""
NEVER = 1 << 62
MAX_KERNELS_PER_LAUNCH = 64
"""Most kernels in one launch."""
MEMORY_GATES = ("combo_kernel_peak_memory_increase_gb", "combo_kernel_peak_memory_pct_threshold")
"""Settings of Inductor, in some versions, by which it would choose groups by memory; small kernels take none."""


class Node(Protocol):
    """The interface of Inductor's scheduler nodes that is used here.

    ancestors: names of all operations that come before.
    """

    ancestors: Any

    def get_operation_names(self) -> Any:
        """Return the names of the node's operations."""


def groups(nodes: Sequence[Node], small: Sequence[bool]) -> list[list[Node]]:
    """Group small nodes that run together: as few groups as possible, each node in the last group that is in time.

    The last, since the tensors that a small node waits for are held in memory: with early groups, the quantized weights
    of a whole model.
    """
    return _Grouping(nodes, small).groups()


class _Grouping:
    """The state of `groups`: levels of nodes, and what small nodes wait for.

    Levels count large nodes. A large node's level is the number of large nodes on the longest path to it; a small
    node's level is the level of the last large node before it. A large node that others wait for then gets the level
    before theirs, so that weights are not quantized too early. Nodes are identified by position, and sets of nodes are
    bits of an int: there are thousands of nodes, and each waits for most of the others.
    """

    def __init__(self, nodes: Sequence[Node], small: Sequence[bool]) -> None:
        self.nodes = nodes
        self.small = [i for i, is_small in enumerate(small) if is_small]
        self.levels: list[int] = []
        self.needed = [NEVER] * len(nodes)
        """By node, the level of the first large node that waits for it."""
        before, after_which = _before(nodes)
        for last, is_small in zip(after_which, small, strict=True):
            self.levels.append(max((self.levels[i] for i in last), default=-1) + (not is_small))
        for i in reversed(range(len(nodes))):
            if not small[i] and self.needed[i] < NEVER:
                self.levels[i] = self.needed[i] - 1
            here = self.needed[i] if small[i] else self.levels[i]
            for j in after_which[i]:
                self.needed[j] = min(self.needed[j], here)
        for i in self.small:
            self.levels[i] = max((self.levels[j] for j in after_which[i]), default=-1)
        smalls = sum(1 << i for i in self.small)
        self.waits = {i: _last(before[i] & smalls, before) for i in self.small}
        """By small node, the small nodes that it waits for, without those that these wait for."""

    def groups(self) -> list[list[Node]]:
        group_of, times = self._as_early_as_possible()
        latest = dict.fromkeys(self.small, len(times) - 1)
        for i in reversed(self.small):
            # the last group before a large node needs it, but before the groups of small nodes that wait for it
            group_of[i] = min(latest[i], bisect.bisect_right(times, self.needed[i]) - 1)
            for j in self.waits[i]:
                latest[j] = min(latest[j], group_of[i] - 1)
        members: list[list[Node]] = [[] for _ in times]
        for i in self.small:
            members[group_of[i]].append(self.nodes[i])
        return members

    def _as_early_as_possible(self) -> tuple[dict[int, int], list[int]]:
        """Return the group of each small node, and for each group the level of the large nodes that it must precede.

        The levels never fall from group to group.
        """
        group_of: dict[int, int] = {}
        times: list[int] = []
        missing = {i: len(waits) for i, waits in self.waits.items()}
        waiting: dict[int, list[int]] = {i: [] for i in self.small}
        for i in self.small:
            for j in self.waits[i]:
                waiting[j].append(i)
        free = [i for i in self.small if not missing[i]]
        while free:
            # the next large node that needs one of them gets all that are ready by then in one launch
            now = min(self.needed[i] for i in free)
            group = [i for i in free if self.levels[i] < now]
            group_of |= dict.fromkeys(group, len(times))
            times.append(now)
            free = [i for i in free if self.levels[i] >= now]
            for i in (i for j in group for i in waiting[j]):
                missing[i] -= 1
                if not missing[i]:
                    free.append(i)
        return group_of, times


def _before(nodes: Sequence[Node]) -> tuple[list[int], list[list[int]]]:
    """Return for each node the set of all nodes before it, and a list of those that precede no other in the set.

    Inductor's sets of ancestors lack operations that were fused with an ancestor later, so they are completed here.
    """
    bits = {name: 1 << i for i, n in enumerate(nodes) for name in n.get_operation_names()}
    before: list[int] = []
    groups: list[list[int]] = []
    for i, node in enumerate(nodes):
        near = 0
        for name in node.ancestors:
            near |= bits.get(name, 0)
        near &= (1 << i) - 1  # operations of one fused node may be ancestors of each other
        last = _last(near, before)
        for j in last:
            near |= before[j]
        before.append(near)
        groups.append(last)
    return before, groups


def _last(nodes: int, before: list[int]) -> list[int]:
    """Return the members of a set of nodes that precede no other member."""
    last = []
    while nodes:
        i = nodes.bit_length() - 1
        last.append(i)
        nodes &= ~(before[i] | 1 << i)
    return last


@faults_of("combine")
def _groups(scheduler: Any) -> list[list[Any]]:
    """Return the nodes of Inductor's scheduler to combine, in groups of at most MAX_KERNELS_PER_LAUNCH."""
    nodes = scheduler.nodes
    # nodes that read the results of such kernels are left out, as in Inductor's own grouping
    mixed = {name for n in nodes for name in sums_of_mixed(n)}
    small_groups = groups(nodes, [_is_small(n) and not mixed & set(n.used_buffer_names()) for n in nodes])
    return [
        group[i : i + MAX_KERNELS_PER_LAUNCH]
        for group in small_groups
        for i in range(0, len(group), MAX_KERNELS_PER_LAUNCH)
    ]


def sums_of_mixed(node: Any) -> set[str]:
    """Return the names of the partial column sums of a kernel that reduces both rows and columns; if not, an empty set.

    Inductor completes these sums after that kernel, and removes the nodes that would have done so.
    """
    return set(node.node2.get_buffer_names()) if type(node).__name__ == "FusedMixOrderReductions" else set()


def _is_small(node: Any) -> bool:
    # no subclasses: lists of foreach ops, and kernels that reduce rows and columns
    if type(node) not in (SchedulerNode, FusedSchedulerNode) or node.is_template() or not node.is_gpu():
        return False
    return bool(node.get_read_write_buffers_sizes() <= SMALL_KERNEL_BYTES)


@contextlib.contextmanager
def combining() -> Iterator[None]:
    """Let Inductor combine kernels in our groups within the context."""
    settings: dict[str, Any] = {"combo_kernels": True, "combo_kernel_per_subkernel_blocks": True}
    settings |= {name: None for name in MEMORY_GATES if hasattr(inductor_config, name)}
    # both algorithms are global in Inductor, so they are put back
    groups_of = ForeachKernelSchedulerNode.group_algorithm_for_combo_kernels
    parts_of = triton_combo_kernel._custom_combo_kernel_horizontal_partition_algorithm
    ForeachKernelSchedulerNode.set_group_algorithm_for_combo_kernels(_groups)
    triton_combo_kernel.set_custom_combo_kernel_horizontal_partition(_undivided)
    try:
        with inductor_config.patch(settings):
            yield
    finally:
        ForeachKernelSchedulerNode.set_group_algorithm_for_combo_kernels(groups_of)
        triton_combo_kernel.set_custom_combo_kernel_horizontal_partition(parts_of)


@faults_of("combine")
def _undivided(nodes: list[Any], *_: Any) -> list[list[Any]]:
    """Return all nodes as one partition, elementwise kernels and reductions together.

    With `combo_kernel_per_subkernel_blocks` each kernel of a launch has its own block sizes.
    """
    return [nodes]
