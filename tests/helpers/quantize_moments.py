"""Updates with moments, and the formulas of moments, for the files test_quantize_moments.py of several tiers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fp8pass.graph.annotation import copy_to_edit
from fp8pass.passes.update import find_moments
from fp8pass.passes.update.find_moments import moments_of
from fp8pass.passes.update.read_moments import ReadMoments
from fp8pass.passes.update.write_moments import WriteMoments
from fp8pass.passes.update.written import written
from fp8pass.runtime.update_key import UpdateKey, attribute
from tests.helpers.harness import E4M3, F16, F32, on_update


def model(dtype: torch.dtype = F32) -> nn.Sequential:
    """Return a model with gradients, whose first weight is large enough for moments in FP8 and whose second is not."""
    made = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 63, bias=False)).to(dtype)
    made(torch.randn(5, 64, dtype=dtype)).square().sum().backward()
    return made


def kinds(make: Callable[..., Any], dtype: torch.dtype = F32) -> dict[str, str]:
    """Return the kind of each moment found in the optimizer's state of the large weight, by name; check that no other is."""
    of = model(dtype)
    optimizer = make(of.parameters())
    optimizer.step()
    found: dict[int, str] = {}

    def backend(module: fx.GraphModule, _: Any) -> Any:
        before = module.code
        moments = moments_of(module, places) if (places := written(module)) else []
        assert module.code == before, "finding moments changes the graph"

        def run(*args: Any) -> Any:
            for moment in moments:
                x = args[moment.ref] if isinstance(moment.ref, int) else attribute(module, moment.ref)
                assert moment.dtype == x.dtype
                found[id(x)] = moment.kind
            return module.forward(*args)

        return run

    torch.compile(optimizer.step, backend=backend)()
    state = optimizer.state[of[0].weight]
    named = {name: found.pop(id(x)) for name, x in state.items() if id(x) in found}
    assert not found, "found a tensor that is too small or not a moment"
    return named


BOTH = {"exp_avg": "first", "exp_avg_sq": "second"}


def adam(p: nn.Parameter, m: Tensor, v: Tensor) -> None:
    """Update a parameter and its moments by hand, as Adam does."""
    with torch.no_grad():
        assert p.grad is not None
        m.lerp_(p.grad, 0.1)
        v.mul_(0.9).add_(p.grad * p.grad * 0.1)
        p.sub_(m / v.sqrt(), alpha=0.1)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> fx.GraphModule:
    """Return Dynamo's graph of `adam`, rewritten."""
    monkeypatch.setattr(find_moments, "MIN_ELEMENTS", 1)
    found: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, _: Any) -> Any:
        found.append(copy_to_edit(module))
        return module.forward

    p = nn.Parameter(torch.randn(4, 8))
    p.grad = torch.randn(4, 8)
    torch.compile(adam, backend=backend, fullgraph=True)(p, torch.zeros(4, 8), torch.zeros(4, 8))
    (module,) = found
    moments = sorted(moments_of(module, written(module)), key=lambda x: x.kind)
    assert [x.kind for x in moments] == ["first", "second"]
    on_update(module, UpdateKey((), (), (), tuple(moments)), ReadMoments(), WriteMoments())
    return module


def stored(kind: str, x: Tensor, scale: float) -> Tensor:
    """Return the stored tensor for a moment, by the formula."""
    x = x.double()
    if kind == "first":
        return (x * scale).clamp(-448, 448).float().to(E4M3)
    return (x.sqrt() * scale).clamp(max=65504).float().to(F16)


def read(kind: str, x_q: Tensor, scale: float) -> Tensor:
    """Return the moment in float64 that a stored tensor stands for."""
    x = x_q.double() / scale
    return x if kind == "first" else x.square()


def power_of_2(target: float, amax: float) -> float:
    """Return the largest power of two whose product with amax is at most `target`; 1 for an amax of 0."""
    return min(2.0 ** math.floor(math.log2(target / amax)), 2.0**126) if amax else 1.0
