"""The save_sums pass: the sums that the forward keeps for the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from fp8pass.base.node_meta import SAVED
from fp8pass.graph.pass_base import JointContext
from fp8pass.options.config import Config
from fp8pass.passes.joint.save_sums import SaveSums
from tests.helpers.harness import BF16, apply, capture, expect_graph, fp8, scale, text

pytestmark = pytest.mark.passes


def product(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
    return torch._scaled_mm(a, b.t(), s, s, out_dtype=BF16)


def stream(x: Tensor, a: Tensor, b: Tensor, s: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
    """Return a function of a residual stream, and a gradient that reads the stream."""
    h = x + product(a, b, s)
    return h.sigmoid(), tangents * h


def inputs() -> tuple[Tensor, ...]:
    return torch.randn(64, 48, dtype=BF16), fp8(64, 32), fp8(48, 32), scale(), torch.randn(64, 48, dtype=BF16)


def saved(module: fx.GraphModule) -> list[str]:
    return [n.name for n in module.graph.nodes if SAVED in n.meta]


def test_graph() -> None:
    """The pass only marks a node; the graph's text does not change."""
    module = capture(stream, *inputs())
    before = text(module)
    expect_graph(
        module,
        """\
x_1: "bf16[64, 48]",
a_1: "f8e4m3fn[64, 32]",
b_1: "f8e4m3fn[48, 32]",
s_1: "f32[]",
tangents_1: "bf16[64, 48]",
permute: "f8e4m3fn[32, 48]" = aten.permute.default(b_1, [1, 0])
_scaled_mm: "bf16[64, 48]" = aten._scaled_mm.default(a_1, permute, s_1, s_1, None, None, torch.bfloat16)
add: "bf16[64, 48]" = aten.add.Tensor(x_1, _scaled_mm)
sigmoid: "bf16[64, 48]" = aten.sigmoid.default(add)
mul: "bf16[64, 48]" = aten.mul.Tensor(tangents_1, add)
return (sigmoid, mul)
""",
    )
    apply(module, SaveSums())
    assert text(module) == before
    assert saved(module) == ["add"]
    assert SaveSums().run(module.graph, JointContext(Config(recipe=None))) == 0, "a second run finds something"


def viewed(x: Tensor, a: Tensor, b: Tensor, s: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
    """View the product, as traced linear layers on batches do, and read the sum through an elementwise op."""
    h = product(a, b, s).view(4, 16, 48) + x.view(4, 16, 48)
    wide = h.float()
    return wide.sigmoid(), tangents.view(4, 16, 48) * wide


def of_two_products(x: Tensor, a: Tensor, b: Tensor, s: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
    """Add parallel branches, of which one's output is also returned."""
    y = product(a, b, s)
    h = product(a, b, s * 2) + y
    return h.sigmoid(), tangents * h, y + 1


@pytest.mark.parametrize("function", [stream, viewed, of_two_products], ids=lambda f: f.__name__)
def test_chosen(function: Callable[..., Any]) -> None:
    module = capture(function, *inputs())
    apply(module, SaveSums())
    assert saved(module) == ["add"]


def not_for_the_backward(x: Tensor, a: Tensor, b: Tensor, s: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
    return (x + product(a, b, s)).sigmoid(), tangents * x


def through_a_matmul(x: Tensor, a: Tensor, b: Tensor, s: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
    """The backward reads a product of the sum, not the sum."""
    y = (x + product(a, b, s)) @ x.t()
    return y, tangents @ x.t() * y


def returned(x: Tensor, a: Tensor, b: Tensor, s: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
    """The sum is an output of the forward, so the backward has it anyway."""
    h = x + product(a, b, s)
    return h, tangents * h


def product_is_read_elsewhere(x: Tensor, a: Tensor, b: Tensor, s: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
    y = product(a, b, s)
    h = x + y
    return h.sigmoid(), tangents * h, tangents * y


def of_the_backward(x: Tensor, a: Tensor, b: Tensor, s: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
    h = tangents + product(a, b, s)
    return x, h * 2


def no_product(x: Tensor, a: Tensor, b: Tensor, s: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
    h = x + x.exp()
    return h.sigmoid(), tangents * h


def broadcast(x: Tensor, a: Tensor, b: Tensor, s: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
    """Add a bias; a sum can be larger than the product if the product is the smaller operand."""
    h = x[0] + product(a, b, s)
    return h.sigmoid(), tangents * h


def of_another_dtype(x: Tensor, a: Tensor, b: Tensor, s: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
    """The sum is in float32, twice as large as the product."""
    h = x.float() + product(a, b, s)
    return h.sigmoid(), tangents * h


LEFT = [
    not_for_the_backward,
    through_a_matmul,
    returned,
    product_is_read_elsewhere,
    of_the_backward,
    no_product,
    broadcast,
    of_another_dtype,
]


@pytest.mark.parametrize("function", LEFT, ids=lambda f: f.__name__)
def test_left(function: Callable[..., Any]) -> None:
    module = capture(function, *inputs())
    apply(module, SaveSums())
    assert saved(module) == []


def test_regions_of_activation_checkpointing_keep_nothing() -> None:
    module = capture(stream, *inputs())
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    apply(module, SaveSums())
    assert saved(module) == []
