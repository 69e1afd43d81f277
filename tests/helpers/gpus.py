"""GPUs that are pretended to be there, with properties, made-up timings and made-up trials."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from fp8pass.gpu import here, speeds, tried
from fp8pass.gpu.speeds import Speeds, expected
from fp8pass.gpu.target import TARGETS, Target, sizes
from fp8pass.gpu.tried import Tried

CUDA = torch.device("cuda", 0)


def properties_of(label: str, target: Target, **changed: Any) -> SimpleNamespace:
    """Return the properties of a GPU with this name and the sizes of a target."""
    of, (major, minor) = sizes(target), target.capability
    found = SimpleNamespace(
        name=label, major=major, minor=minor, multi_processor_count=of.multiprocessors, clock_rate=of.clock / 1e3,
        total_memory=of.memory, L2_cache_size=of.cache, shared_memory_per_multiprocessor=of.shared,
    )  # fmt: skip
    vars(found).update(changed)
    return found


LABELS = {
    "rtx4090": "NVIDIA GeForce RTX 4090", "rtx5090": "NVIDIA GeForce RTX 5090", "gb10": "NVIDIA GB10",
    "rtx_pro_6000": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "l4": "NVIDIA L4", "l40s": "NVIDIA L40S",
    "h20": "NVIDIA H20", "h100": "NVIDIA H100 80GB HBM3", "h100_pcie": "NVIDIA H100 PCIe", "h200": "NVIDIA H200",
    "gh200": "NVIDIA GH200 480GB", "b200": "NVIDIA B200", "gb200": "NVIDIA GB200", "b300": "NVIDIA B300 SXM6 AC",
    "gb300": "NVIDIA GB300", "a100": "NVIDIA A100-SXM4-80GB",
}  # fmt: skip
"""{name of a target: the name that torch gives that GPU}."""


class Pretended:
    """Answers for a pretended GPU, and counts. measured, tried: what was asked; speeds, result, error: the answers."""

    def __init__(self, target: Target) -> None:
        self.measured = 0
        self.tried: list[str] = []
        self.speeds: Speeds | Exception = expected(target)
        self.result = ""
        self.error: Exception | None = None

    def measure(self, device: torch.device, seconds: float, timer: Any = None) -> Speeds:
        """Stand in for `speeds.measure`."""
        self.measured += 1
        if isinstance(self.speeds, Exception):
            raise self.speeds
        return self.speeds

    def try_kinds(self, kinds: Sequence[str], device: str, *_: Any) -> list[Tried]:
        """Stand in for `tried.try_kinds`."""
        self.tried += kinds
        if self.error is not None:
            raise self.error
        return [Tried(kind, "a case", True, self.result) for kind in kinds]

    def faster(self, **times: float) -> None:
        """Make the GPU so many times as fast as published: bf16, fp8, copy."""
        assert isinstance(self.speeds, Speeds)
        self.speeds = replace(self.speeds, **{name: getattr(self.speeds, name) * by for name, by in times.items()})


def forget() -> None:
    """Let this process know no GPU, as after a start."""
    here._known.clear()
    here._targets.clear()
    here._loaded = None


@contextlib.contextmanager
def there(
    folder: Path, target: str | Target, label: str = "", available: bool = False, count: int = 1, **changed: Any
) -> Iterator[Pretended]:
    """Pretend that a GPU is there, within the context.

    folder: Inductor's cache folder. available: torch says so, too, and Dynamo would look for it. count: of such GPUs.
    changed: other properties.
    """
    of = TARGETS[target] if isinstance(target, str) else target
    found = properties_of(label or LABELS.get(of.name, of.name), of, **changed)
    gpu = Pretended(of)
    values: dict[str, Callable[..., Any]] = {
        "is_available": lambda: available,
        "device_count": lambda: count,
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: False,
        "get_device_properties": lambda *_: found,
        "get_device_capability": lambda *_: (found.major, found.minor),
        "get_device_name": lambda *_: found.name,
    }
    forget()
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.dict("os.environ", {"TORCHINDUCTOR_CACHE_DIR": str(folder)}))
        stack.enter_context(mock.patch.object(speeds, "measure", gpu.measure))
        stack.enter_context(mock.patch.object(tried, "try_kinds", gpu.try_kinds))
        yield gpu
    forget()
