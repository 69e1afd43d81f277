"""`fp8pass.calibrate`: static scales, measured once.

Instances share one compiled graph, so scales are inputs of the graph, as in delayed scaling, and not constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from fp8pass.base import scaling
from fp8pass.base._torch import dynamo_config
from fp8pass.base.errors import warn_once
from fp8pass.base.fields import called_with
from fp8pass.compiler.dynamo_passes import annotated
from fp8pass.graph.annotation import Annotation
from fp8pass.graph.inputs import Call
from fp8pass.options.config import Config
from fp8pass.recipes import Calibration
from fp8pass.states.checkpoint import names_in
from fp8pass.states.slots import InstanceState, SlotTable, new_state
from fp8pass.states.static_scales import calibrated


def calibrate(
    model: Any,
    batches: Iterable[Any],
    *,
    loss: Callable[[Any], Tensor] | None = None,
    fp8_format: str = "hybrid",
) -> dict[str, Tensor]:
    """Measure the scales for `StaticScaling`: one for each tensor that a matmul of `model` reads.

    Runs `model` on the batches in high precision, in its current mode (train or eval). `scale = fp8_max / amax`, with
    the amax over all batches. Warns of tensors with a NaN or inf, whose values of that call are left out, and of
    tensors that are zero throughout, whose scale is 1. Leaves the parameters and their `grad` as they are.

    Args:
        model: A module, compiled or not.
        batches: Each batch is a tensor or a tuple of arguments of `model`, or a dict of keyword arguments.
        loss: A function of what `model` returns, which returns f32[]. With it, the gradients that training with this
            loss would quantize get scales, too. None: no gradients.
        fp8_format: That of the `StaticScaling` to come, "hybrid" or "e4m3": it decides the scales of gradients.

    Returns:
        {slot name: scale f32[]}, on CPU.

    Raises:
        TypeError: If `model` is not a module, or `batches` is not a list (or other iterable) of batches.
        ValueError: If there are no batches, no matmul with parameters was seen with finite values, or `loss` or
            `fp8_format` is not valid.
    """
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"calibrate() takes a module or a compiled module, not {type(model).__name__}")
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise TypeError(f"batches is a {type(batches).__name__}: pass several in a list, calibrate(model, [x])")
    LOSS.take("loss", loss)
    # "freeze" leaves NaN and inf in the amaxes, where `_Observer.end_batch` looks for them
    recipe = Calibration(fp8_format=fp8_format, on_nonfinite="freeze", gradients=loss is not None)
    observer = _Observer(model, recipe)
    run = torch.compile(model, backend=observer)
    # Dynamo runs a function eagerly once it reaches its recompile limit: the observer would miss those matmuls
    unlimited = dynamo_config.patch(recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16)
    count = 0
    with unlimited, _uncompiled(model), torch.set_grad_enabled(loss is not None):
        for batch in batches:
            args, kwargs = ((), batch) if isinstance(batch, Mapping) else (_as_args(batch), {})
            result = run(*args, **kwargs)
            if loss is not None:
                parameters = [p for p in model.parameters() if p.requires_grad]
                # not backward(), which would add to the parameters' `grad`
                torch.autograd.grad(loss(result), parameters, allow_unused=True)
            observer.end_batch()
            count += 1
    scales = observer.scales()
    if not scales:
        why = ": all held NaN or inf" if observer.nonfinite else "; pass the model's inputs in batches"
        raise ValueError(f"no matmul with parameters was seen in {count} batches{why}")
    calibrated.add(model)
    return scales


@contextmanager
def _uncompiled(model: nn.Module) -> Iterator[None]:
    """Run modules that were compiled in place (`module.compile()`) uncompiled inside this context."""
    compiled = {m: m._compiled_call_impl for m in model.modules() if m._compiled_call_impl is not None}
    for module in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled.items():
            module._compiled_call_impl = call


LOSS = called_with((None,), "(output) -> f32[]") | None


def _as_args(batch: Any) -> tuple[Any, ...]:
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)


class _Observer:
    """A backend that runs the graph unquantized and records the amaxes of its matmuls' operands."""

    def __init__(self, model: nn.Module, recipe: Calibration) -> None:
        self.model = model
        self.recipe = recipe
        self._before: dict[InstanceState, Tensor] = {}
        """The amaxes f32[T] of the states that this batch has used, as they were before it."""
        self.states: dict[tuple[int, ...], InstanceState] = {}
        self.tables: list[SlotTable] = []
        self.nonfinite: set[str] = set()
        """Slots whose tensors held a NaN or inf in some call."""

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        annotation = annotated(module, Config(recipe=self.recipe, min_speedup=0))
        self.tables += annotation.tables  # keeps tables alive: the keys of `states` have their ids
        return lambda *args: self._run(annotation, args)

    def _run(self, annotation: Annotation, args: tuple[Any, ...]) -> Any:
        owned = [args[i] for i in annotation.owned]
        states = []
        for table in annotation.tables:
            key = (id(table), *map(id, owned))
            if key not in self.states:
                # not of the registry: these states are dropped with the observer
                self.states[key] = new_state(table, owned)
            states.append(self.states[key])
        for state in states:
            self._before.setdefault(state, state.amax())
        call = Call(args, owned, states, [state.tensors for state in states])
        return annotation.run(*args, *annotation.values(call))

    def end_batch(self) -> None:
        """Pass over the tensors that held a NaN or inf in this batch."""
        for state, before in self._before.items():
            self._pass_over_nonfinite(state, before)
        self._before.clear()

    def _pass_over_nonfinite(self, state: InstanceState, before: Tensor) -> None:
        """Restore the amaxes of tensors that held a NaN or inf in this batch, and note the names of their slots."""
        is_finite = state.amax().isfinite()
        state.set_amax(torch.where(is_finite, state.amax(), before))
        names = names_in(self.model, state)
        rows = zip(state.table.names, is_finite.tolist(), strict=True)
        self.nonfinite.update(names[inner] for inner, finite in rows if not finite and inner in names)

    def scales(self) -> dict[str, Tensor]:
        """Return {slot name: scale f32[]}, and warn of NaN, inf and tensors of zeros."""
        amaxes: dict[str, Tensor] = {}
        limits: dict[str, float] = {}
        for state in self.states.values():
            amax_of = dict(zip(state.table.names, state.amax().cpu(), strict=True))
            limit = dict(zip(state.table.names, state.table.fp8_max, strict=True))
            for inner, name in names_in(self.model, state).items():
                amaxes[name] = torch.maximum(amax_of[inner], amaxes.get(name, amax_of[inner]))
                limits[name] = limit[inner]
        seen = {name: float(amax) for name, amax in amaxes.items()}
        _warn_of("NaN or inf in", self.nonfinite, "these calls are skipped")
        _warn_of("nothing but zeros in", {n for n, amax in seen.items() if amax == 0}, "their scales are 1")
        # The amax of a tensor that was never finite is still -1, for none.
        measured = [(name, amax) for name, amax in sorted(amaxes.items()) if amax >= 0]
        return {name: scaling.scale_from_amax(amax, limits[name], 1.0) for name, amax in measured}


def _warn_of(what: str, slots: Set[str], so: str) -> None:
    if slots:
        shown = ", ".join(sorted(slots)[:5]) + (f" and {len(slots) - 5} more" if len(slots) > 5 else "")
        warn_once(f"fp8pass: calibrate saw {what} {shown}: {so}. Calibrate on data like the model's later inputs")
