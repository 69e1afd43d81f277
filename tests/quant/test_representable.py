"""Test that, on values that FP8 represents, FP8 differs from high precision only in how sums are rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8pass import cast_to_representable
from tests.helpers.harness import E4M3, E5M2, F32, compiled


@pytest.mark.passes
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_cast(dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    """The cast gives the nearest representable values, and a second cast does not change them."""
    x = torch.randn(64, 64).to(x_dtype)
    y = cast_to_representable(x, 16.0, dtype)
    assert y.dtype == x_dtype and not torch.equal(x, y)
    assert torch.equal(y, (x.double() * 16).to(F32).to(dtype).double().div(16).to(x_dtype))
    assert torch.equal(cast_to_representable(y, 16.0, dtype), y)
    assert torch.equal(cast_to_representable(x, torch.tensor(16.0), dtype), y)


@pytest.mark.passes
def test_edges() -> None:
    x = torch.tensor([1000.0, -1e9, float("inf"), float("nan"), 0.0, -0.0])
    assert cast_to_representable(x)[:3].tolist() == [448.0, -448.0, 448.0]
    assert cast_to_representable(x, 0.25)[:2].tolist() == [1024.0, -1792.0]
    assert cast_to_representable(x)[3].isnan() and cast_to_representable(x)[4:].tolist() == [0.0, 0.0]
    with pytest.raises(
        ValueError, match=r"dtype is torch.bfloat16: choose one of torch.float8_e4m3fn, torch.float8_e5m2"
    ):
        cast_to_representable(x, 1.0, torch.bfloat16)


M, K, N = 32, 64, 48


def integers(*shape: int) -> Tensor:
    """Return integers up to 7; each row and column has a 7: scales, 448 / 7 = 2**6 and 57344 / 7 = 2**13, are exact."""
    x = torch.randint(-6, 7, shape).float()
    x.fill_diagonal_(7)
    x[:, -1], x[-1, :] = 7, 7
    return x


def representable(rows: int, columns: int, dtype: torch.dtype = E4M3) -> Tensor:
    largest = torch.finfo(dtype).max
    x = cast_to_representable(torch.randn(rows, columns) * (largest / 64), 1.0, dtype)
    x.fill_diagonal_(largest)
    x[:, -1], x[-1, :] = largest, largest
    return x / 4096


class Line(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.fc = nn.Linear(K, N, bias=False)
        self.fc.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y


def products(x: Tensor, weight: Tensor, grad: Tensor, recipe: Any, steps: int = 3) -> dict[str, Tensor]:
    """Return the results of a layer in FP8, in a step that has a history."""
    model = Line(weight.clone())
    run = compiled(model, recipe=recipe)
    for _ in range(steps):
        leaf = x.clone().requires_grad_()
        model.fc.weight.grad = None
        y = run(leaf)
        y.backward(grad)
    return {"output": y.detach(), "grad_input": leaf.grad, "grad_weight": model.fc.weight.grad}


def oracle(x: Tensor, weight: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x, weight, grad = x.double(), weight.double(), grad.double()
    return {"output": x @ weight.t(), "grad_input": grad @ weight, "grad_weight": grad.t() @ x}


@pytest.mark.compiled
@pytest.mark.parametrize("recipe", ["delayed", "dynamic", "rowwise"])
def test_exact(recipe: str) -> None:
    """float32 holds the sums of these integers exactly, and scales round nothing: results are equal to the bit."""
    x, weight, grad = integers(M, K), integers(N, K), integers(M, N)
    found, wanted = products(x, weight, grad, recipe), oracle(x, weight, grad)
    for name, y in found.items():
        assert torch.equal(y.double(), wanted[name]), name


@pytest.mark.compiled
@pytest.mark.parametrize("recipe", ["delayed", "dynamic", "rowwise"])
def test_only_accumulation(recipe: str) -> None:
    """Inputs are representable at the scale that the recipe computes: the amax of every row and column is 448 / 2**k,
    57344 / 2**k for gradients in e5m2. Then x_q * scale_inv is x, and only float32's rounding is left.

    Each sum of n products, exact in float32, loses at most (n - 1) * 2**-24 of the sum of their sizes, in whatever
    order (Higham, Accuracy and Stability of Numerical Algorithms, 4.2); two multiplications with scales, and the
    rounding of the result, lose 2**-24 each.
    """
    x, weight = representable(M, K), representable(N, K)
    grad = representable(M, N) if recipe == "rowwise" else representable(M, N, E5M2)
    found, wanted = products(x, weight, grad, recipe), oracle(x, weight, grad)
    sizes = oracle(x.abs(), weight.abs(), grad.abs())
    for name, n in (("output", K), ("grad_input", N), ("grad_weight", M)):
        bound = (n - 1 + 3) * 2.0**-24 * 1.01 * sizes[name]
        error = (found[name].double() - wanted[name]).abs()
        assert (error <= bound).all(), (name, float((error / bound).max()))


@pytest.mark.compiled
def test_values_that_fp8_rounds_exceed_the_bound() -> None:
    x, weight, grad = torch.randn(M, K), representable(N, K), representable(M, N, E5M2)
    found, wanted = products(x, weight, grad, "delayed"), oracle(x, weight, grad)
    bound = (K + 2) * 2.0**-24 * 1.01 * oracle(x.abs(), weight.abs(), grad.abs())["output"]
    assert ((found["output"].double() - wanted["output"]).abs() > 100 * bound).any()
