"""Bound the amax of a weight before its update is computed: `weight_amax="predicted"` of `fp8pass.train_step`.

An update of Adam or SGD moves no element by more than a number that the optimizer's options give. So the largest value
that a weight can have after the update is known before it, from the amax that the kernel of the update before has
measured: `amax(t + 1) <= grows * amax(t) + moves`. A scale of this bound does not saturate.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from fp8pass.quant.sharded import groups_of

_CLIPPED = 1.01
"""A norm is summed in float32 at best, and gradients are rounded after they are divided by it."""
_ROUNDING = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""The most that the rounding of an update may add to a weight, by its type: stochastic rounding may round up."""


@dataclass(frozen=True)
class Bound:
    """The largest absolute value of a weight after an update: `grows` times that before it, plus `moves`."""

    grows: float
    moves: float


UNKNOWN = Bound(math.inf, math.inf)


@dataclass(frozen=True)
class _Source:
    """The parameter group that updates a parameter. max_grad: the most that an element of its gradient can be."""

    optimizer: weakref.ref[Optimizer]
    group: int
    max_grad: float | None


_sources = WeakTensorKeyDictionary()


def predict(optimizers: Sequence[Optimizer], max_grad: float | None) -> list[str]:
    """Predict from now on the amaxes of all weights of these optimizers for which that is possible.

    Returns a reason for each parameter group for which it is not.
    """
    reasons = []
    for optimizer in optimizers:
        for i, group in enumerate(optimizer.param_groups):
            bound = bound_of(optimizer, group, torch.float32, max_grad)
            if isinstance(bound, str):
                reasons.append(bound)
                continue
            whole = [p for p in group["params"] if not groups_of(p)]
            if len(whole) < len(group["params"]):
                reasons.append("each rank knows only the amax of its own shard of a sharded weight")
            for p in whole:
                _sources[p] = _Source(weakref.ref(optimizer), i, max_grad)
    return list(dict.fromkeys(reasons))


def predicts(parts: Sequence[Tensor]) -> bool:
    """Return whether the amax of a weight, which consists of these parameters, is predicted."""
    return all(p in _sources for p in parts)


def bound_of_parts(parts: Sequence[Tensor]) -> Bound:
    """Return the bound for the next update of a weight of these parameters; `UNKNOWN` if none is known."""
    bounds = [_bound_of_part(p) for p in parts]
    return Bound(max(b.grows for b in bounds), max(b.moves for b in bounds))


def _bound_of_part(p: Tensor) -> Bound:
    source = _sources[p]
    optimizer = source.optimizer()
    if optimizer is None:
        return UNKNOWN
    bound = bound_of(optimizer, optimizer.param_groups[source.group], p.dtype, source.max_grad)
    return UNKNOWN if isinstance(bound, str) else bound


def bound_of(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype, max_grad: float | None) -> Bound | str:
    """Return how much an optimizer can change weights of a group and a dtype, or the reason why that is unknown.

    Adam: `lr * ratio` with `ratio_of_moments`, and `lr * weight_decay` of the weight if the decay is decoupled.
    SGD: `lr` times the largest gradient, `max_grad`, summed over all steps if there is momentum.
    """
    name, lr = type(optimizer).__name__, group["lr"]
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        return f"the learning rate of {name} is a tensor on {lr.device}, and each step would wait to read it"
    lr = float(lr)
    if dtype not in _ROUNDING:
        return f"{name} updates weights in {dtype}"
    more = 1 + _ROUNDING[dtype]
    # exact types: a subclass may compute another update
    if type(optimizer) in (Adam, AdamW):
        beta1, beta2 = map(float, group["betas"])
        if beta1**2 >= beta2:
            return f"the ratio of {name}'s moments has no bound for betas=({beta1}, {beta2}): beta1**2 >= beta2"
        decoupled = type(optimizer) is AdamW or group.get("decoupled_weight_decay", False)
        decay = lr * group["weight_decay"] if decoupled else 0.0
        moves = lr * ratio_of_moments(beta1, beta2, _ROUNDING[dtype])
        return Bound(abs(1 - decay) * more, moves * more)
    if type(optimizer) is SGD:
        momentum, decay = group["momentum"], group["weight_decay"]
        if max_grad is None:
            return "the step of SGD is as large as its gradient: max_grad says how large that can be"
        if momentum and decay:
            return "SGD's momentum sums the decay of earlier, maybe larger weights"
        return Bound((1 + lr * decay) * more, lr * max_grad * _CLIPPED / (1 - momentum) * more)
    return f"no bound is known for the update of {name}"


@functools.cache
def ratio_of_moments(beta1: float, beta2: float, rounding: float = 0.0) -> float:
    """Return the most that `m / sqrt(v)` of Adam, with both corrected for bias, can be after any number of steps.

    m sums `a_i * g_i` and v sums `b_i * g_i**2`. By the inequality of Cauchy and Schwarz, the ratio is at most
    `sqrt(sum(a_i**2 / b_i))`, a geometric series with the ratio `beta1**2 / beta2`. The corrections for bias make it no
    larger: `(1 - (beta1**2 / beta2)**t) * (1 - beta2**t) <= (1 - beta1**t)**2`, since the mean of two numbers is at
    least their geometric mean. Gradients that grow by `beta2 / beta1` from step to step, after many of 0, reach it.
    rounding: the relative error with which each step stores the moments.
    """
    kept = beta1**2 * (1 + rounding) ** 2 / (beta2 * (1 - rounding))
    if kept >= 1:
        return math.inf
    first, second = (1 - beta1) * (1 + rounding), (1 - beta2) * (1 - rounding)
    return first / math.sqrt(second * (1 - kept)) * (1 + rounding)
