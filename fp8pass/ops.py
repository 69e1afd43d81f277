"""Quantize-dequantize as differentiable torch functions: what users write, and what the recipe inserts.

The annotate pass puts these functions into a graph as they are. Run eagerly they are the numerical reference; traced by
AOTAutograd they become the plain ATen quantize and dequantize that the `scaled_mm` pass looks for. So nothing here may
depend on whether it is being compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8pass import scaling
from fp8pass.recipes import DelayedScaling, DynamicScaling


class SlotTensors(NamedTuple):
    """Delayed-scaling state of the T slots of one graph. All of it is mutated in place.

    The first F slots belong to tensors quantized in forward, the other T - F to gradients.

        scale            f32[T]     0 until the slot has seen data
        amax_history     f32[H, T]  newest at row 0
        amax_forward     f32[F]     running amax of the step, -1 where it has recorded nothing
        amax_backward    f32[T-F]
    """

    scale: Tensor
    amax_history: Tensor
    amax_forward: Tensor
    amax_backward: Tensor

    def inputs(self) -> list[Tensor]:
        """What the graph is called with: the four tensors, and `amax_backward` once more for the backward to write.

        The backward must merge into what the buffer holds by then, not into what its forward saw; as an input of its
        own, which the forward does not touch, it is read when the backward runs. `.data` gives each call tensors with
        version counters of their own, so that several forwards may be under way before their backwards.
        """
        return [t.data for t in (*self, self.amax_backward)]


INPUTS = (*SlotTensors._fields, "amax_backward_late")
"""Names of the state inputs of a graph, in order."""


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
    is scaled by this tensor's own amax, which costs a pass over the tensor before it can be quantized; without it by 1.
    record: whether this use counts (training) or only reads the scale (evaluation).
    """

    recipe: DelayedScaling
    dtype: torch.dtype
    slot: int
    index: int
    bootstrap: bool
    record: bool

    def __call__(self, x: Tensor, scales: Tensor, amax: Tensor) -> Tensor:
        """`x` quantized and dequantized; records its amax in `amax`, in place."""
        new = scaling.amax(x)
        scale = scales[self.slot]
        fallback: Tensor | float = 1.0
        if self.bootstrap:
            fallback = scaling.scale_from_amax(new, scaling.fp8_max(self.dtype), 1.0, self.recipe.margin)
        scale = torch.where(scale == 0, fallback, scale)
        x_q = scaling.quantize(x, scale, self.dtype)
        if self.record:
            amax.copy_(record(amax, new, self.index, self.recipe.on_nonfinite))
        return scaling.dequantize(x_q, scaling.inverse_unless_nonfinite(scale, new), x.dtype)


@dataclass(frozen=True)
class Dynamic:
    """How one tensor is quantized with the scale from its own amax; 1 for a tensor of zeros."""

    recipe: DynamicScaling
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """`x` quantized and dequantized."""
        amax = scaling.amax(x)
        scale = scaling.scale_from_amax(amax, scaling.fp8_max(self.dtype), 1.0)
        if self.recipe.power_of_2:
            scale = scaling.floor_to_power_of_2(scale)
        x_q = scaling.quantize(x, scale, self.dtype)
        return scaling.dequantize(x_q, scaling.inverse_unless_nonfinite(scale, amax), x.dtype)


Quantizer = Delayed | Dynamic


class _QDQ(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer, *state: Tensor) -> Tensor:
        ctx.n_state = len(state)
        return quantizer(x, *state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, *[None] * ctx.n_state


class _GradQDQ(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, quantizer: Quantizer, *state: Tensor) -> Tensor:
        ctx.quantizer, ctx.state = quantizer, state
        return y.clone()  # not a view, which users could not modify in place; compiled, the copy goes away

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.quantizer(grads[0], *ctx.state), None, *[None] * len(ctx.state)


def qdq_operand(x: Tensor, quantizer: Quantizer, *state: Tensor) -> Tensor:
    """`x` quantized and dequantized; the gradient passes straight through."""
    return _QDQ.apply(x, quantizer, *state)  # type: ignore[no-any-return, no-untyped-call]


def qdq_gradient(y: Tensor, quantizer: Quantizer, *state: Tensor) -> Tensor:
    """`y` itself; its gradient is quantized and dequantized."""
    return _GradQDQ.apply(y, quantizer, *state)  # type: ignore[no-any-return, no-untyped-call]


def begin_step(
    recipe: DelayedScaling, scale: Tensor, amax_history: Tensor, amax_forward: Tensor, amax_backward: Tensor
) -> Tensor:
    """Begin a training forward: roll what the last step recorded, in place. Returns the scales of this step, f32[T].

    The graph uses the returned tensor, never the buffer: by the time of the backward that may belong to a later step.
    """
    forward, backward = (scaling.fp8_max(recipe.dtype(role)) for role in ("input", "grad_output"))
    scales, history = scaling.roll_history(
        scale,
        amax_history,
        amax=torch.cat([amax_forward, amax_backward]),
        fp8_max=torch.cat([torch.full_like(amax_forward, forward), torch.full_like(amax_backward, backward)]),
        algo=recipe.amax_compute_algo,
        margin=recipe.margin,
    )
    amax_history.copy_(history)
    scale.copy_(scales)
    amax_forward.fill_(scaling.NOTHING)
    amax_backward.fill_(scaling.NOTHING)
    return scales


def qdq(x: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """`dequantize(quantize(x, scale, dtype), 1 / scale, x.dtype)` with a straight-through gradient.

    x: floating, any shape; scale: f32[] tensor or number; dtype: an FP8 type. Saturates at the format's largest value;
    NaN stays NaN.
    """
    return _StaticQDQ.apply(x, scale, dtype)  # type: ignore[no-any-return, no-untyped-call]


class _StaticQDQ(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
        return scaling.dequantize(scaling.quantize(x, scale, dtype), 1 / scale, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None
