"""Capture around collectives: the readers of a collective's result, and the ops that quantize or dequantize it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from fp8pass.base import scaling
from fp8pass.graph.refusal import Reject
from fp8pass.passes.common.patterns import COLLECTIVES
from fp8pass.passes.joint.collective_chains import c10d, capture_dequantized, capture_gathered, scales_of
from tests.helpers.harness import BF16, E4M3, aten, capture, fp8

pytestmark = pytest.mark.passes

X, SCALE = torch.randn(8, 32).to(BF16), torch.tensor(2.0)


@pytest.fixture(autouse=True, scope="module")
def _group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())  # type: ignore[no-untyped-call]
    yield
    dist.destroy_process_group()


def gather(x: Tensor) -> Tensor:
    assert dist.group.WORLD is not None
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 4, dist.group.WORLD.group_name))  # type: ignore[no-any-return]


def collective(function: Callable[..., object], *inputs: Tensor) -> fx.Node:
    (node,) = (n for n in capture(function, *inputs).graph.nodes if n.target in COLLECTIVES)
    return node


def test_readers_after_a_collective() -> None:
    def function(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        whole = gather(x)
        transposed = scaling.quantize(whole.t(), scale, E4M3)
        return scaling.quantize(whole, scale, E4M3), transposed, scaling.amax(whole), whole.view(4, 8, 32).sum((0, 1))

    found = capture_gathered(collective(function, X, SCALE), {})
    assert found is not None
    assert sorted(q.source.target is aten.permute.default for q in found.quantizes) == [False, True]
    assert all(q.ops[-1].meta["val"].dtype == E4M3 for q in found.quantizes)
    assert [str(n.meta["val"].shape) for n in (*found.amaxes, *found.sums)] == ["torch.Size([])", "torch.Size([32])"]
    assert {n.op for q in found.quantizes for n in scales_of(q.ops)} == {"placeholder"}
    assert found.wait in found.moved and len(found.moved) == 3  # also the transpose and the view as four parts


@pytest.mark.parametrize(
    ("read", "reader"),
    [
        (lambda whole: whole.t().cos(), "cos"),
        (lambda whole: whole[:9].amax(), "amax"),
        (lambda whole: whole.split(16)[0].sum(0), "sum"),
    ],
)
def test_other_readers(read: Callable[[Tensor], Tensor], reader: str) -> None:
    """Other readers of a result that is quantized as well are a reason to decline."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        whole = gather(x)
        return scaling.quantize(whole, 2.0, E4M3), read(whole)

    with pytest.raises(Reject, match=f"^{reader}.* reads the result of .* in bfloat16$"):
        capture_gathered(collective(function, X), {})
    assert capture_gathered(collective(lambda x: (read(gather(x)),), X), {}) is None


def test_the_amax_of_a_part() -> None:
    """The amax of a part is another reason to decline."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        whole = gather(x)
        return scaling.quantize(whole, 2.0, E4M3), scaling.amax(whole.split(8)[0])

    with pytest.raises(Reject, match=r"^amax\S* is not known to be the amax of the whole result of \S+$") as error:
        capture_gathered(collective(function, X), {})
    assert error.value.rule == "part"


def test_ops_before_a_collective() -> None:
    def function(x_q: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return (gather(scaling.dequantize(x_q, scale, BF16).view(4, 64)),)

    found = capture_dequantized(collective(function, fp8(8, 32), SCALE))
    assert found is not None
    assert found.x_q.op == "placeholder"
    assert found.ops[-1].target is aten.view.default
    assert [n.op for n in scales_of(found.ops)] == ["placeholder"]
    assert capture_dequantized(collective(lambda x: (gather(x),), X)) is None
