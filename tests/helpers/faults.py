"""Helpers of the tests named test_faults.py in several tiers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8pass.inductor import choices, combo_kernels
from fp8pass.quant import kernel_ops


def planted(*_: Any, **__: Any) -> Any:
    """Take the place of a part of fp8pass."""
    raise ZeroDivisionError("planted")


# ---------------------------------------------------------------------------------------------------------------------
# Lowerings
LOWERINGS: dict[str, Any] = {
    "choices": (choices, "_waits_for_amax"),
    "combine": (combo_kernels, "groups"),
    "fold_quantizes": (kernel_ops, "fp8_max"),
}
"""By the name of what is left out, what is planted where."""


def a_layer() -> tuple[nn.Module, Tensor]:
    return nn.Linear(32, 48), torch.randn(16, 32)
