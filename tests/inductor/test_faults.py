"""A fault in code that fp8pass adds to Inductor: code is generated without that part, and a warning names it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8pass
from fp8pass.compiler import faults
from fp8pass.options.config import Config
from tests.helpers.faults import LOWERINGS, planted


@pytest.fixture(autouse=True)
def _untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which faults have been warned about."""
    monkeypatch.setattr(faults, "_told", set())


@pytest.mark.parametrize("name", ["choices", "fold_quantizes", pytest.param("combine", marks=pytest.mark.variant)])
def test_code_is_generated_without_what_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute = LOWERINGS[name]
    assert callable(getattr(module, attribute))
    monkeypatch.setattr(module, attribute, planted)
    model, x = nn.Linear(32, 48), torch.randn(16, 32)
    with pytest.warns(UserWarning, match=f"fp8pass failed in its pass {name}"):
        report = fp8pass.explain(model, x, kernels=True, config=Config(on_fault="warn"))
    assert len(report.rewritten) == 2 and len(report.faults) in (1, 2)
    assert [p.part for p in report.pictures] == ["before", "forward", "backward"]
