"""The inline_composites pass: composite functions are replaced by the calls that they consist of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fp8pass.passes.common.matmul_calls import signature_of
from fp8pass.passes.dynamo.inline_composites import COMPOSITES, InlineComposites
from tests.helpers.harness import expect_text, on_dynamos_graph

pytestmark = pytest.mark.passes


class Wrapped(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True, **options)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.attention(x, y, y)[0]
        return out


def inlining(applied: list[int]) -> Callable[..., Any]:
    def backend(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        module, counts = on_dynamos_graph(module, InlineComposites())
        applied.extend(counts)
        assert not [n for n in module.graph.nodes if n.target in COMPOSITES]
        return module.forward

    return backend


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"kdim": 32, "vdim": 32, "add_bias_kv": True}, {"add_zero_attn": True}],
    ids=str,
)
def test_outputs_and_gradients_are_the_same(options: dict[str, Any]) -> None:
    model = Wrapped(**options)
    applied: list[int] = []
    run = torch.compile(model, backend=inlining(applied))
    x, y = torch.randn(2, 8, 32), torch.randn(2, 6, 32)
    grads = []
    for f in (model, run):
        model.zero_grad()
        out = f(x, y)
        out.square().sum().backward()
        grads.append([out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert applied == [1]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_a_mask_that_the_function_makes_itself() -> None:
    attention = nn.MultiheadAttention(32, 2, batch_first=True, dropout=0.5)
    applied: list[int] = []
    x, mask = torch.randn(2, 8, 32), nn.Transformer.generate_square_subsequent_mask(8)
    run = torch.compile(attention, backend=inlining(applied))
    y, _ = run(x, x, x, attn_mask=mask, need_weights=False, is_causal=True)
    assert (y.shape, applied) == (x.shape, [1])


def test_nothing_to_inline() -> None:
    applied: list[int] = []
    torch.compile(nn.Linear(4, 4), backend=inlining(applied))(torch.randn(2, 4))
    assert applied == [0]


def test_graph() -> None:
    """The matmuls that attention consists of, with the shapes of their results."""
    found: list[str] = []

    def backend(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        module, _ = on_dynamos_graph(module, InlineComposites())
        calls = (n for n in module.graph.nodes if n.op == "call_function" and signature_of(n))
        found.extend(f"{n.target}: {list(n.meta['example_value'].shape)}" for n in calls)
        return module.forward

    torch.compile(Wrapped(), backend=backend)(torch.randn(2, 8, 32), torch.randn(2, 6, 32))
    expect_text(
        "\n".join(found),
        """\
aten.linear.default: [8, 2, 32]
aten.linear.default: [6, 2, 64]
aten.bmm.default: [4, 8, 6]
aten.bmm.default: [4, 8, 16]
aten.linear.default: [16, 32]
""",
    )
