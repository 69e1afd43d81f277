"""Memory traffic and kernel launches around the matmuls of known blocks, as `inspect` counts them, to the byte.

A change that lowers a number also lowers it here, and updates the tables of docs/inspect.md.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest
import torch
from traffic import around_matmuls

from fp8pass.inspect.inspector import InspectedRun
from tests.helpers import ROOT
from tests.helpers.pretend_gpu import inspect_there

pytestmark = [pytest.mark.gpu_code, pytest.mark.xdist_group("pretended_gpu")]

FROM_TORCH_2_14 = not torch.__version__.startswith(("2.11.", "2.12.", "2.13."))
"""torch 2.14 and 2.15 read some rows of two blocks once more."""
FROM_TORCH_2_15 = FROM_TORCH_2_14 and not torch.__version__.startswith("2.14.")
"""torch 2.15 reads further rows again, and reduces rows and columns of two tensors of the Llama block in one launch."""

# Delayed scaling, compiled for an H100 by torch 2.11 to 2.15: (bytes, launches of Triton kernels, of ATen's).
TRAFFIC = {
    "llama_mlp": (3_322_675_598, 14, 1),
    "llama_block": (4_795_270_024, 28, 2) if FROM_TORCH_2_15 else (4_799_710_100, 30, 2),
    "gpt2_mlp": (2_638_954_894, 16, 2),
}
# The same with matmuls that quantize their result, and what the matmuls' kernels are.
FUSED = {
    "llama_mlp": (2_248_733_094, 11, 1, 3),
    "llama_block": (3_654_218_664, 25, 2, 4) if FROM_TORCH_2_15 else (3_658_658_740, 27, 2, 4),
    "gpt2_mlp": (1_690_919_334, 13, 2, 3),
}

# The same with `save_fp8`, and the bytes that are saved for the backward.
SAVED = {
    "llama_mlp": (3_322_995_252 + 28 * 2048 * FROM_TORCH_2_15, 14, 1, 444_629_097),
    "llama_block": (
        (4_964_607_202, 30, 1, 688_980_161)
        if FROM_TORCH_2_15
        else (4_968_891_630 + 7 * 2048 * FROM_TORCH_2_14, 32, 1, 688_980_161)
    ),
    "gpt2_mlp": (2_639_167_978 + 2 * 4096 * FROM_TORCH_2_14 + 14 * 4096 * FROM_TORCH_2_15, 16, 2, 302_022_741),
}

# The same for a whole step, with the update by AdamW, which writes the FP8 copies of the weights.
STEP = {
    "llama_mlp": (5_436_858_962, 21, 1),
    "llama_block": (
        (7_413_360_036, 38, 2) if FROM_TORCH_2_15 else (7_417_775_612 + 12 * 2048 * FROM_TORCH_2_14, 40, 2)
    ),
}
MLP = [4096 * 14336] * 3
WEIGHTS = {"llama_mlp": MLP, "llama_block": [*[4096 * 4096] * 2, *[4096 * 1024] * 2, *MLP]}
"""Numbers of elements of each weight, by block."""


VARIANT = pytest.mark.variant
STEPS = ["llama_mlp", pytest.param("llama_block", marks=VARIANT)]


def inspected(block: str, **options: Any) -> InspectedRun:
    """Return the run of a block as fp8pass trains it with delayed scaling."""
    (run,) = inspect_there(f"bench.blocks:{block}", run="fp8pass delayed", **options).runs
    return run


@functools.cache
def step(block: str) -> InspectedRun:
    """Return the run of a block with its update."""
    return inspected(block, optimizer="AdamW")


@functools.cache
def forward_and_backward(block: str) -> InspectedRun:
    """Return the run of a block without an update; llama_mlp's run has machine code."""
    return inspected(block, ptx=block == "llama_mlp")


@pytest.mark.parametrize("block", ["llama_mlp", "gpt2_mlp", pytest.param("llama_block", marks=VARIANT)])
def test_traffic_and_launches(block: str) -> None:
    assert around_matmuls(forward_and_backward(block)) == TRAFFIC[block]


@pytest.mark.parametrize("block", ["gpt2_mlp", *(pytest.param(b, marks=VARIANT) for b in ("llama_mlp", "llama_block"))])
def test_traffic_with_matmuls_that_quantize_their_result(block: str) -> None:
    found = inspected(block, options={"epilogues": "always"}, ptx=True)
    kernels = [k for k in found.kernels if k.name.startswith("scaled_mm_fused")]
    assert (*around_matmuls(found), len(kernels)) == FUSED[block]
    assert all(k.kind == "gemm" and k.modules and k.compiled and not k.compiled.spilled for k in kernels)


@pytest.mark.parametrize("block", ["gpt2_mlp", *(pytest.param(b, marks=VARIANT) for b in ("llama_mlp", "llama_block"))])
def test_traffic_with_what_is_saved_in_fp8(block: str) -> None:
    found = inspected(block, options={"save_fp8": True})
    assert (*around_matmuls(found), found.bytes_saved) == SAVED[block]


MEASURED = json.loads((ROOT / "bench" / "results" / "h100.json").read_text())["sections"]["llama_mlp"]["points"]
"""Points that an H100 measured, with torch 2.11."""


