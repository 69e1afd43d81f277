"""Groups of small kernels, on nodes that only know their ancestors, and the restoring of Inductor's own groups."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8pass.base._torch import ForeachKernelSchedulerNode, inductor_config, triton_combo_kernel
from fp8pass.passes.kernels.combo_kernels import MAX_KERNELS_PER_LAUNCH, combining, groups

pytestmark = pytest.mark.gpu_code


@dataclass
class Kernel:
    """The parts of a scheduler node that grouping reads. operations: those fused into the kernel."""

    name: str
    ancestors: set[str] = field(default_factory=set)
    operations: tuple[str, ...] = ()

    def get_operation_names(self) -> set[str]:
        return {self.name, *self.operations}


Graph = tuple[list[Kernel], list[bool]]


def graph(*lines: str) -> Graph:
    """Return kernels in order: "c: a b" waits for a and b. Large kernels have capital letters as names."""
    nodes = [Kernel(line.partition(":")[0], set(line.partition(":")[2].split())) for line in lines]
    return nodes, [n.name.islower() for n in nodes]


def grouped(*lines: str) -> list[str]:
    return ["".join(n.name for n in group) for group in found(graph(*lines))]


def found(graph: Graph) -> list[list[Kernel]]:
    nodes, small = graph
    return [[n for n in group if isinstance(n, Kernel)] for group in groups(nodes, small)]


def test_what_depends_on_nothing_is_one_group() -> None:
    assert grouped() == []
    assert grouped("A") == []
    assert grouped("a", "b", "c") == ["abc"]
    assert grouped("A", "a", "B", "b", "C", "c") == ["abc"]


def test_a_chain_is_a_group_for_each_link() -> None:
    assert grouped("a", "b: a", "c: b a") == ["a", "b", "c"]
    assert grouped("a", "d", "b: a", "e: d", "c: b a", "f: e d") == ["ad", "be", "cf"]


def test_a_diamond() -> None:
    assert grouped("a", "b: a", "c: a", "d: a b c") == ["a", "bc", "d"]
    assert grouped("A", "b: A", "c: A", "D: A b c") == ["bc"]


def test_small_kernels_run_late_but_in_time() -> None:
    assert grouped("a", "B", "c: B", "D: c B") == ["ac"]  # a is delayed to c, since no other kernel needs it earlier
    assert grouped("a", "B: a", "c: B a", "D: c B a") == ["a", "c"]  # B, which c waits for, needs a
    assert grouped("a", "B: a", "e", "c: B a", "D: c B a e") == ["a", "ec"]  # e is not needed before D
    assert grouped("A", "a: A", "b: a A", "c: A", "D: A b a c") == [
        "a",
        "bc",
    ]  # kernels run in the latest group possible


def test_a_reader_runs_after_what_it_reads() -> None:
    assert grouped("a", "b: a", "C", "d: C") == ["a", "bd"]
    assert grouped("a", "b", "c: a", "D: b", "e: D b") == ["ab", "ce"]


def test_kernels_before_and_after_a_large_one() -> None:
    """A kernel that a large one waits for can't be merged with one that waits for the large one: that is a cycle."""
    assert grouped("a", "B: a", "c: B a") == ["a", "c"]
    assert grouped("a", "B: a", "C: B a", "d: C B a", "e", "F: e") == ["ae", "d"]


def test_what_was_fused_with_an_ancestor_comes_before_as_well() -> None:
    """The ancestors of `d` lack `a`, because they were collected when `b` was a separate kernel."""
    nodes = [Kernel("a"), Kernel("C", {"a"}, operations=("b",)), Kernel("d", {"b"})]
    assert found((nodes, [True, False, True])) == [[nodes[0]], [nodes[2]]]


