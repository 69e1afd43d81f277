"""Capabilities and approximate speeds of GPUs and CPUs, which decide legality and layout. Predictions: roofline.py."""

from __future__ import annotations

import functools
import os
import platform

import torch

from fp8pass.base._torch import onednn_multiplies, unset_fake_temporarily
from fp8pass.base.scaling import FP8_DTYPES
from fp8pass.gpu import kernel_kinds
from fp8pass.gpu.here import published_here
from fp8pass.gpu.target import TARGETS as TARGETS
from fp8pass.gpu.target import Target as Target
from fp8pass.gpu.target import as_published as as_published
from fp8pass.gpu.target import sizes as sizes

pretended_device: torch.device | None = None
"""The device of the graphs' tensors at run time, while graphs on the CPU are compiled for a GPU that is missing."""


def target_of(device: torch.device, target: str | Target | None = None) -> Target | None:
    """Return the target to decide for; None on a CPU without one, where nothing is refused or declined by speed.

    target: the option of `Config`; the target itself, once `here.py` has found out about the GPU that is there.
    """
    if target is not None:
        return TARGETS[target] if isinstance(target, str) else target
    return published_here(device) if device.type == "cuda" else None


def why_no_fp8(device: torch.device, target: Target | None) -> str:
    """Return the reason why this device can't run `_scaled_mm`, which names the device; "" if it can."""
    device = pretended_device or device
    if device.type not in ("cpu", "cuda"):
        return f"no FP8 matmul on {device.type} devices; fp8pass supports CPU and NVIDIA GPUs from sm_89 on"
    if device.type == "cuda" and torch.version.hip is not None:
        return "no support for ROCm; fp8pass supports CPU and NVIDIA GPUs from sm_89 on"
    if target is not None and not target.has_fp8:
        return f"{target.name} is {target.sm}; FP8 matmuls need sm_89 (Ada) or later"
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
    features = sorted((name, value) for name, value in can.items() if value is True or name == "sve_max_length")
    limit = os.environ.get("ATEN_CPU_CAPABILITY")  # Inductor reads it to choose the vector length
    return repr((features, limit, [onednn_multiplies(dtype) for dtype in (torch.bfloat16, torch.float16)]))


def _cpu_scales_rows() -> bool:
    x, scale = torch.zeros(16, 16, dtype=FP8_DTYPES[0]), torch.ones(16, 1)
    try:
        torch._scaled_mm(x, x.t(), scale, scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


_CPU_SCALES_ROWS = _cpu_scales_rows()


def scales_rows(device: torch.device, target: Target | None) -> bool:
    """Return whether the device's `_scaled_mm` takes a scale for each row; on CPU by torch's version."""
    if (pretended_device or device).type == "cpu" and not _CPU_SCALES_ROWS:
        return False
    return target is None or not kernel_kinds.why_not("rowwise", target)


def why_no_grouped_kernel(device: torch.device, target: Target | None) -> str:
    """Return the reason why the device has no `torch._scaled_grouped_mm` with scales for rows; "" if it has one.

    torch's kernel is written for sm_90.
    """
    wanted = "grouped FP8 matmuls with scales for rows exist on sm_90"
    if target is None:
        return f"{wanted}, not on {(pretended_device or device).type}"
    return "" if target.capability == (9, 0) else f"{wanted}, and {target.name} is {target.sm}"


def adds_products(device: torch.device) -> bool:
    """Return whether an FP8 matmul adds to a tensor on the device: torch has `scaled_addmm_` for GPUs, from 2.15 on."""
    return (pretended_device or device).type == "cuda" and hasattr(torch.ops.aten, "_scaled_addmm_")


def why_no_block_kernel(recipe: str, device: torch.device, target: Target | None) -> str:
    """Return the reason why the device has no matmul kernel with scales for blocks; "" if it has one.

    recipe: "blockwise" or "mxfp8".
    """
    device = pretended_device or device
    if device.type != "cuda" or target is None:
        return f"{kernel_kinds.where(recipe)}, not on {device.type}"
    return kernel_kinds.why_not(recipe, target)
