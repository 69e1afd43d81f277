"""The Triton code for sm_90 computes the same as its graph, without a GPU: see triton_on_cpu.py."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.helpers.asked import ask
from tests.helpers.triton_on_cpu import convert_float

pytestmark = [pytest.mark.gpu_code, pytest.mark.xdist_group("triton_numerics")]

MATMULS = {"block": [2, 4], "gated": [3, 6], "two": [2, 4]}
"""How many matmuls the forward and the backward of each model have."""


def steps(model: str, *arguments: str) -> list[list[dict[str, Any]]]:
    """Return comparisons of the code's tensors with those of the graph op by op, for each call of a graph."""
    calls: list[list[dict[str, Any]]] = ask("tests.helpers.triton_on_cpu", model, *arguments, TRITON_INTERPRET="1")
    has_state = bool({"delayed", "test-requantize"} & set(arguments))
    for i, call in enumerate(calls):
        kinds = Counter(of["what"] for of in call)
        assert kinds["operand"] == kinds["scale"] == 2 * MATMULS[model][i % 2]
        assert kinds["output"] > 3 and kinds["input"] == ([4, 1] if has_state else [0, 0])[i % 2]
    return calls


def _version(module: Any) -> tuple[int, ...]:
    return tuple(map(int, module.__version__.split(".")[:2]))


interpreted = pytest.mark.skipif(
    _version(triton) < (3, 7) and _version(np) >= (2, 4),
    reason='the interpreter of Triton 3.6 fails on NumPy 2.4: pip install "numpy<2.4"',
)


@interpreted
@pytest.mark.parametrize(
    ("model", "recipe", "n"),
    [
        ("block", "delayed", 2),
        pytest.param("block", "rowwise", 1, marks=pytest.mark.variant),
        pytest.param("gated", "delayed", 1, marks=pytest.mark.variant),
    ],
)
def test_every_bit_is_the_graphs_if_each_op_rounds(model: str, recipe: str, n: int) -> None:
    """Compare outputs, gradients, FP8 operands, scales, state in bfloat16; delayed has a second step, with history."""
    calls = steps(model, recipe, "bfloat16", str(n), "emulate")
    assert len(calls) == 2 * n
    for call in calls:
        for of in call:
            if (of["what"], of["dtype"], of["shape"][1:]) == (
                "output",
                "float32",
                [1],
            ):  # differs in rsqrt of a mean of squares
                assert of["error"] <= 2**-22, of  # sums in another order differ by one or two float32 steps
            else:
                assert of["differing"] == 0, of


@interpreted
@pytest.mark.parametrize(
    ("model", "candidate"),
    [("block", 1), *(pytest.param(*of, marks=pytest.mark.variant) for of in [("block", 2), ("gated", 1)])],
)
def test_tiles_that_do_not_divide_a_tensor_change_no_bit(model: str, candidate: int) -> None:
    """Each candidate computes FP8 operands, scales and amaxes to the bit, also where a tile is larger than the tensor."""
    for call in steps(model, "delayed", "bfloat16", "1", "emulate", "candidate", str(candidate)):
        for of in call:
            exact = of["what"] != "output" or of["dtype"] != "float32"  # float32 sums may be in another order
            assert of["error"] <= (0 if exact else 2**-22), of


@interpreted
@pytest.mark.parametrize("model", ["two", pytest.param("gated", marks=pytest.mark.variant)])
def test_matmuls_that_quantize_their_result_change_no_bit(model: str) -> None:
    """In two steps, with history: everything in the model that can be fused is."""
    for call in steps(model, "delayed", "bfloat16", "2", "emulate", "always"):
        assert [of["shape"][0] for of in call if of["what"] == "fused matmuls"] > [0]
        for of in call:
            # a sum in another order may round a product, or a norm's statistic, to the next number
            assert of["differing"] <= (1e-3 if of["dtype"] != "float32" else 1) and of["error"] <= 1e-3, of


@interpreted
@pytest.mark.parametrize("model", ["two", pytest.param("block", marks=pytest.mark.variant)])
def test_a_kernel_quantizes_a_saturated_tensor_again(model: str) -> None:
    """In the first step no scale saturates, and the kernel does nothing; in the second all do, by a factor of four."""
    calls = steps(model, "test-requantize", "bfloat16", "2", "emulate")
    assert len(calls) == 4
    for call in calls:
        for of in call:
            if of["what"] in ("operand", "scale"):
                assert of["differing"] == 0, of


