"""Movement on FP8 tensors, beyond the cases of XLA's rules."""

from __future__ import annotations

from random import Random

import pytest
import torch

from fp8pass.base._torch import FakeTensorMode
from fp8pass.passes.common import view_ops

pytestmark = pytest.mark.passes


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(n, marks=pytest.mark.variant) for n in range(10, 40))])
def test_which_reshapes_are_views(seed: int) -> None:
    """`is_view` of a fake tensor agrees with a real one, for permutations, slices, expansions and sizes of 1."""
    random = Random(seed)
    for _ in range(50):
        x = torch.empty([random.choice([1, 2, 3, 4]) for _ in range(random.randint(1, 4))])
        x = x.permute(random.sample(range(x.dim()), x.dim()))
        if random.random() < 0.5:
            x = x[:: random.choice([1, 2])]
        if random.random() < 0.5:
            x = x.unsqueeze(0).expand(random.choice([1, 2, 3]), *x.shape)
        shape = _factors(x.numel(), random)
        with FakeTensorMode():
            fake = torch.empty_strided(x.shape, x.stride())
        try:
            x.view(shape)
        except RuntimeError:
            assert not view_ops.is_view(fake, shape), (x.shape, x.stride(), shape)
        else:
            assert view_ops.is_view(fake, shape), (x.shape, x.stride(), shape)


def _factors(n: int, random: Random) -> list[int]:
    shape = []
    while n > 1:
        size = random.choice([d for d in range(1, n + 1) if n % d == 0])
        shape.append(size)
        n //= size
    if shape and random.random() < 0.3:
        shape[random.randrange(len(shape))] = -1
    return shape
