"""Check whether torch has a grouped FP8 kernel for a matmul: shared by annotate and the rewrite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8pass import hardware
from fp8pass.graph.refusal import Reject
from fp8pass.passes.common.patterns import dtype_name
from fp8pass.quant import grouped

LIMITS = {
    "declined": {
        "grouped type, grouped size": (
            "the result is not bfloat16; K or N is not a multiple of 16; there are more than 1023 groups",
            "experts in bfloat16, or autocast; padding",
        ),
    },
}
"""Lines of docs/limits.md: see `Reject`."""

MAX_GROUPS = 1023
"""Most groups that torch's kernel takes:
https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/ScaledGroupMM.cu"""


def why_no_kernel(experts: Tensor, dtype: torch.dtype, target: hardware.Target | None) -> Reject | None:
    """Return why [M, K] or [G, M, K] by [G, K, N], and its gradients, cannot be grouped FP8 matmuls; None if they can.

    experts: the tensor [G, K, N]. dtype: the result's type, which under autocast may differ from the operands' type.
    """
    return why_none_of(experts.shape, experts.device, dtype, target)


def why_none_of(
    experts: Sequence[Any], device: torch.device, dtype: torch.dtype, target: hardware.Target | None
) -> Reject | None:
    """Return the same for experts of this shape on this device."""
    if reason := hardware.why_no_grouped_kernel(device, target):
        return Reject("no kernel", reason)
    if dtype is not torch.bfloat16:
        types = dtype_name(dtype)
        return Reject(
            "grouped type", f"the result is {types}; grouped FP8 matmuls write bfloat16, and replace no other"
        )
    sizes = f"experts {list(experts)}"
    if any(not isinstance(size, int) or size % grouped.ALIGNMENT for size in experts[1:]):
        return Reject("grouped size", f"{sizes}: grouped FP8 matmuls need K and N that are multiples of 16")
    if not isinstance(experts[0], int) or experts[0] > MAX_GROUPS:
        return Reject("grouped size", f"{sizes}: grouped FP8 matmuls take up to {MAX_GROUPS} groups")
    return None
