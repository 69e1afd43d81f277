"""What follows a matmul and goes into its kernel, beyond the cases of XLA's rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import (
    BF16,
    F32,
    aten,
    check_legal_on_cuda,
    detect,
    dq,
    fp8,
    sqnr,
)

BIASES: dict[str, tuple[torch.dtype, tuple[int, ...], dict[str, Any], bool]] = {
    "vector": (BF16, (48,), {}, True),
    "vector, unaligned": (BF16, (40,), {}, True),
    "float16 vector": (torch.float16, (48,), {}, True),
    "float32 vector": (F32, (48,), {}, False),  # no kernel takes one
    "matrix": (BF16, (32, 48), {}, False),
    "column": (BF16, (32, 1), {}, False),
    "alpha and beta": (BF16, (48,), {"alpha": 2, "beta": 0.5}, False),
    "beta 0": (BF16, (48,), {"beta": 0}, False),
}


@pytest.mark.parametrize("case", BIASES)
def test_addmm(case: str) -> None:
    dtype, shape, factors, in_kernel = BIASES[case]
    bias = torch.randn(shape).to(dtype)
    if factors.get("beta") == 0:
        bias.fill_(float("nan"))
    n = 40 if "unaligned" in case else 48

    def product(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.addmm(bias, dq(a, 0.5, dtype), dq(b, 0.25, dtype), **factors)

    inputs = bias, fp8(32, 64), fp8(64, n)
    module, _ = detect(product, *inputs)
    (call,) = (node for node in module.graph.nodes if node.target is aten._scaled_mm.default)
    assert (call.args[4] is not None) == in_kernel
    check_legal_on_cuda(module.graph)
    assert sqnr(product(*inputs), module(*inputs)) > {F32: 120, BF16: 48, torch.float16: 60}[dtype]
