"""Delayed scaling where users place it: `in_qdq`, `out_qdq`, and the `ScaleState` that each tensor's scale comes from.

Runs eagerly, under every torch.compile backend, and best under fp8pass. The functions that are marked `allow_in_graph`
stand in Dynamo's graph as one node each; other backends run or trace them as they are, and the `lift_scale_states` pass
replaces them. They take tensors and constants only, and all that changes from call to call is in tensors: Python values
would be burnt into the compiled graph.

When a step ends is written in two flags. A backward sets `step_ended`; the next use rolls the history and clears it.
While `held`, as in gradient accumulation, backwards leave it alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass import scaling
from fp8pass.quant import ops
from fp8pass.recipes import DelayedScaling

_recipes: dict[str, DelayedScaling] = {}
"""What the keys stand for by which graphs name a recipe: Dynamo passes strings on, but not objects."""


class ScaleState(nn.Module):
    """The delayed-scaling state of one tensor, quantized to one format. A module, so that a model's state has it.

    amax_history_len, amax_compute_algo, margin, on_nonfinite: see `fp8pass.recipes.DelayedScaling`; raises its
    ValueErrors. Buffers, which stay float32 whatever the model is cast to:

        scale           f32[]   0 until the tensor has been anything but zeros: then it is scaled by its own amax
        amax_history    f32[H]  newest first
        amax            f32[]   running amax of the step, -1 where it has recorded nothing
        fp8_max         f32[]   largest value of the format that it was last used with, 0 before
        step_ended      bool[]  the next use begins a step; not saved
        held            bool[]  between `begin_accumulation` and `end_accumulation`; not saved

    Use it for one tensor and one dtype: a scale made for one format is wrong for another. Loading an `amax_history` of
    another length keeps the newest entries and recomputes the scale.
    """

    scale: Tensor
    amax_history: Tensor
    amax: Tensor
    fp8_max: Tensor
    step_ended: Tensor
    held: Tensor

    def __init__(
        self,
        amax_history_len: int = 1024,
        amax_compute_algo: str | Callable[[Tensor], Tensor] = "max",
        margin: int = 0,
        on_nonfinite: str = "evict",
    ) -> None:
        super().__init__()
        self.recipe = DelayedScaling(
            amax_history_len=amax_history_len,
            amax_compute_algo=amax_compute_algo,
            margin=margin,
            on_nonfinite=on_nonfinite,
        )
        self.key = _key(self.recipe)
        for name, shape in (("scale", ()), ("amax_history", (amax_history_len,)), ("amax", ()), ("fp8_max", ())):
            self.register_buffer(name, torch.empty(shape, dtype=torch.float32))
        for name in ("step_ended", "held"):
            self.register_buffer(name, torch.empty((), dtype=torch.bool), persistent=False)
        self.reset_parameters()
        self._anchor = self._new_anchor()

    def reset_parameters(self) -> None:
        """Forget everything. By the name that is called where a model has begun on the meta device."""
        for number in (self.scale, self.amax_history, self.fp8_max):
            number.zero_()
        self.amax.fill_(scaling.NOTHING)
        self.end_accumulation()

    def _new_anchor(self) -> Tensor:
        """Gives a tensor that needs no gradient a place in the backward nonetheless, which ends the step."""
        return torch.zeros((), device=self.scale.device, requires_grad=True)

    def extra_repr(self) -> str:
        """The recipe's arguments."""
        return repr(self.recipe).partition("(")[2].removesuffix(")")

    def begin_accumulation(self) -> None:
        """From here on all uses are one step, whatever backwards come between; the first use begins it."""
        self.step_ended.logical_or_(self.held.logical_not())
        self.held.fill_(True)

    def end_accumulation(self) -> None:
        """The next use begins a new step."""
        self.step_ended.fill_(True)
        self.held.fill_(False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ScaleState:
        """Moves with the model and is not cast with it."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        if self._anchor.device != self.scale.device:
            self._anchor = self._new_anchor()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(f"{prefix}amax_history")
        if isinstance(saved, Tensor) and saved.dim() == 1 and len(saved) != len(self.amax_history):
            state_dict = {**state_dict, **self._resized(state_dict, prefix, saved)}
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.end_accumulation()

    def _resized(self, state_dict: dict[str, Any], prefix: str, saved: Tensor) -> dict[str, Tensor]:
        """What changes in `state_dict` if its history `saved` becomes as long as this one's."""
        length = len(self.amax_history)
        history = scaling.resized_history(saved, length)
        amax = scaling.amax_of_history(history.unsqueeze(1), self.recipe.amax_compute_algo)[0]
        scale, fp8_max = (state_dict.get(f"{prefix}{part}") for part in ("scale", "fp8_max"))
        if scale is None or fp8_max is None:  # torch reports it
            return {f"{prefix}amax_history": history}
        scale = torch.where(fp8_max > 0, scaling.scale_from_amax(amax, fp8_max, scale, self.recipe.margin), scale)
        return {f"{prefix}amax_history": history, f"{prefix}scale": scale}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.key = _key(self.recipe)  # keys are this process's


def _key(recipe: DelayedScaling) -> str:
    """The recipe's text, numbered where two functions have one name."""
    number = 0
    while _recipes.setdefault(key := f"{recipe}~{number}" if number else repr(recipe), recipe) != recipe:
        number += 1
    return key


def remember(key: str, recipe: DelayedScaling) -> None:
    """Let a graph run that another process has made, in which a key stands for a recipe."""
    _recipes[key] = recipe


def recipe_of(argument: object) -> Any:
    """The recipe that an argument of a call in a graph is, has, or stands for as a key; None if none."""
    return _recipes.get(argument) if isinstance(argument, str) else getattr(argument, "recipe", argument)


def in_qdq(x: Tensor, state: ScaleState, dtype: torch.dtype = scaling.E4M3) -> Tensor:
    """`x` quantized and dequantized with the scale of `state`, which records its amax. Gradient: straight through.

    x: floating, any shape of rank 1 or more; returns the same shape and dtype. dtype: an FP8 type. A tensor that holds
    NaN or inf becomes NaN throughout, and one without elements records nothing. Several uses of a state in one step
    merge by max. Without gradients enabled nothing is recorded. Raises TypeError for an `x` that is not floating and a
    `state` that is not a ScaleState, ValueError for another dtype.

    Eager, a step lasts until the first use after a backward through `x`; the result requires a gradient even where `x`
    does not, to learn of that backward. Compiled by fp8pass, each call of a graph is a step, and forwards and backwards
    may come in any order; compiled by other backends it is as eager, and torch raises RuntimeError for a backward that
    has not come before the next forward's.
    """
    _check(x, state, dtype)
    if not torch.is_grad_enabled():
        return qdq_unrecorded(x, state.scale, state.key, dtype)  # type: ignore[no-any-return]
    anchor = None if x.requires_grad else state._anchor
    scale = begin_use(*_step(state), state.key, dtype)
    arguments = state.amax, state.step_ended, state.held, anchor, state.key, dtype
    return qdq_operand(x, scale, *arguments)  # type: ignore[no-any-return]


def out_qdq(y: Tensor, state: ScaleState, dtype: torch.dtype = scaling.E5M2) -> Tensor:
    """`y` itself; its gradient is quantized and dequantized with the scale of `state`, which records its amax.

    y: floating, any shape of rank 1 or more. dtype, state, errors: as for `in_qdq`. The scale is that of the
    step that the forward belongs to; what a backward records counts for the step in which it runs.
    """
    _check(y, state, dtype)
    if not (torch.is_grad_enabled() and y.requires_grad):
        return y.clone()  # as with gradients, no alias of `y`
    scale = begin_use(*_step(state), state.key, dtype)
    arguments = state.amax, state.step_ended, state.held, state.key, dtype
    return qdq_gradient(y, scale, *arguments)  # type: ignore[no-any-return]


def _check(x: object, state: object, dtype: torch.dtype) -> None:
    scaling.check_floating(x, "the first argument")
    if not isinstance(state, ScaleState):
        raise TypeError(f"state is a {type(state).__name__}, not a fp8pass.ScaleState")
    scaling.check_fp8(dtype, scaling.FP8_DTYPES)


def _step(state: ScaleState) -> tuple[Tensor, ...]:
    return state.scale, state.amax_history, state.amax, state.fp8_max, state.step_ended, state.held


# ---------------------------------------------------------------------------------------------------------------------
# What stands in Dynamo's graph. key: the recipe's, in `_recipes`. State is written through `.data`, where autograd does
# not count it: an activation checkpoint that was given the state must not take it for changed.


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def begin_use(
    scale: Tensor,
    amax_history: Tensor,
    amax: Tensor,
    fp8_max: Tensor,
    step_ended: Tensor,
    held: Tensor,
    key: str,
    dtype: torch.dtype,
) -> Tensor:
    """Roll what the last step recorded if it has ended, in place. Returns the scale of this step, f32[], a copy."""
    new_scale = _roll_if(step_ended, scale, amax_history, amax, fp8_max, key, dtype)
    step_ended.data.fill_(False)
    return new_scale


def begin_graph(
    scale: Tensor,
    amax_history: Tensor,
    amax: Tensor,
    fp8_max: Tensor,
    step_ended: Tensor,
    held: Tensor,
    key: str,
    dtype: torch.dtype,
) -> Tensor:
    """`begin_use` of a graph each call of which is a step, unless held: ends the step before and, for the next, this.

    What a graph does not roll in its backward need not be read there, and several forwards may run before theirs.
    """
    released = held.logical_not()
    new_scale = _roll_if(step_ended | released, scale, amax_history, amax, fp8_max, key, dtype)
    step_ended.data.copy_(released)
    return new_scale


def _roll_if(
    ended: Tensor, scale: Tensor, amax_history: Tensor, amax: Tensor, fp8_max: Tensor, key: str, dtype: torch.dtype
) -> Tensor:
    """Roll in place where `ended` bool[]; returns the scale from there on."""
    recipe = _recipes[key]
    fp8_max.data.fill_(scaling.fp8_max(dtype))
    new_scale, history = scaling.roll_history(
        scale.reshape(1),
        amax_history.unsqueeze(1),
        amax=torch.where(ended, amax, scaling.NOTHING).reshape(1),
        fp8_max=fp8_max,
        algo=recipe.amax_compute_algo,
        margin=recipe.margin,
    )
    new_scale = new_scale.reshape(())
    amax_history.data.copy_(history.squeeze(1))
    scale.data.copy_(new_scale)
    amax.data.copy_(torch.where(ended, scaling.NOTHING, amax))
    return new_scale


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def qdq_operand(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,
    step_ended: Tensor,
    held: Tensor,
    anchor: Tensor | None,
    key: str,
    dtype: torch.dtype,
) -> Tensor:
    """`x` quantized and dequantized; records its amax in `amax`, in place. The backward ends the step."""
    x = _EndsStep.apply(x, step_ended, held, anchor)  # type: ignore[no-untyped-call]
    return ops.qdq_operand(x, quantizer(key, dtype), scale, amax)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def qdq_gradient(
    y: Tensor, scale: Tensor, amax: Tensor, step_ended: Tensor, held: Tensor, key: str, dtype: torch.dtype
) -> Tensor:
    """`y` itself; its gradient is quantized, dequantized and recorded in `amax`, which ends the step."""
    y = _EndsStep.apply(y, step_ended, held, None)  # type: ignore[no-untyped-call]
    return ops.qdq_gradient(y, quantizer(key, dtype), scale, amax)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def qdq_unrecorded(x: Tensor, scale: Tensor, key: str, dtype: torch.dtype) -> Tensor:
    """`x` quantized and dequantized, without gradient."""
    return ByState(_recipes[key], dtype)(x, scale)


def quantizer(key: str, dtype: torch.dtype) -> Any:
    """What quantizes by the recipe of that key: a `ByState`, which fx's types do not know."""
    return ByState(_recipes[key], dtype)


@dataclass(frozen=True)
class ByState:
    """How a tensor is quantized with the scale f32[] of its state; by its own amax where that is 0."""

    recipe: DelayedScaling
    dtype: torch.dtype

    def __call__(self, x: Tensor, scale: Tensor, amax: Tensor | None = None) -> Tensor:
        """`x` quantized and dequantized; records its amax in `amax` f32[], in place."""
        new = scaling.amax(x)
        own = scaling.scale_from_amax(new, scaling.fp8_max(self.dtype), 1.0, self.recipe.margin)
        scale = torch.where(scale == 0, own, scale)
        x_q = scaling.quantize(x, scale, self.dtype)
        if amax is not None:
            amax.data.copy_(scaling.merge_amax(amax, new, self.recipe.on_nonfinite))
        return scaling.dequantize(x_q, scaling.inverse_unless_nonfinite(scale, new), x.dtype)


class _EndsStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, step_ended: Tensor, held: Tensor, anchor: Tensor | None) -> Tensor:
        ctx.flags = step_ended, held
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        step_ended, held = ctx.flags
        step_ended.data.logical_or_(held.logical_not())
        return grads[0], None, None, None
