"""Test that ranks whose GPUs measure unlike speeds decide by one target, without waiting for each other."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8pass.base._torch import store_of
from fp8pass.gpu import here
from fp8pass.options.config import Config
from fp8pass.options.machine import on_machine
from tests.helpers.gpus import CUDA, there
from tests.helpers.harness import verdicts
from tests.helpers.torchrun import collectives, on_ranks

pytestmark = pytest.mark.ranks

GPU = "fp8pass.backend.gpu_of"
"""The function that finds out which GPU a graph is on: these tests pretend one, for graphs on the CPU."""


def folder() -> Path:
    return Path(tempfile.mkdtemp())


def agreed_before() -> None:
    """Forget what the ranks have agreed on for all recipes that ask for no trial."""
    if dist.get_rank() == 0:
        store_of(dist.group.WORLD, "fp8pass/target").delete_key("0-1/measured/")
    dist.barrier()


@contextlib.contextmanager
def in_turn(first: int) -> Iterator[None]:
    """Be a context in which this rank acts only after the `first` one has come out of it."""
    store, key = store_of(dist.group.WORLD, "tests/targets"), f"{next(_numbers)}"
    if dist.get_rank() != first:
        store.wait([key])
    yield
    if dist.get_rank() == first:
        store.set(key, "done")


_numbers = itertools.count()


class Layer(nn.Module):
    """A layer that pays on a slow GPU, and does not on a fast one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(1024, 1024, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x)
        return y


@on_ranks(2)
def unlike_speeds() -> Any:
    """Train on two ranks of which the second one measures half the speed in BF16, so that more pays there."""
    found = []
    for first in (0, 1):
        torch.compiler.reset()
        agreed_before()
        with there(folder(), "h100") as gpu, mock.patch(GPU, return_value=CUDA), verdicts() as report:
            gpu.faster(bf16=0.5 ** dist.get_rank())
            run, before = torch.compile(Layer(), backend="fp8pass", options={"lowering": "eager"}), collectives()
            with in_turn(first):  # the other rank has not even begun when this one decides
                y = run(torch.randn(512, 1024))
                assert collectives() == before
            y.sum().backward()
            run(torch.randn(512, 1024))  # whose forward reads what was reduced, of slots that must be the same
            found.append((len(report.rewritten), here.in_use(CUDA), gpu.measured))
    return found


@on_ranks(2)
def kinds_and_groups() -> Any:
    """Decide for groups of one rank, for recipes that ask for trials, and with a file that one rank has kept."""
    rank, mine = dist.get_rank(), folder()
    alone = [dist.new_group([r]) for r in (0, 1)][rank]
    with there(mine, "rtx5090") as gpu:
        gpu.faster(fp8=1.5 if rank else 1)
        own = on_machine(Config(amax_group=alone), CUDA).target
    with there(mine, "rtx5090") as gpu:  # a process that finds what it has measured before
        gpu.result = "refused: made up for the test" if rank else ""
        with in_turn(1):
            asked = on_machine(Config(recipe="rowwise"), CUDA).target
    return own, asked, gpu.measured, gpu.tried


@on_ranks(2)
def unlike_gpus() -> Any:
    agreed_before()
    with (
        warnings.catch_warnings(record=True) as caught,
        there(folder(), ("rtx5090", "h100")[dist.get_rank()]),
        in_turn(0),
    ):
        target = on_machine(Config(recipe="dynamic", reduce_amax=False), CUDA).target
    return target, [str(w.message) for w in caught]


@pytest.mark.filterwarnings("ignore:fp8pass. a graph has no matmul in FP8")
def test_the_first_rank_decides_for_both() -> None:
    (first, second), (of_other, of_other_second) = unlike_speeds()
    assert first == of_other and (first[0], first[2]) == (0, 1)
    assert second == of_other_second and (second[0], second[2]) == (2, 1)
    assert second[1].bf16_peak < 0.6 * first[1].bf16_peak


def test_each_group_and_each_kind_is_agreed_on_by_itself() -> None:
    (own, asked, measured, tried), (other_own, other_asked, other_measured, other_tried) = kinds_and_groups()
    assert own != other_own and own.bf16_peak == other_own.bf16_peak
    assert asked == other_asked and asked.rowwise is False
    assert (measured, other_measured, tried, other_tried) == (0, 0, ["rowwise"], ["rowwise"])


def test_ranks_with_unlike_gpus_are_told_so() -> None:
    (first, none), (second, said) = unlike_gpus()
    assert not none and (first.capability, second.capability) == ((12, 0), (9, 0))
    assert second.bf16_peak == first.bf16_peak
    assert said == [
        "fp8pass: a rank has a rtx5090, sm_120, and this one a h100, sm_90: the speeds of the first decide for all ranks "
        "what runs in FP8, and each rank uses the kernels that it has"
    ]


def test_a_store_that_can_not_compare() -> None:
    store = mock.Mock(compare_set=mock.Mock(side_effect=RuntimeError("not implemented")))
    with there(folder(), "h100") as gpu, mock.patch.object(here, "store_of", return_value=store):
        gpu.faster(bf16=0.5)
        with pytest.warns(UserWarning, match="each rank decides by its own GPU: not implemented"):
            found = here.target_here(CUDA, "measured", (0, 1), ())
        assert found != here.published_here(CUDA)
