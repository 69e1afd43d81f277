"""Test the emulate_matmuls pass, which computes FP8 matmuls in float32 on processors without a kernel for them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from fp8pass import hardware
from tests.helpers.harness import (
    compiled,
)

SAPPHIRE_RAPIDS = {"amx_int8": True, "amx_bf16": True, "amx_fp16": False}


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets what the passes take the processor for, and whether oneDNN may use all of it."""

    def be(can: dict[str, bool], limited: bool = False) -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: can)
        monkeypatch.setattr(hardware, "onednn_multiplies", lambda dtype: not limited)

    return be


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.variant)])
def test_a_model_says_so_once_a_graph(processor: Any, caplog: pytest.LogCaptureFixture, lowering: str) -> None:
    processor(SAPPHIRE_RAPIDS)
    model = nn.Linear(64, 32)
    with caplog.at_level(logging.DEBUG, "fp8pass"):
        compiled(model, recipe="dynamic", lowering=lowering)(torch.randn(16, 64)).sum().backward()
    said = [r.getMessage() for r in caplog.records if "float32" in r.getMessage()]
    assert said == [
        "FP8 matmuls computed in float32: 1; with AMX, torch calls oneDNN, which has no FP8 kernel for processors "
        "without AMX for 16-bit floats"
    ]
