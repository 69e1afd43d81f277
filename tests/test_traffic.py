"""What moves around the matmuls of known blocks, and in how many launches: the compiler's own count, to the byte.

A change that lowers a number lowers it here, too, and prints the tables of docs/inspect.md anew.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from traffic import BLOCKS, around_matmuls

from fp8pass.inspector import Run, inspect

VERSION = ".".join(torch.__version__.split(".")[:2])
# Of delayed scaling, compiled for an H100: (bytes, launches of Triton kernels, of ATen's).
MLPS = {"llama_mlp": (3_391_103_712, 16, 1), "gpt2_mlp": (2_620_752_398, 18, 2)}
TRAFFIC = {
    "2.11": {**MLPS, "llama_block": (5_255_907_674, 35, 2)},  # its Inductor fuses one kernel more, in BF16 as well
    "2.13": {**MLPS, "llama_block": (5_524_449_630, 36, 2)},
    "2.15": {**MLPS, "llama_block": (5_524_449_630, 36, 2)},
}

pytestmark = pytest.mark.skipif(VERSION not in TRAFFIC, reason=f"no count for torch {VERSION}")


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    """Of each block; the machine code of one."""

    def inspected(block: str) -> Run:
        return inspect(f"bench.blocks:{block}", ptx=block == "llama_mlp").run("fp8pass delayed")

    with ThreadPoolExecutor(2) as pool:  # each is a process
        return dict(zip(BLOCKS, pool.map(inspected, BLOCKS), strict=True))


@pytest.mark.parametrize("block", BLOCKS)
def test_traffic_and_launches(runs: dict[str, Run], block: str) -> None:
    assert around_matmuls(runs[block]) == TRAFFIC[VERSION][block]


def test_one_launch_ends_the_amaxes_of_two_layers(runs: dict[str, Run]) -> None:
    """The amaxes of each row or column in; three scales and records out."""
    group, *_ = (k for k in runs["llama_mlp"].kernels if k.what == "last stage of amax, scales, records")
    assert group.modules == "norm, gate, up"
    assert group.bytes_written == 2 * 3 * 4


def test_both_orientations_are_stored_16_bytes_at_once(runs: dict[str, Run]) -> None:
    """A transposed copy that is scattered has stores of 8 bits: one FP8 number of a thread, each in another sector."""
    both = [k for k in runs["llama_mlp"].kernels if re.search(r"quantize \w+ x \d", k.what)]
    assert len(both) == 6  # the norm, three weights, and the gradients of the result and of SwiGLU
    for kernel in both:
        assert kernel.compiled is not None
        assert kernel.compiled.stores[0] == 128 and 8 not in kernel.compiled.stores, kernel
        assert kernel.compiled.registers <= 128 and kernel.compiled.spilled == 0, kernel
