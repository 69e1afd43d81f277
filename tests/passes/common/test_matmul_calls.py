"""Which calls of Dynamo's graph may write into an input."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from fp8pass.passes.common.matmul_calls import mutates

pytestmark = pytest.mark.passes

CALLS: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "x += y": (operator.iadd, {}, True),
    "x @= y": (operator.imatmul, {}, False),  # tensors have no `__imatmul__`: Python assigns the product
    "x @ y": (operator.matmul, {}, False),
    "add_": (torch.Tensor.add_, {}, True),
    "add": (torch.add, {}, False),
    "out=": (torch.add, {"out": "y"}, True),
    "relu": (torch.nn.functional.relu, {}, False),
    "relu in place": (torch.nn.functional.relu, {"inplace": True}, True),
    "aten.add_": (torch.ops.aten.add_.Tensor, {}, True),
    "aten.add": (torch.ops.aten.add.Tensor, {}, False),
}


@pytest.mark.parametrize("case", CALLS)
def test_mutates(case: str) -> None:
    target, kwargs, expected = CALLS[case]
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    kwargs = {key: y if value == "y" else value for key, value in kwargs.items()}
    assert mutates(graph.call_function(target, (x,) if "inplace" in kwargs else (x, y), kwargs)) == expected


def test_python_assigns_the_product() -> None:
    """If tensors had `__imatmul__`, the case "x @= y" would write."""
    assert not hasattr(torch.Tensor, "__imatmul__")
