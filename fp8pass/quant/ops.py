"""Quantize-dequantize as differentiable torch functions: what users write, and what the recipe inserts.

The annotate pass puts these functions into a graph as they are. Run eagerly they are the numerical reference; traced by
AOTAutograd they become the plain ATen quantize and dequantize that the `scaled_mm` pass looks for. So nothing here may
depend on whether it is being compiled.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8pass import scaling
from fp8pass.quant import grouped, moments, sharded
from fp8pass.quant.kernel_ops import ROUNDED
from fp8pass.quant.moments import MomentKind
from fp8pass.quant.sharded import amax_over, copy_of, on_part
from fp8pass.recipes import (
    BlockwiseScaling,
    Calibration,
    DelayedScaling,
    DynamicScaling,
    MXFP8Scaling,
    RowwiseScaling,
    StaticScaling,
)


class SlotTensors(NamedTuple):
    """Delayed-scaling state of the T slots of one graph. All of it is mutated in place.

    The first F slots belong to tensors quantized in forward, the next W to weights whose FP8 copies are kept
    (`fp8pass.weights`), the other T - F - W to gradients.

        scale            f32[T]     0 until the slot has seen data
        amax_history     f32[H, T]  newest at row 0
        amax_forward     f32[F]     running amax of the step, -1 where it has recorded nothing
        amax_backward    f32[T-F-W]
        held             b8[T]      whether the step of this slot has begun already, and nothing is to be rolled
        amax_weights     f32[W]     as amax_forward
        made             f32[2, W]  of the FP8 copies as they are: scale_inv, and amax of what they were made of
    """

    scale: Tensor
    amax_history: Tensor
    amax_forward: Tensor
    amax_backward: Tensor
    held: Tensor
    amax_weights: Tensor
    weight_copy_scales: Tensor

    def inputs(self) -> list[Tensor]:
        """What the graph is called with: the tensors, and `amax_backward` once more for the backward to write.

        The backward must merge into what the buffer holds by then, not into what its forward saw; as an input of its
        own, which the forward does not touch, it is read when the backward runs. `.data` gives each call tensors with
        version counters of their own, so that several forwards may be under way before their backwards.
        """
        *others, amax_weights, weight_copy_scales = self
        of_weights = [amax_weights, weight_copy_scales] if len(amax_weights) else []
        return [t.data for t in (*others, self.amax_backward, *of_weights)]


WEIGHT_INPUTS = ("amax_weights", "weight_copy_scales")
INPUTS = (*SlotTensors._fields[:-2], "amax_backward_late")
"""Names of the state inputs of a graph, in order; behind them come those of weights, if it keeps any."""


@torch.library.custom_op("fp8pass::record", mutates_args=())
def record(amax: Tensor, new: Tensor, index: int, on_nonfinite: str) -> Tensor:
    """`amax` f32[T] with entry `index` merged with the amax `new` f32[]: see `scaling.merge_amax`.

    An op of its own, so that the `batch_records` pass finds all the records of a graph and makes one vector update.
    """
    amax = amax.clone()
    amax[index] = scaling.merge_amax(amax[index], new, on_nonfinite)
    return amax


@record.register_fake
def _(amax: Tensor, new: Tensor, index: int, on_nonfinite: str) -> Tensor:
    return torch.empty_like(amax)


RECORD = torch.ops.fp8pass.record.default


@dataclass(frozen=True)
class Delayed:
    """How one tensor of a graph is quantized with a scale from its slot.

    slot: entry in `scales`; index: entry in the `amax` that it is called with. bootstrap: a slot without history
    is scaled by this tensor's own amax, which costs a pass over the tensor before it can be quantized; without it
    `scales` are those of `scales_or_one`.
    record: whether this use counts (training) or only reads the scale (evaluation). over: groups of the ranks that have
    the other parts of the tensor.
    """

    recipe: DelayedScaling
    dtype: torch.dtype
    slot: int
    index: int
    bootstrap: bool
    record: bool
    over: tuple[str, ...] = field(default=(), repr=False)

    def __call__(self, x: Tensor, scales: Tensor, amax: Tensor) -> Tensor:
        """`x` quantized and dequantized; records its amax in `amax`, in place."""
        new = scaling.amax(x)
        _, scale = self.scaled(x, scales)
        x_q = scaling.quantize(x, scale, self.dtype)
        if self.record:
            amax.copy_(record(amax, new, self.index, self.recipe.on_nonfinite))
        return scaling.dequantize(x_q, scaling.inverse_unless_nonfinite(scale, new), x.dtype)

    def scaled(self, x: Tensor, scales: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        """`x` in the shape that it is quantized in, and what it is multiplied with."""
        scale = scales[self.slot]
        if self.bootstrap:
            amax = amax_over(scaling.amax(x), self.over)
            own = scaling.scale_from_amax(amax, scaling.fp8_max(self.dtype), 1.0, self.recipe.margin)
            scale = torch.where(scale == 0, own, scale)
        return x, scale


@dataclass(frozen=True)
class Dynamic:
    """How one tensor is quantized with the scale from its own amax; 1 for a tensor of zeros. over: as of `Delayed`."""

    recipe: DynamicScaling
    dtype: torch.dtype
    over: tuple[str, ...] = field(default=(), repr=False)

    def __call__(self, x: Tensor) -> Tensor:
        """`x` quantized and dequantized."""
        return _qdq_by_amax(x, amax_over(scaling.amax(x), self.over), self.dtype, self.recipe.power_of_2)

    def scaled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As that of `Delayed`."""
        return x, _scale(amax_over(scaling.amax(x), self.over), self.dtype, self.recipe.power_of_2)


