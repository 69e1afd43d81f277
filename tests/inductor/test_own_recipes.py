"""Test that formulas of the user's are compiled: through Inductor they give the numbers of the annotated graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fp8pass.recipes import DelayedScaling
from tests.helpers.harness import annotated, compiled, sqnr
from tests.helpers.own_recipes import SteadyScaling, halfway


@pytest.mark.parametrize(
    "recipe",
    [DelayedScaling(scaling_factor_compute_algo=halfway), pytest.param(SteadyScaling(), marks=pytest.mark.variant)],
    ids=["a function", "a class"],
)
def test_the_numbers_are_those_of_the_annotated_graph(recipe: Any) -> None:
    layer, x = nn.Linear(32, 32, bias=False), torch.randn(16, 32)
    results = []
    for how, options in ((annotated, {}), (compiled, {"lowering": "inductor"})):
        run = how(copy.deepcopy(layer), recipe=recipe, **options)
        results.append([run(x * factor).detach() for factor in (1.0, 3.0, 3.0)])
    for expected, actual in zip(*results, strict=True):
        assert sqnr(expected, actual) > 100
