"""A warm training step calls few Python functions: the tests count them, and time nothing."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.base.names import PACKAGE
from fp8pass.weights import weight_cache
from fp8pass.weights.weight_cache import WeightsOf, trained
from tests.helpers.train_step import batch, plain_step

AOT = f"{torch.__path__[0]}/_functorch/_aot_autograd/"


class Layer(nn.Module):
    """Some matmuls, each with two parameters."""

    def __init__(self, matmuls: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(32, 32) for _ in range(matmuls))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part(x).relu()
        return x


def step_of(matmuls: int, fused: bool, **options: Any) -> tuple[Callable[[Tensor], None], nn.Module]:
    """Return a training step of four equal layers, after the first steps, and its model."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(matmuls) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused, foreach=not fused)
    step = plain_step(model, optimizer, on_fault="raise", **options)
    for i in range(6):
        step(batch(i, 16, 32))
    return step, model


def calls_of(step: Callable[[Tensor], None]) -> Counter[str]:
    """Return how often a step calls functions in Python, by the file that they are in and their name."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1

    x = batch(7, 16, 32)
    sys.setprofile(note)
    try:
        step(x)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.compiled
@pytest.mark.parametrize("fused", [False, True])
def test_no_python_for_each_parameter(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm step with twice the parameters and copies calls the same functions of fp8pass, as often."""
    # other tests may have left sharded weights, for which a step looks among its parameters
    monkeypatch.setattr(fp8pass.fsdp, "_all", weakref.WeakSet())

    def ours(matmuls: int) -> dict[str, int]:
        calls = calls_of(step_of(matmuls, fused, lowering="eager")[0])
        # but for what runs op by op, and the calls of layers and of functions of an update
        others = ("/quant/", "/base/scaling.py", "/compiler/eager.py", "/compiler/one_node.py", ":without_autocast")
        return {name: n for name, n in calls.items() if name.startswith(PACKAGE) and not any(o in name for o in others)}

    few, many = ours(3), ours(6)
    assert few
    assert {name: (n, many[name]) for name, n in few.items() if many.get(name) != n} == {}
    assert many.keys() == few.keys()


@pytest.mark.inductor
def test_functions_are_called_past_wrappers() -> None:
    """Neither layers nor their updates run AOTAutograd's Python; versions of what updates write count up all the same."""
    step, model = step_of(3, fused=False)
    versions = [p._version for p in model.parameters()]
    calls = {name: n for name, n in calls_of(step).items() if name.startswith(AOT)}
    assert not [name for name in calls if name.endswith(":runtime_wrapper")], calls
    assert all(p._version > before for p, before in zip(model.parameters(), versions, strict=True))


@pytest.mark.passes
def test_copies_are_looked_up_when_an_optimizer_updates_others(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(5)]
    optimizer = torch.optim.SGD(parameters[:2])
    found, find = list[list[int]](), WeightsOf(trained)

    def note(parts: list[Tensor]) -> list[Any]:
        found.append([next(i for i, p in enumerate(parameters) if p is part) for part in parts])
        return []

    monkeypatch.setattr(weight_cache, "weights_of", note)

    def looked_up(*optimizers: torch.optim.Optimizer) -> list[list[int]]:
        found.clear()
        assert find(optimizers) is find(optimizers)
        return [*found]

    assert looked_up(optimizer) == [[0, 1]]
    assert looked_up(optimizer) == []
    optimizer.add_param_group({"params": parameters[2:4]})
    assert looked_up(optimizer) == [[0, 1, 2, 3]]
    parameters[3].requires_grad_(False)
    assert looked_up(optimizer) == [[0, 1, 2]]
    parameters[3].requires_grad_()
    assert looked_up(optimizer) == [[0, 1, 2, 3]]
    optimizer.param_groups[0]["params"][1] = parameters[4]
    assert looked_up(optimizer) == [[0, 4, 2, 3]]
    assert looked_up(torch.optim.SGD([parameters[4]])) == [[4]]
    assert looked_up(optimizer, torch.optim.SGD([parameters[1]])) == [[0, 4, 2, 3, 1]]
    assert looked_up() == [[]]
