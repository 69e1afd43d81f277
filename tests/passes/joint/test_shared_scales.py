"""Analysis of scales: which are known to be the same on all ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fp8pass.base import scaling
from fp8pass.passes.common.patterns import as_node, constant
from fp8pass.passes.joint.check_shared_scales import is_shared, without_nan
from fp8pass.passes.joint.collective_chains import marked, unmarked
from fp8pass.quant import ops, sharded
from tests.helpers.harness import capture

pytestmark = pytest.mark.passes

GROUPS: dict[str, str] = {}
SCALES = torch.ones(2)


@pytest.fixture(autouse=True, scope="module")
def _groups() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())  # type: ignore[no-untyped-call]
    world, half = dist.group.WORLD, dist.new_group([0, 1])
    assert world is not None
    GROUPS.update(world=world.group_name, half=half.group_name)
    yield
    dist.destroy_process_group()


def result(function: Callable[[Tensor], Tensor]) -> object:
    (output,) = (n for n in capture(lambda x: (function(x),), SCALES).graph.nodes if n.op == "output")
    return output.args[0][0]  # type: ignore[index, union-attr]


def shared(x: Tensor, group: str = "world") -> Tensor:
    return ops.shared(x, GROUPS[group])


@pytest.mark.parametrize(
    ("function", "of_world", "of_half"),
    [
        (lambda x: x[0], False, False),
        (lambda x: torch.full((), 2.0), True, True),
        (lambda x: shared(x)[0].reciprocal() * 2, True, True),
        (lambda x: shared(x, "half")[0], False, True),
        (lambda x: shared(x)[0] * x[1], False, False),
        (lambda x: sharded.amax_over(x, [GROUPS["world"]])[0] + 1, True, True),
        (lambda x: sharded.amax_over(x, [GROUPS["half"]])[0], False, True),
        (lambda x: shared(x).sum(), False, False),  # not elementwise
    ],
)
def test_the_same_on_all_ranks(function: Callable[[Tensor], Tensor], of_world: bool, of_half: bool) -> None:
    scale = result(function)
    assert (is_shared(scale, GROUPS["world"]), is_shared(scale, GROUPS["half"])) == (of_world, of_half)


def test_poison_is_taken_off() -> None:
    world, half = GROUPS["world"], GROUPS["half"]
    poisoned = result(lambda x: scaling.inverse_unless_nonfinite(shared(x)[0], x[1]).view(1))
    finite = without_nan(poisoned, world)
    assert is_shared(finite, world)
    assert not is_shared(poisoned, world)
    assert without_nan(finite, world) is finite
    assert without_nan(result(lambda x: torch.where(x[1] < 3, shared(x)[0], float("nan"))), world) is None
    assert without_nan(result(lambda x: torch.where(x[1] < float("inf"), shared(x)[0], 1.0)), world) is None
    assert without_nan(result(lambda x: scaling.inverse_unless_nonfinite(shared(x, "half")[0], x[1])), world) is None
    of_half = result(lambda x: scaling.inverse_unless_nonfinite(shared(x, "half")[0], x[1]))
    assert without_nan(of_half, half) is not None


def test_marks_are_known() -> None:
    """The mark for infinities is NaN, and no other choice of NaN is taken for it."""
    x = torch.tensor([1.0, -2.0, float("inf"), -float("inf"), float("nan")])
    assert marked(x).isnan().tolist() == [False, False, True, True, True]
    node = as_node(result(lambda x: marked(x + 1)))
    assert str(unmarked(node).target) == "aten.add.Tensor"
    assert unmarked(unmarked(node)) is unmarked(node)
    other = as_node(result(lambda x: torch.where(x.abs() == 1.0, float("nan"), x)))
    assert constant(other) is None
    assert unmarked(other) is other
