"""The collector of garbage is off while a graph is compiled, and as it was afterwards."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch

from fp8pass.base import collector
from fp8pass.graph.verify import verify
from tests.helpers.harness import compiled
from tests.helpers.models import make

pytestmark = pytest.mark.compiled


def test_no_collection_while_graphs_are_compiled() -> None:
    on: list[bool] = []

    def noting(*args: Any) -> Any:
        on.append(gc.isenabled())
        return verify(*args)

    with mock.patch("fp8pass.compiler.run_passes.verify", noting):
        run = compiled(make(lambda: torch.nn.Linear(32, 48)), lowering="eager")
        for _ in range(2):
            run(torch.randn(16, 32)).sum().backward()
    assert on and not any(on)
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with collector.paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(KeyError), collector.paused():
        raise KeyError
    assert gc.isenabled()
