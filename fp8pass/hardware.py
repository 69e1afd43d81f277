"""Capabilities and approximate speeds of GPUs and CPUs, which decide legality and layout. Predictions: roofline.py."""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from fp8pass._torch import onednn_multiplies, unset_fake_temporarily
from fp8pass.scaling import FP8_DTYPES

pretended_device: torch.device | None = None
"""The device of the graphs' tensors at run time, while graphs on the CPU are compiled for a GPU that is missing."""


@dataclass(frozen=True)
class Target:
    """One kind of device. Peaks are without sparsity, in operations per second; bandwidth in bytes per second.

    The other numbers say what kernels reach, for `roofline.py`: shares of a peak from 0 to 1, and times in seconds.
    Their defaults are from published measurements, the same for all devices; those of the H200 and the H100 are fitted
    to an H200 (`bench/kernel_times.py`), and the file of a measured machine replaces them (`roofline.load_machine`).
    """

    name: str
    capability: tuple[int, int]
    bf16_peak: float
    fp8_peak: float
    bandwidth: float
    # These two are fitted: bench/roofline.py prints the measurements, and docs/roofline.md has them.
    gemm_share: float = 0.64
    """The share of the arithmetic peak that a large matmul reaches, where the next two are None."""
    bf16_share: float | None = None
    """That share in BF16, and in other high precision."""
    fp8_share: float | None = None
    """That share in FP8 with one scale for each tensor, with fast accumulation."""
    # Before sm_100, whose tensor cores accumulate in float32. Fast accumulation is 1.1 to 1.2 times as fast:
    # https://github.com/pytorch/ao/issues/2377.
    slow_accum_share: float = 1 / 1.15
    """Speed of FP8 matmuls without fast accumulation, relative to those with it."""
    gemm_start: float = 4e-6
    """Fixed time of a matmul in seconds: launch, first loads, last stores, idle multiprocessors."""
    # 2.2 of 2.4 TB/s in large Triton kernels on an H100: torchao/testing/training/roofline_utils.py.
    memory_share: float = 0.92
    """The share of the bandwidth that a kernel reaches which reads and writes in order."""
    # A tiled transpose on a GH200: https://github.com/pytorch/pytorch/pull/194310. Inductor's cast with transposed copy
    # reached 1.4 of 2.4 TB/s in 2024 (0.58): https://github.com/pytorch/pytorch/issues/133242.
    transposed_share: float = 0.75
    """The share of the bandwidth that a kernel reaches which writes a transposed copy."""
    tiles_share: float = 0.75
    """The share that a kernel reaches which quantizes tile by tile, with one scale: see `tiles_source.py`."""
    rows_share: float = 0.92
    """The share of the bandwidth that a kernel reaches which reduces rows: norms, and amaxes."""
    # A Triton kernel that moves one element, on an H100: torchao/testing/training/roofline_utils.py.
    launch: float = 2e-6
    """Shortest time of any other kernel, in seconds."""

    @property
    def has_fp8(self) -> bool:
        """True if the device has FP8 tensor cores, which `_scaled_mm` needs: sm_89 (Ada) and later."""
        return self.capability >= (8, 9)


# From NVIDIA's data sheets of the A100 SXM, L40S, H100 SXM, H200 SXM and HGX B200 (sparse figures halved).
_A100 = Target("a100", (8, 0), 312e12, 312e12, 2.039e12)
_L40S = Target("sm_89", (8, 9), 362e12, 733e12, 0.864e12)
_H100 = Target(
    "h100", (9, 0), 989e12, 1979e12, 3.35e12,
    bf16_share=0.81, fp8_share=0.725, slow_accum_share=1.0, transposed_share=0.56, rows_share=0.73,
)  # fmt: skip
"""The chip of the H200 with slower memory: kernels that memory limits only in part reach more of its bandwidth.

Their two shares are the H200's, with the other bandwidth in the p-norm of `kernel_time.py`.
"""
_H200 = Target(
    "h200", (9, 0), 989e12, 1979e12, 4.8e12,
    bf16_share=0.81, fp8_share=0.725, slow_accum_share=1.0, transposed_share=0.41, rows_share=0.57,
)  # fmt: skip
# The data sheet rounds the bandwidth to 7.7 or 8 TB/s; the driver says 7680 bits at 3996 MHz, twice a cycle:
# https://github.com/pytorch/ao/pull/4002.
_B200 = Target("b200", (10, 0), 2250e12, 4500e12, 7.672e12)
MEASURED = ("bf16_share", "fp8_share", "slow_accum_share", "transposed_share", "rows_share")
"""The fields that are fitted to an H200 for the H100 and the H200."""
TARGETS = {
    "a100": _A100,
    "sm_80": _A100,
    "sm_89": _L40S,
    "h100": _H100,
    "sm_90": _H100,
    "h200": _H200,
    "b200": _B200,
    "sm_100": _B200,
}


