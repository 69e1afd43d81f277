"""Seeds, a clean compiler for every test, and GPU tests that run where a GPU is."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU with FP8 (sm_89 or later)")
    gc.set_threshold(50_000, 20, 50)  # graphs are many objects that live long: looking for garbage took 6% of the time


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no GPU with FP8 here"))


SHARED = (
    "test_checkpoints.py",
    "test_ddp.py",
    "test_demo.py",
    "test_inspector.py",
    "test_pipelining.py",
    "test_sm90.py",
    "test_stats.py",
    "test_traffic.py",
    "test_triton_numerics.py",
)
"""Tests of one of these files share what takes long: a fixture, or a process that they ask."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several workers, one worker runs all tests of such a file. Otherwise each would make what they share."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    def scope(test: str) -> str:
        file = test.partition("::")[0]
        return file if file.endswith(SHARED) else test

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = scope
    return scheduler


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """No graph comes from a cache that another test, or another day, has filled: there the passes would not run."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()