@interpreted
@pytest.mark.parametrize(("model", "layers"), [("one", 1), pytest.param("two", 2, marks=pytest.mark.variant)])
def test_an_update_that_writes_fp8_weights_and_moments(model: str, layers: int) -> None:
    """Compare AdamW's updates. Float32 differs by its rounding, because the code fuses products with sums."""
    updates = ask("tests.helpers.triton_on_cpu", model, "delayed", "float32", "2", "updates", TRITON_INTERPRET="1")
    written = [Counter(of["dtype"] for of in call if of["what"] == "input") for call in updates]
    assert [{k: n for k, n in of.items() if k != "float32"} for of in written] == [
        {"float8_e4m3fn": 2 * layers, "int64": 1},  # weights in both orientations; moments in FP8 come later
        {"float8_e4m3fn": 2 * layers + layers, "float16": layers, "int64": 1},
    ]
    for call in updates:
        for of in call:
            if of["dtype"] == "float32":
                assert of["error"] <= 4e-7, of
            elif of["dtype"] == "float16":  # a step of FP8, where float32 rounding decides a tie
                assert of["error"] <= 2**-10 and of["differing"] < 1e-3, of
            else:
                assert of["steps"] <= 1 and of["differing"] < 1e-3, of


@interpreted
def test_the_code_of_users_differs_by_float32_rounding() -> None:
    """The code that users get keeps more digits between bfloat16 ops than the graph, run op by op, does."""
    calls = steps("block", "delayed", "float32", "2")
    assert len(calls) == 4
    for call in calls:
        for of in call:
            if of["dtype"].startswith("float8"):
                assert of["steps"] <= 1 and of["differing"] < 1e-3, of  # where float32 rounding decides a tie
            elif of["what"] == "scale":
                assert of["error"] <= 2**-22, of
            else:
                assert of["error"] <= 1e-6 or of["sqnr"] > 50, of  # matmuls sum operands that differ by a step of FP8


BELOW_HALF = [2.0**-10, 1.5 * 2.0**-9, -0.0]
CASES = {
    tl.bfloat16: (torch.bfloat16, [1 + 2**-8, 1 + 3 * 2**-8, 1.999, float("inf"), float("nan")]),
    tl.float8e4nv: (torch.float8_e4m3fn, [31.64, 17.0, 19.0, 448.0, 1e9, float("-inf"), float("nan"), *BELOW_HALF]),
    tl.float8e5: (torch.float8_e5m2, [31.64, 9.0, 11.0, 57344.0, 1e9, float("-inf"), float("nan"), *BELOW_HALF]),
}
ROUNDED = {
    tl.bfloat16: [1.0, 1 + 2**-6, 2.0, float("inf"), float("nan")],
    tl.float8e4nv: [32.0, 16.0, 20.0, 448.0, 448.0, -448.0, float("nan"), 0.0, 2.0**-8, -0.0],
    tl.float8e5: [32.0, 8.0, 12.0, 57344.0, 57344.0, -57344.0, float("nan"), 2.0**-10, 1.5 * 2.0**-9, -0.0],
}


@pytest.mark.parametrize("target", CASES, ids=str)
def test_casts_are_those_of_sm_90(target: Any) -> None:
    """Casts round to nearest even and keep carries, and FP8 saturates, unlike the casts of Triton's interpreter."""
    dtype, values = CASES[target]
    codes = convert_float(np.array(values, dtype=np.float32), tl.float32, target, None)
    back = torch.from_numpy(codes.view(np.uint8).copy()).view(dtype).double()
    expected = torch.tensor(ROUNDED[target], dtype=torch.float64)
    assert torch.equal(back.nan_to_num(-1), expected.nan_to_num(-1))
    assert torch.equal(
        back.signbit(), expected.signbit() | back.isnan() & back.signbit()
    )  # the sign of NaN is not specified
    again = convert_float(codes.view(f"u{dtype.itemsize}"), target, tl.float32, None).view(np.float32)
    assert torch.equal(torch.from_numpy(again.copy()).double().nan_to_num(-1), expected.nan_to_num(-1))
