"""Test arguments of public functions that need a model to be compiled."""

from __future__ import annotations

import torch
from torch import nn

import fp8pass
from fp8pass import Config

X = torch.randn(4, 16)


LAYER = nn.Linear(16, 16)


def test_a_config_is_taken_by_explain() -> None:
    assert fp8pass.explain(LAYER, X, config=Config(recipe="rowwise")).rewritten
