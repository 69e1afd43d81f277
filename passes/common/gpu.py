"""Describe the GPU that a kernel is generated for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Gpu:
    """The GPU that a kernel is generated for. capability: 90 for sm_90, for example. shared_memory: bytes per block."""

    capability: int
    multiprocessors: int
    shared_memory: int


def gpu_of(device: torch.device) -> Gpu:
    """Return the properties of a CUDA device that decide which kernels fit."""
    properties: Any = torch.cuda.get_device_properties(device)
    capability = 10 * properties.major + properties.minor
    return Gpu(capability, properties.multi_processor_count, properties.shared_memory_per_block_optin)
