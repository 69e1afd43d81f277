"""Test files that name modules of fp8pass as they were before files moved between folders: all load, and run."""

from __future__ import annotations

import pickle
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fp8pass
from fp8pass.dump import replay
from tests.golden.make_before_moves import CONFIGS, STEPS, Dequantize, Run, arguments
from tests.helpers import ROOT
from tests.helpers.asked import ask

pytestmark = pytest.mark.tools

FILES = ROOT / "tests" / "golden" / "before_moves"


def test_a_run_with_a_frozen_weight_goes_on() -> None:
    saved = torch.load(FILES / "run.pt", weights_only=False)  # a frozen weight and a `ScaleState` are pickled by name
    losses, module = saved.pop("losses"), saved.pop("module")
    today = Run()
    assert today.train(range(STEPS)) == pytest.approx(losses, rel=1e-3)
    assert type(saved["model"]["base.weight"]) is type(today.model.base.weight.data)
    assert type(module) is fp8pass.ScaleState
    assert torch.equal(module.scale, saved["model"]["x_scale.scale"])
    resumed = Run()
    resumed.load(saved)
    assert resumed.train(range(STEPS, STEPS + 2)) == pytest.approx(today.train(range(STEPS, STEPS + 2)), rel=1e-3)


def test_pickled_recipes_and_configs() -> None:
    assert pickle.loads((FILES / "configs.pickle").read_bytes()) == CONFIGS


def test_an_exported_layer() -> None:
    """The file has the weight that the layer began with, in e4m3 with 3 bits after the leading one."""
    torch.manual_seed(0)
    layer = nn.Linear(32, 64)
    saved = load_file(FILES / "export" / "model.safetensors")
    weight = saved["0.weight"].float() * saved["0.weight_scale"]
    torch.testing.assert_close(weight, layer.weight.detach(), rtol=2**-4, atol=2**-9)


def test_an_exported_program_finds_the_ops() -> None:
    program = torch.export.load(FILES / "program.pt2")
    assert [n.target for n in program.graph.nodes if "fp8pass" in str(n.target)]
    assert torch.equal(program.module()(*arguments()), Dequantize()(*arguments()))


def results(file: Path) -> dict[str, Any]:
    made = runpy.run_path(str(file))
    return replay.run(made["GRAPH"], made["INPUTS"], made["ATTRIBUTES"])


def test_a_dump_imports_a_function_by_the_name_that_its_module_had() -> None:
    """As one of `smooth_swiglu` does."""
    lines = (
        "from fp8pass.dump import replay\nfrom fp8pass.scaling import channel_scales\nfound = channel_scales.__module__"
    )
    assert ask("tests.helpers.fresh", lines)["found"] == "fp8pass.base.scaling"


def test_dumps_run() -> None:
    before, after = (results(FILES / "dumps" / f"018.joint.scaled_mm.{which}.txt") for which in ("before", "after"))
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=1e-4, atol=1e-4)
    for file in ("007.dynamo.write_weights.after.txt", "008.dynamo.annotate.after.txt"):
        made = results(FILES / "dumps" / file)
        assert [bool(torch.isfinite(x.double()).all()) for x in made.values() if isinstance(x, Tensor)]
