"""Seeds, a clean compiler for every test, and GPU tests that run where a GPU is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU with FP8 (sm_89 or later)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no GPU with FP8 here"))


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """No graph comes from a cache that another test, or another day, has filled: there the passes would not run."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()
