"""The batch_records pass: chains of records become one update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fp8pass
from fp8pass.base import scaling
from fp8pass.base._torch import min_cut_partition
from fp8pass.compiler.joint_passes import JointPasses
from fp8pass.passes.joint.batch_records import BatchRecords
from fp8pass.quant.ops import RECORD, record
from tests.helpers.harness import apply, capture, compiled, count, expect_graph, text


def chain(amax: Tensor, indices: list[int], on_nonfinite: str, *new: Tensor) -> Tensor:
    for i, value in zip(indices, new, strict=True):
        amax = record(amax, value, i, on_nonfinite)
    return amax


def inputs(indices: list[int], values: list[float], on_nonfinite: str = "evict") -> tuple[Any, ...]:
    return torch.tensor([1.0, -1.0, 3.0]), indices, on_nonfinite, *map(torch.tensor, values)


@pytest.mark.passes
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


@pytest.mark.passes
@pytest.mark.parametrize("on_nonfinite", ["evict", "skip", "freeze"])
@pytest.mark.parametrize("indices", [[0, 1, 2], [2, 0, 1], [0, 2], [1], [1, 1, 1], [0, 1, 2, 0]], ids=str)
def test_same_numbers_as_the_chain(indices: list[int], on_nonfinite: str) -> None:
    args = inputs(indices, [5.0, float("nan"), 0.5, 6.0][: len(indices)], on_nonfinite)
    module = capture(chain, *args)
    assert count(module, RECORD) == len(indices)
    apply(module, BatchRecords())
    assert count(module, RECORD) == 0
    torch.testing.assert_close(module(*args), chain(*args), equal_nan=True)


@pytest.mark.passes
def test_launches_do_not_grow_with_the_slots() -> None:
    """Each slot adds only an `unsqueeze` for the stack."""
    sizes = []
    for n in (4, 8, 16):
        module = capture(chain, torch.zeros(n), list(range(n)), "evict", *torch.rand(n))
        apply(module, BatchRecords())
        sizes.append(len([x for x in module.graph.nodes if x.op == "call_function"]) - n)
    assert len(set(sizes)) == 1


@pytest.mark.passes
def test_nothing_to_do() -> None:
    module = capture(lambda x: x + 1, torch.randn(3))
    before = text(module)
    apply(module, BatchRecords())
    assert text(module) == before


@pytest.mark.compiled
@pytest.mark.parametrize("layers", [1, 3])
def test_the_backward_reads_nothing_that_its_forward_has_overwritten(
    layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step or a scale that the backward recomputed would start from buffers that have changed since."""
    backwards: list[fx.GraphModule] = []

    def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        forward, backward = min_cut_partition(joint, joint_inputs, **kwargs)
        backwards.append(backward)
        written = {n.args[0].name for n in forward.graph.nodes if n.target is torch.ops.aten.copy_.default}
        read = {n.name for n in backward.graph.nodes if n.op == "placeholder"}
        assert len(written) == 4  # scale, history, and both amaxes: one recorded, one reset
        assert not written & read
        return forward, backward

    monkeypatch.setattr("fp8pass.compiler.partition.min_cut_partition", partition)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))
    compiled(model)(torch.randn(8, 16)).sum().backward()
    assert len(backwards) == 1


@pytest.mark.compiled
def test_composition_in_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a training forward and backward, each slot's amax is in place, and no record op is left."""
    left: list[int] = []
    run = JointPasses.__call__

    def counted(self: JointPasses, graph: fx.Graph) -> None:
        run(self, graph)
        left.append(sum(n.target is RECORD for n in graph.nodes))

    monkeypatch.setattr(JointPasses, "__call__", counted)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    f = compiled(model)
    for _ in range(2):
        x = torch.randn(8, 16)
        f(x).sum().backward()
    saved = fp8pass.state(model).state_dict()
    assert left == [0]
    assert saved["0.input.amax"] == scaling.amax(x)
    assert saved["1.weight.amax"] == scaling.amax(model[1].weight)
    assert saved["1.grad_output.amax"] == 1.0