@dataclass(frozen=True)
class Rowwise:
    """How one tensor is quantized with a scale for each row: from the amax over `dims`, which a matmul contracts."""

    recipe: RowwiseScaling
    dtype: torch.dtype
    dims: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """`x` quantized and dequantized."""
        return _qdq_by_amax(x, scaling.amax_along(x, self.dims), self.dtype, self.recipe.power_of_2)

    def scaled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As that of `Delayed`; a scale for each row."""
        return x, _scale(scaling.amax_along(x, self.dims), self.dtype, self.recipe.power_of_2)


@dataclass(frozen=True)
class Groupwise:
    """How one tensor [R, C] in groups of rows is quantized with a scale for each column of each group.

    For matmuls that sum over the rows of every group by itself; offs i32[G]: see `grouped.py`.
    """

    recipe: RowwiseScaling
    dtype: torch.dtype

    def __call__(self, x: Tensor, offs: Tensor) -> Tensor:
        """`x` quantized and dequantized."""
        amax = grouped.amax_of_groups(x, offs)
        scale = _scale(amax, self.dtype, self.recipe.power_of_2)
        x_q = scaling.quantize(x, grouped.by_row(scale, offs, x.shape[0]), self.dtype)
        result: Tensor = grouped.dequantize_groups(x_q, scaling.inverse_unless_nonfinite(scale, amax), offs, x.dtype)
        return result

    def scaled(self, x: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
        """As that of `Delayed`; a scale for each element. Of rows that belong to no group zeros."""
        in_group = grouped.group_of_rows(offs, x.shape[0]) < len(offs)
        scale = _scale(grouped.amax_of_groups(x, offs), self.dtype, self.recipe.power_of_2)
        return torch.where(in_group.unsqueeze(1), x, 0), grouped.by_row(scale, offs, x.shape[0])


def _qdq_by_amax(x: Tensor, amax: Tensor, dtype: torch.dtype, power_of_2: bool) -> Tensor:
    scale = _scale(amax, dtype, power_of_2)
    x_q = scaling.quantize(x, scale, dtype)
    return scaling.dequantize(x_q, scaling.inverse_unless_nonfinite(scale, amax), x.dtype)


def _scale(amax: Tensor, dtype: torch.dtype, power_of_2: bool) -> Tensor:
    scale = scaling.scale_from_amax(amax, scaling.fp8_max(dtype), 1.0)
    return scaling.floor_to_power_of_2(scale) if power_of_2 else scale


@dataclass(frozen=True)
class Blockwise:
    """How one tensor is quantized with a scale for each block, of one row or of `block` rows.

    dims: those that a matmul contracts; blocks of `block` elements lie along them. With square blocks there is no such
    direction: a matrix is quantized as it is, and serves in both orientations.
    """

    recipe: BlockwiseScaling | MXFP8Scaling
    dtype: torch.dtype
    block: int
    square: bool = False
    dims: tuple[int, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """`x` quantized and dequantized."""
        matrix, back = self._matrix_of(x)
        blocks, scale, scale_inv = self._blocks(matrix)
        x_q = scaling.quantize(blocks, scale, self.dtype).reshape(matrix.shape).contiguous()
        scale_inv = scale_inv.reshape(blocks.shape[0], blocks.shape[2]).contiguous()
        result: Tensor = dequantize_blocks(x_q, scale_inv, x.dtype)
        return result if back is None else result.view([x.shape[d] for d in back]).permute(_inverse(back))

    def scaled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As that of `Delayed`; in blocks, with a scale for each."""
        matrix, _ = self._matrix_of(x)
        blocks, scale, _ = self._blocks(matrix)
        return blocks, scale

    def _matrix_of(self, x: Tensor) -> tuple[Tensor, list[int] | None]:
        """`x` as [R, C], blocks along C, and the order of its dimensions in that; None as it is."""
        if self.square:
            return x, None
        order = [*(d for d in range(x.dim()) if d not in self.dims), *self.dims]
        rows = math.prod(x.shape[d] for d in order[: -len(self.dims)])  # -1 is ambiguous where `x` is empty
        return x.permute(order).reshape(rows, math.prod(x.shape[d] for d in self.dims)), order

    def _blocks(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[R, C] as [R / r, r, C / c, c], and the scales of blocks and their inverses as the recipe stores them."""
        rows, columns = x.shape
        height = self.block if self.square else 1
        blocks = x.reshape(rows // height, height, columns // self.block, self.block)
        amax = scaling.amax_along(blocks, (1, 3))
        if isinstance(self.recipe, MXFP8Scaling):
            scale_inv = scaling.e8m0_from_amax(amax, scaling.fp8_max(self.dtype))
            return blocks, _reciprocal_of_e8m0(scale_inv), scale_inv
        scale = _scale(amax, self.dtype, self.recipe.power_of_2)
        return blocks, scale, scaling.inverse_unless_nonfinite(scale, amax)


def _inverse(order: list[int]) -> list[int]:
    return [order.index(d) for d in range(len(order))]


def _reciprocal_of_e8m0(codes: Tensor) -> Tensor:
    """`2**(127 - code)`, f32. Not 1 / the value: code 0 stands for 2**-127, which GPUs flush to 0."""
    exponent = (254 - codes.to(torch.int32)).clamp(1, 254)
    return (exponent << 23).view(torch.float32)


@torch.library.custom_op("fp8pass::dequantize_blocks", mutates_args=())
def dequantize_blocks(x_q: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """`x_q` f8[R, C] times the scale of each block, in float32, rounded once to `dtype`.

    scale_inv: [R / r, C / c] for blocks of r rows and c columns; f32, or u8 that is e8m0. An op of its own, so that
    the detector knows the blocks; where it does not become a scaled matmul, it becomes `dequantized_blocks`.
    """
    return dequantized_blocks(x_q, scale_inv, dtype)


@dequantize_blocks.register_fake
def _(x_q: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x_q, dtype=dtype)


DEQUANTIZE_BLOCKS = torch.ops.fp8pass.dequantize_blocks.default


def dequantized_blocks(x_q: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """The formula of `dequantize_blocks`."""
    if scaling.is_empty(x_q):
        return x_q.to(dtype)
    rows, columns = scale_inv.shape
    blocks = x_q.view(rows, x_q.shape[0] // rows, columns, x_q.shape[1] // columns)
    scale = scaling.float_from_e8m0(scale_inv) if scale_inv.dtype == torch.uint8 else scale_inv
    return scaling.dequantize(blocks, scale.view(rows, 1, columns, 1), dtype).view(x_q.shape)


@dataclass(frozen=True)
class Static:
    """How one tensor is quantized with a scale that is fixed. Saturates; NaN stays NaN.

    slot: column in `scales` f32[2, T], whose rows are the scales and their inverses.
    """

    recipe: StaticScaling
    dtype: torch.dtype
    slot: int

    def __call__(self, x: Tensor, scales: Tensor) -> Tensor:
        """`x` quantized and dequantized."""
        return frozen_operand(scaling.quantize(x, scales[0, self.slot], self.dtype), self, x.dtype, scales)

    def scaled(self, x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """As that of `Delayed`."""
        return x, scales[0, self.slot]


@dataclass(frozen=True)
class Observe:
    """How one tensor is looked at to calibrate a scale for it: its amax is recorded, as `Delayed` does it."""

    recipe: Calibration
    dtype: torch.dtype
    slot: int = -1
    index: int = -1

    def __call__(self, x: Tensor, scales: Tensor, amax: Tensor) -> Tensor:
        """`x` itself."""
        amax.copy_(record(amax, scaling.amax(x), self.index, self.recipe.on_nonfinite))
        return x


Quantizer = Delayed | Dynamic | Rowwise | Groupwise | Blockwise | Static | Observe
Stateful = Delayed | Static | Observe
"""Quantizers with a place in the state."""


def inputs_of(quantizer: Quantizer, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a quantizer takes beside its tensor, of what those of one gradient take."""
    return state if isinstance(quantizer, Stateful | Groupwise) else ()


def quantized(x: Tensor, quantizer: Quantizer, *state: Tensor) -> Tensor:
    """`x` quantized and dequantized. Of a DTensor each rank has a part: see `sharded.py`."""

    def of_part(part: Tensor, groups: tuple[str, ...]) -> Tensor:
        if groups and isinstance(quantizer, (Delayed, Dynamic)):
            return replace(quantizer, over=groups)(part, *state)
        return quantizer(part, *state)

    return on_part(of_part, x)


def frozen_operand(x_q: Tensor, quantizer: Static, dtype: torch.dtype, scales: Tensor) -> Tensor:
    """An operand that was quantized in advance, dequantized to `dtype`."""
    return scaling.dequantize(x_q, scales[1, quantizer.slot], dtype)


@torch.library.custom_op("fp8pass::with_transpose", mutates_args=())
def with_transpose(x_q: Tensor, x_t: Tensor) -> Tensor:
    """`x_q` f8[N, K], of which `x_t` f8[K, N] is the transposed copy.

    An op of its own, so that the `use_transposes` pass finds both; nothing is computed by it in the end.
    """
    return x_q.clone()


@with_transpose.register_fake
def _(x_q: Tensor, x_t: Tensor) -> Tensor:
    return torch.empty_like(x_q)


WITH_TRANSPOSE = torch.ops.fp8pass.with_transpose.default


@torch.library.custom_op("fp8pass::shared", mutates_args=())
def _shared(scales: Tensor, group: str) -> Tensor:
    """An op of its own, so that the `quantize_collectives` pass finds it; nothing is computed by it in the end."""
    return scales.clone()


@_shared.register_fake
def _(scales: Tensor, group: str) -> Tensor:
    return torch.empty_like(scales)


def shared(scales: Tensor, group: str) -> Tensor:
    """`scales`, which are the same on all ranks of a group, known by its name."""
    result: Tensor = _shared(scales, group)
    return result


SHARED = torch.ops.fp8pass.shared.default


class _QDQ(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer, *state: Tensor) -> Tensor:
        ctx.n_state = len(state)
        return quantized(x, quantizer, *state)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, *[None] * ctx.n_state


class _Cached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Delayed, *state: Tensor) -> Tensor:
        ctx.n_state = len(state)
        weight_copy_scales, *copies = state
        x_q: Tensor = copies[0] if len(copies) == 1 else with_transpose(*copies)
        return scaling.dequantize(x_q, weight_copy_scales[0, quantizer.index], x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, *[None] * ctx.n_state


class _SelectGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, y_a: Tensor, y_b: Tensor, *how: Any) -> Tensor:
        ctx.how = how
        return copy_of(y)

    @staticmethod
    @once_differentiable
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        # not compiled: in a compiled step, Dynamo takes the backward of what ran eagerly for code of the user's
        (grad,), (quantizer_a, quantizer_b, *state) = grads, ctx.how
        needed = ctx.needs_input_grad[1:3]
        quantizers = [q for q, n in zip((quantizer_a, quantizer_b), needed, strict=True) if n and q is not None]
        found = {q: quantized(grad, q, *inputs_of(q, state)) for q in quantizers}
        routed = (found.get(q, grad) if n else None for q, n in zip((quantizer_a, quantizer_b), needed, strict=True))
        return None, *routed, *[None] * len(ctx.how)


