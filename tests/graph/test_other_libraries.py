"""The verifier's rule about ops that another library runs: passes keep the strides of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn

from fp8pass.compiler.order import JOINT
from fp8pass.graph.builder import Builder
from fp8pass.graph.other_libraries import arguments_of
from fp8pass.graph.pass_base import JointContext
from fp8pass.graph.verify import verify
from tests.helpers.harness import aten, capture, compiled

pytestmark = pytest.mark.tools


def convolution(x: Tensor, weight: Tensor) -> Tensor:
    return aten.convolution.default(x * 2, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)


@torch.library.custom_op("fp8pass_tests::triple", mutates_args=())
def _triple(x: Tensor) -> Tensor:
    return x * 3


@_triple.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


ELSEWHERE: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str]] = {
    "convolution": (
        convolution,
        (torch.randn(2, 8, 4, 4), torch.randn(8, 8, 1, 1)),
        "aten.convolution.default another layout of `input`",
    ),
    "attention": (
        lambda q: aten._scaled_dot_product_flash_attention_for_cpu(q * 2, q * 2, q)[0],
        (torch.randn(2, 4, 8, 16),),
        "attention_for_cpu.default another layout of `query`",
    ),
    "custom op": (lambda x: _triple(x * 2), (torch.randn(2, 8, 4, 4),), "triple.default another layout of `x`"),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["", "symbolic"])
@pytest.mark.parametrize("case", ELSEWHERE)
def test_a_pass_that_changes_the_strides_of_what_another_library_reads_is_refused(case: str, dynamic: bool) -> None:
    function, inputs, message = ELSEWHERE[case]
    module = capture(function, *inputs, dynamic=dynamic)
    read = next(n for n in module.graph.nodes if n.target is aten.mul.Tensor)
    before, build = arguments_of(module.graph), Builder(module.graph, "a pass")
    same = build.emit(read.next, aten.clone.default, read)
    read.replace_all_uses_with(same, delete_user_cb=lambda user: user is not same)
    verify(module.graph, before=before, made_by="a pass")
    other = build.emit(same.next, aten.clone.default, same, memory_format=torch.channels_last)
    same.replace_all_uses_with(other, delete_user_cb=lambda user: user is not other)
    with pytest.raises(AssertionError, match=f"a pass gave .*{message}: clone_default_1 has strides .*, not "):
        verify(module.graph, before=before, made_by="a pass")


def test_pointwise_ops_may_read_any_strides() -> None:
    module = capture(lambda x: (x * 2).relu().sum(-1), torch.randn(2, 8, 4, 4))
    assert not arguments_of(module.graph)


def test_the_pipeline_refuses_such_a_pass() -> None:
    """The error names the pass, and is a fault of fp8pass."""

    class Turns:
        name = "turns"

        def run(self, graph: fx.Graph, context: JointContext) -> int:
            found = [n for n in graph.nodes if n.target is aten.convolution.default]
            for node in found:
                turned = context.builder(graph, self.name).emit(
                    node, aten.clone.default, node.args[0], memory_format=torch.channels_last
                )
                node.replace_input_with(node.args[0], turned)
            return len(found)

    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 16))
    with (
        mock.patch("fp8pass.compiler.order.JOINT", (*JOINT, Turns())),
        pytest.raises(Exception, match=r"in its pass turns: turns gave convolution.* another layout of `input`"),
    ):
        compiled(model)(torch.randn(2, 8, 4, 4))
