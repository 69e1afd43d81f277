"""Delayed scaling placed by users: `in_qdq`, `out_qdq`, and the `ScaleState` that each tensor's scale comes from.

Runs eagerly and under every torch.compile backend; fp8pass makes the fastest code of it. Each function marked
`allow_in_graph` is one node in Dynamo's graph; other backends run or trace it as it is, and the `lift_scale_states`
pass replaces it. These functions take tensors and constants only, and keep all that changes between calls in tensors:
Dynamo would make Python values constants of the compiled graph.

Two flags say when a step ends. A backward sets `step_ended`; the next use rolls the history and clears the flag. While
`held` is set, as in gradient accumulation, backwards do not set `step_ended`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fp8pass.base import scaling
from fp8pass.quant import ops
from fp8pass.recipes import DelayedScaling, next_scale_of, scale_of

_recipes: dict[str, DelayedScaling] = {}
"""{key: recipe}. Graphs refer to a recipe by its key, because Dynamo takes strings as constants, but not objects."""


class ScaleState(nn.Module):
    """The delayed-scaling state of one tensor, quantized to one format.

    It is a module, so that the `state_dict` of a model contains it. Buffers, which keep their dtype when the model is
    cast:

        scale           f32[]   0 until a nonzero value was recorded; while 0, the tensor is scaled by its own amax
        amax_history    f32[H]  newest first
        amax            f32[]   running amax of the step, -1 if nothing is recorded
        fp8_max         f32[]   largest value of the format that it was last used with, 0 before
        step_ended      bool[]  the next use begins a step; not saved
        held            bool[]  between `begin_accumulation` and `end_accumulation`; not saved

    Use it for one tensor and one dtype: a scale made for one format is wrong for another. Loading an `amax_history` of
    another length keeps the newest entries and recomputes the scale.

    Args:
        amax_history_len: H, the number of steps in the history, 1 or more.
        amax_compute_algo: "max", "most_recent", or a callable f32[H] -> f32[] written in torch.
        margin: `scale = fp8_max / amax / 2**margin`, 0 or more.
        on_nonfinite: "evict", "skip" or "freeze": see `fp8pass.recipes.DelayedScaling`.
        scaling_factor_compute_algo: A callable (amax, old_scale, fp8_max, recipe) -> scale, or None: see there.

    Raises:
        ValueError: If an argument is not one that `fp8pass.recipes.DelayedScaling` takes.
    """

    scale: Tensor
    amax_history: Tensor
    amax: Tensor
    fp8_max: Tensor
    step_ended: Tensor
    held: Tensor

    was_made: ClassVar[bool] = False
    """True once the process has made one."""

    def __new__(cls, *_: Any, **__: Any) -> ScaleState:
        """Note that there is one, also where it is unpickled."""
        ScaleState.was_made = True
        return super().__new__(cls)

    def __init__(
        self,
        amax_history_len: int = 1024,
        amax_compute_algo: str | Callable[[Tensor], Tensor] = "max",
        margin: int = 0,
        on_nonfinite: str = "evict",
        scaling_factor_compute_algo: Callable[[Tensor, Tensor, Tensor, Any], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.recipe = DelayedScaling(
            amax_history_len=amax_history_len,
            amax_compute_algo=amax_compute_algo,
            margin=margin,
            on_nonfinite=on_nonfinite,
            scaling_factor_compute_algo=scaling_factor_compute_algo,
        )
        self.key = _key(self.recipe)
        for name, shape in (("scale", ()), ("amax_history", (amax_history_len,)), ("amax", ()), ("fp8_max", ())):
            self.register_buffer(name, torch.empty(shape, dtype=torch.float32))
        for name in ("step_ended", "held"):
            self.register_buffer(name, torch.empty((), dtype=torch.bool), persistent=False)
        self.reset_parameters()
        # neither a parameter, which would be trained, nor a buffer, which would be saved
        self._anchor = self._new_anchor()

    def reset_parameters(self) -> None:
        """Reset all buffers to the state before the first use.

        FSDP and others call a method of this name on modules that were built on the meta device.
        """
        for number in (self.scale, self.amax_history, self.fp8_max):
            number.zero_()
        self.amax.fill_(scaling.NOTHING)
        self.end_accumulation()

    def _new_anchor(self) -> Tensor:
        """Return a tensor f32[] that requires a gradient.

        As an input of `_EndsStep` it makes autograd run its backward, which ends the step, for an `x` that does not
        require a gradient.
        """
        return torch.zeros((), device=self.scale.device, requires_grad=True)

    def extra_repr(self) -> str:
        """Return the recipe's arguments as text."""
        return repr(self.recipe).partition("(")[2].removesuffix(")")

    def begin_accumulation(self) -> None:
        """Make all uses until `end_accumulation` one step, whatever backwards run between; the first begins it."""
        self.step_ended.logical_or_(self.held.logical_not())  # within another accumulation, the step goes on
        self.held.fill_(True)

    def end_accumulation(self) -> None:
        """Make the next use begin a new step."""
        self.step_ended.fill_(True)
        self.held.fill_(False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ScaleState:
        """Move the buffers with the model, without its casts: `Module.to`, `half` and the like call this."""
        before = dict(self._buffers)  # in float32: a cast to half would round scales, and overflow amaxes
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
        self.end_accumulation()  # the flags are not saved: the step that was saved has ended

    def _resized(self, state_dict: dict[str, Any], prefix: str, saved: Tensor) -> dict[str, Tensor]:
        """Return the history `saved` resized to this state's length, and the scale recomputed from it, by key."""
        length = len(self.amax_history)
        history = scaling.resized_history(saved, length)
        scale, fp8_max = (state_dict.get(f"{prefix}{part}") for part in ("scale", "fp8_max"))
        if scale is None or fp8_max is None:  # Module._load_from_state_dict reports missing keys
            return {f"{prefix}amax_history": history}
        (new,) = next_scale_of(self.recipe)(history.unsqueeze(1), scale.reshape(1), fp8_max.reshape(1))
        scale = torch.where(fp8_max > 0, new, scale)
        return {f"{prefix}amax_history": history, f"{prefix}scale": scale}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.key = _key(self.recipe)  # keys hold in one process only: `_recipes` numbers them


def _key(recipe: DelayedScaling) -> str:
    """Return the recipe's key: its text, numbered if another recipe has the same text (two functions of one name)."""
    number = 0
    while _recipes.setdefault(key := f"{recipe}~{number}" if number else repr(recipe), recipe) != recipe:
        number += 1
    return key


def remember(key: str, recipe: DelayedScaling) -> None:
    """Register the key of a recipe, so that a graph made in another process, which holds the key, runs here."""
    _recipes[key] = recipe


def recipe_of(argument: object) -> Any:
    """Return the recipe for an argument of a call in a graph: a key, an object with a `recipe`, or a recipe.

    Returns None for a key that is not registered, and any other argument itself.
    """
    return _recipes.get(argument) if isinstance(argument, str) else getattr(argument, "recipe", argument)


def in_qdq(x: Tensor, state: ScaleState, dtype: torch.dtype = scaling.E4M3) -> Tensor:
    """Quantize and dequantize `x` with the scale of `state`, and record its amax there. Gradient: straight through.

    A tensor that holds NaN or inf becomes NaN throughout, and one without elements records nothing. Several uses of a
    state in one step merge by max. If gradients are disabled, nothing is recorded.

    In eager mode, a step lasts until the first use after a backward through `x`; the result requires a gradient even if
    `x` does not, so that the backward is noticed. Compiled by fp8pass, each call of a graph is a step, and forwards and
    backwards may run in any order. Compiled by other backends, steps are as in eager mode, and torch raises
    RuntimeError for a backward that runs after the next forward.

    Args:
        x: Floating point, any shape of rank 1 or more.
        state: The state of this tensor.
        dtype: An FP8 dtype.

    Returns:
        A tensor of the shape and dtype of `x`.

    Raises:
        TypeError: If `x` is not a floating-point tensor, or `state` is not a ScaleState.
        ValueError: If `dtype` is not an FP8 dtype.
    """
    _check(x, state, dtype)
    if not torch.is_grad_enabled():
        return qdq_unrecorded(x, state.scale, state.key, dtype)  # type: ignore[no-any-return]
    anchor = None if x.requires_grad else state._anchor
    scale = begin_use(*_step(state), state.key, dtype)
    arguments = state.amax, state.step_ended, state.held, anchor, state.key, dtype
    return qdq_operand(x, scale, *arguments)  # type: ignore[no-any-return]


def out_qdq(y: Tensor, state: ScaleState, dtype: torch.dtype = scaling.E5M2) -> Tensor:
    """Return `y`; quantize and dequantize its gradient with the scale of `state`, and record the gradient's amax there.

    The backward uses the scale of the forward's step; the amax that it records counts for the step in which the
    backward runs.

    Args:
        y: Floating point, any shape of rank 1 or more.
        state: The state of the gradient.
        dtype: An FP8 dtype.

    Returns:
        A tensor with the values of `y`, not an alias of it.

    Raises:
        TypeError: If `y` is not a floating-point tensor, or `state` is not a ScaleState.
        ValueError: If `dtype` is not an FP8 dtype.
    """
    _check(y, state, dtype)
    if not (torch.is_grad_enabled() and y.requires_grad):
        return y.clone()  # not an alias of `y`, as with gradients
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
# The functions in Dynamo's graph. key: the recipe's key in `_recipes`. They write state through `.data`, which does not
# bump its version counter: torch.utils.checkpoint saves its inputs for the backward, and autograd would raise if state
# among them had another version by then.


class _Use(NamedTuple):
    """The arguments of `begin_use`, in order: the buffers of a `ScaleState`, its recipe's key, and the FP8 dtype."""

    scale: Tensor
    amax_history: Tensor
    amax: Tensor
    fp8_max: Tensor
    step_ended: Tensor
    held: Tensor
    key: str
    dtype: torch.dtype


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def begin_use(*arguments: Any) -> Tensor:
    """Roll the history in place if the last step has ended. Return a copy of the scale of this step, f32[]."""
    use = _Use(*arguments)
    new_scale = _roll_if(use.step_ended, use)
    use.step_ended.data.fill_(False)
    return new_scale


def begin_graph(*arguments: Any) -> Tensor:
    """Roll the history for a graph whose every call is a step unless held; mark this call's step as ended, too.

    It is `begin_use` for such graphs. Their backwards do not write `step_ended`, so they need not read the flags, and
    several forwards may run before their backwards.
    """
    use = _Use(*arguments)
    released = use.held.logical_not()
    # `step_ended` too: the first call within an accumulation is held, and rolls what the calls before it recorded
    new_scale = _roll_if(use.step_ended | released, use)
    use.step_ended.data.copy_(released)
    return new_scale


def _roll_if(ended: Tensor, use: _Use) -> Tensor:
    """Roll in place if `ended` bool[] is true; return the scale f32[] for this use."""
    use.fp8_max.data.fill_(scaling.fp8_max(use.dtype))
    new_scale, history = scaling.roll_history(
        use.scale.reshape(1),
        use.amax_history.unsqueeze(1),
        amax=torch.where(ended, use.amax, scaling.NOTHING).reshape(1),
        fp8_max=use.fp8_max,
        next_scale=next_scale_of(_recipes[use.key]),
    )
    new_scale = new_scale.reshape(())
    # With NOTHING as the amax, `roll_history` returns scale and history unchanged. A `where` on the device instead of a
    # branch: reading `ended` would synchronize, and break the graph under Dynamo.
    use.amax_history.data.copy_(history.squeeze(1))
    use.scale.data.copy_(new_scale)
    use.amax.data.copy_(torch.where(ended, scaling.NOTHING, use.amax))
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
    """Quantize and dequantize `x`, and record its amax in `amax`, in place. The backward ends the step."""
    x = _EndsStep.apply(x, step_ended, held, anchor)  # type: ignore[no-untyped-call]
    return ops.qdq_operand(x, quantizer(key, dtype), scale, amax)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def qdq_gradient(
    y: Tensor, scale: Tensor, amax: Tensor, step_ended: Tensor, held: Tensor, key: str, dtype: torch.dtype
) -> Tensor:
    """Return `y`; the backward quantizes and dequantizes its gradient, records it in `amax`, and ends the step."""
    y = _EndsStep.apply(y, step_ended, held, None)  # type: ignore[no-untyped-call]
    return ops.qdq_gradient(y, quantizer(key, dtype), scale, amax)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def qdq_unrecorded(x: Tensor, scale: Tensor, key: str, dtype: torch.dtype) -> Tensor:
    """Quantize and dequantize `x`, without gradient or record."""
    return ByState(_recipes[key], dtype)(x, scale)


def quantizer(key: str, dtype: torch.dtype) -> Any:
    """Return the `ByState` for the recipe of that key, typed as Any: fx's types of node arguments lack it."""
    return ByState(_recipes[key], dtype)


@dataclass(frozen=True)
class ByState:
    """A quantizer with the scale f32[] of a tensor's state, or with the tensor's own amax while that scale is 0."""

    recipe: DelayedScaling
    dtype: torch.dtype

    def __call__(self, x: Tensor, scale: Tensor, amax: Tensor | None = None) -> Tensor:
        """Quantize and dequantize `x`, and record its amax in `amax` f32[], in place, unless that is None."""
        new = scaling.amax(x)
        scale_of_x = scale_of(self.recipe, new, scaling.fp8_max(self.dtype))
        scale = torch.where(scale == 0, scale_of_x, scale)
        x_q = scaling.quantize(x, scale, self.dtype)
        if amax is not None:
            amax.data.copy_(scaling.merge_amax(amax, new, self.recipe.on_nonfinite))
        return scaling.dequantize(x_q, scaling.inverse_unless_nonfinite(scale, new), x.dtype)


class _EndsStep(torch.autograd.Function):
    """The identity, whose backward sets `step_ended` unless `held`. anchor: see `ScaleState._new_anchor`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step_ended: Tensor, held: Tensor, anchor: Tensor | None) -> Tensor:
        # not by save_for_backward, which would raise if another use had written a flag before this backward
        ctx.flags = step_ended, held
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        step_ended, held = ctx.flags
        step_ended.data.logical_or_(held.logical_not())
        return grads[0], None, None, None
