"""Check what the backend compiles: legal on CUDA, and close to the reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fp8pass.compiler.joint_passes import JointPasses
from tests.helpers.harness import check_legal_on_cuda, sqnr


@pytest.fixture(autouse=True, scope="module")
def legal_on_cuda() -> Iterator[None]:
    """Check that whatever a test of this file compiles is legal on CUDA."""
    run = JointPasses.__call__

    def checked(self: JointPasses, graph: torch.fx.Graph) -> None:
        run(self, graph)
        calls = check_legal_on_cuda(graph)
        # the report of a function also has the verdicts of other functions, and of the other layers that it stands for
        assert self.body is not None or calls >= len(self.report.rewritten)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JointPasses, "__call__", checked)
        yield


def compare(actual: dict[str, Tensor], expected: dict[str, Tensor], decibels: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert sqnr(value, actual[name]) > decibels, f"{name}: {sqnr(value, actual[name]):.1f} dB"
