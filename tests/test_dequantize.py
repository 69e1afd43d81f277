"""Operands that are dequantized, beyond the cases of XLA's rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.harness import (
    check_legal_on_cuda,
    detect,
    fp8,
    scale,
)

SPELLINGS: dict[str, Callable[..., Tensor]] = {
    "mul": lambda a, s, b, t: (a.float() * s) @ (b.float() * t),
    "mul, scale first": lambda a, s, b, t: (s * a.float()) @ (t * b.float()),
    "div": lambda a, s, b, t: (a.float() / s) @ (b.float() / t),
    "one-element scale": lambda a, s, b, t: (a.float() * s.view(1)) @ (b.float() * t.view(1, 1)),
    "bfloat16 scale": lambda a, s, b, t: (a.float() * s.bfloat16()) @ (b.float() * t),
    "number": lambda a, s, b, t: (a.float() * 0.5) @ (b.float() / 3),
    "no scale": lambda a, s, b, t: a.float() @ (b.float() * t),
    "cast, scale, cast": lambda a, s, b, t: (a.bfloat16().float() * s).half().float() @ b.float(),
    "views": lambda a, s, b, t: (a.float().view(4, 8, 64) * s).reshape(32, 64) @ (b.float().t() * t).t(),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling: str) -> None:
    function = SPELLINGS[spelling]
    inputs = fp8(32, 64), scale(0.25), fp8(64, 48), scale(2.0)
    module, (gemm,) = detect(function, *inputs)
    assert (gemm.status, gemm.reason, gemm.scaling, gemm.dtypes) == ("rewritten", "", "user", ("e4m3", "e4m3", "f32"))
    torch.testing.assert_close(module(*inputs), function(*inputs), rtol=1e-5, atol=1e-4)
    assert check_legal_on_cuda(module.graph) == 1
