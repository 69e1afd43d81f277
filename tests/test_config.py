"""Options: valid ones are taken, wrong ones are named."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import fp8pass
from fp8pass.config import Config, make_config
from fp8pass.recipes import DelayedScaling, DynamicScaling, RowwiseScaling, Schedule, StaticScaling


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FP8PASS_ON_FAULT")  # which tests/conftest.py sets
    config = make_config()
    assert config == Config()
    assert config.recipe == DelayedScaling()
    assert (config.strict, config.lowering, config.target, config.mode) == (False, "inductor", None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"recpie": "delayed"},
            r"unknown fp8pass option 'recpie': choose one of 'recipe', .*; did you mean 'recipe'\?",
        ),
        (
            {"recipe": "delay"},
            r"unknown recipe 'delay': choose one of 'delayed', 'dynamic', .*; did you mean 'delayed'\?",
        ),
        ({"lowering": "triton"}, "unknown lowering 'triton': choose one of 'inductor', 'eager'"),
        ({"target": "h20"}, r"unknown target 'h20'.*did you mean 'h200'\?"),
        ({"mode": "max-autotun"}, r"unknown mode 'max-autotun': .*did you mean 'max-autotune'\?"),
        ({"recipe": fp8pass.recipes.Recipe()}, "unknown recipe"),
        ({"min_speedup": -1}, "min_speedup=-1: a ratio of times"),
        ({"config": "delayed"}, "option 'config' must be a fp8pass.Config, not str"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DelayedScaling(amax_history_len=0), "amax_history_len=0: at least one step"),
        (lambda: DelayedScaling(amax_compute_algo="mean"), "unknown amax_compute_algo 'mean'"),
        (lambda: DelayedScaling(on_nonfinite="ignore"), "unknown on_nonfinite 'ignore'"),
        (lambda: DynamicScaling(fp8_format="e5m2"), "fp8_format='e5m2': no GPU multiplies e5m2 by e5m2"),
        (lambda: DynamicScaling(fp8_format="e3m4"), "unknown fp8_format 'e3m4': choose one of 'hybrid', 'e4m3'"),
        (lambda: DelayedScaling(margin=-1), "margin=-1: a negative one makes the largest values overflow"),
        (
            lambda: RowwiseScaling(high_precision="wgrad"),
            "unknown matmul in high_precision 'wgrad': choose one of 'output'",
        ),
        (lambda: RowwiseScaling(fast_accum=("grads",)), "unknown matmul in fast_accum 'grads'"),
        (lambda: StaticScaling({"up.input": 0.0}), r"scale 0.0 of 'up.input': it must be finite and above 0"),
        (lambda: fp8pass.recipes.resolve("static"), r"the static recipe needs scales: StaticScaling\(scales\)"),
        (lambda: fp8pass.recipes.resolve({"a.*": {"*": "delayed"}}), "the recipe of 'a.*' must be one recipe"),
        (lambda: Schedule({10: "delayed"}), r"from step 0 on, not only at \[10\]"),
        (lambda: Schedule({0: Schedule({0: None})}), "a schedule within a schedule"),
    ],
)
def test_wrong_recipes(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_wrong_option_reaches_the_user() -> None:
    with pytest.raises(Exception, match="did you mean 'strict'"):
        torch.compile(lambda x: x + 1, backend="fp8pass", options={"strct": True})(torch.ones(2))


def test_config_object_and_options_together() -> None:
    config = make_config({"config": Config(recipe="dynamic", strict=True), "strict": False}, mode="max-autotune")
    assert (config.recipe, config.strict, config.mode) == (DynamicScaling(), False, "max-autotune")


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RECIPE": "none",
        "STRICT": "1",
        "MIN_SPEEDUP": "1.5",
        "FILTER": "head,*.gate",
        "DUMP": "/x",
    }.items():
        monkeypatch.setenv(f"FP8PASS_{name}", value)
    config = make_config({"min_speedup": 2})
    assert (config.recipe, config.strict, config.min_speedup) == (None, True, 2)
    assert (config.filter, config.dump_dir) == (("head", "*.gate"), "/x")
    monkeypatch.setenv("FP8PASS_STRICT", "yes")
    with pytest.raises(ValueError, match="unknown FP8PASS_STRICT 'yes': choose one of '0', '1'"):
        make_config()


@pytest.mark.parametrize(
    ("patterns", "fqn", "out"),
    [
        ("head", "head", True),
        ("head", "h", False),
        (["head"], "head", True),
        (["head"], "head.proj", True),
        (["head"], "header", False),
        (["*.gate"], "a.b.gate", True),
    ],
)
def test_filter_patterns(patterns: list[str], fqn: str, out: bool) -> None:
    assert bool(Config(filter=patterns).leaves_out(fqn, 1, 1, 1)) == out


def test_the_backend_is_found_without_importing_fp8pass() -> None:
    code = "import torch; torch.compile(torch.nn.Linear(16, 16), backend='fp8pass', options={'lowering': 'eager'})(torch.ones(4, 16))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_repr_of_a_recipe_is_python() -> None:
    recipe = DelayedScaling(margin=2, amax_compute_algo=lambda h: h.mean())
    assert repr(recipe).startswith("DelayedScaling(amax_compute_algo='test_repr_of")
    assert eval(repr(DelayedScaling(margin=2)), {"DelayedScaling": DelayedScaling}) == DelayedScaling(margin=2)
    assert fp8pass.recipes.resolve("dynamic") == DynamicScaling()
