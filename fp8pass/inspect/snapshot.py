"""Save and restore what a training step changes: models, optimizers, random state, FP8 state.

`fp8pass.bisect` uses it to run one step repeatedly.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fp8pass.quant.ops import SlotTensors
from fp8pass.states.checkpoint import State
from fp8pass.states.model_state import state as state_of
from fp8pass.states.slots import InstanceState, registry
from fp8pass.train.training_step import TrainStep, reached

Undo = Callable[[], None]


class Snapshot:
    """The saved state of all objects that `roots` (functions, for example) reach; `train_step` finds models likewise.

    It covers parameters, buffers, gradients and plain attributes (numbers, strings, None) of modules; optimizers; other
    objects with `state_dict` and `load_state_dict`, such as learning-rate schedules; `torch.Generator` objects; the
    global random state of torch, Python and NumPy; all FP8 state. It does not cover iterators, or the content of other
    containers.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        objects = list(reached(roots, _has_state))
        parts = {part for x in objects if isinstance(x, nn.Module) for part in x.modules() if part is not x}
        objects = [x for x in objects if not isinstance(x, nn.Module) or x not in parts]
        self._undo = [_random_state(), _fp8_state(), *map(_undo, objects)]
        self._steps = [x for x in objects if isinstance(x, TrainStep)]
        self.found = [type(x).__name__ for x in objects if not isinstance(x, TrainStep)]

    def restore(self) -> None:
        """Restore everything in place, and drop all compiled code."""
        torch.compiler.reset()  # otherwise Dynamo reuses what it compiled under the last trial
        for step in self._steps:
            step.forget()
        with torch.no_grad():
            for undo in self._undo:
                undo()


def _has_state(x: Any) -> bool:
    loads = all(callable(getattr(type(x), name, None)) for name in ("state_dict", "load_state_dict"))
    return isinstance(x, (TrainStep, torch.Generator)) or (loads and not isinstance(x, State))


def _undo(x: Any) -> Undo:
    """Return a function that restores one object to its current state."""
    if isinstance(x, TrainStep):
        return lambda: None
    if isinstance(x, nn.Module):
        return _all(_module(x))
    if isinstance(x, Optimizer):
        return _optimizer(x)
    if isinstance(x, torch.Generator):
        generator, number = x, x.get_state()
        return lambda: _ignored(generator.set_state(number))
    # Copied again at each restore: LRScheduler.load_state_dict, for one, keeps the objects that it is given.
    saved = copy.deepcopy(x.state_dict())
    return lambda: _ignored(x.load_state_dict(copy.deepcopy(saved)))


def _ignored(result: Any) -> None:
    """Ignore a result, so that a lambda returns None."""


def _all(undo: Iterator[Undo]) -> Undo:
    every = list(undo)

    def run() -> None:
        for one in every:
            one()

    return run


def _module(model: nn.Module) -> Iterator[Undo]:
    for module in model.modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str, type(None)))}
        dicts: list[dict[str, Any]] = [vars(module), module._parameters, module._buffers]
        for values in dicts:
            kept = plain if values is vars(module) else dict(values)
            yield functools.partial(values.update, kept)
    for x in (*model.parameters(), *model.buffers()):
        yield _tensor(x)
    yield _loaded(state_of(model))


def _tensor(x: Tensor) -> Undo:
    data, grad = x.detach().clone(), x.grad
    of_grad = None if grad is None else grad.detach().clone()

    def undo() -> None:
        x.detach().copy_(data)
        x.grad = grad
        if grad is not None and of_grad is not None:
            grad.copy_(of_grad)

    return undo


def _loaded(state: State) -> Undo:
    """Save the loaded entries of a `State`, from which instance states that are created later take their values."""
    loaded, steps = state._loaded, state._steps
    entries = dict(loaded.entries)

    def undo() -> None:
        state._loaded, state._steps = replace(loaded, entries=dict(entries)), steps

    return undo


def _optimizer(optimizer: Optimizer) -> Undo:
    groups = [dict(group, params=list(group["params"])) for group in optimizer.param_groups]
    states = {p: _copied(state) for p, state in optimizer.state.items()}

    def undo() -> None:
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(_copied(saved))
        optimizer.state.clear()
        optimizer.state.update({p: _copied(state) for p, state in states.items()})

    return undo


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    """Copy the values; the parameters of a group stay the same tensors."""
    return {k: list(v) if k == "params" else copy.deepcopy(v) for k, v in group.items()}


def _random_state() -> Undo:
    cpu, python = torch.get_rng_state(), random.getstate()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    numpy = sys.modules.get("numpy")  # a step that has not imported it does not draw from it
    arrays = numpy.random.get_state() if numpy else None

    def undo() -> None:
        torch.set_rng_state(cpu)
        random.setstate(python)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)
        if numpy:
            numpy.random.set_state(arrays)

    return undo


def _fp8_state() -> Undo:
    saved = [(state, _instance_state(state)) for state in registry.states()]

    def undo() -> None:
        registry.keep([state for state, _ in saved if state.alive()])
        for _, undo_state in saved:
            undo_state()

    return undo


def _instance_state(state: InstanceState) -> Undo:
    made_again = ("held_on_device", "recompute_buffers", "derived")  # at the next call
    # the references of `owned` append to the list `gone`: a copy of it would never hear that a tensor is gone
    constant = ("table", "owned", "gone", "tensors", "relatives", "neighbours", "counted", *made_again)
    values = {f.name: copy.copy(getattr(state, f.name)) for f in fields(state) if f.name not in constant}
    tensors, relatives = SlotTensors(*(t.clone() for t in state.tensors)), list(state.relatives)
    neighbours, counted = list(state.neighbours), state.counted
    restore_counted = counted.saved() if counted is not None else lambda: None

    def undo() -> None:
        restore_counted()
        for t, saved in zip(state.tensors, tensors, strict=True):
            t.copy_(saved)
        for name, value in values.items():
            setattr(state, name, copy.copy(value))
        state.counted = counted
        state.relate(relatives, neighbours)
        state.forget_copies()

    return undo
