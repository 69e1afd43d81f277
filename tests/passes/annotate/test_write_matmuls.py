"""The write_matmuls pass: products of matrices in other spellings become matmuls with the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fp8pass.passes.common.matmul_calls import signature_of
from fp8pass.passes.dynamo.write_matmuls import WriteMatmuls
from tests.helpers.harness import on_dynamos_graph
from tests.helpers.write_matmuls import FORMS, WRITTEN, leaves, total


def grads(function: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the `total` of the outputs, and the gradients of all inputs."""
    y = total(function(*inputs))
    return [y.detach(), *torch.autograd.grad(y, inputs)]


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize("form", FORMS)
def test_numbers_and_gradients_are_the_same(form: str) -> None:
    function, _, matmuls = FORMS[form]
    found: list[int] = []

    def backend(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        count = (form in WRITTEN) * (1 + (form == "matrix_power"))
        module, applied = on_dynamos_graph(module, WriteMatmuls(), WriteMatmuls())
        assert applied == [count, 0]
        calls = [n for n in module.graph.nodes if signature_of(n)]
        assert all(tuple(n.meta["example_value"].shape) for n in calls if "of vectors" not in form)
        found.append(len(calls))
        return module.forward

    torch._dynamo.reset()
    inputs = leaves(form)
    for a, b in zip(grads(torch.compile(function, backend=backend), inputs), grads(function, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert found == [matmuls]
