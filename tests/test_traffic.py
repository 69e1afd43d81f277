"""What moves around the matmuls of known blocks, and in how many launches: the compiler's own count, to the byte.

A change that lowers a number lowers it here, too, and prints the tables of docs/inspect.md anew.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from traffic import BLOCKS, around_matmuls

from fp8pass.inspector import Run, inspect

# Of delayed scaling, compiled for an H100 by torch 2.11, 2.13 and 2.15: (bytes, launches of Triton kernels, of ATen's).
TRAFFIC = {
    "llama_mlp": (3_323_273_674, 14, 1),
    "llama_block": (4_968_694_792, 30, 2),
    "gpt2_mlp": (2_619_687_370, 14, 2),
}


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    """Of each block; the machine code of one."""

    def inspected(block: str) -> Run:
        return inspect(f"bench.blocks:{block}", ptx=block == "llama_mlp").run("fp8pass delayed")

    with ThreadPoolExecutor(2) as pool:  # each is a process
        return dict(zip(BLOCKS, pool.map(inspected, BLOCKS), strict=True))


@pytest.mark.parametrize("block", BLOCKS)
def test_traffic_and_launches(runs: dict[str, Run], block: str) -> None:
    assert around_matmuls(runs[block]) == TRAFFIC[block]


def test_one_launch_ends_the_amaxes_of_two_layers(runs: dict[str, Run]) -> None:
    """The amaxes of each row or column in; two scales and records out, and the two scales of the next layer."""
    group = next(k for k in runs["llama_mlp"].kernels if "last stage of amax" in k.what)
    assert sorted(group.what.split(", ")) == ["last stage of amax", "records", "scales", "scales"]
    assert {"norm", "gate+up"} <= set(group.modules.split(", "))
    assert group.bytes_written == (2 * 2 + 2) * 4


def test_both_orientations_are_stored_16_bytes_at_once(runs: dict[str, Run]) -> None:
    """A transposed copy that is scattered has stores of 8 bits: one FP8 number of a thread, each in another sector."""
    both = [k for k in runs["llama_mlp"].kernels if re.search(r"quantize \w+ x \d", k.what)]
    assert len(both) == 5  # the norm, gate and up, down, and the gradients of the result and of SwiGLU
    for kernel in both:
        assert kernel.compiled is not None
        assert kernel.compiled.stores[0] == 128 and 8 not in kernel.compiled.stores, kernel
        assert kernel.compiled.registers <= 128 and kernel.compiled.spilled == 0, kernel
