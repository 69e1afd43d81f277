"""Options: valid ones are accepted, and errors name wrong ones."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fp8pass
from fp8pass.base.fields import RULE
from fp8pass.options.config import Config, Reduction, make_config
from fp8pass.recipes import (
    ByModule,
    DelayedScaling,
    DynamicScaling,
    MXFP8Scaling,
    RowwiseScaling,
    Schedule,
    StaticScaling,
)

pytestmark = pytest.mark.passes


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FP8PASS_ON_FAULT")  # tests/conftest.py sets it
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
        ({"target": "h102"}, r"unknown target 'h102'.*did you mean 'h100'\?"),
        ({"mode": "max-autotun"}, r"unknown mode 'max-autotun': .*did you mean 'max-autotune'\?"),
        ({"recipe": fp8pass.recipes.Recipe()}, "unknown recipe"),
        ({"min_speedup": -1}, "min_speedup=-1: a ratio of times"),
        ({"config": "delayed"}, "option 'config' must be a fp8pass.Config, not str"),
        ({"min_speedup": float("nan")}, "min_speedup=nan: a ratio of times, 0"),
        ({"min_speedup": True}, "min_speedup=True: a ratio of times, 0"),
        ({"strict": "false"}, "strict='false': True or False"),
        ({"strict": 1}, "strict=1: True or False"),
        ({"merge_siblings": "auto"}, "merge_siblings='auto': True, False or None"),
        ({"skip_nonfinite": None}, "skip_nonfinite=None: True or False"),
        ({"reduce_amax": "no"}, "reduce_amax='no': True or False"),
        ({"reduce_amax_interval": 1.5}, "reduce_amax_interval=1.5: a number of steps, 1 or more"),
        ({"monitor_interval": 0}, "monitor_interval=0: a number of steps, 1 or more"),
        ({"monitor_steps": True}, "monitor_steps=True: a number of steps, 1 or more"),
        ({"monitor": 1}, "monitor=1: True, False, or patterns of slots"),
        ({"filter": [nn.Linear]}, r"filter=\[<class .*Linear'>\]: a function \(fqn, M, K, N\) -> bool, or patterns"),
        ({"filter": lambda fqn: True}, r"called as filter\(fqn, M, K, N\): too many positional arguments"),
        ({"dump_dir": 3}, "dump_dir=3: the path of a folder, or None"),
        ({"target": 90}, "unknown target 90: choose one of"),
        ({"mode": True}, "unknown mode True: choose one of"),
        ({"weight_cache": True}, "unknown weight_cache True: choose one of 'off', 'fp8', 'fp8[+]transpose'"),
        ({"optimizer_state": None}, "unknown optimizer_state None: choose one of 'off', 'fp8', 'fp8[+]float16'"),
        ({"update_rounding": True}, "unknown update_rounding True: choose one of 'nearest', 'stochastic'"),
        ({"amax_group": 3}, "amax_group=3: a torch.distributed.ProcessGroup or DeviceMesh, or None"),
        ({"recipe": DelayedScaling}, r"recipe=DelayedScaling is a class; write DelayedScaling\("),
        ({"recipe": {}}, r"recipe={}: needs a name pattern, such as {'\*': 'delayed'}"),
        ({"recipe": {nn.Linear: "delayed"}}, "keys are module name patterns"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"second": "int8"}, "unknown second 'int8': choose one of 'e4m3', 'e5m2', 'float16'"),
        ({"block": 8}, "block=8: a number of elements, 16 or more, or None"),
        ({"expand": True}, "expand=True chooses a power for each block: set block=256, too"),
        ({"second": "float16", "block": 256}, "block is for moments in FP8"),
        ({"blocks": 256}, "unknown Moments field 'blocks'.*did you mean 'block'"),
    ],
)
def test_wrong_moments(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fp8pass.Moments(**fields)


def test_each_field_of_options_has_a_rule() -> None:
    recipes = [
        r for r in vars(fp8pass.recipes).values() if isinstance(r, type) and issubclass(r, fp8pass.recipes.Recipe)
    ]
    for kind in (Config, Reduction, ByModule, fp8pass.Moments, *recipes):
        assert all(RULE in field.metadata for field in fields(kind)), kind


def test_numpy_numbers_are_accepted() -> None:
    config = Config(strict=np.True_, min_speedup=np.float32(2), monitor_interval=np.int64(3), dump_dir=Path("x"))
    kept = config.strict, config.min_speedup, config.monitor_interval, config.dump_dir
    assert kept == (True, 2.0, 3, "x") and [type(x) for x in kept] == [bool, float, int, str]
    assert repr(DelayedScaling(margin=np.int32(2))) == "DelayedScaling(margin=2)"
    assert StaticScaling({"up.input": np.float32(2)}).scales == {"up.input": 2.0}


def test_a_config_and_options_that_have_no_such_field() -> None:
    with pytest.raises(ValueError, match=r"unknown Config field 'recpie': choose one of .*; did you mean 'recipe'\?"):
        Config(recpie="delayed")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"options='delayed': a dict of fields of fp8pass\.Config"):
        make_config("delayed")  # type: ignore[arg-type]


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
        (lambda: Schedule({10: "delayed"}), r"must begin at step 0, and this one has the steps \[10\]"),
        (lambda: Schedule({0: Schedule({0: None})}), "a schedule within a schedule"),
        (lambda: Schedule({0: None, 1.5: "delayed"}), "step=1.5: a schedule's keys are numbers of steps, whole"),  # type: ignore[dict-item]
        (lambda: Schedule({"0": None}), "step='0': a schedule's keys"),  # type: ignore[dict-item]
        (lambda: Schedule([(0, None)]), r"Schedule\(\[\(0, None\)\]\): a dict {first step: recipe}"),
        (lambda: DelayedScaling(margin=1.5), "margin=1.5: a whole number, 0 or more"),
        (
            lambda: DelayedScaling(amax_history_len="delayed"),
            "amax_history_len='delayed': a number of steps, 1 or more",
        ),
        (lambda: DelayedScaling(amax_compute_algo=lambda: 1), r"called as amax_compute_algo\(f32\[H\]\)"),  # type: ignore[misc]
        (lambda: RowwiseScaling(power_of_2="no"), "power_of_2='no': True or False"),
        (lambda: RowwiseScaling(fast_accum=True), "fast_accum=True: one or several of 'output', 'grad_input'"),
        (lambda: RowwiseScaling(high_precison=()), "unknown RowwiseScaling field 'high_precison'.*'high_precision'"),  # type: ignore[call-arg]
        (lambda: StaticScaling("3"), "scales='3': a dict {slot or name pattern: scale}, as fp8pass.calibrate"),
        (lambda: StaticScaling(True), "scales=True: a dict"),
        (lambda: StaticScaling(-1.0), r"scale -1.0 of '\*': it must be finite and above 0"),
        (lambda: StaticScaling(1.0, fp8_format="e5m2"), "no GPU multiplies e5m2 by e5m2"),
        (lambda: MXFP8Scaling("e5m2"), "no GPU multiplies e5m2 by e5m2"),
        (
            lambda: StaticScaling({"up.input": torch.ones(2)}),
            "of 'up.input': it must be a number, or a tensor with one element",
        ),
        (lambda: StaticScaling({"up.input": True}), "scale True of 'up.input': it must be a number"),
        (lambda: ByModule({"*": "delayed"}), r"rules={'\*': 'delayed'}: pairs \(name pattern, recipe\)"),
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
    for text in ("True", "true", "1"):
        monkeypatch.setenv("FP8PASS_STRICT", text)
        monkeypatch.setenv("FP8PASS_MONITOR", text)
        assert make_config().strict is make_config().monitor is True
    monkeypatch.setenv("FP8PASS_STRICT", "")  # counts as unset
    assert make_config().strict is False
    monkeypatch.setenv("FP8PASS_MIN_SPEEDUP", "fast")
    with pytest.raises(ValueError, match="FP8PASS_MIN_SPEEDUP='fast': a ratio of times"):
        make_config()


def test_a_warning_names_an_unknown_variable_and_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8PASS_RECPIE", "rowwise")
    with pytest.warns(UserWarning, match="FP8PASS_RECPIE is unknown, and ignored; did you mean 'FP8PASS_RECIPE'"):
        make_config()


def test_a_variable_comes_before_the_default_of_a_train_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fp8pass.train_step(print).config.weight_cache == "fp8+transpose"
    monkeypatch.setenv("FP8PASS_WEIGHT_CACHE", "off")
    assert fp8pass.train_step(print).config.weight_cache == "off"


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


@pytest.mark.variant
def test_the_backend_is_found_without_importing_fp8pass() -> None:
    """Without variants, test_versions.py tests this, with a torch that claims to be newer; this runs a new process."""
    code = "import torch; torch.compile(torch.nn.Linear(16, 16), backend='fp8pass', options={'lowering': 'eager'})(torch.ones(4, 16))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_repr_of_a_recipe_is_python() -> None:
    recipe = DelayedScaling(margin=2, amax_compute_algo=lambda h: h.mean())
    assert repr(recipe).startswith("DelayedScaling(amax_compute_algo='test_repr_of")
    assert eval(repr(DelayedScaling(margin=2)), {"DelayedScaling": DelayedScaling}) == DelayedScaling(margin=2)
    assert fp8pass.recipes.resolve("dynamic") == DynamicScaling()