class _GradQDQ(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, quantizer: Quantizer, *state: Tensor) -> Tensor:
        ctx.quantizer, ctx.state = quantizer, state
        return copy_of(y)  # not a view, which users could not modify in place; compiled, the copy goes away

    @staticmethod
    @once_differentiable
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        return quantized(grads[0], ctx.quantizer, *ctx.state), None, *[None] * len(ctx.state)


def qdq_operand(x: Tensor, quantizer: Quantizer, *state: Tensor) -> Tensor:
    """`x` quantized and dequantized; the gradient passes straight through."""
    return _QDQ.apply(x, quantizer, *state)  # type: ignore[no-any-return, no-untyped-call]


def cached_operand(x: Tensor, quantizer: Delayed, *state: Tensor) -> Tensor:
    """`x`, a weight, as its FP8 copy has it: `qdq_operand` where it was quantized when it was last changed.

    state: `weight_copy_scales` f32[2, W], see `SlotTensors`; `x_q` f8[N, K], the copy; and, where one is kept, `x_t`
    f8[K, N], the transposed copy. quantizer: its index is that among the W. `begin_step` records the amax.
    """
    return _Cached.apply(x, quantizer, *state)  # type: ignore[no-any-return, no-untyped-call]


def qdq_gradient(y: Tensor, quantizer: Quantizer, *state: Tensor) -> Tensor:
    """`y` itself; its gradient is quantized and dequantized."""
    return _GradQDQ.apply(y, quantizer, *state)  # type: ignore[no-any-return, no-untyped-call]


