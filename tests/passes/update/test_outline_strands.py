"""Updates whose equal parameters are compiled once: the functions, and the bits of updates that are compiled whole."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.compiler.lower import lower
from fp8pass.graph.annotation import Annotation
from fp8pass.passes.update import outline_strands
from fp8pass.weights.update_graph import UpdateGraph
from tests.helpers.optimizers import Lion
from tests.helpers.train_step import batch, everything

LAYERS = 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def model_of(layers: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), *(Layer() for _ in range(layers)), nn.LayerNorm(64)).to(dtype)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Annotation]:
    """Compile equal parameters once, however few there are; collect the annotations of the updates."""
    monkeypatch.setattr(outline_strands, "FUNCTIONS_COST", 0.0)
    annotations: list[Annotation] = []

    def noting(annotation: Annotation, *args: Any) -> Any:
        annotations.append(annotation)
        return lower(annotation, *args)

    monkeypatch.setattr("fp8pass.compiler.update_compiler.lower", noting)
    return annotations


def trained(
    make: Callable[..., torch.optim.Optimizer], layers: int = LAYERS, clips: bool = False, **config: Any
) -> dict[str, Tensor]:
    """Train for some steps, of which one overflows if it may be skipped; return all that has changed."""
    torch._dynamo.reset()
    model = model_of(layers, torch.bfloat16 if "update_rounding" in config else torch.float32)
    optimizer = make(model.parameters())

    @fp8pass.train_step(**{"recipe": "delayed", "min_speedup": 0, "lowering": "eager", **config})
    def step(x: Tensor, by: float) -> None:
        (model(x).square().mean() * by).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    for i in range(4):
        overflows = i == 2 and config.get("skip_nonfinite")
        step(batch(i, 16, 32).to(next(model.parameters()).dtype), math.inf if overflows else 1.0)
    return everything(model, optimizer)


ADAMW: Callable[..., torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, foreach=True)  # noqa: E731
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": ADAMW,
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2, foreach=True),
    "Lion": lambda p: Lion(p, lr=1e-3),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "clip": {"clips": True, "weight_cache": "fp8"},
    "fp8 moments, skip": {"optimizer_state": "fp8", "skip_nonfinite": True},
    "moments in blocks": {"optimizer_state": fp8pass.Moments(block=256, expand=True)},
    "moments in 16 bits": {"optimizer_state": "fp8+float16"},
    "stochastic, fp8 moments, skip": {
        "update_rounding": "stochastic",
        "optimizer_state": "fp8",
        "skip_nonfinite": True,
    },
    "stochastic": {"update_rounding": "stochastic"},
    "predicted": {"weight_amax": "predicted"},
    "no copies": {"weight_cache": "off"},
    "dynamic": {"recipe": "dynamic"},
    "rowwise": {"recipe": "rowwise"},
}


def check_equal(made: list[Annotation], make: Any, **config: Any) -> None:
    once = trained(make, **config)
    assert any(len(body.layers) > 1 for a in made for body in a.bodies.values()), "nothing was compiled once"
    made.clear()
    whole = trained(make, compile_once=False, **config)
    assert not any(a.bodies for a in made)
    assert once.keys() == whole.keys()
    assert [name for name in once if not torch.equal(once[name], whole[name])] == []


@pytest.mark.compiled
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_of_optimizers(made: list[Annotation], name: str) -> None:
    check_equal(made, OPTIMIZERS[name])


@pytest.mark.compiled
def test_a_graph_that_only_clips_gradients(made: list[Annotation], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an update, of gradients, which are new tensors in each step, and no option of updates is for it."""
    updates, plans = list[UpdateGraph](), Counter[UpdateGraph]()
    plan, init = UpdateGraph._new_plan, UpdateGraph.__init__

    def made_one(self: UpdateGraph, *args: Any) -> None:
        init(self, *args)
        updates.append(self)

    def planned(self: UpdateGraph, args: Any) -> Any:
        plans[self] += 1
        return plan(self, args)

    monkeypatch.setattr(UpdateGraph, "__init__", made_one)
    monkeypatch.setattr(UpdateGraph, "_new_plan", planned)
    options = {"skip_nonfinite": True, "optimizer_state": "fp8", "update_rounding": "stochastic"}
    check_equal(made, ADAMW, clips=True, **options)
    clipping = [u for u in updates if u.counts is None]
    assert len(clipping) == 2 and all(plans[u] == 1 and u.gradient_bytes == 0 for u in clipping)
    assert sum(u.counts is not None for u in updates) >= 2


@pytest.mark.compiled
def test_gradients_that_a_graph_clips_are_strands(made: list[Annotation]) -> None:
    trained(ADAMW, clips=True)
    layers = [len(body.layers) for body in made[0].bodies.values()]  # it is compiled before the optimizer's update
    assert sum(n > 1 for n in layers) == 2, "the norms of equal gradients, and the products with the coefficient"


@pytest.mark.compiled
@pytest.mark.parametrize("name", CONFIGS)
def test_bits_of_options(made: list[Annotation], name: str) -> None:
    check_equal(made, ADAMW, **CONFIGS[name])
