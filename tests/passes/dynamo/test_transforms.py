"""Test function transforms of torch.func: matmuls inside of one are declined, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.harness import compiled, sqnr, verdicts

pytestmark = pytest.mark.compiled

VMAP = torch.func.vmap


class Around(nn.Module):
    """Two layers, and a function in between that gets the output of the first and a weight."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.w = nn.Parameter(torch.randn(32, 32) / 6)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.between(self.first(x), self.w))
        return out


def of_rows(h: Tensor, w: Tensor) -> Tensor:
    """Multiply one row at a time, which inside of vmap looks as a vector by a matrix."""
    return VMAP(lambda row: row @ w)(h)


def nested(h: Tensor, w: Tensor) -> Tensor:
    """Nest one transform in another, with a matmul inside of the outer one after the inner one has ended."""
    return VMAP(lambda x: VMAP(lambda row: row @ w)(x) @ w)(h.view(4, 4, 32)).view(16, 32)


def in_a_checkpoint(h: Tensor, w: Tensor) -> Tensor:
    return checkpoint(lambda x: of_rows(x, w), h, use_reentrant=False)  # type: ignore[return-value]


def derivative(h: Tensor, w: Tensor) -> Tensor:
    return torch.func.jvp(lambda x: x @ w, (h,), (h,))[1]  # type: ignore[no-any-return]


def pulled_back(h: Tensor, w: Tensor) -> Tensor:
    return torch.func.vjp(lambda x: x @ w, h)[1](h)[0]  # type: ignore[no-any-return]


MAPPED = "inside of torch.func.vmap, where tensors do not show the dimension that is mapped over"
INSIDE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str, int]] = {
    "vmap": (of_rows, MAPPED, 3),
    "nested": (nested, MAPPED, 6),
    "checkpoint": (in_a_checkpoint, MAPPED, 3),
    "jvp": (derivative, "inside of torch.func.jvp, whose derivative is taken in the forward", 3),
    "vjp": (pulled_back, "of a gradient of torch.func, whose derivative is taken in the forward", 3),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in ("nested", "checkpoint", "vjp") else pytest.mark.variant) for c in INSIDE]
)
def test_only_what_a_transform_holds_is_declined(case: str) -> None:
    between, reason, held = INSIDE[case]
    model, x = Around(between), torch.randn(16, 32)
    with verdicts() as report:
        y = compiled(model)(x)
        y.square().mean().backward()
    expected = model(x)
    actual = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    expected.square().mean().backward()
    assert sqnr(expected, y) > 22
    assert all(sqnr(p.grad, actual[n]) > 15 for n, p in model.named_parameters() if p.grad is not None)
    assert sorted(g.name for g in report.rewritten) == ["first"] * 2 + ["second"] * 3
    assert len(report.declined) >= held, report
    assert {(g.rule, g.reason.startswith(reason)) for g in report.declined} == {("torch.func", True)}


def test_a_mask_made_by_vmap_declines_nothing() -> None:
    """transformers makes masks of attention so."""
    at = torch.arange(16)

    def masked(h: Tensor, w: Tensor) -> Tensor:
        allowed = VMAP(VMAP(lambda i, j: i >= j, in_dims=(None, 0)), in_dims=(0, None))(at, at)
        return torch.where(allowed, h @ h.t(), 0.0) @ h @ w

    with verdicts() as report:
        compiled(Around(masked), strict=True)(torch.randn(16, 32)).sum().backward()
    assert len(report.rewritten) == len(report.gemms) > 12


def test_a_filter_leaves_out_what_a_transform_holds() -> None:
    model = Around(of_rows)
    with pytest.raises(Exception, match=r"output of w .* inside of torch.func.vmap"):
        compiled(model, strict=True)(torch.randn(16, 32))
    with verdicts() as report:
        compiled(model, strict=True, filter="w")(torch.randn(16, 32))
    assert {g.rule for g in report.declined} == {"filter"}
