"""Scales and biases of matmuls begin at multiples of 16 bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from fp8pass.graph.pass_base import JointContext
from fp8pass.options.config import Config
from fp8pass.passes.common.patterns import RESHAPES, as_node, through
from fp8pass.passes.joint.align_arguments import AlignArguments
from fp8pass.passes.joint.list_matmuls import ListMatmuls
from fp8pass.passes.joint.scaled_mm import ScaledMM
from fp8pass.quant.kernel_ops import ALIGNED, ALIGNED_STRIDE, ROUNDED
from tests.helpers.harness import BF16, aten, capture, count, dq, fp8, run, scale
from tests.helpers.xla_rules import CASES
from tests.helpers.xla_rules_cases import results, rewritten

pytestmark = pytest.mark.passes


def aligned(module: fx.GraphModule) -> int:
    return AlignArguments().run(module.graph, JointContext(Config(recipe=None)))


def test_scales_of_every_rule_of_xla_are_copies() -> None:
    found = 0
    for name, case in CASES.items():
        module, *_ = rewritten(case)
        aligned(module)
        for matmul in module.graph.find_nodes(op="call_function", target=aten._scaled_mm.default):
            for node in (through(as_node(a), RESHAPES) for a in matmul.args[2:4]):
                if node.meta["val"].numel() == 1:
                    assert ALIGNED in (node.target, as_node(node.args[0]).target), name
                    assert node.meta["val"].storage_offset() % ALIGNED_STRIDE == 0, name
                    found += 1
        assert aligned(module) == 0, name
        if case.device == "cpu" and case.target is None:
            for wanted, got in zip(results(case.function(*case.inputs)), results(module(*case.inputs)), strict=True):
                assert wanted.shape == got.shape, name
    assert found > 100


def test_elements_of_a_vector_share_a_copy() -> None:
    def function(a: Tensor, b: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return dq(a, s[1]) @ dq(b, s[2]).t(), dq(a, s[1]) @ dq(b, s[0]).t()

    inputs = fp8(16, 32), fp8(48, 32), torch.tensor([0.5, 0.25, 2.0])
    module = capture(function, *inputs)
    run(module, ListMatmuls(), ScaledMM(), AlignArguments())
    assert count(module, ALIGNED) == 1
    matmul = next(iter(module.graph.find_nodes(op="call_function", target=aten._scaled_mm.default)))
    assert [as_node(a).meta["val"].storage_offset() for a in matmul.args[2:4]] == [4, 8]
    for wanted, got in zip(function(*inputs), module(*inputs), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(("first", "copies"), [(0, 0), (1, 1), (8, 0)])
def test_a_bias_is_copied_if_it_begins_elsewhere(first: int, copies: int) -> None:
    def function(a: Tensor, b: Tensor, s: Tensor, bias: Tensor) -> Tensor:
        return torch._scaled_mm(a, b.t(), s, s, bias=bias[first : first + 48], out_dtype=BF16)

    inputs = fp8(16, 32), fp8(48, 32), scale(), torch.randn(64, dtype=BF16)
    module = capture(function, *inputs)
    aligned(module)
    assert count(module, ROUNDED) == copies
    assert torch.equal(module(*inputs), function(*inputs))


def test_scales_of_rows_that_are_inputs_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return (dq(a, x) @ dq(b, y).t()).to(BF16)

    monkeypatch.setattr("fp8pass.hardware._CPU_SCALES_ROWS", True)
    monkeypatch.setattr("fp8pass.passes.joint.epilogue.output_saturates", lambda *_: True)
    inputs = fp8(32, 64), fp8(48, 64), torch.rand(32, 1), torch.rand(48, 1)
    module = capture(function, *inputs)
    run(module, ListMatmuls(), ScaledMM(), AlignArguments())
    assert count(module, aten._scaled_mm.default) == 1
    assert count(module, ROUNDED) == 2
