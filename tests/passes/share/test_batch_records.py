"""The batch_records pass: chains of records become one update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8pass.passes.joint.batch_records import BatchRecords
from fp8pass.quant.ops import RECORD, record
from tests.helpers.harness import apply, capture, count, expect_graph, text


def chain(amax: Tensor, indices: list[int], on_nonfinite: str, *new: Tensor) -> Tensor:
    for i, value in zip(indices, new, strict=True):
        amax = record(amax, value, i, on_nonfinite)
    return amax


def inputs(indices: list[int], values: list[float], on_nonfinite: str = "evict") -> tuple[Any, ...]:
    return torch.tensor([1.0, -1.0, 3.0]), indices, on_nonfinite, *map(torch.tensor, values)


def test_graph() -> None:
    module = capture(chain, *inputs([0, 1, 2], [5.0, 6.0, 0.5]))
    assert apply(module, BatchRecords()) == []
    expect_graph(
        module,
        """\
arg0,
arg1,
arg2,
arg3,
arg4,
arg5,
arg0_1: "f32[3]"
arg3_1: "f32[]"
arg4_1: "f32[]"
arg5_1: "f32[]"
arg0_1, arg1_1, arg1_2, arg1_3, arg2_1, arg3_1, arg4_1, arg5_1, = fx_pytree.tree_flatten_spec([arg0, arg1, arg2, arg3, arg4, arg5], self._in_spec)
unsqueeze_default: "f32[1]" = aten.unsqueeze.default(arg3_1, 0)
unsqueeze_default_1: "f32[1]" = aten.unsqueeze.default(arg4_1, 0)
unsqueeze_default_2: "f32[1]" = aten.unsqueeze.default(arg5_1, 0)
cat_default: "f32[3]" = aten.cat.default([unsqueeze_default, unsqueeze_default_1, unsqueeze_default_2])
lt_scalar: "b8[3]" = aten.lt.Scalar(cat_default, inf)
scalar_tensor_default: "f32[]" = aten.scalar_tensor.default(0.0, dtype = torch.float32, layout = torch.strided, device = device(type='cpu'))
where_self: "f32[3]" = aten.where.self(lt_scalar, cat_default, scalar_tensor_default)
maximum_default: "f32[3]" = aten.maximum.default(arg0_1, where_self)
return pytree.tree_unflatten([maximum_default], self._out_spec)
""",
    )


@pytest.mark.parametrize("on_nonfinite", ["evict", "skip", "freeze"])
@pytest.mark.parametrize("indices", [[0, 1, 2], [2, 0, 1], [0, 2], [1], [1, 1, 1], [0, 1, 2, 0]], ids=str)
def test_same_numbers_as_the_chain(indices: list[int], on_nonfinite: str) -> None:
    args = inputs(indices, [5.0, float("nan"), 0.5, 6.0][: len(indices)], on_nonfinite)
    module = capture(chain, *args)
    assert count(module, RECORD) == len(indices)
    apply(module, BatchRecords())
    assert count(module, RECORD) == 0
    torch.testing.assert_close(module(*args), chain(*args), equal_nan=True)


def test_launches_do_not_grow_with_the_slots() -> None:
    """Each slot adds only an `unsqueeze` for the stack."""
    sizes = []
    for n in (4, 8, 16):
        module = capture(chain, torch.zeros(n), list(range(n)), "evict", *torch.rand(n))
        apply(module, BatchRecords())
        sizes.append(len([x for x in module.graph.nodes if x.op == "call_function"]) - n)
    assert len(set(sizes)) == 1


def test_nothing_to_do() -> None:
    module = capture(lambda x: x + 1, torch.randn(3))
    before = text(module)
    apply(module, BatchRecords())
    assert text(module) == before
