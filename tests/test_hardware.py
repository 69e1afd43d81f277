"""Targets."""

from __future__ import annotations

import torch

from fp8pass.hardware import TARGETS, target_of, why_no_fp8

CPU = torch.device("cpu")


def test_targets() -> None:
    assert target_of(CPU) is None
    assert target_of(CPU, "sm_90") is TARGETS["h100"]
    assert why_no_fp8(CPU, None) == ""
    assert why_no_fp8(torch.device("cuda"), TARGETS["h200"]) == ""
    assert "a100 is sm_80; FP8 matmuls need sm_89" in why_no_fp8(torch.device("cuda"), TARGETS["a100"])
    assert "no FP8 matmul on mps devices" in why_no_fp8(torch.device("mps"), None)
