"""Dumps of training steps, for the files test_dump.py of several tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.harness import compiled, without_caches
from tests.helpers.models import make

FP8 = 0.3
"""The largest relative distance of gradients of tensors that were quantized twice or more."""


def files(folder: Path, pattern: str = "*") -> list[str]:
    return sorted(str(f.relative_to(folder)) for f in folder.rglob(pattern) if f.is_file())


def dumped(model: nn.Module, x: Tensor, folder: Path, **options: Any) -> Path:
    """Return `folder`, after two training steps have written their dumps to it."""
    run = compiled(model, dump_dir=str(folder), **options)
    for _ in range(2):
        run(x).sum().backward()
    return folder


@pytest.fixture(scope="module")
def of_block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the dumps of a `Block`."""
    with without_caches():
        return dumped(make(), torch.randn(16, 32), tmp_path_factory.mktemp("block"))
