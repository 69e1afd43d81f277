"""Targets, and the prediction whether FP8 pays."""

from __future__ import annotations

import pytest
import torch

from fp8pass.hardware import TARGETS, predicted_speedup, target_of, why_no_fp8

CPU = torch.device("cpu")


def test_targets() -> None:
    assert target_of(CPU) is None
    assert target_of(CPU, "sm_90") is TARGETS["h100"]
    assert [TARGETS[n].needs_k_major for n in ("sm_89", "sm_90", "sm_100")] == [True, True, False]
    assert why_no_fp8(CPU, None) == ""
    assert why_no_fp8(torch.device("cuda"), TARGETS["h200"]) == ""
    assert "a100 is sm_80; FP8 matmuls need sm_89" in why_no_fp8(torch.device("cuda"), TARGETS["a100"])
    assert "no FP8 matmul on mps devices" in why_no_fp8(torch.device("mps"), None)


@pytest.mark.parametrize(
    ("m", "k", "n", "pays"),
    [(16384, 8192, 8192, True), (8192, 4096, 14336, True), (2048, 256, 1024, False), (8192, 64, 64, False)],
)
def test_large_matmuls_pay_and_small_ones_do_not(m: int, k: int, n: int, pays: bool) -> None:
    for target in ("h100", "h200", "b200"):
        gain = predicted_speedup(m, k, n, 2, training=True, target=TARGETS[target])
        assert (gain > 1) == pays
        assert gain < 2.3


def test_the_roofline_by_hand() -> None:
    """8192**3 in BF16 on an H100: 3 GEMMs of 1.1e12 FLOPs at 78% of the peaks; 3 operands of 2 + 2 bytes at 92%."""
    flops, elements = 2 * 8192**3, 8192**2
    bf16, fp8 = 3 * flops / (989e12 * 0.78), 3 * flops / (1979e12 * 0.78)
    quantize = 3 * elements * 4 / (3.35e12 * 0.92)
    gain = predicted_speedup(8192, 8192, 8192, 2, training=True, target=TARGETS["h100"])
    assert gain == pytest.approx(bf16 / (fp8 + quantize))