def qdq_no_grad(x: Tensor, quantizer: Quantizer | None, *state: Tensor) -> Tensor:
    """`x`, quantized and dequantized if there is a quantizer; no gradient passes."""
    return x.detach() if quantizer is None else quantized(x.detach(), quantizer, *state)


def select_gradients(
    y: Tensor, y_a: Tensor, y_b: Tensor, grad_a: Quantizer | None, grad_b: Quantizer | None, *state: Tensor
) -> Tensor:
    """`y`, with the gradients of `y_a` and `y_b`: three forms of one product, each of differently quantized factors.

    y has the output, y_a the gradient of the first factor, y_b that of the second; the values of y_a and y_b are not
    used, and so not computed in compiled code. grad_a, grad_b: what quantizes the gradient for each. state: of those
    that have any; of `Groupwise`, `offs`.
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
) -> Tensor:
    """Begin a training forward: roll what the last step recorded, in place. Returns the scales of this step, f32[T].

    Where `held`, the step goes on. The graph uses the returned tensor, never the buffer: by the time of the backward
    that may belong to a later step. of_weights: `amax_weights` and `weight_copy_scales`, where copies of weights are
    kept: this step uses those, and their amaxes are recorded here.
    """
    forward, backward = (scaling.fp8_max(recipe.dtype(role)) for role in ("input", "grad_output"))
    early = [amax_forward, *of_weights[:1]]
    amax = torch.cat([*early, amax_backward])
    limits = [*(torch.full_like(part, forward) for part in early), torch.full_like(amax_backward, backward)]
    scales, history = scaling.roll_history(
        scale,
        amax_history,
        amax=torch.where(held, scaling.NOTHING, amax),
        fp8_max=torch.cat(limits),
        algo=recipe.amax_compute_algo,
        margin=recipe.margin,
    )
    amax_history.copy_(history)
    scale.copy_(scales)
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
    """The scales f32[W] of weights in the next step, which will roll what this one has recorded; writes nothing.

    first: F, where they begin among the T slots.
    """
    of_weights = slice(first, first + len(amax_weights))
    scales, _ = scaling.roll_history(
        scale[of_weights],
        amax_history[:, of_weights],
        amax=amax_weights,
        fp8_max=torch.full_like(amax_weights, scaling.fp8_max(recipe.dtype("weight"))),
        algo=recipe.amax_compute_algo,
        margin=recipe.margin,
    )
    return scales


@torch.no_grad()
def write_weight(
    scales: Tensor, index: int, parts: list[Tensor], copies: list[Tensor], transposes: list[Tensor]
) -> Tensor:
    """Quantize a weight, which consists of `parts` one below the other, into its FP8 copy, in place. Returns its amax.

    scales: f32[W], of which it is entry `index`. copies: of each part, f8[n, K]; transposes: of each f8[K, n], or none.
    """
    amaxes = []
    for i, part in enumerate(parts):
        stored = part if part.dtype == torch.float32 else ROUNDED(part)
        x_q = scaling.quantize(stored, scales[index], scaling.E4M3)
        amaxes.append(scaling.amax(stored))
        copies[i].copy_(x_q)
        if transposes:
            transposes[i].copy_(x_q.t().contiguous())
    return functools.reduce(torch.maximum, amaxes)


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


@torch.no_grad()
def decode_moment(kind: MomentKind, x_q: Tensor, moment_scales: Tensor, index: int, dtype: torch.dtype) -> Tensor:
    """The moment that `x_q` stores. moment_scales: f32[2, n], see `moments.Fp8Moment`."""
    return moments.decode(kind, x_q, moment_scales[0, index], dtype)


@torch.no_grad()
def next_moment_scales(kinds: tuple[MomentKind, ...], moment_scales: Tensor, skipped: Tensor | None) -> Tensor:
    """The scales f32[n] to store moments by, of what is stored now; the same as now where `skipped` b8[].

    kinds: of each, first moments before second ones.
    """
    now = moment_scales[0].reciprocal()
    firsts = kinds.count("first")  # these come first
    first, second = torch.split(moment_scales[1], [firsts, len(kinds) - firsts])
    targets = torch.full_like(first, moments.TARGETS["first"]), torch.full_like(second, moments.TARGETS["second"])
    new = moments.scale_towards(torch.cat(targets), moment_scales[1], now)
    return new if skipped is None else torch.where(skipped, now, new)


@torch.no_grad()
def write_moment(kind: MomentKind, x: Tensor, x_q: Tensor, scales: Tensor, index: int) -> Tensor:
    """Store `x` in `x_q`, in place, with entry `index` of `scales` f32[n]. Returns the amax f32[] of what is stored."""
    x, scale = x.float(), scales[index]
    x_q.copy_(moments.encode(kind, x, scale))
    # the largest stored value is the stored largest value: rounding keeps order, and Inductor would leave it out
    stored = moments.encode(kind, scaling.amax(x), scale)
    return (stored if kind == "first" else ROUNDED(stored)).float() * scale.reciprocal()


@torch.no_grad()
def write_moment_scales(moment_scales: Tensor, scales: Tensor, amaxes: list[Tensor]) -> None:
    """Say in `moment_scales` f32[2, n] what is stored now, in place."""
    moment_scales.copy_(torch.stack([scales.reciprocal(), torch.stack(amaxes)]))


@torch.no_grad()
def any_nonfinite(tensors: list[Tensor]) -> Tensor:
    """Return whether any of the tensors, floating and of any shape, holds a NaN or an infinity: b8[]."""
    device = max((x.device for x in tensors), key=lambda d: d.type != "cpu")
    amaxes = [scaling.amax(x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1)) for x in tensors if x.numel()]
    return scaling.is_finite(torch.stack([a.to(device) for a in amaxes]).amax()).logical_not()


@torch.no_grad()
def restore_where(unchanged: Tensor, x: Tensor, old: Tensor) -> None:
    """Put `old` back into `x`, in place, where `unchanged` b8[]."""
    x.copy_(torch.where(unchanged, old, x))


@torch.no_grad()
def forget_step(forgets: Tensor, amax: Tensor) -> None:
    """Empty the running amaxes f32[...] of a step, in place, where `forgets` b8[]: nothing will be rolled."""
    amax.copy_(torch.where(forgets, scaling.NOTHING, amax))


@torch.no_grad()
def count_skips(event: Tensor, counts: Tensor) -> None:
    """Count calls, and those with the event, in `counts` i64[2], in place."""
    counts.add_(torch.stack([torch.ones_like(event), event]))


def scales_or_one(scales: Tensor) -> Tensor:
    """`scales` f32[T], with 1 for slots that have no history yet: for all of them at once."""
    return torch.where(scales == 0, 1.0, scales)


def qdq(x: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """`dequantize(quantize(x, scale, dtype), 1 / scale, x.dtype)` with a straight-through gradient.

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
    """`beta * bias + y` in `dtype`, as linear, addmm and baddbmm mean it: beta 0 ignores even a NaN bias."""
    if beta == 0:
        bias = torch.where(torch.zeros_like(bias, dtype=torch.bool), bias, 0)
    bias = bias.to(dtype)
    return sharded.add(y, bias if beta in (0, 1) else beta * bias)
