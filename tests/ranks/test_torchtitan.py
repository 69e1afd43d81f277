"""Test that a resumed run of torchtitan's Trainer is equal to the bit, in its parallel layouts.

These tests run where torchtitan is installed. For several ranks, torchtitan 0.3 needs a torch newer than 2.13.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.helpers.torchrun import run

pytest.importorskip("torchtitan")

LAYOUTS = {
    "one": (1, "--training.global_batch_size=4"),
    "fsdp": (2, "--training.global_batch_size=8"),
    "ddp": (2, "--parallelism.data_parallel_shard_degree=1", "--parallelism.data_parallel_replicate_degree=2"),
    "tensor": (2, "--parallelism.tensor_parallel_degree=2", "--training.global_batch_size=4"),
    "pipeline": (2, "--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=1F1B"),
}
"""The number of ranks, and torchtitan's flags. Steps have two microbatches where a flag says how many sequences."""


def saved(folder: Path) -> dict[str, Any]:
    """Return all that a checkpoint holds, but the position in the data, by name."""
    dcp_to_torch_save(folder, folder / "all.pt")
    tree = torch.load(folder / "all.pt", weights_only=False)
    tree.pop("dataloader")
    found = {}
    for name, value in tree.items():
        found.update({f"{name}.{key}": x for key, x in value.items()} if isinstance(value, dict) else {name: value})
    return found


def are_equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.variant
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_is_equal_to_the_bit(layout: str, tmp_path: Path) -> None:
    ranks, *flags = LAYOUTS[layout]
    if ranks > 1 and not hasattr(dist, "set_timeout"):
        pytest.skip("torchtitan 0.3 on several ranks needs a torch newer than 2.13")
    command = ("-m", "tests.helpers.titan_runs", str(tmp_path), *flags)
    done = run(ranks, *command)
    assert done.returncode == 0, done.stderr[-4000:]
    whole = saved(tmp_path / "checkpoint" / "step-4")
    shutil.rmtree(tmp_path / "checkpoint" / "step-4")
    done = run(ranks, *command, "--checkpoint.load_step=2")
    assert done.returncode == 0, done.stderr[-4000:]
    resumed = saved(tmp_path / "checkpoint" / "step-4")
    assert whole["fp8.steps"] == 4  # whatever the number of microbatches
    assert sum(name.startswith("fp8.layers") for name in whole) == 84
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if not are_equal(whole[name], resumed[name])] == []