def test_operations_of_one_kernel_that_need_each_other() -> None:
    nodes = [Kernel("a", {"b"}, operations=("b",)), Kernel("c", {"not here"})]
    assert found((nodes, [True, True])) == [nodes]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Draw kernels that wait for earlier ones; sets hold direct ancestors or all, as after fusion. Some are fused."""
    n, near = draw(st.integers(0, 16)), draw(st.integers(1, 16))
    everything: list[set[str]] = []
    nodes = []
    for i in range(n):
        direct = draw(st.sets(st.integers(max(0, i - near), i - 1), max_size=4)) if i else set()
        ancestors = {f"{j}" for j in direct}
        everything.append(ancestors.union(*(everything[j] for j in direct)))
        nodes.append(Kernel(f"{i}", everything[i] if draw(st.booleans()) else ancestors, (f"{i}b",)))
    return nodes, [draw(st.booleans()) for _ in nodes]


def before(nodes: list[Kernel]) -> dict[str, set[str]]:
    """Return all ancestors of each kernel, by name."""
    found: dict[str, set[str]] = {}
    for node in nodes:
        found[node.name] = node.ancestors.union(*(found[a] for a in node.ancestors))
    return found


def is_acyclic(edges: set[tuple[str, str]]) -> bool:
    """Return whether there is an order in which the first of each pair comes before the second."""
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for a, b in edges:
        sorter.add(b, a)
    try:
        sorter.prepare()
    except CycleError:
        return False
    return True


def levels(graph: Graph) -> dict[str, int]:
    """Return, for each large kernel, how many large kernels are on the longest path to it."""
    found: dict[str, int] = {}
    order = before(graph[0])
    for node in (n for n, small in zip(*graph, strict=True) if not small):
        found[node.name] = 1 + max((found[a] for a in order[node.name] if a in found), default=-1)
    return found


def merged(nodes: list[Kernel], groups: list[list[Kernel]]) -> set[tuple[str, str]]:
    """Return pairs of which the first has to run before the second, when each group is one kernel."""
    of = {n.name: "+".join(m.name for m in group) for group in groups for n in group}
    return {(of.get(a, a), of.get(n.name, n.name)) for n in nodes for a in n.ancestors}


@settings(deadline=None, derandomize=True, database=None, max_examples=200)
@given(graphs())
def test_the_groups_of_any_graph_can_be_run(given: Graph) -> None:
    """Every small kernel is in one group, no group is empty, and no kernel runs before what it needs."""
    nodes, small = given
    result = found(given)
    assert sorted(n.name for g in result for n in g) == sorted(n.name for n, s in zip(nodes, small, strict=True) if s)
    assert all(result)
    assert is_acyclic(merged(nodes, result))


@settings(deadline=None, derandomize=True, database=None, max_examples=100)
@given(graphs())
def test_no_kernel_could_run_in_a_later_group(given: Graph) -> None:
    """Moving a kernel to a later group makes a cycle, unless the later group would then have to run earlier.

    A group has to run before the first large kernel that waits for it.
    """
    result, order, depths = found(given), before(given[0]), levels(given)

    def due(group: list[Kernel]) -> int:
        return min((depths[name] for name in depths if any(n.name in order[name] for n in group)), default=1 << 30)

    for i, j in itertools.combinations(range(len(result)), 2):
        for node in result[i]:
            if len(result[i]) == 1 or due([node]) < due(result[j]):
                continue
            moved = [[*g, node] if k == j else [n for n in g if n is not node] for k, g in enumerate(result)]
            names = ["+".join(n.name for n in g) for g in moved]
            assert not is_acyclic(merged(given[0], moved) | set(itertools.pairwise(names))), (node, i, j)


def test_thousands_of_kernels() -> None:
    """Large kernels run in a chain; each has a small one after it, and a last small one reads all results."""
    nodes: list[Kernel] = []
    for i in range(1000):
        large = {n.name for n in nodes if n.name[0] == "L"}
        nodes += [Kernel(f"L{i}", large), Kernel(f"s{i}", {*large, f"L{i}"})]
    nodes.append(Kernel("state", {n.name for n in nodes}))
    tails, state = found((nodes, [n.name[0] == "s" for n in nodes]))
    assert (len(tails), [n.name for n in state]) == (1000, ["state"])


def of_inductor() -> tuple[Any, ...]:
    return (
        ForeachKernelSchedulerNode.group_algorithm_for_combo_kernels,
        triton_combo_kernel._custom_combo_kernel_horizontal_partition_algorithm,
        inductor_config.combo_kernels,
        inductor_config.combo_kernel_per_subkernel_blocks,
    )


@pytest.fixture
def restored() -> Iterator[None]:
    groups_of, parts_of = of_inductor()[:2]
    yield
    ForeachKernelSchedulerNode.set_group_algorithm_for_combo_kernels(groups_of)
    triton_combo_kernel.set_custom_combo_kernel_horizontal_partition(parts_of)


def test_inductors_own_groups_are_restored(restored: None) -> None:
    own = of_inductor()
    with combining():
        assert all(a is not b for a, b in zip(of_inductor(), own, strict=True))
    assert of_inductor() == own
    with pytest.raises(ZeroDivisionError), combining():
        raise ZeroDivisionError
    assert of_inductor() == own
    assert MAX_KERNELS_PER_LAUNCH == 64