@pytest.mark.parametrize(
    ("run", "recipe"), [("bf16", "bf16"), pytest.param("torchao tensorwise", "torchao tensorwise", marks=VARIANT)]
)
def test_peak_memory_is_what_an_h100_allocated(run: str, recipe: str) -> None:
    peer = "torchao:tensorwise" if "torchao" in run else None
    (found,) = inspect_there("bench.blocks:llama_mlp", run=run, peer=peer).runs
    assert [found.peak_bytes] == [point["peak_bytes"] for point in MEASURED if point["recipe"] == recipe]


def test_peak_memory_of_fp8_is_what_an_h100_allocated() -> None:
    found = forward_and_backward("llama_mlp")
    assert [found.peak_bytes] == [point["peak_bytes"] for point in MEASURED if point["recipe"] == "delayed"]
    assert found.held[0].modules == "norm, gate+up"
    twice = [held.bytes for held in found.held if held.dtype == "e5m2" and held.bytes > 1e8]
    assert twice == [28672 * 8192] * 2  # the gradient of gate and up, by rows and transposed


def test_one_launch_ends_the_amaxes_of_two_layers() -> None:
    """It reads amaxes of rows or columns, and writes two scales and records, and the two scales of the next layer."""
    group = next(k for k in forward_and_backward("llama_mlp").kernels if "last stage of amax" in k.what)
    assert sorted(group.what.split(", ")) == ["last stage of amax", "records", "scales", "scales"]
    assert {"norm", "gate+up"} <= set(group.modules.split(", "))
    assert group.bytes_written == (2 * 2 + 2) * 4


def test_both_orientations_are_stored_16_bytes_at_once() -> None:
    """A scattered transposed copy would have stores of 8 bits, of single FP8 numbers, each to another sector."""
    both = [k for k in forward_and_backward("llama_mlp").kernels if re.search(r"quantize \w+ x \d", k.what)]
    assert len(both) == 5  # the norm, gate and up, down, and the gradients of the result and of SwiGLU
    for kernel in both:
        assert kernel.compiled is not None
        assert kernel.compiled.stores[0] == 128 and 8 not in kernel.compiled.stores, kernel
        assert kernel.compiled.registers <= 128 and kernel.compiled.spilled == 0, kernel


@pytest.mark.parametrize("block", STEPS)
def test_traffic_and_launches_of_a_step(block: str) -> None:
    assert around_matmuls(step(block)) == STEP[block]


@pytest.mark.parametrize("block", STEPS)
def test_a_weight_and_its_state_are_read_once_in_the_update(block: str) -> None:
    """It reads bfloat16 parameter, gradient, moments; it writes parameter, moments, FP8 copies: 8 bytes each way."""
    update = [k for k in step(block).kernels if k.graph == "update"]
    large = [k for k in update if k.bytes_read >= 2 * min(WEIGHTS[block])]
    assert all("write_weight" in k.what and "quantize e4m3 x 2" in k.what for k in large)
    assert sorted(round(k.bytes_read / 8, -3) for k in large) == sorted(round(n, -3) for n in WEIGHTS[block])
    for k in large:
        assert 0 <= k.bytes_written - k.bytes_read < 1 << 17, (
            "writes more than the amaxes of columns of tiles in addition"
        )
    others = [k for k in update if k not in large]
    assert sum(k.bytes_moved for k in others) < 2 << 20


def test_an_update_with_moments_in_fp8_and_bfloat16_parameters_moves_12_bytes() -> None:
    """It reads parameter and gradient, 2 bytes each, and moments, 1 each; it writes all but the gradient, and copies."""
    options = {"optimizer_state": "fp8", "update_rounding": "stochastic"}
    model = "tests.helpers.inspected:worthwhile"
    (found,) = inspect_there(model, run="fp8pass delayed", optimizer="AdamW", options=options).runs
    update = [k for k in found.kernels if k.graph == "update"]
    (large,) = (k for k in update if k.bytes_read > 1 << 20)
    assert round(large.bytes_read / 6, -3) == round(8192 * 8192, -3)
    assert 0 <= large.bytes_written - large.bytes_read < 1 << 20  # amaxes of parts of columns
    assert sum(k.bytes_moved for k in update if k is not large) < 2 << 20


def test_an_update_of_several_weights_reads_each_once_with_all_that_it_does() -> None:
    """Amaxes and copies of a weight lie far apart in such a graph; one kernel makes them. The check reads gradients."""
    options = {"skip_nonfinite": True, "update_rounding": "stochastic", "min_speedup": 0}
    (found,) = inspect_there(
        "tests.helpers.inspected:six", run="fp8pass delayed", optimizer="AdamW", options=options
    ).runs
    large = [k for k in found.kernels if k.graph == "update" and k.bytes_read >= 1024 * 1024]
    assert sum("quantize e4m3 x 2" in k.what for k in large) == 6
    assert sum(k.bytes_read for k in large) == pytest.approx(6 * 1024 * 1024 * (8 + 2), rel=1e-2)


@pytest.mark.parametrize("block", STEPS)
def test_no_forward_or_backward_reads_a_weight_in_bfloat16(block: str) -> None:
    """Without quantizing the weights, 2 bytes read and 2 written for each element are saved, and their amaxes."""
    kernels = [k for k in step(block).of("triton") if k.graph != "update"]
    others = [k for k in step(block).of("extern") if "attention" not in k.name]
    now, before = sum(k.bytes_moved for k in (*kernels, *others)), around_matmuls(forward_and_backward(block))[0]
    assert (before - now) / (4 * sum(WEIGHTS[block])) == pytest.approx(1, rel=1e-3)
