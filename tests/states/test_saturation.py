"""The warnings of steps that saturated much under delayed scaling, and of tensors that vanish after an outlier."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8pass.recipes import DelayedScaling
from fp8pass.states import saturation
from fp8pass.states.saturation import MUCH, compared, smallest_normal
from tests.helpers.harness import compiled
from tests.helpers.models import make


@pytest.fixture(autouse=True)
def _no_warning_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saturation, "_tellers", [saturation._of_growth, saturation._of_fall])


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))


def trained(inputs: Iterator[Tensor], about: str = "as their delayed scales allow", **options: Any) -> list[str]:
    """Train on these inputs; return what was warned."""
    model = make(layers)
    run = compiled(model, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x in inputs:
            run(x).square().mean().backward()
    return [str(w.message) for w in caught if about in str(w.message)]


def inputs(factor: Callable[[int], float], steps: int = 12) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(16, 32, generator=generator) * factor(i) for i in range(steps))


@pytest.mark.passes
@pytest.mark.parametrize(("algo", "wanted"), [("max", [8.0, 0.5, 0.0]), ("most_recent", [8.0, 4.0, 0.0])])
def test_what_exceeded_its_scale(algo: str, wanted: list[float]) -> None:
    """Newest first: a jump, a rise that an older amax has seen already, and a slot that has begun."""
    history = torch.tensor([[16.0, 4.0, 3.0], [2.0, 1.0, 0.0], [1.0, 8.0, 0.0], [2.0, 1.0, 0.0]])
    scale = torch.ones(3)
    assert compared(history, scale, 1, algo, 0)[0].tolist() == wanted
    assert compared(history, scale, 1, algo, 1)[0].tolist() == [x / 2 for x in wanted]
    assert compared(torch.full((4, 1), float("nan")), scale[:1], 2, algo, 0)[0].tolist() == [0]
    assert compared(torch.full((4, 1), -1.0), scale[:1], 2, algo, 0)[0].tolist() == [0], "a slot that was not used yet"
    after_infinity = history.where(history < 16, torch.inf)
    assert compared(after_infinity, scale, 2, algo, 0)[0, 0] == (1 if algo == "max" else 2)


@pytest.mark.compiled
def test_a_jump_is_warned_of_once() -> None:
    recipe = DelayedScaling(amax_history_len=4)
    (said,) = trained(inputs(lambda i: 1000 if i >= 5 else 1), recipe=recipe)
    assert said.startswith("fp8pass: ") and "0.input 1" in said and "on_saturation='requantize'" in said
    assert trained(inputs(lambda i: 1000 if i >= 5 else 1), recipe=recipe) == [], "a second model"


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("factor", "options"),
    [
        (lambda i: 1.0, {}),
        (lambda i: MUCH / 4 if i >= 5 else 1, {}),
        (lambda i: 1000 if i >= 5 else 1, {"on_saturation": "requantize"}),
    ],
)
def test_what_is_not_warned_of(factor: Callable[[int], float], options: dict[str, Any]) -> None:
    assert trained(inputs(factor), recipe=DelayedScaling(amax_history_len=4, **options)) == []


@pytest.mark.passes
def test_what_the_newest_became_and_how_far_it_fell() -> None:
    """A slot that was not used yet has 0, and one that met an infinity fell from the largest float."""
    history = torch.tensor([[2.0, -1.0, 1.0], [3.0, -1.0, torch.inf]])
    _, scaled, fallen = compared(history, torch.tensor([4.0, 1.0, 1.0]), 1, "max", 0).tolist()
    assert scaled == [8.0, 0.0, 1.0] and (fallen[0], fallen[2]) == (1.5, torch.finfo().max)
    assert (smallest_normal(448.0), smallest_normal(57344.0)) == (2.0**-6, 2.0**-14)


@pytest.mark.compiled
@pytest.mark.parametrize("on_saturation", ["saturate", "requantize"])
def test_an_outlier_in_rows_that_are_masked(on_saturation: str) -> None:
    """Its amax rounds the other rows of later batches to 0, as after transformers#48205, where such rows are garbage."""
    recipe = DelayedScaling(amax_history_len=16, on_saturation=on_saturation)
    (said,) = trained(inputs(lambda i: 1e12 if i == 4 else 1, 20), "are rounded to 0", recipe=recipe)
    assert said.startswith("fp8pass: ") and ".input" in said and "amax of 16 steps" in said and "rowwise" in said


@pytest.mark.compiled
@pytest.mark.parametrize("factor", [lambda i: 1e3 if i == 4 else 1, lambda i: 1e-42])
def test_what_is_small_but_not_rounded_to_0_by_an_outlier(factor: Callable[[int], float]) -> None:
    """Nobody is warned of numbers that e4m3 represents beside the outlier, or that are too small for any scale."""
    assert not trained(inputs(factor, 20), "are rounded to 0", recipe=DelayedScaling(amax_history_len=16))
