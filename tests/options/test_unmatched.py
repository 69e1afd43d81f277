"""Test patterns that match nothing: an error with the nearest names of the model, or a warning if it is unknown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8pass
from fp8pass import Config, Fp8Error, explain
from fp8pass.base.errors import warn_once
from fp8pass.base.names import MATMULS
from fp8pass.passes.common import matmul_calls
from fp8pass.recipes import Schedule, StaticScaling
from tests.helpers.models import Decorated

pytestmark = pytest.mark.compiled

X = torch.randn(16, 32)


class Block(nn.Module):
    """Two layers, and one without a matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(32, 32), nn.Linear(32, 32, bias=False), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(self.norm(x)))
        return y


class Model(nn.Module):
    """Two blocks, a norm and a head; breaks: the graph breaks before the head."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.Identity(), nn.Linear(32, 32)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        if self.breaks:
            torch._dynamo.graph_break()
        y: Tensor = self.head(self.norm(x))
        return y


@pytest.fixture(autouse=True)
def _told_anew() -> None:
    warn_once.cache_clear()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a typo": ({"filter": ["hedd"]}, "filter: 'hedd' matches no module or matmul of Model; did you mean 'head'"),
    "a name within": ({"filter": "up"}, "filter: 'up' matches no module or matmul of Model; did you mean '*.up'"),
    "a typo after a star": ({"filter": ["layers.*.dwon"]}, "did you mean 'layers.*.down'"),
    "a layer too many": ({"filter": ["layers.7"]}, "did you mean 'layers.1' or 'layers.0'"),
    "a recipe": ({"recipe": {"haed": None, "*": "dynamic"}}, "recipe: 'haed' matches no module or matmul of Model"),
    "a later phase": ({"recipe": Schedule({0: None, 9: {"haed": None, "*": "dynamic"}})}, "recipe: 'haed' matches no"),
    "a recipe after all others": (
        {"recipe": {"*": "dynamic", "head": None}},
        "recipe: 'head' has no effect in Model, because '*' comes before it and matches 'head' too",
    ),
    "a role": ({"monitor": ["*.grad_outptu"]}, "did you mean '*.grad_output'"),
    "a scale": (
        {"recipe": StaticScaling({"layers.0.up.input": 1.0, "layers.0.upp.weight": 1.0})},
        "StaticScaling: 'layers.0.upp.weight' belongs to no module or matmul of Model; did you mean 'layers.0.up'",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_pattern_that_matches_nothing_is_an_error(what: str) -> None:
    options, message = WRONG[what]
    with pytest.raises(Fp8Error) as raised:
        explain(Model(), X, config=Config(**options))
    assert message in str(raised.value)


def test_it_is_an_error_where_the_forward_is_decorated() -> None:
    model = Decorated()
    with pytest.raises(Fp8Error, match=r"filter: 'layers.1' matches no module or matmul of Decorated; did you mean"):
        explain(model, torch.randn(32, 32), config=Config(filter=["layers.1"]))
    report = explain(model, torch.randn(32, 32), config=Config(filter=["layers.0"]))
    assert {(g.name, g.rule) for g in report.declined} == {("layers.0", "filter")}


def test_it_is_judged_before_a_step_is_trained() -> None:
    model = Model()
    before = [p.clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @fp8pass.train_step(filter=["hedd"], lowering="eager")
    def step(model: nn.Module, x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    with pytest.raises(
        ValueError, match=r"filter: 'hedd' matches no module or matmul of .*step .*; did you mean 'head'"
    ):
        step(model, X)
    assert all(map(torch.equal, before, model.parameters()))


def test_all_that_a_graph_after_a_break_has_is_known_before() -> None:
    """These are modules without matmuls, slots by their numbers, and matmuls without parameters."""
    patterns = {
        "filter": ["head", "norm", "head.bias"],
        "monitor": ["layers.1", "*.grad_output", "layers.0.up.input_1"],
    }
    report = explain(Model(breaks=True), X, config=Config(recipe={"layers.*.matmul": None, "*": "dynamic"}, **patterns))
    assert len(report.breaks) == 1 and {g.rule for g in report.gemms if g.name == "head"} == {"filter"}


def compiled_blocks(model: Model, **options: Any) -> Callable[[Tensor], Tensor]:
    for block in model.layers:
        block.compile(backend="fp8pass", options={"lowering": "eager", **options})
    return model


@torch.no_grad()
def test_a_block_that_is_compiled_by_itself_may_lack_what_the_model_has() -> None:
    compiled_blocks(Model(), filter=["head", "down"])(X)
    with pytest.raises(Exception, match=r"filter: 'hedd' matches no module or matmul of Model; did you mean 'head'"):
        compiled_blocks(Model(), filter=["hedd"])(X)


@torch.no_grad()
def test_names_of_the_model_have_no_effect_in_a_block() -> None:
    said = "filter: 'layers.1' has no effect in a graph of Block, where names are like 'up', 'down', 'norm'"
    with pytest.warns(UserWarning, match=said):
        compiled_blocks(Model(), filter=["layers.1"])(X)


def test_a_function_may_know_more_than_is_seen() -> None:
    model, other = Model(), nn.Linear(32, 32)
    with pytest.warns(
        UserWarning, match=r"'hedd' matches no module or matmul of what is compiled; did you mean 'head' or"
    ):
        explain(lambda x: model(x), X, config=Config(filter=["hedd"]), backward=False)
    said = "'head' has no effect in a graph of model and other, where names are like 'model', 'other', 'model.head'"
    with pytest.warns(UserWarning, match=said):
        explain(lambda x: model(x) + other(x), X, config=Config(filter=["head"]), backward=False)


def test_the_layers_that_travel_in_fp8() -> None:
    with pytest.raises(ValueError, match=r"filter: 'hedd' matches no module or matmul of Model; did you mean 'head'"):
        fp8pass.fsdp.enable_fp8_all_gather(Model(), ["hedd"])


def test_statistics_of_what_is_not_watched() -> None:
    model = nn.Linear(32, 32)
    torch.compile(model, backend="fp8pass", options={"monitor": True, "lowering": "eager"})(X).sum().backward()
    with pytest.raises(
        ValueError, match=r"slots='weight.wieght': matches none of 3 watched tensors; did you mean 'weight.weight'"
    ):
        fp8pass.stats(model, "weight.wieght")


def test_matmuls_are_called_by_their_spellings() -> None:
    """`matmul_calls` lists these names without importing the passes."""
    assert {s.name for s in vars(matmul_calls).values() if isinstance(s, matmul_calls.MatmulSignature)} == MATMULS
