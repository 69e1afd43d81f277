"""Write the Triton kernel that quantizes a tensor again, in place, if a flag on the device is set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fp8pass.base._torch import TRITON_IMPORTS, PyCodeCache, triton_type
from fp8pass.base.scaling import fp8_max

NAME = "requantize_if_saturated"
"""The kernel's name; Inductor appends a number."""
SIDE = 64
"""Rows and columns of a tile."""


@dataclass(frozen=True)
class Requantize:
    """A kernel for a matrix [rows, columns]. dtype: of FP8. transposed: True if it writes a transposed copy too."""

    rows: int
    columns: int
    dtype: torch.dtype
    transposed: bool
    programs: int

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return -(-self.rows // SIDE) * -(-self.columns // SIDE)


def kernel_of(requantize: Requantize) -> Any:
    """Return the kernel, a `triton.JITFunction`, with the argument as its attribute `requantize`.

    It takes x [rows, columns], the scale f32[], the flag b8[], and one or two outputs.
    """
    kernel = getattr(PyCodeCache.load(source_of(requantize)), NAME)
    kernel.requantize = requantize
    return kernel


def source_of(requantize: Requantize) -> str:
    """Return the source of the kernel, a Python module."""
    columns = requantize.columns
    limit, across = fp8_max(requantize.dtype), -(-columns // SIDE)
    outputs = "out0, out1" if requantize.transposed else "out0"
    lines = [
        "@triton.autotune([triton.Config({}, num_warps=8, num_stages=2)], [])",
        "@triton.jit",
        f"def {NAME}(x, scale, flag, {outputs}):",
        "    if tl.load(flag) != 0:",
        "        by = tl.load(scale)",
        f"        for tile in range(tl.program_id(0), {requantize.tiles}, {requantize.programs}):",
        f"            row = tile // {across} * {SIDE} + tl.arange(0, {SIDE})[:, None]",
        f"            column = tile % {across} * {SIDE} + tl.arange(0, {SIDE})[None, :]",
        f"            inside = (row < {requantize.rows}) & (column < {columns})",
        # int64: the matrix may have 2**31 elements or more, and Triton's indices are int32
        f"            scaled = tl.load(x + row.to(tl.int64) * {columns} + column, inside).to(tl.float32) * by",
        # Inductor's helpers keep NaN, which tl.minimum and tl.maximum do not
        f"            clamped = triton_helpers.minimum(triton_helpers.maximum(scaled, -{limit}), {limit})",
        f"            q = clamped.to({triton_type(requantize.dtype)})",
        f"            tl.store(out0 + row.to(tl.int64) * {columns} + column, q, inside)",
    ]
    if requantize.transposed:
        lines.append(f"            tl.store(out1 + column.to(tl.int64) * {requantize.rows} + row, q, inside)")
    return TRITON_IMPORTS + "\n\n" + "\n".join(lines) + "\n"
