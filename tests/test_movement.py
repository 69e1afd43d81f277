"""Movement on FP8 tensors, compiled by Inductor: all of it at once, with the rest of XLA's rules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from fp8pass.passes import movement
from tests.harness import compiled, sqnr, verdicts
from tests.xla_rules import CASES, Case


def cases(letters: str) -> list[Case]:
    chosen = (case for name, case in CASES.items() if name[0] in letters)
    return [c for c in chosen if c.device == "cpu" and c.target is None and not c.dynamic]


def tensors(results: Any) -> list[Tensor]:
    return [t for r in results for t in ([r] if isinstance(r, Tensor) else r)]


@contextmanager
def _no_graph_caches() -> Iterator[None]:
    """Where a cache hits, passes do not run, and there are no verdicts."""
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


@pytest.mark.parametrize("letters", ["P", "M", "SL", "TE"])
def test_compiled_by_inductor(letters: str) -> None:
    """Whatever is rewritten also compiles, and computes what eager computes."""
    chosen = cases(letters)
    functions, inputs = [c.function for c in chosen], [c.inputs for c in chosen]

    def everything(inputs: list[tuple[Any, ...]]) -> list[Any]:
        return [f(*i) for f, i in zip(functions, inputs, strict=True)]

    with verdicts() as report, _no_graph_caches():
        actual = compiled(everything, recipe=None, lowering="inductor")(inputs)
    assert len(report.rewritten) == sum(c.calls > 0 for c in chosen) + (letters == "SL")  # one case has two matmuls
    for wanted, got in zip(tensors(everything(inputs)), tensors(actual), strict=True):
        assert (wanted.dtype, wanted.shape) == (got.dtype, got.shape)
        dtype = wanted.dtype
        assert torch.equal(wanted.float().isfinite(), got.float().isfinite())
        wanted, got = wanted.float().nan_to_num(0, 0, 0), got.float().nan_to_num(0, 0, 0)
        if dtype.itemsize == 1:  # Inductor does not round to bfloat16 in between: now and then the next FP8 value
            assert (wanted != got).float().mean() < 0.1
            torch.testing.assert_close(got, wanted, rtol=1 / 7, atol=2**-9)
        elif wanted.numel():
            assert sqnr(wanted, got) > (90 if dtype == torch.float32 else 45)


@pytest.mark.parametrize("seed", range(40))
def test_which_reshapes_are_views(seed: int) -> None:
    """Against torch, on real tensors: any permutation, slices, expansions and sizes of 1."""
    random = Random(seed)
    for _ in range(50):
        x = torch.empty([random.choice([1, 2, 3, 4]) for _ in range(random.randint(1, 4))])
        x = x.permute(random.sample(range(x.dim()), x.dim()))
        if random.random() < 0.5:
            x = x[:: random.choice([1, 2])]
        if random.random() < 0.5:
            x = x.unsqueeze(0).expand(random.choice([1, 2, 3]), *x.shape)
        shape = _factors(x.numel(), random)
        try:
            x.view(shape)
        except RuntimeError:
            assert not movement._is_view(x, shape), (x.shape, x.stride(), shape)
        else:
            assert movement._is_view(x, shape), (x.shape, x.stride(), shape)


def _factors(n: int, random: Random) -> list[int]:
    shape = []
    while n > 1:
        size = random.choice([d for d in range(1, n + 1) if n % d == 0])
        shape.append(size)
        n //= size
    if shape and random.random() < 0.3:
        shape[random.randrange(len(shape))] = -1
    return shape
