"""Test `update_in_backward`: parameters are updated while the backward runs, with the numbers of an update after it."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8pass
from fp8pass.base.errors import Fp8Error
from tests.helpers.train_step import RECIPE, batch, everything
from tests.train.test_train_step import Lion, assert_same

pytestmark = pytest.mark.compiled

SIZE = 32
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "lion": Lion,
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(F.relu(self.up(x)))
        return result


def layers(count: int = 3) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return nn.Sequential(*[Layer() for _ in range(count)])


def early(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator with the option, and buckets of a layer's size."""
    given = {"recipe": RECIPE, "lowering": "eager", "update_in_backward": True, "update_bucket_bytes": 16 * SIZE**2}
    return fp8pass.train_step(**{**given, **options})


def step_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    after_backward: Callable[[], Any] = lambda: None,
    backwards: int = 1,
) -> Callable[[Tensor], Tensor]:
    """Return a function that does a step. after_backward: called between the backward and the update."""

    def step(x: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), x * 0.5)
        loss.backward(retain_graph=backwards > 1)  # type: ignore[no-untyped-call]
        for _ in range(backwards - 1):
            loss.backward()  # type: ignore[no-untyped-call]
        after_backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


VARIANTS = [pytest.param(n, marks=pytest.mark.variant) if n != "adamw" else n for n in OPTIMIZERS]


@pytest.mark.parametrize("name", VARIANTS)
def test_same_numbers_and_fewer_gradients(name: str) -> None:
    """Every number is the same to the bit, also as the learning rate changes, and gradients are freed layer by layer."""
    results: list[Any] = []
    step_early = None
    for options in ({}, {"update_in_backward": False}):
        model = layers()
        optimizer = OPTIMIZERS[name](model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        step = early(**options)(step_of(model, optimizer))
        losses = []
        for i in range(5):
            losses.append(step(batch(i)))
            schedule.step()
        results.append((losses, everything(model, optimizer), str(step.report)))
        step_early = step_early or step._early
    assert_same(results[0][:2], results[1][:2])
    held, parts = step_early.peak_bytes, step_early.all_bytes
    of_layer, of_all = (sum(p.nbytes for p in layers(n).parameters()) for n in (1, 3))
    assert (held, parts) == (of_layer, of_all)
    assert "12 parameters were updated in 3 parts while the backward ran" in results[0][2]
    assert "while the backward ran" not in results[1][2]


def linear() -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return nn.Linear(SIZE, SIZE)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize(
    ("after_backward", "backwards", "message"),
    [
        pytest.param(clip, 1, r"wrote into the gradient of (weight|bias) after that\. Clipping", id="clip"),
        pytest.param(
            lambda model: None, 2, "(weight|bias) got 2 gradients in the first call, one from each", id="accumulate"
        ),
    ],
)
def test_what_needs_all_gradients(after_backward: Callable[[nn.Module], None], backwards: int, message: str) -> None:
    """The first call, which updates after its backward, raises an error that says what stands in the way."""
    model = linear()
    step = early()(step_of(model, sgd(model), functools.partial(after_backward, model), backwards))
    with pytest.raises(Fp8Error, match=message):
        step(batch(0))


def test_skip_nonfinite() -> None:
    with pytest.raises(ValueError, match="skip_nonfinite=True decides by all gradients"):
        early(skip_nonfinite=True)(lambda: None)


def test_calls_that_differ_from_the_first() -> None:
    """A parameter without gradient is updated later as always; a call without `optimizer.step` raises an error."""
    model = nn.ModuleDict({"a": linear(), "b": linear()})
    optimizer = sgd(model)

    @early(update_bucket_bytes=1)
    def step(x: Tensor, names: str, updates: bool = True) -> None:
        y = sum(model[name](x) for name in names)
        y.square().mean().backward()
        if updates:
            optimizer.step()
        optimizer.zero_grad()

    step(batch(0), "ab")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(batch(1), "a")
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"a.weight", "a.bias"}
    with pytest.raises(Fp8Error, match=r"ran no optimizer\.step\(\), so 4 parameters were updated too early"):
        step(batch(2), "ab", updates=False)


class Counting(torch.optim.SGD):
    """An optimizer that counts steps in its groups, as schedule-free ones do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["k"])


def test_an_optimizer_that_counts_steps() -> None:
    model = linear()
    step = early()(step_of(model, Counting(model.parameters(), lr=0.1)))
    step(batch(0))
    with pytest.raises(Fp8Error, match="Counting changes 'k' of its param_groups in each step"):
        step(batch(1))


def test_a_step_that_is_gone_leaves_no_hook() -> None:
    """Parameters keep nothing of a step that was dropped: another loop trains them as before."""
    model = linear()
    step = early()(step_of(model, sgd(model)))
    for i in range(2):
        step(batch(i))
    del step
    gc.collect()
    model(batch(0)).sum().backward()
    assert model.weight.grad is not None
    assert not model.weight._post_accumulate_grad_hooks
