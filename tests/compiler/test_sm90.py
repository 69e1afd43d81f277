"""The code that Inductor generates for sm_90, without a GPU: see pretend_gpu.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.other_libraries import LIBRARIES
from tests.helpers.pretend_gpu import pretend
from tests.helpers.xla_rules import on_gpu

pytestmark = [pytest.mark.gpu_code, pytest.mark.xdist_group("pretended_gpu")]

# Strides of both scales of each GEMM of the forward and of the backward.
ONE: list[Any] = [[], []]
BATCHED: list[Any] = [[1, 1], [1, 1]]  # each scale is an element of one vector, viewed as [1, 1]
SCALES: dict[tuple[str, str], list[list[Any]]] = {
    ("delayed", "block"): [[BATCHED] * 2, [BATCHED] * 4],
    ("dynamic", "block"): [[ONE] * 2, [ONE] * 4],
    ("rowwise", "block"): [  # [M, 1] and [1, N]; an N of 1000 is padded to 1008
        [[[1, 1], [1008, 1]], [[1, 1], [512, 1]]],
        [[[1, 1], [1008, 1]], [[1, 1], [1008, 1]], [[1, 1], [512, 1]], [[1, 1], [512, 1]]],
    ],
    ("blockwise", "block"): [  # column-major [M, K/128] and 128x128; row-major for 1x128 of the second operand
        [[[1, 256], [1, 4]], [[1, 256], [1, 8]]],
        [[[1, 256], [1, 4]], [[1, 256], [1, 8]], [[1, 512], [1024, 1]], [[1, 1024], [512, 1]]],
    ],
    ("mxfp8", "block"): [[[[1], [1]]] * 2, [[[1], [1]]] * 4],  # 1-D, in the order that the kernels read
    ("dynamic", "layer"): [[ONE], [ONE] * 2],
    ("rowwise", "layer"): [[[[1, 1], [1008, 1]]], [[[1, 1], [512, 1]]] * 2],
    ("blockwise", "layer"): [[[[1, 256], [1, 4]]], [[[1, 256], [1, 8]], [[1, 1024], [512, 1]]]],
    ("mxfp8", "layer"): [[[[1], [1]]], [[[1], [1]]] * 2],
}
WHOLE = [case for case in SCALES if case[1] == "block" and case[0] != "delayed"]
"""Cases that are variants: without variants, their recipes run a layer, with a norm, a bias and an activation."""


def _first_by_rows_second_by_columns(calls: list[list[Any]]) -> bool:
    """Return whether the strides are those that torch accepts, with rows that begin at multiples of 16 bytes."""
    return all(a[1] == b[0] == 1 and a[0] % 16 == b[1] % 16 == 0 for a, b, *_ in calls)


@pytest.mark.parametrize(
    ("recipe", "model"), [pytest.param(*case, marks=[pytest.mark.variant] * (case in WHOLE)) for case in SCALES]
)
def test_every_triton_kernel_compiles_and_operands_and_scales_are_laid_out_as_kernels_read_them(
    recipe: str, model: str
) -> None:
    found = pretend(recipe, model)
    for calls, scales in zip(found["strides"], SCALES[recipe, model], strict=True):
        assert sorted((call[2:] for call in calls), key=str) == sorted(scales, key=str)
        assert _first_by_rows_second_by_columns(calls)
    assert all(n > (5 if model == "block" else 2) for n in found["kernels"])
    assert found["own_ops"] == 0  # all of fp8pass's ops became generated code
    assert found["min_nan"] == 0  # triton-lang/triton#11111
    assert found["unaligned"] == []


@pytest.mark.parametrize("model", ["linear", pytest.param("block", marks=pytest.mark.variant)])
def test_every_kernel_of_a_whole_step_compiles(model: str) -> None:
    """The updates, the first and the one with FP8 moments, write FP8 weights, in both orientations, and moments."""
    found, layers = pretend("step", model), 1 if model == "linear" else 2
    assert [len(calls) for calls in found["strides"]] == [layers, 2 * layers, 0, 0]
    assert all(n > (5 if model == "block" else 1) for n in found["kernels"][:2])
    first, with_moments = found["kernels"][2:]
    assert with_moments <= first + 1  # one kernel updates a weight and its moments in FP8; one counts the updates
    assert found["own_ops"] == found["min_nan"] == 0
    assert found["unaligned"] == []


def test_rounding_of_parts_compiles() -> None:
    """Each rank's bits begin at the index of its part's first element, which is an input of the graph."""
    found = pretend("parts")
    assert len(found["kernels"]) == 1 and found["kernels"][0] > 0 and found["own_ops"] == 0


@pytest.mark.parametrize("layers", [1, pytest.param(2, marks=pytest.mark.variant)])
def test_experts_compile(layers: int) -> None:
    """Output, grad_input and grad_weight multiply row-major by column-major, of 500 tokens in 4 groups with padding."""
    found = pretend("experts", str(layers))
    up, down = [[256, 1], [131072, 1, 256], [1], [512, 1]], [[512, 1], [131072, 1, 512], [1], [256, 1]]
    over_tokens = [[560, 1], [1, 560], [1], [1]]
    if layers == 1:  # its grad_input has the strides of the second layer's output
        assert found["strides"] == [[up], [down, over_tokens]]
    else:
        assert found["strides"] == [[up, down], [up, down, over_tokens, over_tokens]]
    assert all(n > (5 if layers == 2 else 2) for n in found["kernels"])
    assert found["own_ops"] == found["min_nan"] == 0


@pytest.mark.parametrize(("what", "op"), [("grad", "added_gradient"), ("main_grad", "_scaled_addmm_")])
def test_weight_gradients_are_added_in_the_matmul(what: str, op: str) -> None:
    """From torch 2.15 on, in place, each by one call; on earlier versions the calls are those without."""
    adding = (2 if what == "grad" else 1) if hasattr(torch.ops.aten, "_scaled_addmm_") else 0
    assert pretend("accumulating", what) == {"_scaled_mm": 4 - adding, **({op: adding} if adding else {})}


@pytest.mark.parametrize(("which", "slices"), [("columns", 4), ("rows", 2)])
def test_gradients_of_slices_are_written_into_that_of_their_table(which: str, slices: int) -> None:
    """Inductor before torch 2.15 returns memory that nobody wrote, if one kernel sums rows and columns: pytorch#193061."""
    assert pretend("slices", which) == [256 * i for i in range(slices)]


