"""Quantize matrices whose rows form consecutive groups, such as the tokens of each expert.

    offs    i32[G]    the row at which each group ends. A group may be empty; rows after the last group belong to none

If a matmul sums over the rows of each group, every group has a scale per column. Kernels for such a matmul require that
groups begin at multiples of 16 rows. `offs` is data, which need not satisfy that, so groups are moved apart, with rows
of zeros between them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.base import scaling

ALIGNMENT = 16
"""Groups must begin at multiples of this many FP8 elements: TMA reads from addresses that are multiples of 16 bytes.

torch's kernel asserts it on the device (`GroupMMCommon.cuh`), and a failed assertion ends the process.
"""

FALLBACK = "transformers::grouped_mm_fallback"
"""The custom op of transformers that multiplies experts if their dtype has no grouped matmul under torch.compile."""
FALLBACK_BACKWARD = f"{FALLBACK}_backward"


def in_bfloat16(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Multiply `a` [M, K] in groups by `b` [G, K, N] in bfloat16, as autocast would if it included grouped matmuls.

    The result has the dtype of `a`.
    """
    return torch._grouped_mm(a.to(torch.bfloat16), b.to(torch.bfloat16), offs=offs).to(a.dtype)


def group_of_rows(offs: Tensor, rows: int) -> Tensor:
    """Return the index of each row's group, i64[rows]; G for rows that belong to no group."""
    # right=True: the row at which a group ends belongs to the next group, and empty groups get no row
    return torch.bucketize(torch.arange(rows, device=offs.device), offs, right=True)


def room(rows: int, groups: int) -> int:
    """Return the most rows that groups can take when all begin at multiples of 16; the result is such a multiple."""
    return -(-(rows + groups * (ALIGNMENT - 1)) // ALIGNMENT) * ALIGNMENT


def _sizes(offs: Tensor) -> tuple[Tensor, Tensor]:
    """Return (rows, rows including the zeros after them) of each group, i32[G] each."""
    sizes = torch.diff(offs, prepend=torch.zeros_like(offs[:1]))
    return sizes, (sizes + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT


def ends_apart(offs: Tensor) -> Tensor:
    """Return the row at which each group ends after groups are moved apart, i32[G], including the zeros after it."""
    # torch's kernel reads the ends as int32 (`GroupMMCommon.cuh`); cumsum of int32 gives int64 by default
    return _sizes(offs)[1].cumsum(0, dtype=torch.int32)


@torch.library.custom_op("fp8pass::rows_apart", mutates_args=())
def rows_apart(offs: Tensor, rows: int) -> Tensor:
    """Return which of `rows` rows moves to each place so that groups begin at multiples of 16: i64[room], -1 for zeros.

    A custom op, so that compiled code computes it once, instead of again for each element of the rows: see
    `expand_blocks`.
    """
    return rows_apart_formula(offs, rows)


@rows_apart.register_fake
def _(offs: Tensor, rows: int) -> Tensor:
    return offs.new_empty(room(rows, len(offs)), dtype=torch.int64)


ROWS_APART = torch.ops.fp8pass.rows_apart.default


def rows_apart_formula(offs: Tensor, rows: int) -> Tensor:
    """Compute `rows_apart` in plain torch."""
    (sizes, spaces), ends, places = _sizes(offs), ends_apart(offs), room(rows, len(offs))
    # places after the last group count to it here, and get -1 below, because their rows come after its end
    group = group_of_rows(ends, places).clamp(max=len(offs) - 1)
    row = torch.arange(places, device=offs.device) - (ends - spaces)[group] + (offs - sizes)[group]
    return torch.where(row < offs[group], row, -1)


def taken(x: Tensor, row: Tensor) -> Tensor:
    """Return the rows of `x` with the indices `row`, [room, C]; zeros for -1."""
    return torch.where((row >= 0).unsqueeze(1), x[row.clamp(min=0)], 0)


def amax_of_groups(x: Tensor, offs: Tensor) -> Tensor:
    """Return `max(abs(x))` of each column of each group, f32[G, C]: 0 for an empty group, NaN if the column has a NaN.

    x: [R, C]; rows that belong to no group do not count. The reduction has two stages, of which only the first, over 16
    rows, reads `x`.
    """
    rows, columns = x.shape
    if statically_known_true(rows == 0):  # `taken` reads row 0 for -1, so there must be a row
        return torch.zeros(len(offs), columns, device=x.device)
    row: Tensor = rows_apart(offs, rows)
    blocks = taken(x, row).abs().view(-1, ALIGNMENT, columns).amax(1).float()
    group = group_of_rows(ends_apart(offs), row.shape[0])[::ALIGNMENT]
    # one more row, for the blocks of zeros after the last group, whose index is G; it is cut off at the end
    none = torch.zeros(len(offs) + 1, columns, device=x.device)
    index = group.unsqueeze(1).expand(-1, columns)
    return none.scatter_reduce(0, index, blocks, "amax", include_self=True)[:-1]


def by_row(scales: Tensor, offs: Tensor, rows: int) -> Tensor:
    """Return the scales of each row, f32[rows, C], from those of its group, f32[G, C]; any for rows of no group."""
    # rows of no group have the index G, which no scale has
    return scales[group_of_rows(offs, rows).clamp(max=len(offs) - 1)]


@torch.library.custom_op("fp8pass::dequantize_groups", mutates_args=())
def dequantize_groups(x_q: Tensor, scale_inv: Tensor, offs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x_q` f8[R, C] times the scale_inv f32[G, C] of its group and column, rounded once to `dtype`.

    A custom op, so that the `grouped_mm` pass can find the groups. If it does not become part of a scaled matmul, the
    `expand_blocks` pass replaces it by `dequantized_groups`.
    """
    return dequantized_groups(x_q, scale_inv, offs, dtype)


@dequantize_groups.register_fake
def _(x_q: Tensor, scale_inv: Tensor, offs: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x_q, dtype=dtype)


DEQUANTIZE_GROUPS = torch.ops.fp8pass.dequantize_groups.default


def dequantized_groups(x_q: Tensor, scale_inv: Tensor, offs: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `dequantize_groups` in plain torch."""
    return scaling.dequantize(x_q, by_row(scale_inv, offs, x_q.shape[0]), dtype)


# needs_exact_strides: Inductor could otherwise change the operands' strides. The fake implementation calls that of
# `torch._scaled_grouped_mm`, which requires row-major `a` and column-major `b`.
@torch.library.custom_op("fp8pass::scaled_grouped_mm", mutates_args=(), tags=(torch.Tag.needs_exact_strides,))
def _scaled_grouped_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Compute `torch._scaled_grouped_mm` in float32, for CPUs, where torch has no kernel. Rows of no group are 0."""
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
