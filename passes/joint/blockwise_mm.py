"""Rewrite two dequantizes with a scale for each block, and a matmul, as one scaled matmul, where a kernel exists.

    before   a: bf16[M, K] = dequantize_blocks(a_q: f8e4m3fn[M, K], a_scale_inv: f32[M, K/128])
             b: bf16[K, N] = permute(dequantize_blocks(b_q: f8e4m3fn[N, K], b_scale_inv: f32[N/128, K/128]))
             y: bf16[M, N] = mm(a, b)
    after    y: bf16[M, N] = _scaled_mm(a_q, permute(b_q), a_scale_inv by columns, permute(b_scale_inv), out_dtype=bf16)

changes  nothing but rounding: scales are copied into the layouts that cuBLASLt takes, and M is padded with zeros

Blocks are 1x128, 128x128, or 1x32 with scales in e8m0, which are laid out in tiles of 128 rows by 4 blocks. A matmul
that cannot be shown to fit a kernel is declined, and multiplies the same FP8 values in high precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fp8pass.base._torch import FakeTensorMode
from fp8pass.base.names import short
from fp8pass.base.scaling import E4M3, E5M2, FP8_DTYPES
from fp8pass.gpu.trial import tiles
from fp8pass.graph.builder import Builder, compute, erase_unused, val
from fp8pass.graph.pass_base import JointContext
from fp8pass.graph.refusal import Reject
from fp8pass.hardware import Target, target_of, why_no_block_kernel
from fp8pass.passes.common.matmul_calls import BLOCK_ROWS
from fp8pass.passes.common.patterns import ADDING_MATMULS, MATMULS, at, aten, dtype_name, prims
from fp8pass.passes.common.view_ops import pad
from fp8pass.passes.joint.list_matmuls import operands
from fp8pass.passes.joint.operands import UNSCALED, Dequantize, dequantize
from fp8pass.quant.ops import DEQUANTIZE_BLOCKS

LIMITS = {
    "detected": {
        "block layout, no kernel": (
            "blocks do not lie along the summed dimension, two operands' blocks do not fit, or the device has no "
            "kernel",
            "see the table of [kernels](recipes.md#where-they-run)",
        ),
    },
}
"""Lines of docs/limits.md: see `Reject`."""


@dataclass(frozen=True)
class BlockOperand:
    """One operand as rows [R, K], where the matmul sums over K. The rows are `x_q` or its transpose.

    transposed: True if x_q has K first. size: elements per block along K. square: True if blocks have as many rows.
    """

    x_q: fx.Node
    scale_inv: fx.Node
    transposed: bool
    size: int
    square: bool

    @property
    def is_e8m0(self) -> bool:
        """True if the scales are e8m0 codes (MXFP8)."""
        return val(self.scale_inv).dtype == torch.uint8

    @property
    def rows(self) -> int:
        """The number of rows: M or N."""
        return int(val(self.x_q).shape[1 if self.transposed else 0])

    @property
    def k(self) -> int:
        """The size of the dimension that the matmul sums over."""
        return int(val(self.x_q).shape[0 if self.transposed else 1])


def blocks(dq: Dequantize, dim: int, mode: FakeTensorMode) -> BlockOperand:
    """Capture an operand with a scale for each block.

    dim: the dimension that the matmul sums over. Raises Reject if the blocks do not lie along it.
    """
    assert dq.blocks is not None
    assert isinstance(dq.x_q, fx.Node)
    node, x_q = dq.blocks, val(dq.x_q)
    if dq.scale != UNSCALED or dq.rows is not None:
        raise Reject("scale", f"{at(node)} has a scale for each block, and is scaled once more")
    scale_inv = node.args[1]
    assert isinstance(scale_inv, fx.Node)
    # kernels for 128-element blocks take e4m3 alone
    valid = FP8_DTYPES if val(scale_inv).dtype == torch.uint8 else (E4M3,)
    if dq.dtype not in valid or not x_q.is_contiguous() or not all(isinstance(size, int) for size in x_q.shape):
        what = f"{dtype_name(dq.dtype)} {list(x_q.shape)} with strides {list(x_q.stride())}"
        names = " or ".join(map(dtype_name, valid))
        raise Reject("block layout", f"{at(node)} dequantizes {what}, not {names} in rows of a fixed size")
    moved = dq.apply_views(lambda target, *args, **kwargs: compute(mode, target, args, kwargs), {})
    moved = val(moved) if isinstance(moved, fx.Node) else moved
    # movement is on fake tensors, which have no addresses: shape, strides and storage tell a view of `x_q` from a copy
    rows, columns = x_q.shape
    along = (rows, columns) if dim == -1 else (columns, rows)
    strides = (columns, 1) if dim == -1 else (1, columns)
    if moved.dim() == 3 and moved.shape[0] == 1:
        moved = moved.select(0, 0)
    if moved.dim() != 2:
        raise Reject("batches", f"{at(node)} has a scale for each block, and is one of {moved.shape[0]} matrices")
    if moved.untyped_storage()._cdata != x_q.untyped_storage()._cdata:
        raise Reject(
            "block layout", f"{at(node)} is copied to another layout before the matmul, and its scales are not"
        )
    height, width = rows // int(val(scale_inv).shape[0]), columns // int(val(scale_inv).shape[1])
    if (tuple(moved.shape), moved.stride()) == (along, strides):
        return BlockOperand(dq.x_q, scale_inv, False, width, height == width)
    if height == width and (tuple(moved.shape), moved.stride()) == (along[::-1], strides[::-1]):
        return BlockOperand(dq.x_q, scale_inv, True, width, True)
    raise Reject("block layout", f"{at(node)} has blocks of {height}x{width} that do not lie along the sum")


def match(captured: Sequence[Dequantize | None], mode: FakeTensorMode) -> tuple[BlockOperand, BlockOperand]:
    """Capture both operands of a matmul. Raises Reject if one has no scale for each block, or its blocks do not fit."""
    dq_a, dq_b = captured
    if dq_a is None or dq_b is None or dq_a.blocks is None or dq_b.blocks is None:
        raise Reject("block layout", "one operand has a scale for each block, and the other does not")
    return blocks(dq_a, -1, mode), blocks(dq_b, -2, mode)


def check(a: BlockOperand, b: BlockOperand, node: fx.Node, target: str | Target | None) -> None:
    """Raise Reject if there is no kernel for two operands with such blocks, on this device, for `node`."""
    device = val(node).device
    kind = "mxfp8" if a.is_e8m0 else "blockwise"
    sizes = f"[{a.rows}, {a.k}] by [{a.k}, {b.rows}]"
    if (a.size, a.is_e8m0) != (b.size, b.is_e8m0):
        raise Reject("block layout", f"blocks of {a.size} can't be multiplied with blocks of {b.size}")
    if reason := why_no_block_kernel(kind, device, target_of(device, target)):
        raise Reject("no kernel", f"{reason}; the same FP8 values are multiplied in high precision")
    if node.target in ADDING_MATMULS:
        raise Reject("form", f"{at(node)} adds a matrix to the product")
    if val(a.x_q).dtype is val(b.x_q).dtype is E5M2:
        raise Reject("e5m2 x e5m2", f"{sizes}: both operands are float8_e5m2, for which no GPU has a kernel")
    if b.rows % 16:
        raise Reject("block size", f"{sizes}: kernels with scales for blocks need N that is a multiple of 16")
    if kind == "mxfp8":
        return
    # cuBLASLt's documentation, "128-element 1D and 128x128 2D Block Scaling"
    if a.square and b.square:
        raise Reject("block layout", f"{sizes}: both operands have 128x128 blocks, for which there is no kernel")
    # cuBLASLt wants each column of these K/128 scales to begin at a multiple of 4, torch the columns without gaps
    if (a.square or b.square) and a.k % 512:
        raise Reject("block size", f"{sizes}: with 128x128 blocks, kernels take scales only for K a multiple of 512")
    if a.k == a.size:  # torch looks for scales of rows first, and would find [M, 1] and [1, N]
        raise Reject("block size", f"{sizes} has one block along K, which kernels take for a scale per row")


class BlockwiseMM:
    """The pass. Runs before `scaled_mm`, which handles only scales for tensors and rows."""

    name = "blockwise_mm"

    def run(self, graph: fx.Graph, context: JointContext) -> int:
        """Rewrite matmuls for which a kernel exists; note why the others with blockwise operands are declined."""
        if not any(node.target is DEQUANTIZE_BLOCKS for node in graph.nodes):
            return 0
        applied, build = 0, context.builder(graph, self.name)
        for node, gemm in context.gemms.items():
            if node.target not in MATMULS:
                continue
            captured = [_try_dequantize(operand) for operand in operands(node)]
            if all(dq is None or dq.blocks is None for dq in captured):
                continue
            try:
                a, b = match(captured, build.mode)
                check(a, b, node, context.config.target)
            except Reject as reject:
                gemm.rule, gemm.reason, gemm.quantized = reject.rule, str(reject), None not in captured
            else:
                build.replace(node, _scaled(build, node, a, b))
                gemm.status, gemm.rule, gemm.reason, gemm.fast_accum = "rewritten", "", "", False
                gemm.dtypes = short(val(a.x_q).dtype), short(val(b.x_q).dtype), gemm.dtypes[2]
                applied += 1
        erase_unused(graph)
        return applied


def _try_dequantize(operand: fx.Node) -> Dequantize | None:
    try:
        return dequantize(operand)
    except Reject:
        return None


def _scaled(build: Builder, node: fx.Node, a: BlockOperand, b: BlockOperand) -> fx.Node:
    """Emit the scaled matmul that computes `node`, before it."""

    def emit(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return build.emit(node, target, *args, **kwargs)

    def rows(x: BlockOperand) -> fx.Node:
        if not x.transposed:
            return x.x_q
        turned = emit(aten.permute.default, x.x_q, [1, 0])
        return emit(aten.clone.default, turned, memory_format=torch.contiguous_format)

    dtype, lacking = val(node).dtype, -a.rows % BLOCK_ROWS
    first, second = rows(a), rows(b)
    if lacking:
        first = pad(first, [0, 0, 0, lacking], val(first).dtype, emit)
    out_dtype = dtype if dtype in (torch.bfloat16, torch.float32) else torch.float32
    layout_a, layout_b = (tiles, tiles) if a.is_e8m0 else (_layout_of_a(a), _layout_of_b(b))
    if lacking and not a.is_e8m0:  # `tiles` fills up rows itself
        layout_a = _padded(layout_a, lacking)
    (scale_a,), (scale_b,) = build.inline(node, layout_a, a.scale_inv), build.inline(node, layout_b, b.scale_inv)
    columns = emit(aten.permute.default, second, [1, 0])
    # False: no fast accumulation, with which Hopper's tensor cores accumulate in less than float32
    y = emit(aten._scaled_mm.default, first, columns, scale_a, scale_b, None, None, out_dtype, False)
    y = emit(aten.slice.Tensor, y, 0, 0, a.rows) if lacking else y
    y = y if out_dtype == dtype else emit(prims.convert_element_type.default, y, dtype)
    return y if val(node).dim() == 2 else emit(aten.view.default, y, list(val(node).shape))


def _padded(layout: Callable[[Tensor], Tensor], lacking: int) -> Callable[[Tensor], Tensor]:
    """Return a layout of scales with as many rows more, which belong to rows of zeros."""
    return lambda scale_inv: layout(F.pad(scale_inv, (0, 0, 0, lacking), value=1.0))


def _by_columns(scale_inv: Tensor) -> Tensor:
    """Copy f32[R, C] into a layout with R contiguous."""
    return scale_inv.t().clone(memory_format=torch.contiguous_format).t()


def _layout_of_a(a: BlockOperand) -> Any:
    """Return the function that lays out scales of the first operand as cuBLASLt takes them.

    1x128 blocks: [M, K/128] by columns. 128x128 blocks: [M/128, K/128] by rows.
    """
    if not a.square:
        return _by_columns
    return (
        (lambda s: s.t().clone(memory_format=torch.contiguous_format)) if a.transposed else (lambda s: s.view(s.shape))
    )


def _layout_of_b(b: BlockOperand) -> Any:
    """Return the function that lays out scales of the second operand as cuBLASLt takes them.

    1x128 blocks: [K/128, N] by rows. 128x128 blocks: [K/128, N/128] by columns.
    """
    if not b.square:
        return lambda s: s.t().clone(memory_format=torch.contiguous_format)
    return _by_columns if b.transposed else (lambda s: s.t())
