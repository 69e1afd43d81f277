"""The numerics monitor: what quantization does to each tensor, counted in the graph that quantizes it.

The `insert_monitors` pass puts these functions next to quantize-dequantize. What they count goes into a vector for each
tensor, which lies on the device; when a step begins, those of the last one are moved into a ring buffer. No step waits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8pass import scaling
from fp8pass.quant import ops


class Numerics(NamedTuple):
    """What is counted of a tensor x in a step: f32 numbers. The first two merge by max over uses, the others add up.

    amax         max(abs(x)), NaN if x holds one
    scale_inv    of the smallest scale, where each row or block has its own
    elements     of x, in all uses
    nonzero      those that are not 0, NaN and inf among them
    underflowed  those of them that became 0
    saturated    those that are too large for the format, and were clamped to its largest value
    nonfinite    those that are NaN or inf
    signal       sum((x * scale)**2) of the finite ones
    noise        sum((quantize(x * scale) - x * scale)**2) of those
    """

    amax: Any
    scale_inv: Any
    elements: Any
    nonzero: Any
    underflowed: Any
    saturated: Any
    nonfinite: Any
    signal: Any
    noise: Any


MAXIMA = 2
"""So many of the numbers merge by max."""
N = len(Numerics._fields)


def numerics_of(x: Tensor, scale: Tensor, x_q: Tensor) -> Tensor:
    """The `Numerics` f32[9] of a tensor. x: of rank 1 or more; scale: broadcasts to it; x_q: FP8, quantized by it."""
    finite = x.abs() < float("inf")
    nonzero = x != 0
    scaled = torch.where(finite, x.float(), 0.0) * scale
    q = torch.where(finite, x_q.float(), 0.0)
    found = Numerics(
        amax=scaling.amax(x),
        scale_inv=scale.reciprocal().amax(),
        elements=torch.full((), x.numel(), dtype=torch.float32, device=x.device),
        nonzero=_sum(nonzero),
        underflowed=_sum(nonzero & finite & (q == 0)),
        saturated=_sum(scaled.abs() > overflow_from(x_q.dtype)),
        nonfinite=_sum(~finite),
        signal=_sum(scaled * scaled),
        noise=_sum((q - scaled) ** 2),
    )
    return torch.stack(found)


def overflow_from(dtype: torch.dtype) -> float:
    """What is larger would be rounded to a number that the format does not have: its largest one and half a step.

    464 for e4m3, 61440 for e5m2: by the scale of a tensor's own amax, rounding alone takes nothing there.
    """
    info = torch.finfo(dtype)
    return info.max + 2.0 ** (torch.tensor(info.max).log2().floor().item()) * info.eps / 2


def _sum(x: Tensor) -> Tensor:
    """Of all elements, f32[]; rows first, as in `scaling.amax`, to share its kernel."""
    return x.float().sum(-1).sum()


def merge(numerics: Tensor, new: Tensor) -> Tensor:
    """Of several uses of a tensor in a step, f32[..., 9]."""
    maxima = torch.maximum(numerics[..., :MAXIMA], new[..., :MAXIMA])
    return torch.cat([maxima, numerics[..., MAXIMA:] + new[..., MAXIMA:]], -1)


@torch.library.custom_op("fp8pass::record_numerics", mutates_args=())
def record_numerics(numerics: Tensor, new: Tensor, index: int) -> Tensor:
    """`numerics` f32[T, 9] with row `index` merged with `new` f32[9].

    An op of its own, as `ops.record`: the `batch_records` pass makes one update of all.
    """
    numerics = numerics.clone()
    numerics[index] = merge(numerics[index], new)
    return numerics


@record_numerics.register_fake
def _(numerics: Tensor, new: Tensor, index: int) -> Tensor:
    return torch.empty_like(numerics)


RECORD_NUMERICS = torch.ops.fp8pass.record_numerics.default


def _record(x: Tensor, quantizer: Any, numerics: Tensor, index: int, *state: Tensor) -> None:
    x, scale = quantizer.scaled(x, *ops.inputs_of(quantizer, state))
    new = numerics_of(x, scale, scaling.quantize(x, scale, quantizer.dtype))
    numerics.copy_(record_numerics(numerics, new, index))


@torch.no_grad()
def watch_operand(x: Tensor, quantizer: ops.Quantizer, numerics: Tensor, index: int, *state: Tensor) -> None:
    """Count what `quantizer(x, *state)` does in row `index` of `numerics` f32[T, 9], in place."""
    _record(x, quantizer, numerics, index, *state)


@torch.no_grad()
def watch_cached(
    x: Tensor, quantizer: ops.Delayed, numerics: Tensor, index: int, made: Tensor, x_q: Tensor, *_: Tensor
) -> None:
    """As `watch_operand`, of a weight whose FP8 copy is kept: see `ops.cached_operand`."""
    scale = made[0, quantizer.index].reciprocal()
    scale = torch.where(scale.isnan(), 1.0, scale)  # of a weight that is not finite
    numerics.copy_(record_numerics(numerics, numerics_of(x, scale, x_q), index))


def watch_gradient(
    y: Tensor, quantizers: tuple[ops.Quantizer, ...], numerics: Tensor, indices: tuple[int, ...], *state: Tensor
) -> Tensor:
    """`y` itself; of its gradient, what each quantizer does is counted, as in `watch_operand`."""
    return _WatchGradient.apply(y, quantizers, numerics, indices, *state)  # type: ignore[no-any-return, no-untyped-call]


class _WatchGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, quantizers: Any, numerics: Tensor, indices: Any, *state: Tensor) -> Tensor:
        ctx.how = quantizers, numerics, indices, state
        return y.clone()  # not a view, as in `ops.qdq_gradient`

    @staticmethod
    @once_differentiable
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        quantizers, numerics, indices, state = ctx.how
        for quantizer, index in zip(quantizers, indices, strict=True):
            _record(grads[0], quantizer, numerics, index, *state)
        return grads[0], None, None, None, *[None] * len(state)


# ---------------------------------------------------------------------------------------------------------------------
# Where the numbers are kept


@dataclass(frozen=True)
class Watched:
    """A tensor that is watched: its slot's name, what it is to its matmul, and the user's line of that."""

    name: str
    role: str
    source: str


WATCHED = "fp8pass_watched"
"""In the meta of a node of the annotated graph that quantizes: the `Watched` of each quantizer in its arguments."""


@dataclass(frozen=True)
class WatchTable:
    """What one graph watches: tensors of the forward, in its order; then gradients, in that of the forward too.

    n_forward: how many are of the forward. steps: how many the ring buffer holds.
    """

    watched: tuple[Watched, ...]
    n_forward: int
    device: torch.device
    steps: int

    @property
    def code(self) -> str:
        """Tells graphs of one instance apart."""
        return repr(self.watched)


class MonitorBuffer:
    """The numbers of one instance, for one graph. All tensors stay where they are.

    forward: f32[F, 9], backward: f32[T-F, 9], of the step that goes on; past: f32[S, T, 9], those before it.
    """

    def __init__(self, table: WatchTable) -> None:
        self.table = table
        self._count = 0
        """How many steps are over."""
        self.steps: deque[int] = deque(maxlen=table.steps + 1)
        """Those that are kept; the last one goes on."""
        self.called: deque[int] = deque(maxlen=table.steps + 1)
        """When each of them called the graph first, on a clock that all graphs have."""
        total, first, device = len(table.watched), table.n_forward, table.device
        with torch.inference_mode(False):
            self.forward = torch.zeros(first, N, device=device)
            self.backward = torch.zeros(total - first, N, device=device)
            self.past = torch.zeros(table.steps, total, N, device=device)
            self._repeated = torch.zeros_like(self.forward)

    @torch.no_grad()
    def begin(self, step: int, clock: int) -> None:
        """A step begins, unless it has already. A few small copies."""
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

    def inputs(self, repeats: bool = False) -> list[Tensor]:
        """What the graph is called with. repeats: its forward runs again, in a backward, and has been counted."""
        return [(self._repeated if repeats else self.forward).data, self.backward.data]

    def read(self) -> Tensor:
        """Of `steps`, f32[S, T, 9] on the CPU. Waits for the device."""
        rows = [self.past[i % len(self.past)] for i in range(self._count + 1 - len(self.steps), self._count)]
        return torch.stack([*rows, torch.cat([self.forward, self.backward])]).cpu()
