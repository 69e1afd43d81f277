"""Where graphs of DistributedDataParallel are cut: at layers, or by DDPOptimizer at its buckets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from fp8pass.backend import fp8pass
from fp8pass.compiler.ddp_cuts import configured, cuts_at_layers
from fp8pass.options.config import Config
from tests.helpers.models import Block, make

pytestmark = pytest.mark.passes

BUCKET = 4096
"""Bytes of a gradient bucket: those of one Linear of 32 features, without its bias."""


def is_cut(*modules: nn.Module, backend: Any = fp8pass, **options: Any) -> bool:
    """Return whether a graph that calls these modules one after the other is cut at layers."""
    found: list[bool] = []

    def look(module: fx.GraphModule, _: Any) -> Any:
        found.append(cuts_at_layers(backend, options, module, BUCKET))
        return module.forward

    torch.compile(nn.Sequential(*modules), backend=look, fullgraph=True)(torch.randn(2, 16, 32, requires_grad=True))
    return found == [True]


def blocks(n: int = 2) -> list[nn.Module]:
    return [make(Block) for _ in range(n)]


def linear(features: int = 32) -> nn.Module:
    return nn.Linear(32, features, bias=False)


def test_equal_layers() -> None:
    assert is_cut(*blocks())
    assert is_cut(linear(), *blocks(), linear(99))


def test_no_equal_layers() -> None:
    assert not is_cut(*blocks(1), linear())


def test_several_parameters_outside_of_layers_that_are_larger_than_a_bucket() -> None:
    """DDPOptimizer would begin to reduce the last one's gradient while that of the first is computed."""
    assert is_cut(linear(), linear(), *blocks())
    assert not is_cut(linear(), linear(), linear(), *blocks())
    frozen = linear().requires_grad_(False)
    assert is_cut(linear(), linear(), frozen, *blocks())


def test_layers_that_are_not_compiled_once() -> None:
    assert not is_cut(*blocks(), options={"compile_once": False})
    assert is_cut(*blocks(), mode="reduce-overhead")
    assert is_cut(*blocks(), backend=configured(lambda: Config())(lambda *args: None))
    assert not is_cut(*blocks(), backend=configured(lambda: Config(compile_once=False))(lambda *args: None))


def test_other_backends() -> None:
    assert not is_cut(*blocks(), backend=torch.compile)