@dataclass(frozen=True)
class Sizes:
    """Holds the numbers of a GPU's parts, and their sizes.

    multiprocessors: number of them. threads, shared, programs: most threads, bytes of shared memory and blocks that one
    of them runs at once. memory, cache: bytes of the GPU's memory and of its L2 cache. clock: in Hz, the highest.
    registers, schedulers: of one multiprocessor.
    """

    multiprocessors: int
    threads: int
    shared: int
    programs: int
    memory: int
    cache: int
    clock: float
    registers: int = 65536
    schedulers: int = 4


# From CUDA's device properties, and the table of technical specifications in the CUDA C++ Programming Guide.
_SIZES = {
    "a100": Sizes(108, 2048, 167936, 32, 80 << 30, 40 << 20, 1.41e9),
    "sm_89": Sizes(142, 1536, 102400, 24, 48 << 30, 96 << 20, 2.52e9),
    "h100": Sizes(132, 2048, 233472, 32, 80 << 30, 50 << 20, 1.98e9),
    "h200": Sizes(132, 2048, 233472, 32, 141 << 30, 50 << 20, 1.98e9),
    "b200": Sizes(148, 2048, 233472, 32, 180 << 30, 126 << 20, 1.965e9),
}
_NEAREST = {(8, 0): "a100", (8, 9): "sm_89", (9, 0): "h100", (10, 0): "b200"}


def sizes(target: Target) -> Sizes:
    """Return the sizes of a GPU; of one that is not known, those of the GPU with the nearest compute capability."""
    nearest = max((known for known in _NEAREST if known <= target.capability), default=(8, 0))
    return _SIZES.get(target.name) or _SIZES[_NEAREST[nearest]]


def as_published(target: Target) -> Target:
    """Return a target with the defaults for all that is fitted to an H200: what others measured, in older versions."""
    defaults: dict[str, Any] = {f.name: f.default for f in fields(Target)}
    return replace(target, **{name: defaults[name] for name in MEASURED})


def target_of(device: torch.device, name: str | None = None) -> Target | None:
    """Return the target to decide for; None on a CPU without `name`, where nothing is refused or declined by speed."""
    if name is not None:
        return TARGETS[name]
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    label = torch.cuda.get_device_name(device)
    for target in (_H200, _B200, _H100):
        if target.name.upper() in label.upper():
            return target
    near = _B200 if capability >= (10, 0) else _H100 if capability >= (9, 0) else _L40S
    return as_published(replace(near, name=label, capability=capability))


def why_no_fp8(device: torch.device, target: Target | None) -> str:
    """Return the reason why this device can't run `_scaled_mm`, which names the device; "" if it can."""
    device = pretended_device or device
    if device.type not in ("cpu", "cuda"):
        return f"no FP8 matmul on {device.type} devices; fp8pass supports CPU and NVIDIA GPUs from sm_89 on"
    if device.type == "cuda" and torch.version.hip is not None:
        return "no support for ROCm; fp8pass supports CPU and NVIDIA GPUs from sm_89 on"
    if target is not None and not target.has_fp8:
        major, minor = target.capability
        return f"{target.name} is sm_{major}{minor}; FP8 matmuls need sm_89 (Ada) or later"
    return ""


@functools.cache
def _saturates_on_cpu(dtype: torch.dtype) -> bool:
    """Return whether the CPU's FP8 matmuls with this output dtype saturate, by running them.

    torch's kernels behave as its cast does; oneDNN's kernels, which some processors use, overflow.
    """
    # passes run under a fake mode, whose tensors have no values
    with unset_fake_temporarily():
        large, scale = torch.full((16, 16), 448.0), torch.ones(())
        factors = [large.to(d) for d in FP8_DTYPES]
        products = [torch._scaled_mm(a, b.t(), scale, scale, out_dtype=dtype) for a in factors for b in factors]
        return all(
            bool((x.float() == torch.finfo(dtype).max).all()) for x in (torch.full((), 1e9).to(dtype), *products)
        )


