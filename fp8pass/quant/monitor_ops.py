"""The numerics monitor: counts the effects of quantization on each tensor, in the graph that quantizes it.

The `insert_monitors` pass inserts these functions next to quantize-dequantize. Each tensor has a vector of statistics
on the device; when a step begins, the vectors of the step before are moved into a ring buffer. No step waits for the
device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8pass.base import scaling
from fp8pass.base.node_meta import QuantizedTensor
from fp8pass.quant import ops
from fp8pass.quant.sharded import part_of


class Numerics(NamedTuple):
    """The f32 statistics of a tensor x in a step. Over several uses the first three merge by max, the others add up.

    amax         max(abs(x)), NaN if x holds a NaN
    scale_inv    of the smallest scale, if each row or block has a scale
    unit         what x is divided by for the last two, times the format's largest value: x**4 itself may overflow
    elements     number of elements of x
    nonzero      number of elements other than 0, including NaN and inf
    underflowed  number of finite elements other than 0 that became 0
    saturated    number of elements too large for the format, which were clamped to its largest value
    nonfinite    number of elements that are NaN or inf
    signal       sum((x * scale)**2) over the finite elements
    noise        sum((quantize(x * scale) - x * scale)**2) over the finite elements
    requantized  number of uses that were quantized again by the tensor's own amax: `on_saturation="requantize"`
    square       sum((x / (unit * fp8_max))**2) over the finite elements
    fourth       sum((x / (unit * fp8_max))**4) over the finite elements
    """

    amax: Any
    scale_inv: Any
    unit: Any
    elements: Any
    nonzero: Any
    underflowed: Any
    saturated: Any
    nonfinite: Any
    signal: Any
    noise: Any
    requantized: Any
    square: Any
    fourth: Any


MAXIMA = 3
"""Number of leading fields of `Numerics` that merge by max."""
POWERS = (2, 4)
"""The power of x in each of the last fields. Where two uses have different units, these are converted to one."""
N = len(Numerics._fields)


def numerics_of(x: Tensor, scale: Tensor, x_q: Tensor, requantized: Tensor | None = None) -> Tensor:
    """Return the `Numerics` f32[13] of x, of rank 1 or more.

    scale: broadcasts to x; x_q: x quantized with it. requantized: whether that is not the delayed scale, b8[].
    """
    finite = x.abs() < float("inf")  # False for NaN, too
    nonzero = x != 0
    finite_x = torch.where(finite, x.float(), 0.0)
    scaled = finite_x * scale
    q = torch.where(finite, x_q.float(), 0.0)
    limit = scaling.fp8_max(x_q.dtype)
    if scale.numel() == 1:  # at most about 1 in these units, and no further pass over x
        unit, of_unit = scale.reciprocal().amax(), scaled / limit
    else:  # a row of zeros has scale 1, which may be far from that of the others
        unit = scaling.amax(finite_x) / limit
        of_unit = finite_x / torch.where(unit > 0, unit * limit, 1.0)
    square = of_unit * of_unit
    numerics = Numerics(
        amax=scaling.amax(x),
        scale_inv=scale.reciprocal().amax(),
        unit=unit,
        elements=torch.full((), x.numel(), dtype=torch.float32, device=x.device),
        nonzero=_sum(nonzero),
        underflowed=_sum(nonzero & finite & (q == 0)),
        saturated=_sum(scaled.abs() > scaling.overflow_from(x_q.dtype)),
        nonfinite=_sum(~finite),
        signal=_sum(scaled * scaled),
        noise=_sum((q - scaled) ** 2),
        requantized=torch.zeros((), device=x.device) if requantized is None else requantized.float(),
        square=_sum(square),
        fourth=_sum(square * square),
    )
    return torch.stack(numerics)


def _sum(x: Tensor) -> Tensor:
    """Sum all elements, f32[]; rows first, as in `scaling.amax`, to share its kernel."""
    return x.float().sum(-1).sum()


def merge(numerics: Tensor, new: Tensor) -> Tensor:
    """Merge the statistics of two uses of a tensor in a step, f32[..., 13] each."""
    maxima, end = torch.maximum(numerics[..., :MAXIMA], new[..., :MAXIMA]), N - len(POWERS)
    sums = numerics[..., MAXIMA:end] + new[..., MAXIMA:end]
    unit = maxima[..., MAXIMA - 1]
    safe = torch.where(unit > 0, unit, 1.0)
    moments = []
    for i, power in enumerate(POWERS):
        before, now = (counts[..., end + i] * (counts[..., MAXIMA - 1] / safe) ** power for counts in (numerics, new))
        moments.append(before + now)
    return torch.cat([maxima, sums, torch.stack(moments, -1)], -1)


@torch.library.custom_op("fp8pass::record_numerics", mutates_args=())
def record_numerics(numerics: Tensor, new: Tensor, index: int) -> Tensor:
    """Return `numerics` f32[T, 13] with row `index` merged with `new` f32[13].

    A custom op, like `ops.record`, so that the `batch_records` pass finds all records and merges them into one update.
    """
    numerics = numerics.clone()
    numerics[index] = merge(numerics[index], new)
    return numerics


@record_numerics.register_fake
def _(numerics: Tensor, new: Tensor, index: int) -> Tensor:
    return torch.empty_like(numerics)


RECORD_NUMERICS = torch.ops.fp8pass.record_numerics.default


def _record(x: Tensor, quantizer: Any, numerics: Tensor, index: int, *state: Tensor) -> None:
    inputs = ops.inputs_of(quantizer, state)
    requantized = quantizer.is_requantized(x, *inputs) if isinstance(quantizer, ops.Delayed) else None
    x, scale = quantizer.scaled(x, *inputs)
    new = numerics_of(x, scale, scaling.quantize(x, scale, quantizer.dtype), requantized)
    numerics.copy_(record_numerics(numerics, new, index))


@ops.in_forward_only
@ops.like_first
@torch.no_grad()
def watch_operand(x: Tensor, quantizer: ops.Quantizer, numerics: Tensor, index: int, *state: Tensor) -> None:
    """Count the effects of `quantizer(x, *state)` in row `index` of `numerics` f32[T, 13], in place."""
    _record(x, quantizer, numerics, index, *state)


@ops.in_forward_only
@ops.like_first
@torch.no_grad()
def watch_cached(
    x: Tensor, quantizer: ops.Cacheable, numerics: Tensor, index: int, scales: Tensor, *copies: Tensor
) -> None:
    """Count as `watch_operand` does, for a weight whose FP8 copy is cached: see `ops.cached_operand`."""
    scale = ops.scale_inv_of_copy(quantizer, scales).reciprocal()
    scale = torch.where(scale.isnan(), 1.0, scale)  # the scale_inv of a weight with a NaN or inf is NaN
    x_q = copies[0].t() if ops.is_turned(quantizer) else copies[0]
    numerics.copy_(record_numerics(numerics, numerics_of(part_of(x), scale, x_q), index))


@ops.like_first
def watch_gradient(
    y: Tensor, quantizers: tuple[ops.Quantizer, ...], numerics: Tensor, indices: tuple[int, ...], *state: Tensor
) -> Tensor:
    """Return `y`; count the effects of each quantizer on its gradient, as `watch_operand` does."""
    return _WatchGradient.apply(y, quantizers, numerics, indices, *state)  # type: ignore[no-any-return, no-untyped-call]


class _WatchGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, quantizers: Any, numerics: Tensor, indices: Any, *state: Tensor) -> Tensor:
        ctx.how = quantizers, numerics, indices, state
        return y.clone()  # for the same reason as in `ops._GradQDQ`

    @staticmethod
    @once_differentiable
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        # not compiled, as in `ops._SelectGradients`
        quantizers, numerics, indices, state = ctx.how
        for quantizer, index in zip(quantizers, indices, strict=True):
            _record(grads[0], quantizer, numerics, index, *state)
        return grads[0], None, None, None, *[None] * len(state)


# ---------------------------------------------------------------------------------------------------------------------
# The buffers of the statistics


@dataclass(frozen=True)
class WatchTable:
    """The monitored tensors of one graph: those of the forward in its order, then gradients, in that order too.

    n_forward: number of tensors of the forward. steps: number of steps that the ring buffer holds. kurtosis: that of
    activations above which to warn; None for no warning.
    """

    watched: tuple[QuantizedTensor, ...]
    n_forward: int
    device: torch.device
    steps: int
    kurtosis: float | None = None

    @property
    def code(self) -> str:
        """A text that differs between graphs of one instance."""
        return repr(self.watched)


class MonitorBuffer:
    """The statistics of one instance, for one graph. All tensors keep their addresses.

    forward: f32[F, 13] and backward: f32[T-F, 13], of the current step. past: f32[S, T, 13], of the steps before it.
    """

    def __init__(self, table: WatchTable) -> None:
        self.table = table
        self.warned_of: set[str] = set()
        """The slots whose kurtosis was warned of."""
        self._count = 0
        """Number of steps that have ended."""
        self.steps: deque[int] = deque(maxlen=table.steps + 1)
        """The steps whose statistics are kept; the last one is the current step."""
        self.called: deque[int] = deque(maxlen=table.steps + 1)
        """For each of these steps, the time of the first call of the graph, on a clock that all graphs share."""
        total, first, device = len(table.watched), table.n_forward, table.device
        with torch.inference_mode(False):  # tensors made in inference mode can't be written in place outside of it
            self.forward = torch.zeros(first, N, device=device)
            self.backward = torch.zeros(total - first, N, device=device)
            self.past = torch.zeros(table.steps, total, N, device=device)
            self._repeated = torch.zeros_like(self.forward)

    @torch.no_grad()
    def begin(self, step: int, clock: int) -> None:
        """Begin a step, unless it has begun already. Takes a few small copies."""
        if self.steps and self.steps[-1] == step:
            return
        if self.steps:
            row = self.past[self._count % len(self.past)]
            kept = torch.split(row, [len(self.forward), len(self.backward)])
            for of_step, place in zip((self.forward, self.backward), kept, strict=True):
                place.copy_(of_step)
                of_step.zero_()
            self._count += 1
        self.steps.append(step)
        self.called.append(clock)

    def saved(self) -> Callable[[], None]:
        """Return a function that restores the statistics as they are now, in tensors that keep their addresses."""
        count, steps, called = self._count, list(self.steps), list(self.called)
        tensors = self.forward, self.backward, self.past
        values = [t.clone() for t in tensors]

        def restore() -> None:
            self._count = count
            for kept, before in ((self.steps, steps), (self.called, called)):
                kept.clear()
                kept.extend(before)
            for t, value in zip(tensors, values, strict=True):
                t.copy_(value)

        return restore

    def inputs(self, repeats: bool = False) -> list[Tensor]:
        """Return the graph's inputs. repeats: True if a backward runs the forward again, which is counted already."""
        # `.data`: as in `SlotInput.value`, each call has its own version counters
        return [(self._repeated if repeats else self.forward).data, self.backward.data]

    def read(self) -> Tensor:
        """Return the statistics of `steps`, f32[S, T, 13] on the CPU. Synchronizes with the device."""
        rows = [self.past[i % len(self.past)] for i in range(self._count + 1 - len(self.steps), self._count)]
        return torch.stack([*rows, torch.cat([self.forward, self.backward])]).cpu()
