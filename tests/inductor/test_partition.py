"""The cut between forward and backward, with a user's own partitioner."""

from __future__ import annotations

import torch
from torch import nn

from fp8pass.base._torch import inductor_config
from tests.helpers.harness import BF16, compiled
from tests.helpers.partition import Cut, Own, is_fp8
from tests.helpers.partition import cuts as cuts


def test_a_partitioner_of_the_users_own(cuts: list[Cut]) -> None:
    own, x = Own(), torch.randn(64, 32, dtype=BF16)
    with inductor_config.patch(custom_partitioner_fn=own):
        run = compiled(nn.Linear(32, 48, bias=False).bfloat16(), recipe="dynamic", lowering="inductor", min_speedup=0)
        run(x.requires_grad_())
    (cut,) = cuts
    assert own.outputs == [1 + 2]  # fp8pass adds the two copies to the outputs that the partitioner sees
    assert (len(cut.outputs), cut.marked) == (1, [[32, 64], [32, 48]])
    assert len([n for n in cut.saved if is_fp8(n)]) == 2