def output_saturates(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether matmuls with this FP8 output dtype saturate at its largest finite value.

    On CUDA they do; on CPU it depends on dtype and processor.
    """
    return (pretended_device or device).type == "cuda" or _saturates_on_cpu(dtype)


def why_emulated(device: torch.device, a: torch.dtype, b: torch.dtype) -> str:
    """Return the reason why the device multiplies these FP8 dtypes one element at a time; "" if it doesn't.

    float32 is faster then. torch passes operands of one dtype to oneDNN if the CPU has AMX, operands of two dtypes if
    it has AMX for float16, and computes all others in float32. oneDNN has FP8 kernels if it may use AMX for float16.
    """
    can = torch.cpu.get_capabilities()
    if (pretended_device or device).type != "cpu" or not can.get("amx_int8" if a == b else "amx_fp16"):
        return ""
    if not can.get("amx_fp16"):
        return "with AMX, torch calls oneDNN, which has no FP8 kernel for processors without AMX for 16-bit floats"
    if not onednn_multiplies(torch.float16):
        return "with AMX, torch calls oneDNN, whose FP8 kernels ONEDNN_MAX_CPU_ISA disables"
    return ""


def reference_dtypes() -> tuple[torch.dtype, ...]:
    """Return which of bfloat16 and float16 torch multiplies by a reference routine on this CPU: bench/cpu_matmuls.py.

    It does so if oneDNN has no kernel for the dtype. () on CPUs other than x86, where torch has other kernels.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    return tuple(dtype for dtype in (torch.bfloat16, torch.float16) if not onednn_multiplies(dtype))


def cpu_key() -> str:
    """Return a key for torch's caches: the features and limits of this CPU that generated code depends on.

    Inductor's C++ code and `why_emulated` depend on them, and Inductor's keys lack them, as of torch 2.15. Inductor
    writes C++ for one vector length, and another CPU that takes the text from a cache compiles it again: with longer
    vectors that code writes past the end of buffers, with shorter ones it leaves elements out.
    """
    can = torch.cpu.get_capabilities()
    known = sorted((name, value) for name, value in can.items() if value is True or name == "sve_max_length")
    limit = os.environ.get("ATEN_CPU_CAPABILITY")  # Inductor reads it to choose the vector length
    return repr((known, limit, [onednn_multiplies(dtype) for dtype in (torch.bfloat16, torch.float16)]))


def _cpu_scales_rows() -> bool:
    x, scale = torch.zeros(16, 16, dtype=FP8_DTYPES[0]), torch.ones(16, 1)
    try:
        torch._scaled_mm(x, x.t(), scale, scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


_CPU_SCALES_ROWS = _cpu_scales_rows()


def scales_rows(device: torch.device, target: Target | None) -> bool:
    """Return whether the device's `_scaled_mm` takes a scale for each row: from sm_90 on; on CPU by torch's version.

    sm_89 has it too, but up to torch 2.11 it runs on the wrong stream (pytorch issue 177651).
    """
    if (pretended_device or device).type == "cpu" and not _CPU_SCALES_ROWS:
        return False
    return target is None or target.capability >= (9, 0)


def why_no_grouped_kernel(device: torch.device, target: Target | None) -> str:
    """Return the reason why the device has no `torch._scaled_grouped_mm` with scales for rows; "" if it has one.

    torch's kernel is written for sm_90.
    """
    wanted = "grouped FP8 matmuls with scales for rows exist on sm_90"
    if target is None:
        return f"{wanted}, not on {(pretended_device or device).type}"
    if target.capability != (9, 0):
        return f"{wanted}, and {target.name} is sm_{target.capability[0]}{target.capability[1]}"
    return ""


# Matmul kernels by their scales: first compute capability, first without the kernel, first CUDA version (cuBLASLt's
# documentation).
_BLOCK_KERNELS = {"blockwise": ((9, 0), (10, 0), (12, 9)), "mxfp8": ((10, 0), (12, 0), (12, 8))}


def why_no_block_kernel(recipe: str, device: torch.device, target: Target | None) -> str:
    """Return the reason why the device has no matmul kernel with scales for blocks; "" if it has one.

    recipe: "blockwise" or "mxfp8".
    """
    device = pretended_device or device
    first, end, cuda = _BLOCK_KERNELS[recipe]
    wanted = f"{recipe} kernels exist on sm_{first[0]}{first[1]} with CUDA {cuda[0]}.{cuda[1]} or later"
    if device.type != "cuda" or target is None:
        return f"{wanted}, not on {device.type}"
    if not first <= target.capability < end:
        major, minor = target.capability
        return f"{wanted}, and {target.name} is sm_{major}{minor}"
    if torch.version.cuda is not None and tuple(map(int, torch.version.cuda.split(".")[:2])) < cuda:
        return f"{wanted}, and this torch is built with CUDA {torch.version.cuda}"
    return ""
