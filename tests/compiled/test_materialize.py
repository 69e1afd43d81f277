"""Test the materialize pass in a compiled model whose small parameters are read by a sum as well."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.helpers.harness import compiled


def test_small_parameters_in_one_sum_train_next_to_fp8() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(32, 32)
            self.p, self.q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.fc(x).sum() + torch.cat([self.p, self.q]).sum()
            return y

    model = Model()
    compiled(model, recipe="dynamic", strict=True)(torch.randn(16, 32)).backward()
    assert model.p.grad is not None and torch.equal(model.p.grad, torch.ones(3))
