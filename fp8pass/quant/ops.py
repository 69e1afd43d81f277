"""Quantize-dequantize (QDQ) as differentiable torch functions, which users call and the annotate pass inserts.

The annotate pass inserts calls of these functions into a graph. Run eagerly they are the numerical reference; traced by
AOTAutograd they become the plain ATen quantize and dequantize that the `scaled_mm` pass looks for, by way of one op for
each quantizer: see `one_op.py`. So nothing here may compute anything else when it is being compiled.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8pass.base import scaling
from fp8pass.quant import grouped, moments, random_bits, sharded
from fp8pass.quant.kernel_ops import ROUNDED, SATURATED
from fp8pass.quant.one_op import QUANTIZER, Elementwise, is_traced
from fp8pass.quant.random_bits import keys_of as keys_of
from fp8pass.quant.sharded import Division, amax_over, copy_of, on_part, part_of, recorded_over, with_part
from fp8pass.recipes import (
    BlockwiseScaling,
    Calibration,
    DelayedScaling,
    DynamicScaling,
    MXFP8Scaling,
    RowwiseScaling,
    StaticScaling,
    next_scale_of,
    scale_of,
)

Function = TypeVar("Function", bound=Callable[..., Any])


def like_first(function: Function) -> Function:
    """Mark a function whose result is like its first argument: only matmuls read what it quantizes."""
    function.is_like_first = True  # type: ignore[attr-defined]
    return function


def in_forward_only(function: Function) -> Function:
    """Mark a function that a repeated forward leaves out, because it has done its work in the first."""
    function.is_in_forward_only = True  # type: ignore[attr-defined]
    return function


def writing(
    *names: str, rows_of: Mapping[str, int] | None = None, by_row: bool = False
) -> Callable[[Function], Function]:
    """Mark a function of an update by the parameters that it writes, in place: tensors, or lists of them.

    rows_of: {parameter of which it reads one row: along this dimension}; its parameter `index` says which. by_row: True
    if it treats each row by itself, with the element of its lists that has the row's number; None for none.
    """

    def marked(function: Function) -> Function:
        function.writes, function.rows_of, function.by_row = names, rows_of or {}, by_row  # type: ignore[attr-defined]
        return function

    return marked


class SlotTensors(NamedTuple):
    """The state of delayed scaling for the T slots of one graph. All tensors are mutated in place.

    The first F slots belong to tensors quantized in the forward, the next W to weights whose FP8 copies are cached
    between updates, the other T - F - W to gradients.

        scale               f32[T]       0 until the slot has an amax
        amax_history        f32[H, T]    newest at row 0
        amax_forward        f32[F]       running amax of the step; -1 if nothing is recorded
        amax_backward       f32[T-F-W]   as amax_forward
        held                b8[T]        True if the step of this slot continues, so that it is not rolled
        amax_weights        f32[W]       as amax_forward
        weight_copy_scales  f32[2, W]    of the current FP8 copies: scale_inv, and amax of the weights quantized
    """

    scale: Tensor
    amax_history: Tensor
    amax_forward: Tensor
    amax_backward: Tensor
    held: Tensor
    amax_weights: Tensor
    weight_copy_scales: Tensor


@torch.library.custom_op("fp8pass::record", mutates_args=())
def record(amax: Tensor, new: Tensor, index: int, on_nonfinite: str) -> Tensor:
    """Return `amax` f32[T] with entry `index` merged with the amax `new` f32[]: see `scaling.merge_amax`.

    A custom op, so that the `batch_records` pass finds all records of a graph and merges them into one vector update.
    """
    amax = amax.clone()  # mutates_args is empty: the op may not write into its input
    amax[index] = scaling.merge_amax(amax[index], new, on_nonfinite)
    return amax


@record.register_fake
def _(amax: Tensor, new: Tensor, index: int, on_nonfinite: str) -> Tensor:
    return torch.empty_like(amax)


RECORD = torch.ops.fp8pass.record.default


@dataclass(frozen=True)
class Delayed(Elementwise):
    """Quantizes one tensor of a graph with the scale of its slot.

    slot: index in `scales`. index: index in the `amax` that it is called with. bootstrap: True to scale by this
    tensor's own amax while the slot has no history, which takes a pass over the tensor before it can be quantized;
    False if `scales` are those of `scales_or_one`.
    record: True to record the amax (training), False to only read the scale (evaluation). over: names of the groups of
    ranks that have the other parts of the tensor.
    """

    recipe: DelayedScaling
    dtype: torch.dtype
    slot: int
    index: int
    bootstrap: bool
    record: bool
    over: tuple[str, ...] = field(default=(), repr=False)

    @property
    def place_in_copy_scales(self) -> tuple[int, ...]:
        """The index of a copy's scale_inv in `SlotTensors.weight_copy_scales`."""
        return 0, self.index

    @property
    def records(self) -> bool:
        """Return whether `results` has a new `amax`."""
        return self.record

    def __call__(self, x: Tensor, scales: Tensor, amax: Tensor) -> Tensor:
        """Quantize and dequantize `x`; record its amax in `amax`, in place."""
        return scaling.dequantize(*self.parts(x, scales, amax), x.dtype)

    def results(self, x: Tensor, scales: Tensor, amax: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Return `x` quantized and dequantized, and, if it records, `amax` with that of `x`."""
        x_, new = self.by_scale(x, scales[self.slot])
        return (x_, self._merged(amax, new)) if self.record else (x_,)

    def by_scale(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return `x` quantized and dequantized, and its amax f32[]. scale: as in `with_amax`."""
        x_q, scale_inv, new = self.with_amax(x, scale)
        return scaling.dequantize(x_q, scale_inv, x.dtype), new

    def parts(self, x: Tensor, scales: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize `x`; record its amax in `amax`, in place. Return (`x_q`, scale_inv f32[])."""
        x_q, scale_inv, new = self.with_amax(x, scales[self.slot])
        if self.record:
            amax.copy_(self._merged(amax, new))
        return x_q, scale_inv

    def _merged(self, amax: Tensor, new: Tensor) -> Tensor:
        merged: Tensor = record(amax, new, self.index, self.recipe.on_nonfinite)
        return merged

    def with_amax(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Quantize `x`, and record nothing. Return (`x_q`, scale_inv f32[], the amax of `x` f32[]).

        scale: f32[], of the slot.
        """
        new = scaling.amax(x)
        # `new` is the amax of this rank's part: not the one to scale by if ranks have other parts
        scale = self._scale(x, scale, None if self.over else new)
        x_q = scaling.quantize(x, scale, self.dtype)
        return x_q, scaling.inverse_unless_nonfinite(scale, new), new

    def scaled(self, x: Tensor, scales: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        """Return `x` in the shape in which it is quantized, and the scale."""
        return x, self._scale(x, scales[self.slot])

    def _scale(self, x: Tensor, scale: Tensor, amax: Tensor | None = None) -> Tensor:
        """Return the scale f32[] that `x` is quantized by. scale: of the slot. amax: of `x`, if it is known already."""
        scale = self._delayed_scale(x, scale)
        if not self.recipe.requantizes:
            return scale
        amax = _amax_of_whole(x, self.over) if amax is None else amax
        dynamic = scale_of(self.recipe, amax, scaling.fp8_max(self.dtype))
        return torch.where(self._saturates(x, scale), dynamic, scale)

    def is_requantized(self, x: Tensor, scales: Tensor, *_: Tensor) -> Tensor | None:
        """Return whether `x` is quantized by its own amax because its delayed scale saturates, b8[]; None for never."""
        return self._saturates(x, self._delayed_scale(x, scales[self.slot])) if self.recipe.requantizes else None

    def _saturates(self, x: Tensor, scale: Tensor) -> Tensor:
        """Return whether more than the threshold of the elements of `x` are too large for the format, b8[]."""
        if scaling.is_empty(x) and not self.over:
            return torch.zeros((), dtype=torch.bool, device=x.device)
        # rows first, as in `scaling.amax`
        count: Tensor = SATURATED(x, scale, self.dtype).sum(-1).sum()
        if self.over:  # the largest share of a rank's part, so that all ranks decide the same
            count = amax_over(count / max(x.numel(), 1), self.over)
            return count > self.recipe.saturation_threshold
        return count > self.recipe.saturation_threshold * x.numel()

    def _delayed_scale(self, x: Tensor, scale: Tensor) -> Tensor:
        if self.bootstrap:
            amax = _amax_of_whole(x, self.over)
            dynamic = scale_of(self.recipe, amax, scaling.fp8_max(self.dtype))
            # not a branch: Python would wait for the GPU, and Dynamo would break the graph
            scale = torch.where(scale == 0, dynamic, scale)
        return scale


def _amax_of_whole(x: Tensor, over: tuple[str, ...]) -> Tensor:
    """Return the amax f32[] of a tensor of which this rank has the part `x`; 0 if it has no elements on any rank."""
    if over and scaling.is_empty(x):
        return amax_over(torch.zeros((), device=x.device), over)  # the -1 of an empty tensor would become 1
    return amax_over(scaling.amax(x), over)


@dataclass(frozen=True)
class Dynamic(Elementwise):
    """Quantizes one tensor with the scale from its own amax; 1 for a tensor of zeros. over: see `Delayed`."""

    recipe: DynamicScaling
    dtype: torch.dtype
    over: tuple[str, ...] = field(default=(), repr=False)

    place_in_copy_scales: ClassVar[tuple[int, ...]] = ()
    """The index of a copy's scale_inv in the tensor that belongs to the copy, f32[]: that tensor itself."""

    def __call__(self, x: Tensor) -> Tensor:
        """Quantize and dequantize `x`."""
        return scaling.dequantize(*self.parts(x), x.dtype)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize `x`; return (`x_q`, scale_inv f32[])."""
        return _quantized_by_amax(x, _amax_of_whole(x, self.over), self.dtype, self.recipe)

    def scales_below(self, parts: Sequence[Tensor], scales: Tensor) -> list[Tensor]:
        """Return the scale f32[] for each of `parts`, which are one tensor, one below the other.

        Sets `scales` f32[], in place, to scale_inv.
        """
        amax = functools.reduce(torch.maximum, map(scaling.amax, parts))
        scale = scale_of(self.recipe, amax, scaling.fp8_max(self.dtype))
        scales.copy_(scaling.inverse_unless_nonfinite(scale, amax))
        return [scale] * len(parts)

    def scaled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return `x` and the scale."""
        return x, scale_of(self.recipe, _amax_of_whole(x, self.over), scaling.fp8_max(self.dtype))


@dataclass(frozen=True)
class Rowwise(Elementwise):
    """Quantizes one tensor with a scale for each row, from the amax over `dims`, which the matmul sums over."""

    recipe: RowwiseScaling
    dtype: torch.dtype
    dims: tuple[int, ...]

    place_in_copy_scales: ClassVar[tuple[int, ...]] = ()
    """See `Dynamic`; the tensor has size 1 along `dims`."""

    def __call__(self, x: Tensor) -> Tensor:
        """Quantize and dequantize `x`."""
        return scaling.dequantize(*self.parts(x), x.dtype)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize `x`; return (`x_q`, scale_inv of each row, f32 with size 1 along `dims`)."""
        return _quantized_by_amax(x, scaling.amax_along(x, self.dims), self.dtype, self.recipe)

    def scales_below(self, parts: Sequence[Tensor], scales: Tensor) -> list[Tensor]:
        """Return the scales of a weight, which is the only one of `parts`; set `scales`, in place, to scale_inv."""
        (x,) = parts  # layers are not merged: `has_one_scale`
        amax = scaling.amax_along(x, self.dims)
        scale = scale_of(self.recipe, amax, scaling.fp8_max(self.dtype))
        scales.copy_(scaling.inverse_unless_nonfinite(scale, amax))
        return [scale]

    def scaled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return `x` and the scale of each row."""
        return x, scale_of(self.recipe, scaling.amax_along(x, self.dims), scaling.fp8_max(self.dtype))


@dataclass(frozen=True)
class Groupwise:
    """Quantizes one tensor [R, C] in groups of rows with a scale for each column of each group.

    For matmuls that sum over the rows of each group separately. offs: i32[G], see `grouped.py`.
    """

    recipe: RowwiseScaling
    dtype: torch.dtype

    def __call__(self, x: Tensor, offs: Tensor) -> Tensor:
        """Quantize and dequantize `x`."""
        amax = grouped.amax_of_groups(x, offs)
        scale = scale_of(self.recipe, amax, scaling.fp8_max(self.dtype))
        x_q = scaling.quantize(x, grouped.by_row(scale, offs, x.shape[0]), self.dtype)
        result: Tensor = grouped.dequantize_groups(x_q, scaling.inverse_unless_nonfinite(scale, amax), offs, x.dtype)
        return result

    def scaled(self, x: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
        """Return `x`, with zeros in rows that belong to no group, and a scale for each element."""
        in_group = grouped.group_of_rows(offs, x.shape[0]) < len(offs)
        scale = scale_of(self.recipe, grouped.amax_of_groups(x, offs), scaling.fp8_max(self.dtype))
        return torch.where(in_group.unsqueeze(1), x, 0), grouped.by_row(scale, offs, x.shape[0])


def _quantized_by_amax(
    x: Tensor, amax: Tensor, dtype: torch.dtype, recipe: DynamicScaling | RowwiseScaling
) -> tuple[Tensor, Tensor]:
    """Return (`x_q`, scale_inv)."""
    scale = scale_of(recipe, amax, scaling.fp8_max(dtype))
    return scaling.quantize(x, scale, dtype), scaling.inverse_unless_nonfinite(scale, amax)


@dataclass(frozen=True)
class Blockwise:
    """Quantizes one tensor with a scale for each block, of `block` elements of one row, or of `block` rows and columns.

    dims: the dimensions that the matmul sums over; blocks of one row lie along them. square: True for blocks of `block`
    rows and columns: the matrix is quantized as it is, for matmuls in both orientations, and `dims` is not used.
    """

    recipe: BlockwiseScaling | MXFP8Scaling
    dtype: torch.dtype
    block: int
    square: bool = False
    dims: tuple[int, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Quantize and dequantize `x`."""
        matrix, back = self._matrix_of(x)
        result: Tensor = dequantize_blocks(*self._parts_of(matrix), x.dtype)
        return result if back is None else result.view([x.shape[d] for d in back]).permute(_inverse(back))

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize `x`; return (`x_q` [R, C], scale_inv [R / r, C / c] of blocks of r rows and c columns)."""
        return self._parts_of(self._matrix_of(x)[0])

    def _parts_of(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        blocks, scale, scale_inv = self._blocks(matrix)
        # contiguous: of a permuted `x` the quantized tensor would be permuted, and `blockwise_mm` takes only rows
        x_q = scaling.quantize(blocks, scale, self.dtype).reshape(matrix.shape).contiguous()
        return x_q, scale_inv.reshape(blocks.shape[0], blocks.shape[2]).contiguous()

    def scaled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return `x` in blocks, and the scale of each block."""
        matrix, _ = self._matrix_of(x)
        blocks, scale, _ = self._blocks(matrix)
        return blocks, scale

    def _matrix_of(self, x: Tensor) -> tuple[Tensor, list[int] | None]:
        """Return `x` as [R, C], with blocks along C, and the order of its dimensions there; (`x`, None) if square."""
        if self.square:
            return x, None
        order = [*(d for d in range(x.dim()) if d not in self.dims), *self.dims]
        rows = math.prod(x.shape[d] for d in order[: -len(self.dims)])  # -1 is ambiguous if `x` is empty
        return x.permute(order).reshape(rows, math.prod(x.shape[d] for d in self.dims)), order

    def _blocks(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return `x` [R, C] as [R / r, r, C / c, c], the scales of blocks, and scale_inv as the recipe stores it."""
        rows, columns = x.shape
        height = self.block if self.square else 1
        blocks = x.reshape(rows // height, height, columns // self.block, self.block)
        amax = scaling.amax_along(blocks, (1, 3))
        if isinstance(self.recipe, MXFP8Scaling):
            scale_inv = scaling.e8m0_from_amax(amax, scaling.fp8_max(self.dtype))
            return blocks, _reciprocal_of_e8m0(scale_inv), scale_inv
        scale = scale_of(self.recipe, amax, scaling.fp8_max(self.dtype))
        # a user's own formula may give any scales
        exact = self.recipe.power_of_2 and type(self.recipe).scale is BlockwiseScaling.scale
        return blocks, scale, scaling.inverse_unless_nonfinite(scale, amax, exact)


def _inverse(order: list[int]) -> list[int]:
    return [order.index(d) for d in range(len(order))]


def _reciprocal_of_e8m0(codes: Tensor) -> Tensor:
    """Return `2**(127 - code)`, f32. Not as 1 / value: code 0 stands for 2**-127, which GPUs flush to 0."""
    # 1: for codes 254 and 255 (NaN) the exponent would be that of a subnormal number or negative. A block of code 255
    # is NaN after dequantizing, whatever it is multiplied by here
    exponent = (254 - codes.to(torch.int32)).clamp(1, 254)
    return (exponent << 23).view(torch.float32)


@torch.library.custom_op("fp8pass::dequantize_blocks", mutates_args=())
def dequantize_blocks(x_q: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x_q` f8[R, C] times the scale_inv of each block, in float32, rounded once to `dtype`.

    scale_inv: [R / r, C / c] for blocks of r rows and c columns; f32, or e8m0 codes as u8. A custom op, so that the
    `blockwise_mm` pass can find the blocks. If it does not become part of a scaled matmul, the `expand_blocks` pass
    replaces it by `dequantized_blocks`.
    """
    return dequantized_blocks(x_q, scale_inv, dtype)


@dequantize_blocks.register_fake
def _(x_q: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x_q, dtype=dtype)


DEQUANTIZE_BLOCKS = torch.ops.fp8pass.dequantize_blocks.default


def dequantized_blocks(x_q: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `dequantize_blocks` in plain torch."""
    # without rows or columns, the sizes of blocks below would be divisions by 0
    if scaling.is_empty(x_q):
        return x_q.to(dtype)
    rows, columns = scale_inv.shape
    blocks = x_q.view(rows, x_q.shape[0] // rows, columns, x_q.shape[1] // columns)
    scale = scaling.float_from_e8m0(scale_inv) if scale_inv.dtype == torch.uint8 else scale_inv
    return scaling.dequantize(blocks, scale.view(rows, 1, columns, 1), dtype).view(x_q.shape)


@dataclass(frozen=True)
class Static(Elementwise):
    """Quantizes one tensor with a fixed scale. Saturates; NaN stays NaN.

    slot: column in `scales` f32[2, T], whose rows are the scales and their reciprocals.
    """

    recipe: StaticScaling
    dtype: torch.dtype
    slot: int

    @property
    def place_in_copy_scales(self) -> tuple[int, ...]:
        """The index of a copy's scale_inv in `scales`."""
        return 1, self.slot

    def scales_below(self, parts: Sequence[Tensor], scales: Tensor) -> list[Tensor]:
        """Return the scale f32[] for each of `parts`, which are one tensor, one below the other."""
        return [scales[0, self.slot]] * len(parts)

    def __call__(self, x: Tensor, scales: Tensor) -> Tensor:
        """Quantize and dequantize `x`."""
        return frozen_operand(scaling.quantize(x, scales[0, self.slot], self.dtype), self, x.dtype, scales)

    def scaled(self, x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Return `x` and the scale."""
        return x, scales[0, self.slot]


@dataclass(frozen=True)
class Observe:
    """Records the amax of one tensor as `Delayed` does, to calibrate a scale, and quantizes nothing."""

    recipe: Calibration
    dtype: torch.dtype
    slot: int = -1
    index: int = -1

    def __call__(self, x: Tensor, scales: Tensor, amax: Tensor) -> Tensor:
        """Record the amax of `x` in `amax`, in place; return `x`."""
        amax.copy_(record(amax, scaling.amax(x), self.index, self.recipe.on_nonfinite))
        return x


Quantizer = Delayed | Dynamic | Rowwise | Groupwise | Blockwise | Static | Observe
Stateful = Delayed | Static | Observe
"""Quantizers that have a slot."""
ByItself = Dynamic | Rowwise | Static
"""Quantizers whose scale depends on the tensor alone, not on other steps."""
Cacheable = Delayed | ByItself
"""Quantizers of weights whose FP8 copies can be kept: see `cached_operand`."""


def is_turned(quantizer: object) -> bool:
    """Return whether a copy is kept only as `x_t`: its matmul sums over the rows, each with scales of columns."""
    return isinstance(quantizer, Rowwise) and 0 in quantizer.dims


def scale_inv_of_copy(quantizer: Cacheable, scales: Tensor) -> Tensor:
    """Return the scale_inv of a copy, from the tensor that has it."""
    place = quantizer.place_in_copy_scales
    return scales[place] if place else scales


def as_matrix(quantizer: Cacheable, *copies: Tensor) -> Tensor:
    """Return the FP8 copy of a weight f8[N, K], of which `copies` are `x_q`, or `x_q` and `x_t`, or only `x_t`."""
    if len(copies) == 2:
        x_q: Tensor = with_transpose(*copies)
        return x_q
    return copies[0].t() if is_turned(quantizer) else copies[0]


def inputs_of(quantizer: Quantizer, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the arguments that a quantizer takes after its tensor. state: those of all quantizers of one gradient."""
    return state if isinstance(quantizer, Stateful | Groupwise) else ()


def quantized(x: Tensor, quantizer: Quantizer, *state: Tensor) -> Tensor:
    """Quantize and dequantize `x`. For a DTensor, each rank does that with its part: see `sharded.py`."""

    def of_part(part: Tensor, groups: tuple[str, ...]) -> Tensor:
        if groups and isinstance(quantizer, (Delayed, Dynamic)):
            return replace(quantizer, over=groups)(part, *state)
        if isinstance(quantizer, Elementwise) and is_traced(part):
            return _as_one_op(quantizer, part, *state)
        return quantizer(part, *state)

    return on_part(of_part, x)


def _as_one_op(quantizer: Elementwise, x: Tensor, *state: Tensor) -> Tensor:
    x_, *written = QUANTIZER(quantizer, x, *state)
    for new in written:
        state[-1].copy_(new)
    return x_


def frozen_operand(x_q: Tensor, quantizer: Static, dtype: torch.dtype, scales: Tensor) -> Tensor:
    """Dequantize to `dtype` an operand that was quantized in advance."""
    return scaling.dequantize(x_q, scales[1, quantizer.slot], dtype)


@torch.library.custom_op("fp8pass::with_transpose", mutates_args=())
def with_transpose(x_q: Tensor, x_t: Tensor) -> Tensor:
    """Return `x_q` f8[N, K], of which `x_t` f8[K, N] is the transposed copy.

    A custom op, so that the `use_transposes` pass finds both copies; the pass removes it.
    """
    return x_q.clone()  # a custom op may not return its input


@with_transpose.register_fake
def _(x_q: Tensor, x_t: Tensor) -> Tensor:
    return torch.empty_like(x_q)


WITH_TRANSPOSE = torch.ops.fp8pass.with_transpose.default


@torch.library.custom_op("fp8pass::shared", mutates_args=())
def _shared(scales: Tensor, group: str) -> Tensor:
    """Return `scales`. A custom op, so that the `quantize_collectives` pass finds it; the pass removes it."""
    return scales.clone()  # a custom op may not return its input


@_shared.register_fake
def _(scales: Tensor, group: str) -> Tensor:
    return torch.empty_like(scales)


def shared(scales: Tensor, group: str) -> Tensor:
    """Return `scales`, marked as the same on all ranks of the group with this name."""
    result: Tensor = _shared(scales, group)
    return result


SHARED = torch.ops.fp8pass.shared.default


class _QDQ(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer, *state: Tensor) -> Tensor:
        ctx.n_state = len(state)
        return quantized(x, quantizer, *state)

    # not once_differentiable, unlike those below: the gradient passes straight through, and so has second derivatives
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, *[None] * ctx.n_state


class _Cached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Cacheable, *state: Tensor) -> Tensor:
        ctx.n_state = len(state)
        scales, *copies = state
        x_hp = scaling.dequantize(as_matrix(quantizer, *copies), scale_inv_of_copy(quantizer, scales), x.dtype)
        return with_part(x, x_hp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, *[None] * ctx.n_state


class _HandedOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale_inv: Tensor, *copies: Tensor) -> Tensor:
        ctx.n_copies = len(copies)
        x_q: Tensor = copies[0] if len(copies) == 1 else with_transpose(*copies)
        return scaling.dequantize(x_q, scale_inv, x.dtype).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, *[None] * ctx.n_copies


class _QDQAs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, like: Tensor, quantizer: Delayed | Dynamic, *state: Tensor) -> Tensor:
        ctx.n_state = len(state)
        _, scale = quantizer.scaled(like, *state)
        scale_inv = scaling.inverse_unless_nonfinite(scale, scaling.amax(like))
        return scaling.dequantize(scaling.quantize(x, scale, quantizer.dtype), scale_inv, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None, *[None] * ctx.n_state


class _DifferentiatedAs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, other: Tensor) -> Tensor:
        return copy_of(y)  # as in `_GradQDQ`

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, grads[0]


class _SelectGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, y_a: Tensor, y_b: Tensor, *how: Any) -> Tensor:
        ctx.how = how
        return copy_of(y)  # as in `_GradQDQ`

    @staticmethod
    @once_differentiable
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        # not compiled: in a compiled step, Dynamo would treat the backward of a function that ran eagerly as user code
        (grad,), (quantizer_a, quantizer_b, *state) = grads, ctx.how
        needed = ctx.needs_input_grad[1:3]
        quantizers = [q for q, n in zip((quantizer_a, quantizer_b), needed, strict=True) if n and q is not None]
        # by quantizer: if both gradients have equal quantizers, they share one quantized tensor
        gradients = {q: quantized(grad, q, *inputs_of(q, state)) for q in quantizers}
        routed = (
            gradients.get(q, grad) if n else None for q, n in zip((quantizer_a, quantizer_b), needed, strict=True)
        )
        return None, *routed, *[None] * len(ctx.how)


class _GradQDQ(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, quantizer: Quantizer, *state: Tensor) -> Tensor:
        ctx.quantizer, ctx.state = quantizer, state
        # a copy: autograd raises if users modify a view that a Function returns. Compiled code has no copy
        return copy_of(y)

    @staticmethod
    @once_differentiable
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        # not compiled, as in `_SelectGradients`
        return quantized(grads[0], ctx.quantizer, *ctx.state), None, *[None] * len(ctx.state)


@like_first
def qdq_operand(x: Tensor, quantizer: Quantizer, *state: Tensor) -> Tensor:
    """Quantize and dequantize `x`; the gradient passes straight through."""
    return _QDQ.apply(x, quantizer, *state)  # type: ignore[no-any-return, no-untyped-call]


def qdq_as(x: Tensor, like: Tensor, quantizer: Delayed | Dynamic, *state: Tensor) -> Tensor:
    """Quantize and dequantize `x` as `qdq_operand` does `like`, with its scale; the gradient passes straight through.

    Records nothing. Everything becomes NaN if `like` holds an infinity or NaN, as `like` itself does.
    """
    # detached: torch 2.15 would run the backward of another library's op before `like`, on a gradient of zeros
    return _QDQAs.apply(x, like.detach(), quantizer, *state)  # type: ignore[no-any-return, no-untyped-call]


def differentiated_as(y: Tensor, other: Tensor) -> Tensor:
    """Return `y`, whose gradient goes to `other`: a tensor of the same shape, computed in another way.

    The value of `other` is not used, so compiled code does not compute it.
    """
    # detached: autograd would go on into `y` with a gradient of zeros
    return _DifferentiatedAs.apply(y.detach(), other)  # type: ignore[no-any-return, no-untyped-call]


@like_first
def cached_operand(x: Tensor, quantizer: Cacheable, *state: Tensor) -> Tensor:
    """Return `x`, a weight, dequantized from its FP8 copy: `qdq_operand` for a weight quantized when it last changed.

    state: a tensor with the scale_inv of the copy, then the copy as in `as_matrix`; of a DTensor, that of this rank's
    part. Under delayed scaling that tensor is `weight_copy_scales` f32[2, W], see `SlotTensors`: the quantizer's index
    is that among the W weights, and `begin_step` records the amax. Otherwise see `place_in_copy_scales` of the
    quantizer.
    """
    return _Cached.apply(x, quantizer, *state)  # type: ignore[no-any-return, no-untyped-call]


@torch.no_grad()
def quantize_once(x: Tensor, quantizer: Delayed | Dynamic, transposed: bool, *state: Tensor) -> tuple[Tensor, ...]:
    """Quantize `x` [..., K], of M rows, for matmuls in several functions, which get it by `handed_over`.

    Returns scale_inv f32[], `x_q` f8[M, K] and, if `transposed`, the transposed copy `x_t` f8[K, M].
    """
    x_q, scale_inv = quantizer.parts(x, *state)
    rows = x_q.reshape(-1, x.shape[-1]).contiguous()
    return (scale_inv, rows, rows.t().contiguous()) if transposed else (scale_inv, rows)


@like_first
def handed_over(x: Tensor, scale_inv: Tensor, *copies: Tensor) -> Tensor:
    """Return `x` dequantized from the result of `quantize_once`; the gradient passes straight through."""
    return _HandedOver.apply(x, scale_inv, *copies)  # type: ignore[no-any-return, no-untyped-call]


@like_first
def qdq_gradient(y: Tensor, quantizer: Quantizer, *state: Tensor) -> Tensor:
    """Return `y`; quantize and dequantize its gradient."""
    return _GradQDQ.apply(y, quantizer, *state)  # type: ignore[no-any-return, no-untyped-call]


@like_first
def qdq_no_grad(x: Tensor, quantizer: Quantizer | None, *state: Tensor) -> Tensor:
    """Quantize and dequantize `x`, or leave it as it is if `quantizer` is None; no gradient passes."""
    return x.detach() if quantizer is None else quantized(x.detach(), quantizer, *state)


@like_first
def select_gradients(
    y: Tensor, y_a: Tensor, y_b: Tensor, grad_a: Quantizer | None, grad_b: Quantizer | None, *state: Tensor
) -> Tensor:
    """Return `y` with the gradients of `y_a` and `y_b`: three forms of one product, of differently quantized operands.

    y gives the output, y_a the gradient of the first operand, y_b that of the second. The values of y_a and y_b are not
    used, so compiled code does not compute them. grad_a, grad_b: the quantizer of the gradient for each. state: see
    `inputs_of`; `offs` for `Groupwise`.
    """
    return _SelectGradients.apply(y, y_a, y_b, grad_a, grad_b, *state)  # type: ignore[no-any-return, no-untyped-call]


def begin_step(
    recipe: DelayedScaling,
    scale: Tensor,
    amax_history: Tensor,
    amax_forward: Tensor,
    amax_backward: Tensor,
    held: Tensor,
    *of_weights: Tensor,
    limits: Sequence[tuple[float, int]] = (),
) -> Tensor:
    """Begin a training forward: roll the amaxes of the last step, in place. Return the scales of this step, f32[T].

    The step of a slot continues where `held`. The graph uses the returned tensor, never the buffer, which may belong to
    a later step when the backward runs. of_weights: `amax_weights` and `weight_copy_scales`, if copies of weights are
    cached: this step reads the copies, so their amaxes are recorded here. limits: of the slots' formats, as
    `SlotTable.limits`; by default all are those of operands, and in the backward of gradients.
    """
    forward, backward = (scaling.fp8_max(recipe.dtype(role)) for role in ("input", "grad_output"))
    early = [amax_forward, *of_weights[:1]]
    amax = torch.cat([*early, amax_backward])
    limits = limits or [*((forward, len(part)) for part in early), (backward, len(amax_backward))]
    scales, history = scaling.roll_history(
        scale,
        amax_history,
        amax=torch.where(held, scaling.NOTHING, amax),  # -1: `roll_history` leaves a held slot as it is
        fp8_max=torch.cat([torch.full_like(amax[:n], limit) for limit, n in limits]),
        next_scale=next_scale_of(recipe),
    )
    amax_history.copy_(history)
    scale.copy_(scales)
    # held slots keep their running amax, and the others begin the step with none
    left = torch.where(held, amax, scaling.NOTHING)
    left_forward, *left_weights, left_backward = torch.split(left, [len(part) for part in (*early, amax_backward)])
    amax_forward.copy_(left_forward)
    amax_backward.copy_(left_backward)
    if of_weights:
        amax_weights, weight_copy_scales = of_weights
        amax_weights.copy_(scaling.merge_amax(left_weights[0], weight_copy_scales[1], recipe.on_nonfinite))
    return scales


@torch.no_grad()
def next_scales(
    recipe: DelayedScaling, first: int, scale: Tensor, amax_history: Tensor, amax_weights: Tensor
) -> Tensor:
    """Return the weights' scales f32[W] in the next step, which will roll the amaxes of this one. Writes nothing.

    first: F, the index of the first weight among the T slots.
    """
    of_weights = slice(first, first + len(amax_weights))
    scales, _ = scaling.roll_history(
        scale[of_weights],
        amax_history[:, of_weights],
        amax=amax_weights,
        fp8_max=torch.full_like(amax_weights, scaling.fp8_max(recipe.dtype("weight"))),
        next_scale=next_scale_of(recipe),
    )
    return scales


@torch.no_grad()
def amaxes_of_ranks(amax_weights: Tensor, group: str) -> Tensor:
    """Return the largest of the ranks' amaxes f32[W] of a step: what `amax_reduction.py` makes of them after the step.

    For the scales of sharded weights, in the update before that reduction.
    """
    return recorded_over(amax_weights, group)


@torch.no_grad()
def predicted_scales(scales: Tensor, weight_copy_scales: Tensor, bounds: Tensor, indices: tuple[int, ...]) -> Tensor:
    """Return `scales` f32[W] with those at `indices` computed from what the weights can become in an update.

    weight_copy_scales: f32[2, W], whose second row has the amaxes before the update. bounds: f32[3, n], for each index
    the fields of `weight_bounds.Bound`; infinite ones keep the scale. The scale is `fp8_max / (grows * amax + moves)`.
    """
    new = scaling.scale_from_amax(
        bounds[0] * _entries(weight_copy_scales[1], indices) + bounds[1],
        scaling.fp8_max(scaling.E4M3),
        _entries(scales, indices),
    )
    if len(indices) == len(scales):
        return new
    return torch.stack([new[indices.index(i)] if i in indices else scales[i] for i in range(len(scales))])


def _entries(x: Tensor, indices: tuple[int, ...]) -> Tensor:
    """Return the entries of `x` at some indices, which go up."""
    # selects, not an index tensor, which would have to be copied to the GPU
    return x if len(indices) == len(x) else torch.stack([x[i] for i in indices])


@writing("bounds")
@torch.no_grad()
def note_overshoot(bounds: Tensor, scales: Tensor, weight_copy_scales: Tensor, indices: tuple[int, ...]) -> None:
    """Keep in the third row of `bounds` f32[3, n], in place, the most of what a predicted scale made of a new amax.

    It is a part of `fp8_max`: more than 1 if the weight became larger than predicted, so that it saturated.
    weight_copy_scales: f32[2, W], whose second row has the new amaxes.
    """
    share = _entries(weight_copy_scales[1], indices) * _entries(scales, indices) / scaling.fp8_max(scaling.E4M3)
    bounds[2].copy_(torch.where(torch.isfinite(bounds[0]), torch.maximum(bounds[2], share), bounds[2]))


@writing("copies", "transposes", rows_of={"scales": 0})
@torch.no_grad()
def write_weight(
    scales: Tensor, index: int, parts: list[Tensor], copies: list[Tensor], transposes: list[Tensor]
) -> Tensor:
    """Quantize a weight, which is `parts` concatenated along dim 0, into its FP8 copy, in place. Return its amax f32[].

    scales: f32[W], the weight's scale at `index`. copies: f8[n, K] for each part. transposes: f8[K, n] for each, or [].
    For a DTensor, the copies and the amax are those of this rank's shard.
    """
    amaxes = []
    for i, part in enumerate(map(part_of, parts)):
        # the update's kernel has the weight in float32, and its copy must be that of the weight in memory: see
        # `_rounded`
        stored = part if part.dtype == torch.float32 else ROUNDED(part)
        amaxes.append(scaling.amax(stored))
        _store(scaling.quantize(stored, scales[index], scaling.E4M3), copies[i : i + 1], transposes[i : i + 1])
    return functools.reduce(torch.maximum, amaxes)


@writing("scales", "copies", "transposes")
@torch.no_grad()
def write_weight_by_itself(
    quantizer: ByItself, parts: list[Tensor], scales: Tensor, copies: list[Tensor], transposes: list[Tensor]
) -> None:
    """Quantize a weight, which is `parts` concatenated along dim 0, into its FP8 copy, in place, with its scales.

    scales: the tensor that `cached_operand` reads scale_inv from. copies: f8[n, K] for each part, or []. transposes:
    f8[K, n] for each, or [].
    """
    stored = [part if part.dtype == torch.float32 else ROUNDED(part) for part in map(part_of, parts)]
    for i, scale in enumerate(quantizer.scales_below(stored, scales)):
        x_q = scaling.quantize(stored[i], scale, quantizer.dtype)
        _store(x_q, copies[i : i + 1], transposes[i : i + 1])


def _store(x_q: Tensor, copies: list[Tensor], transposes: list[Tensor]) -> None:
    """Write the part of a weight into its place in each copy that there is."""
    for copy in copies:
        copy.copy_(x_q)
    for transpose in transposes:
        # contiguous: the clone by which `tiles.match` finds a tensor that is stored in both orientations
        transpose.copy_(x_q.t().contiguous())


@writing("weight_copy_scales", rows_of={"weight_copy_scales": 1, "scales": 0}, by_row=True)
@torch.no_grad()
def write_weight_copy_scales(weight_copy_scales: Tensor, scales: Tensor, amaxes: list[Tensor | None]) -> None:
    """Set the entries of `weight_copy_scales` f32[2, W] for the copies that were written, in place.

    scales: f32[W], the scales that the copies were quantized with. amaxes: the amax f32[] of each weight; None for a
    copy that was not written.
    """
    amax = torch.stack([weight_copy_scales[1, i] if new is None else new for i, new in enumerate(amaxes)])
    scale_inv = scaling.inverse_unless_nonfinite(scales, amax)
    if None in amaxes:
        scale_inv = torch.stack(
            [(weight_copy_scales[0] if new is None else scale_inv)[i] for i, new in enumerate(amaxes)]
        )
    weight_copy_scales.copy_(torch.stack([scale_inv, amax]))


@writing(rows_of={"moment_scales": 1})
@torch.no_grad()
def decode_moment(
    stored_as: moments.Format,
    x_q: Tensor,
    moment_scales: Tensor,
    index: int,
    dtype: torch.dtype,
    blocks: Tensor | None = None,
    division: Division | None = None,
) -> Tensor:
    """Return the moment that `x_q` stores. moment_scales: f32[2, n], blocks: f32[1 or 2, b], see `Fp8Moment`.

    division: how the moment is sharded, if it is; then all of these belong to this rank's shard.
    """
    if blocks is not None:
        x = moments.decode_blocks(stored_as, x_q, blocks, dtype)
    else:
        x = moments.decode(stored_as, x_q, moment_scales[0, index], dtype)
    return x if division is None else division.whole(x)


@torch.no_grad()
def next_moment_scales(targets: tuple[float, ...], moment_scales: Tensor, skipped: Tensor | None) -> Tensor:
    """Return the scales f32[n] to store moments with, from the stored values; the current scales if `skipped` b8[].

    targets: `Format.target` of each moment, equal ones one after another.
    """
    now = moment_scales[0].reciprocal()  # exact: scales are powers of two
    runs = [(target, len(list(same))) for target, same in itertools.groupby(targets)]
    parts = torch.split(moment_scales[1], [count for _, count in runs])
    wanted = torch.cat([torch.full_like(part, target) for part, (target, _) in zip(parts, runs, strict=True)])
    new = moments.scale_towards(wanted, moment_scales[1], now)
    return new if skipped is None else torch.where(skipped, now, new)


@writing("x_q", "blocks", rows_of={"scales": 0, "keys": 0})
@torch.no_grad()
def write_moment(
    stored_as: moments.Format,
    x: Tensor,
    x_q: Tensor,
    scales: Tensor,
    index: int,
    keys: Tensor | None = None,
    blocks: Tensor | None = None,
    skipped: Tensor | None = None,
) -> Tensor:
    """Store `x` in `x_q`, in place, with entry `index` of `scales` f32[n]; return the amax f32[] of stored values.

    For a DTensor, this rank's shard is stored. keys: see `random_bits.key_at`, for stochastic rounding. A moment in
    `blocks` has its own scales, which are written too, unless `skipped` b8[]; its amax is returned as 0.
    """
    x, scale = part_of(x).float(), scales[index]
    key = None if keys is None else random_bits.key_at(keys, index)
    if blocks is not None:
        stored, now = moments.encode_blocks(stored_as, x, key)
        if skipped is not None:  # in float32, since Inductor has no `where` for float8
            stored, now = torch.where(skipped, x_q.float(), stored), torch.where(skipped, blocks, now)
        x_q.copy_(stored.to(stored_as.dtype))
        blocks.copy_(now)
        return torch.zeros_like(scale)
    if stored_as.stochastic:
        stored = moments.encode_exactly(stored_as, x, scale, None, key)
        x_q.copy_(stored.to(stored_as.dtype))
        return scaling.amax(stored) * scale.reciprocal()
    x_q.copy_(moments.encode(stored_as, x, scale))
    # rounding keeps order, so the amax of the stored values is the amax as it would be stored. Inductor rounds to FP8,
    # but takes a cast to float16 for one to float32, in which it computes (`upcast_compute_type`)
    stored = moments.encode(stored_as, scaling.amax(x), scale)
    return (stored if stored_as.kind == "first" else ROUNDED(stored)).float() * scale.reciprocal()


@torch.no_grad()
def float32_copy(x: Tensor) -> Tensor:
    """Return a bfloat16 tensor as f32."""
    return x.float()


@writing("into", rows_of={"keys": 0})
@torch.no_grad()
def write_rounded(x: Tensor, into: Tensor, keys: Tensor, index: int) -> None:
    """Round `x` f32[...] stochastically into a bfloat16 tensor, in place. keys: see `random_bits.key_at`."""
    into.copy_(with_part(into, random_bits.round_to_bfloat16(part_of(x), random_bits.key_at(keys, index))))


@writing("updates")
@torch.no_grad()
def count_update(updates: Tensor) -> None:
    """Add 1 to `updates` i32[1], in place."""
    updates.add_(1)


@writing("moment_scales", rows_of={"moment_scales": 1, "scales": 0}, by_row=True)
@torch.no_grad()
def write_moment_scales(moment_scales: Tensor, scales: Tensor, amaxes: list[Tensor]) -> None:
    """Set `moment_scales` f32[2, n], in place, for moments that were stored with `scales` f32[n]."""
    moment_scales.copy_(torch.stack([scales.reciprocal(), torch.stack(amaxes)]))


@torch.no_grad()
def amax_of_part(x: Tensor) -> Tensor:
    """Return the amax f32[] of this rank's part of a floating tensor of any shape; 0 if it is empty."""
    x = part_of(x)
    if not x.numel():
        return torch.zeros((), device=x.device)
    return scaling.amax(x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1))


@torch.no_grad()
def any_nonfinite(amaxes: list[Tensor], groups: tuple[str, ...] = ()) -> Tensor:
    """Return whether any of the tensors with these amaxes f32[] holds a NaN or an infinity: b8[].

    groups: of the ranks that have other parts of them; all return the same. Takes the tensors themselves, too, as
    graphs that were dumped before do.
    """
    amaxes = [amax_of_part(x) if x.dim() else x for x in amaxes]
    # `stack` takes tensors of one device: a GPU, if any of them is on one
    device = max((x.device for x in amaxes), key=lambda d: d.type != "cpu")
    most = torch.stack([a.to(device) for a in amaxes]).amax()
    return scaling.is_finite(amax_over(most, groups)).logical_not()


@writing("x")
@torch.no_grad()
def restore_where(unchanged: Tensor, x: Tensor, old: Tensor) -> None:
    """Copy `old` back into `x`, in place, if `unchanged` b8[]."""
    x.copy_(with_part(x, torch.where(unchanged, part_of(old), part_of(x))))


@writing("amax")
@torch.no_grad()
def forget_step(forgets: Tensor, amax: Tensor) -> None:
    """Reset the running amaxes f32[...] of a step, in place, if `forgets` b8[]: nothing will be rolled."""
    amax.copy_(torch.where(forgets, scaling.NOTHING, amax))


@writing("counts")
@torch.no_grad()
def count_skips(event: Tensor, counts: Tensor) -> None:
    """Count calls, and calls with `event` b8[], in `counts` i64[2], in place."""
    counts.add_(torch.stack([torch.ones_like(event), event]))


def scales_or_one(scales: Tensor) -> Tensor:
    """Return `scales` f32[T], with 1 for slots that have no scale yet, for all slots at once."""
    return torch.where(scales == 0, 1.0, scales)


def qdq(x: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return `dequantize(quantize(x, scale, dtype), 1 / scale, x.dtype)`, with a straight-through gradient.

    x: floating, any shape; scale: f32[] tensor or number; dtype: an FP8 type. Saturates at the format's largest value;
    NaN stays NaN. Raises TypeError for an `x` or `scale` that is not floating, ValueError for a dtype that is not FP8
    and for a scale of 0.
    """
    scaling.check_not_zero(scale)
    return _StaticQDQ.apply(x, scale, dtype)  # type: ignore[no-any-return, no-untyped-call]


class _StaticQDQ(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
        return scaling.dequantize(scaling.quantize(x, scale, dtype), 1 / scale, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


def add_bias(y: Tensor, bias: Tensor, dtype: torch.dtype, beta: float = 1) -> Tensor:
    """Return `beta * bias + y` in `dtype`, as linear, addmm and baddbmm define it: beta 0 ignores even a NaN bias."""
    if beta == 0:
        # zeros, but computed from the bias: its gradient is 0, as that of torch's ops is, and not None
        bias = torch.where(torch.zeros_like(bias, dtype=torch.bool), bias, 0)
    bias = bias.to(dtype)
    return sharded.add(y, bias if beta in (0, 1) else beta * bias)