def test_a_random_number_is_that_of_its_element_in_every_kernel() -> None:
    """Torch 2.13 draws others in kernels with one dimension than in those with two: pytorch#198333."""
    assert pretend("dropped") == [False, False]


SIMILAR = [pytest.mark.variant]
OF_LIBRARIES = [pytest.param(n, marks=SIMILAR * (n == "flash, positions first")) for n in LIBRARIES]


@pytest.mark.parametrize("name", OF_LIBRARIES)
def test_save_fp8_keeps_the_strides_of_what_other_libraries_read(name: str) -> None:
    """Strides alone are shown: whether a kernel gives right numbers with them, only a GPU shows."""
    found = pretend("libraries", name)
    saved = found["saved"]
    assert saved["forward"] and saved["backward"]
    if "plain" in found:
        for part in ("forward", "backward"):
            assert [call["reads"] for call in saved[part]] == [call["reads"] for call in found["plain"][part]]
    else:
        (forward,), (backward,) = saved["forward"], saved["backward"]
        _, *inputs, result = backward["reads"][:5]  # after the gradient
        assert inputs == forward["reads"]
        assert result == forward["makes"]


EVERY = ["first", pytest.param("every", marks=pytest.mark.variant)]
"""Cases of XLA's rules: the first of each rule that a GPU has a matmul for, or every one."""


@pytest.mark.parametrize("which", EVERY)
def test_movement_compiles(which: str) -> None:
    calls = [call for of_graph in pretend("rules", which)["strides"] for call in of_graph]
    cases = on_gpu(which).items()
    chosen = [c for name, c in cases if name[0] != "E" and c.target is None and not c.dynamic]
    assert len({name.split()[0] for name, c in cases if name[0] != "E" and c.calls}) > 30
    assert len(calls) == sum(c.calls for c in chosen)
    assert _first_by_rows_second_by_columns(calls)


READS = 2 if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12) else 1
"""Kernels that read a large product to quantize it and for its amax: 2.11 splits the reduction by itself."""
LARGE = {
    "E7 amax and quantize, large": READS + 1,  # one more for the last stage of the amax
    "E8 amax of the scaled, large": READS + 1,
    "E9 own amax, large": 3,  # quantizing has to wait for the amax
    "E9 amax of rows, large": 1,
}


@pytest.mark.parametrize("which", EVERY)
def test_epilogues_compile_and_what_stays_outside_the_matmul_is_one_kernel(which: str) -> None:
    """No kernel runs after a matmul whose epilogue was folded; otherwise one kernel runs all of the epilogue."""
    found = pretend("epilogues", which)
    small = {name: case for name, case in on_gpu(which).items() if name[0] == "E"}
    assert set(found) == {*small, *(name for name in LARGE if name.removesuffix(", large") in small)}
    for name, of in found.items():
        folded = name in small and (small[name].after in ((), ("view",)) or name == "E5 on CPU")
        assert of["after"] == LARGE.get(name, 0 if folded else 1), (name, of)
        (calls,) = of["strides"]
        assert len(calls) == (small[name].calls if name in small else 1), name
        assert _first_by_rows_second_by_columns(calls), name
