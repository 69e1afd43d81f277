"""Matrices in groups of rows, as experts have them: the tokens of each lie behind those of the one before.

    offs    i32[G]    where each group ends. A group may be empty; rows behind the last one belong to none of them

Where a matmul sums over the rows of each group, every group has a scale per column. And kernels want groups to begin at
multiples of 16 rows there, which `offs`, data, need not do: so they are moved apart, with zeros in between.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8pass import scaling

ALIGNMENT = 16
"""FP8 elements, of one byte, at multiples of which TMA can begin to read: kernels assert it, and end the process."""

FALLBACK = "transformers::grouped_mm_fallback"
"""The custom op in which transformers multiplies experts where torch.compile takes no grouped matmul of their type."""
FALLBACK_BACKWARD = f"{FALLBACK}_backward"


def in_bfloat16(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Multiply [M, K] in groups by [G, K, N] in bfloat16, as autocast would if it knew grouped matmuls.

    The result has the type of `a`.
    """
    return torch._grouped_mm(a.to(torch.bfloat16), b.to(torch.bfloat16), offs=offs).to(a.dtype)


def group_of_rows(offs: Tensor, rows: int) -> Tensor:
    """The group of each row, i64[rows]; G where it belongs to none."""
    return torch.bucketize(torch.arange(rows, device=offs.device), offs, right=True)


def room(rows: int, groups: int) -> int:
    """How many rows there are at most when all groups begin at multiples of 16; such a multiple itself."""
    return -(-(rows + groups * (ALIGNMENT - 1)) // ALIGNMENT) * ALIGNMENT


def _sizes(offs: Tensor) -> tuple[Tensor, Tensor]:
    """Of each group i32[G]: its rows, and those with the zeros behind them."""
    sizes = torch.diff(offs, prepend=torch.zeros_like(offs[:1]))
    return sizes, (sizes + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT


def ends_apart(offs: Tensor) -> Tensor:
    """Where groups end that are moved apart, i32[G], with the zeros behind them."""
    return _sizes(offs)[1].cumsum(0, dtype=torch.int32)


@torch.library.custom_op("fp8pass::rows_apart", mutates_args=())
def rows_apart(offs: Tensor, rows: int) -> Tensor:
    """Which of `rows` rows is to be where, so that each group begins at a multiple of 16: i64[room], -1 for a zero.

    An op of its own, so that compiled code computes it once, and not anew for each element of the rows: see
    `expand_blocks`.
    """
    return rows_apart_formula(offs, rows)


@rows_apart.register_fake
def _(offs: Tensor, rows: int) -> Tensor:
    return offs.new_empty(room(rows, len(offs)), dtype=torch.int64)


ROWS_APART = torch.ops.fp8pass.rows_apart.default


def rows_apart_formula(offs: Tensor, rows: int) -> Tensor:
    """The formula of `rows_apart`."""
    (sizes, spaces), ends, places = _sizes(offs), ends_apart(offs), room(rows, len(offs))
    group = group_of_rows(ends, places).clamp(max=len(offs) - 1)
    row = torch.arange(places, device=offs.device) - (ends - spaces)[group] + (offs - sizes)[group]
    return torch.where(row < offs[group], row, -1)


def taken(x: Tensor, row: Tensor) -> Tensor:
    """The rows of `x` that `row` names, [room, C]; zeros for -1."""
    return torch.where((row >= 0).unsqueeze(1), x[row.clamp(min=0)], 0)


def amax_of_groups(x: Tensor, offs: Tensor) -> Tensor:
    """`max(abs(x))` of each column of each group, f32[G, C]: 0 of an empty one, NaN where there is one.

    x: [R, C]. Reads of `x` what belongs to a group. In two stages, of which the first, over 16 rows, reads `x` once.
    """
    rows, columns = x.shape
    if rows == 0:  # there is none that `taken` could read
        return torch.zeros(len(offs), columns, device=x.device)
    row: Tensor = rows_apart(offs, rows)
    blocks = taken(x, row).abs().view(-1, ALIGNMENT, columns).amax(1).float()
    group = group_of_rows(ends_apart(offs), row.shape[0])[::ALIGNMENT]
    none = torch.zeros(len(offs) + 1, columns, device=x.device)
    index = group.unsqueeze(1).expand(-1, columns)
    return none.scatter_reduce(0, index, blocks, "amax", include_self=True)[:-1]


def by_row(scales: Tensor, offs: Tensor, rows: int) -> Tensor:
    """The scales f32[G, C] of groups for each of their rows, f32[rows, C]; for rows of no group, any."""
    return scales[group_of_rows(offs, rows).clamp(max=len(offs) - 1)]


@torch.library.custom_op("fp8pass::dequantize_groups", mutates_args=())
def dequantize_groups(x_q: Tensor, scale_inv: Tensor, offs: Tensor, dtype: torch.dtype) -> Tensor:
    """`x_q` f8[R, C] times the scale of its group and column, f32[G, C], rounded once to `dtype`.

    An op of its own, so that the detector knows the groups; where it does not become a scaled matmul, it becomes
    `dequantized_groups`.
    """
    return dequantized_groups(x_q, scale_inv, offs, dtype)


@dequantize_groups.register_fake
def _(x_q: Tensor, scale_inv: Tensor, offs: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x_q, dtype=dtype)


DEQUANTIZE_GROUPS = torch.ops.fp8pass.dequantize_groups.default


def dequantized_groups(x_q: Tensor, scale_inv: Tensor, offs: Tensor, dtype: torch.dtype) -> Tensor:
    """The formula of `dequantize_groups`."""
    return scaling.dequantize(x_q, by_row(scale_inv, offs, x_q.shape[0]), dtype)


# Inductor would lay operands out as it likes, and `torch._scaled_grouped_mm` is asked for the result's shape
@torch.library.custom_op("fp8pass::scaled_grouped_mm", mutates_args=(), tags=(torch.Tag.needs_exact_strides,))
def _scaled_grouped_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`torch._scaled_grouped_mm` in float32, where torch has none: on CPU. Rows of no group are 0."""
    a, b = a.float(), b.float()
    if offs is None:
        return ((a * scale_a.unsqueeze(-1)) @ (b * scale_b.unsqueeze(-2))).to(dtype)
    ends = offs.tolist()
    groups = list(enumerate(zip([0, *ends[:-1]], ends, strict=True)))
    if b.dim() == 2:
        scale_a, scale_b = scale_a.view(len(ends), -1, 1), scale_b.view(len(ends), 1, -1)
        return torch.stack([(a[:, i:j] * scale_a[g]) @ (b[i:j] * scale_b[g]) for g, (i, j) in groups]).to(dtype)
    y = [(a[i:j] * scale_a[i:j, None]) @ (b[g] * scale_b[g]) for g, (i, j) in groups]
    return F.pad(torch.cat(y), (0, 0, 0, len(a) - ends[-1])).to(dtype)


@_scaled_grouped_mm.register_fake
def _(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
    return torch._scaled_grouped_mm(a, b, scale_a, scale_b, offs, out_dtype=dtype)


SCALED_GROUPED_MM_ON_CPU = torch.ops.fp8pass.scaled_grouped_mm.default
