"""The formula of torch 2.15's `_scaled_addmm` for CPUs, and its schema where torch lacks it."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8pass.passes.kernels.emulate_matmuls import in_float32

_SCHEMA = (
    "_scaled_addmm(Tensor self, Tensor mat1, Tensor mat2, Tensor[] scale_a, int[] recipe_a, int[] swizzle_a, "
    "Tensor[] scale_b, int[] recipe_b, int[] swizzle_b, int[] contraction_dim=[], *, Scalar beta=1, Scalar alpha=1, "
    "bool use_fast_accum=False) -> Tensor"
)


def _scaled_addmm(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: list[Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: list[Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    *_: object,
    use_fast_accum: bool = False,
) -> Tensor:
    assert recipe_a == recipe_b == [0] and not swizzle_a and not swizzle_b and not use_fast_accum
    assert x.dtype is torch.float32 and x.is_contiguous()
    return x + in_float32(a, b, scale_a[0], scale_b[0])


_ops = torch.library.Library("aten", "FRAGMENT")
if not hasattr(torch.ops.aten, "_scaled_addmm"):
    _ops.define(_SCHEMA)
    _ops.impl("_scaled_addmm", lambda x, a, b, *_, **__: torch.addmm(x, a.float(), b.float()), "Meta")
_ops.impl("_scaled_addmm", _scaled_addmm, "CPU")
SCALED_ADDMM = torch.ops.aten._scaled_addmm.default
