"""What several kernels read is made once; what is no vector stays as it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8pass._torch import FORCE_STRIDE_ORDER
from fp8pass.passes.make_once import MakeOnce
from tests.harness import apply, aten, capture, compiled, count


def test_an_expanded_number_of_which_parts_are_read_is_not_laid_out() -> None:
    def gradient_of_a_sum_of_a_cat(g: Tensor) -> tuple[Tensor, Tensor]:
        expanded = (g * 2).expand(8)
        return expanded[:3] + 1, expanded[3:] + 1

    module = capture(gradient_of_a_sum_of_a_cat, torch.ones(()))
    apply(module, MakeOnce())
    assert count(module, FORCE_STRIDE_ORDER) == 0 and count(module, aten.slice.Tensor) == 2


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
