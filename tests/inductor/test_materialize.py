"""The materialize pass: a user's own vectors, which it may take for vectors of slots, compile in Inductor."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.helpers.harness import E4M3, compiled


def test_vectors_of_a_user_compile() -> None:
    def function(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        return torch.cat([a, b]), torch.cat([c, c]), torch.cat([a.to(E4M3), b.to(E4M3)])

    inputs = torch.rand(3), torch.rand(5), torch.tensor([True, False])
    for wanted, got in zip(
        function(*inputs), compiled(function, recipe=None, lowering="inductor")(*inputs), strict=True
    ):
        assert torch.equal(wanted.float(), got.float())
