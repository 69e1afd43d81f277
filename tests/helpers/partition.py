"""Recorded calls of the partitioner, for the files test_partition.py of several tiers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fp8pass.base._torch import CustomPartitionerFn, min_cut_partition
from fp8pass.base.node_meta import SAVED
from fp8pass.base.scaling import FP8_DTYPES
from fp8pass.compiler.partition import Partition
from fp8pass.passes.kernels import emulate_matmuls
from tests.helpers.harness import BF16, compiled, without_caches


@dataclass
class Cut:
    """One call of the partitioner. outputs: names of the forward's outputs; marked: shapes of nodes marked as SAVED."""

    outputs: list[str]
    marked: list[list[int]]
    forward: fx.GraphModule
    backward: fx.GraphModule

    @property
    def saved(self) -> list[fx.Node]:
        return list(self.forward.graph.output_node().args[0])[len(self.outputs) :]  # type: ignore[arg-type]


@contextlib.contextmanager
def noted_cuts() -> Iterator[list[Cut]]:
    """Yield a list to which each call of the partitioner inside is appended."""
    found: list[Cut] = []
    cut = Partition.__call__

    def noted(self: Partition, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        outputs: Any = gm.graph.output_node().args[0]
        names = [n.name for n in outputs[: kwargs["num_fwd_outputs"]]]
        marked = [list(n.meta["val"].shape) for n in gm.graph.nodes if SAVED in n.meta]
        found.append(Cut(names, marked, *cut(self, gm, joint_inputs, **kwargs)))
        return found[-1].forward, found[-1].backward

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Partition, "__call__", noted)
        patch.setattr(
            emulate_matmuls, "why_emulated", lambda *_: ""
        )  # as on most CPUs; emulated matmuls would have other names
        yield found


@pytest.fixture
def cuts() -> Iterator[list[Cut]]:
    """Yield a list to which each call of the partitioner in the test is appended."""
    with noted_cuts() as found:
        yield found


def step(model: nn.Module, x: Tensor, **options: Any) -> list[Tensor]:
    """Return the output and all gradients of the second of two training steps, whose scales have a history."""
    run = compiled(model, min_speedup=0, **options)
    for _ in range(2):
        model.zero_grad()
        x = x.detach().requires_grad_()
        y = run(x)
        y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


def layers() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)).bfloat16(), torch.randn(64, 32, dtype=BF16)


@pytest.fixture(scope="module")
def delayed() -> tuple[list[Tensor], Cut]:
    """Return the results of a step of `layers`, and the cut of its graph."""
    with without_caches(), noted_cuts() as found:
        return step(*layers()), found[-1]


def is_fp8(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor) and node.meta["val"].dtype in FP8_DTYPES


class Own(CustomPartitionerFn):  # type: ignore[misc]
    """A user's partitioner."""

    def __init__(self) -> None:
        self.outputs: list[int] = []

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        self.outputs.append(kwargs["num_fwd_outputs"])
        return min_cut_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return "own"
