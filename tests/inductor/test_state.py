"""The lifetime of delayed-scaling state: compiled code keeps no model alive, and no batch."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8pass.recipes import Schedule
from fp8pass.states.slots import registry
from tests.helpers.harness import compiled
from tests.helpers.models import make

pytestmark = pytest.mark.shares_code


@pytest.mark.parametrize(
    "how",
    [
        "lowered op by op",
        "lowered by Inductor",
        pytest.param("by a schedule", marks=pytest.mark.variant),
        "after an error in a backward",
    ],
)
def test_code_that_is_kept_keeps_neither_the_model_nor_the_batch_that_it_was_compiled_for(how: str) -> None:
    torch._dynamo.reset()  # otherwise the code may have been compiled for another test's model
    model, batches = make(), [torch.randn(8, 32, requires_grad=True) for _ in range(2)]
    options_of: dict[str, dict[str, Any]] = {
        "lowered by Inductor": {"lowering": "inductor"},
        "by a schedule": {"recipe": Schedule({0: None, 1: "delayed"})},
    }
    run = compiled(model, **options_of.get(how, {}))
    for x in batches:
        y = run(x)
        if how.startswith("after") and x is batches[1]:
            y.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                y.sum().backward()
        else:
            y.sum().backward()
    kept = [weakref.ref(x) for x in (*model.parameters(), *batches)]
    del model, batches, run, x, y
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)
    assert all(s.alive() for s in registry.states())


def fail(_: Tensor) -> None:
    raise ZeroDivisionError
