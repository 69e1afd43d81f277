"""Test the write_matmuls pass in compiled graphs: matrix products in other spellings become matmuls, and run in FP8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.harness import annotated, compiled, sqnr, verdicts
from tests.helpers.write_matmuls import FORMS, leaves, total

IN_FP8 = [form for form in FORMS if form not in ("multi_dot of vectors", "matrix_power")]


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize(
    "forms",
    [
        ["addmm_", "gru_cell", "three", "addbmm"],
        pytest.param(IN_FP8, marks=pytest.mark.variant),
    ],
    ids=len,
)
def test_they_run_in_fp8(forms: list[str]) -> None:
    """One graph has them all; results are those of the annotated graph, run eagerly."""
    inputs = [leaves(form) for form in forms]

    def function(inputs: list[list[Tensor]]) -> list[Tensor]:
        return [total(FORMS[form][0](*of)) for form, of in zip(forms, inputs, strict=True)]

    with verdicts() as report:
        actual = compiled(function, recipe="dynamic", strict=True)(inputs)
        of_ours = torch.autograd.grad(sum(actual), [x for of in inputs for x in of])  # type: ignore[arg-type]
    assert report.declined == []
    assert sum(g.kind == "output" for g in report.rewritten) == sum(FORMS[form][2] for form in forms)
    expected = annotated(function, recipe="dynamic")(inputs)
    of_reference = torch.autograd.grad(sum(expected), [x for of in inputs for x in of])
    pairs = [*zip(expected, actual, strict=True), *zip(of_reference, of_ours, strict=True)]
    assert min(sqnr(e, a) for e, a in pairs) > 100


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.pair = nn.LSTMCell(32, 32), nn.Bilinear(32, 32, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, c = self.cell(x, (x + 1, x))
        out: Tensor = self.pair(h, c)
        return out


def test_layers_keep_the_names_and_types_that_they_have_under_autocast() -> None:
    model, x = Layers(), torch.randn(16, 32)

    def under_autocast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)  # type: ignore[no-any-return]

    with verdicts() as report:
        y = compiled(under_autocast, strict=True)(x)
    assert {g.name for g in report.rewritten} == {"cell.weight_ih", "cell.weight_hh", "pair"}
    expected = under_autocast(x)
    assert y.dtype == expected.dtype
    assert sqnr(expected, y) > 15


def test_what_is_in_place_under_autocast_is_declined() -> None:
    """Autocast would cast the operands of the matmul that replaces the op."""

    def function(y: Tensor, a: Tensor) -> Tensor:
        return y.clone().addmm_(a, a)

    y, a = torch.randn(2, 16, 16)
    with verdicts() as report, torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        with pytest.warns(UserWarning, match="no matmul in FP8"):
            actual = compiled(function, recipe="dynamic")(y, a)
        assert torch.equal(actual, function(y, a))
    assert report.reasons() == {
        "addmm_ is not cast by autocast; assign the result of torch.addmm instead": 1,
    }


def test_attention_of_torch_raises_nothing_under_strict() -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    with verdicts() as report:
        compiled(layer, strict=True)(torch.randn(2, 8, 32)).sum().backward()
    assert {(g.rule, g.name) for g in report.declined} <= {("attention", "self_attn.scaled_dot_product_attention")}
    assert len(report.rewritten) == 11
