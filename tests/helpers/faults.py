"""Faults to plant into fp8pass, for the files test_faults.py of several tiers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8pass.compiler import heuristics
from fp8pass.passes.kernels import combo_kernels
from fp8pass.quant import kernel_ops


def planted(*_: Any, **__: Any) -> Any:
    """Raise, instead of a function of fp8pass that this replaces."""
    raise ZeroDivisionError("planted")


LOWERINGS: dict[str, Any] = {
    "choices": (heuristics, "_waits_for_amax"),
    "combine": (combo_kernels, "groups"),
    "fold_quantizes": (kernel_ops, "fp8_max"),
}
"""The module and the name of the function that `planted` replaces, by the name of the pass that fails."""


def a_layer() -> tuple[nn.Module, Tensor]:
    return nn.Linear(32, 48), torch.randn(16, 32)
