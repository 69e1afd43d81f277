"""Public functions with wrong arguments raise an error of one line that says what to pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fp8pass
from fp8pass import Config, ScaleState, in_qdq, out_qdq, qdq
from fp8pass.base.scaling import E4M3

X = torch.randn(4, 16)


LAYER = nn.Linear(16, 16)


FP8 = "choose one of torch.float8_e4m3fn, torch.float8_e5m2$"


def nothing() -> None:
    """Stand in for a step that is never run."""


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "quantize to float32": (
        lambda: fp8pass.quantize(X, 1.0, torch.float32),
        ValueError,
        f"dtype is torch.float32: {FP8}",
    ),
    "quantize to complex": (
        lambda: fp8pass.quantize(X, 1.0, torch.complex64),
        ValueError,
        "dtype is torch.complex64: ",
    ),
    "quantize integers": (
        lambda: fp8pass.quantize(X.long(), 1.0, E4M3),
        TypeError,
        "x is torch.int64: pass a floating",
    ),
    "quantize no tensor": (
        lambda: fp8pass.quantize([1.0], 1.0, E4M3),
        TypeError,
        "x is list: pass a floating-point tensor",
    ),
    "a scale that is text": (
        lambda: fp8pass.quantize(X, "1", E4M3),
        TypeError,
        "scale is '1': pass a number or a float32 tensor",
    ),
    "a complex scale": (lambda: fp8pass.quantize(X, torch.ones(1) * 1j, E4M3), TypeError, "scale is torch.complex64: "),
    "dequantize float32": (
        lambda: fp8pass.dequantize(X, 1.0, X.dtype),
        TypeError,
        "x_q is torch.float32: pass what fp8pass.quan",
    ),
    "dequantize to FP8": (
        lambda: fp8pass.dequantize(X.to(E4M3), 1.0, E4M3),
        ValueError,
        "choose one of torch.float32, ",
    ),
    "qdq to float32": (lambda: qdq(X, 1.0, torch.float32), ValueError, f"dtype is torch.float32: {FP8}"),
    "qdq by 0": (lambda: qdq(X, 0.0, E4M3), ValueError, "scale is 0: pass the multiplier for x"),
    "representable by 0": (
        lambda: fp8pass.cast_to_representable(X, 0),
        ValueError,
        "scale is 0: pass the multiplier for x",
    ),
    "representable complex": (
        lambda: fp8pass.cast_to_representable(X * 1j),
        TypeError,
        "x is torch.complex64: pass a floating",
    ),
    "in_qdq of integers": (lambda: in_qdq(X.long(), ScaleState()), TypeError, "the first argument is torch.int64: "),
    "out_qdq of no tensor": (
        lambda: out_qdq(3.0, ScaleState()),
        TypeError,
        "the first argument is float: pass a floating",
    ),
    "a recipe's name": (
        lambda: ScaleState("delayed"),
        ValueError,
        "amax_history_len='delayed': a number of steps, 1 or",
    ),
    "explain nothing": (
        lambda: fp8pass.explain(None),
        TypeError,
        r"explain\(\) takes a module or a function.*, not NoneType",
    ),
    "explain by a name": (
        lambda: fp8pass.explain(LAYER, X, config="rowwise"),
        TypeError,
        "config is 'rowwise': pass a fp8pass.Config",
    ),
    "bisect with a number": (
        lambda: fp8pass.bisect(nothing, 3),
        ValueError,
        "check=3: a function that is called as check",
    ),
    "bisect with an argument": (
        lambda: fp8pass.bisect(lambda x: x),  # type: ignore[misc]
        ValueError,
        r"called as step\(\): missing a required argument",
    ),
    "bisect in half a run": (
        lambda: fp8pass.bisect(nothing, max_runs=3.5),
        ValueError,
        "max_runs=3.5: a number of runs, 3",
    ),
    "calibrate on a tensor": (
        lambda: fp8pass.calibrate(LAYER, X),
        TypeError,
        r"batches is a Tensor: pass several in a list",
    ),
    "calibrate on nothing": (lambda: fp8pass.calibrate(LAYER, None), TypeError, "batches is a NoneType: pass several"),
    "train a string": (lambda: fp8pass.train_step("delayed"), TypeError, r"options by name: .*, not 'delayed'"),
    "train with a typo": (lambda: fp8pass.train_step(recipe="delay"), ValueError, "did you mean 'delayed'"),
    "state of nothing": (
        lambda: fp8pass.state(None),
        TypeError,
        r"state\(\) takes a module or a compiled module, not NoneType",
    ),
    "accumulate nothing": (lambda: fp8pass.accumulate(None).__enter__(), TypeError, r"accumulate\(\) takes a module"),
    "stats of a number": (lambda: fp8pass.stats(LAYER, slots=3), TypeError, "slots is 3: pass a name pattern"),
    "stats since a name": (
        lambda: fp8pass.stats(LAYER, since="x"),
        TypeError,
        "since is 'x': pass the number of a step",
    ),
    "gather of nothing": (lambda: fp8pass.fsdp.enable_fp8_all_gather(None), TypeError, r"takes a module, not NoneType"),
    "gather with a number": (lambda: fp8pass.fsdp.enable_fp8_all_gather(LAYER, 3), ValueError, "filter=3: a function"),
}


@pytest.mark.passes
@pytest.mark.parametrize("what", WRONG)
def test_one_line_says_what_to_pass(what: str) -> None:
    call, kind, message = WRONG[what]
    with pytest.raises(kind, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


@pytest.mark.passes
def test_straight_through_gradients_have_derivatives() -> None:
    """The gradient passes unchanged, and so does the gradient of the gradient."""
    state = ScaleState()
    for qdq_ in (lambda x: qdq(x, 2.0, E4M3), lambda x: in_qdq(x, state)):
        x = X.clone().requires_grad_()
        y = qdq_(x)
        (grad,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        assert torch.equal(grad, 2 * y) and torch.equal(second, torch.full_like(x, 2.0))


@pytest.mark.compiled
def test_a_config_is_taken_by_explain() -> None:
    assert fp8pass.explain(LAYER, X, config=Config(recipe="rowwise")).rewritten
