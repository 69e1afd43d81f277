"""Describe the GPU that a kernel is generated for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Gpu:
    """The GPU that a kernel is generated for. capability: 90 for sm_90, say. shared_memory: bytes for one block."""

    capability: int
    multiprocessors: int
    shared_memory: int


def gpu_of(device: torch.device) -> Gpu:
    """Return what the device has."""
    found: Any = torch.cuda.get_device_properties(device)
    capability = 10 * found.major + found.minor
    return Gpu(capability, found.multi_processor_count, found.shared_memory_per_block_optin)
