"""Lets torchtitan, which asks for a GPU, train on the CPU over gloo. Import it before any other part of torchtitan."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torchtitan's own imports warn of
    from torchtitan.tools import utils

_ANSWERS: dict[str, Any] = {
    "current_device": lambda: 0,
    "empty_cache": lambda: None,
    "get_device_name": lambda _: "cpu",
    "get_device_properties": lambda _: SimpleNamespace(total_memory=2**33),
    "memory_stats": lambda _: {},
    "reset_peak_memory_stats": lambda: None,
}
"""Answer what torchtitan asks of `torch.cuda`, and `torch.cpu` lacks or answers otherwise."""

utils.device_type, utils.device_module = "cpu", SimpleNamespace(**{**vars(torch.cpu), **_ANSWERS})

IS_COMPLETE = hasattr(dist, "set_timeout")
"""True if torch has what torchtitan 0.3 needs: 2.15 has it all; 2.13 trains one process, without `set_timeout`."""
if not IS_COMPLETE:
    vars(dist)["set_timeout"] = lambda *_: None

_set_divisor = FSDPModule.set_gradient_divide_factor


def _set_divisor_by_sum(self: FSDPModule, factor: float) -> None:
    """Set the divisor of gradients, without the reduction that gloo lacks."""
    _set_divisor(self, factor)
    self.set_force_sum_reduction_for_comms(True)


FSDPModule.set_gradient_divide_factor = _set_divisor_by_sum  # type: ignore[method-assign]
