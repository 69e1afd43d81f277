"""Test the batch_records pass in the pipeline: each slot's amax is updated once, also across forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

import fp8pass
from fp8pass.base import scaling
from fp8pass.base._torch import min_cut_partition
from fp8pass.compiler.joint_passes import JointPasses
from fp8pass.quant.ops import RECORD
from tests.helpers.harness import compiled


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
