"""Matmuls of an optimizer in FP8, where the user asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8pass
from fp8pass.base.scaling import E4M3
from fp8pass.report.report import Report
from tests.helpers.harness import sqnr, verdicts

RATE, MOMENTUM, DECAY, EPS, STEPS = 0.1, 0.0, 0.0, 1e-7, 5
Coefficients = tuple[float, float, float]
OF_MUON: Coefficients = (3.4445, -4.7750, 2.0315)
"""The default coefficients of torch's Muon."""


def exact_update(grad: Tensor, steps: int, quantize: bool, of: Coefficients = OF_MUON) -> Tensor:
    """Return Muon's update of a parameter with this gradient in float64, with the operands of its matmuls in FP8.

    Each row of the first operand, and each column of the second, is scaled to at most 448. Between matmuls torch's Muon
    rounds to bfloat16.
    """

    def rounded(x: Tensor) -> Tensor:
        return x.bfloat16().double()

    def product(a: Tensor, b: Tensor) -> Tensor:
        return rounded(in_fp8(a) @ in_fp8(b.T).T if quantize else a @ b)

    def in_fp8(x: Tensor) -> Tensor:
        scale = (448 / x.abs().amax(1, keepdim=True).float()).double()
        return (x * scale).float().to(E4M3).double() / scale

    (a, b, c), x = of, rounded(grad)
    x = x.T if grad.shape[0] > grad.shape[1] else x
    x = rounded(x / rounded(x.norm()))
    for _ in range(steps):
        gram = product(x, x.T)
        update = rounded(b * gram + product(rounded(c * gram), gram))
        x = rounded(a * x + product(update, x))
    return x.T if grad.shape[0] > grad.shape[1] else x


def updated(
    shape: tuple[int, int], steps: int = STEPS, of: Coefficients = OF_MUON, decay: float = 0.0, **options: Any
) -> tuple[Tensor, Tensor, Report]:
    """Return a gradient, the update that a compiled Muon makes with it, and the report.

    decay: how fast the singular values of the gradient fall, the i-th by i**-decay.
    """
    p = nn.Parameter(torch.zeros(shape))
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(noise, full_matrices=False)
    p.grad = left * values * torch.arange(1, len(values) + 1) ** -decay @ right
    muon = torch.optim.Muon(
        [p], lr=RATE, weight_decay=DECAY, momentum=MOMENTUM, nesterov=False, eps=EPS, ns_steps=steps, ns_coefficients=of
    )
    options = {"min_speedup": 0, "lowering": "eager", **options}
    with verdicts() as report:
        torch.compile(muon.step, backend="fp8pass", options=options)()
    scaled = RATE * max(1, shape[0] / shape[1]) ** 0.5  # as `_adjust_lr` of torch's Muon scales the rate
    return p.grad, -p.detach() / scaled, report


@pytest.mark.compiled
@pytest.mark.parametrize("shape", [(32, 48), (64, 32)])
def test_numbers_are_those_of_a_muon_that_quantizes(shape: tuple[int, int]) -> None:
    """Of one iteration, without the term that is no product: further ones make small differences much larger."""
    of = (0.0, 1.0, 30.0)
    grad, update, report = updated(shape, 1, of, update_matmuls="fp8", strict=True)
    assert [(gemm.scaling, *gemm.dtypes) for gemm in report.rewritten] == 3 * [("rowwise", "e4m3", "e4m3", "bf16")]
    plain, exact = (exact_update(grad, 1, quantize, of) for quantize in (False, True))
    assert sqnr(exact, update) > 45 > 35 > sqnr(plain, update) > 20


@pytest.mark.compiled
def test_a_tensor_and_its_transpose_are_quantized_once(tmp_path: Path) -> None:
    updated((64, 32), update_matmuls="fp8", dump_dir=str(tmp_path))
    (file,) = tmp_path.rglob("*.annotate.after.py")
    # in each iteration: x by rows, for both factors of its Gram matrix, and by columns; c * gram; gram; their product
    assert file.read_text().count("quant_ops_qdq_no_grad(") == 5 * STEPS


@pytest.mark.compiled
def test_without_a_recipe_they_are_in_high_precision_and_the_report_names_the_option() -> None:
    _, _, report = updated((32, 48))
    assert not report.rewritten and all("without update_matmuls" in gemm.reason for gemm in report.gemms)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("shape", "decay", "least"),
    [((64, 32), 0.0, 0.95), ((128, 128), 0.0, 0.95), ((96, 256), 0.0, 0.95), ((128, 128), 3.0, 0.92)],
)
def test_the_iteration_stays_as_stable_as_in_bfloat16(shape: tuple[int, int], decay: float, least: float) -> None:
    """Its singular values end in [0, 1.25] or so; with one scale for the tensor, those of 64 x 32 reach 100."""
    grad, update, _ = updated(shape, decay=decay, update_matmuls="fp8")
    exact = exact_update(grad, STEPS, quantize=False)
    assert float(torch.linalg.matrix_norm(update.double(), 2)) < 1.3
    assert float(F.cosine_similarity(update.double().flatten(), exact.flatten(), 0)) > least


@pytest.mark.inductor
def test_a_training_step_with_muon() -> None:
    """It trains as with matmuls in bfloat16; what updates do with parameters, moments and FP8 weights stays."""
    losses = []
    for how in ("off", "fp8"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        matrices, vectors = ([p for p in model.parameters() if (p.dim() == 2) == two] for two in (True, False))
        optimizers = torch.optim.Muon(matrices, lr=0.02, ns_steps=1), torch.optim.Adam(vectors, lr=1e-2)

        @fp8pass.train_step(min_speedup=0, update_matmuls=how, on_fault="raise")
        def step(x: Tensor, model: nn.Module = model, optimizers: Any = optimizers) -> Tensor:
            loss = (model(x) - x).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        with verdicts():
            batches = torch.randn(12, 64, 32, generator=torch.Generator().manual_seed(1))
            losses.append([float(step(x)) for x in batches])
        assert len(step.report.rewritten) == (11 if how == "fp8" else 5)
        assert any("FP8 copies of 2 weights" in note for note in step.report.notes)
    plain, quantized = losses
    assert quantized[-1] < 0.9 * quantized[0] and abs(quantized[-1] / plain[-1] - 1) < 0.05
