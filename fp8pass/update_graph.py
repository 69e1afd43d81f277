"""What Dynamo calls in place of a graph that updates parameters: it brings the FP8 copies of weights along.

Which weights have copies is known when the graph is called, not when it is compiled: so it is compiled then, and again
when a weight more has a copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass.passes.write_weights import Place, State, Write, attribute
from fp8pass.slots import SlotGroup
from fp8pass.weights import Fp8Weight, newest, weights_of

Run = Callable[..., Any]


@dataclass(frozen=True)
class UpdateKey:
    """What an update graph is compiled for."""

    states: tuple[State, ...]
    writes: tuple[Write, ...]


@dataclass(frozen=True)
class _Plan:
    """What a call does with tensors like those of the last one."""

    weights: list[Fp8Weight]
    groups: list[SlotGroup]
    run: Run

    def fits(self) -> bool:
        """Whether the scales of the weights are where they were."""
        return all(w.group in self.groups for w in self.weights)


class UpdateGraph:
    """An update; what Dynamo calls. places: of the tensors that it writes.

    compile_for: compiles for a key and examples of the inputs that come behind Dynamo's.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        places: Sequence[Place],
        compile_for: Callable[[UpdateKey, list[Tensor]], Run],
    ) -> None:
        self._module = module
        self._places = list(places)
        self._compile_for = compile_for
        self._runs: dict[UpdateKey, Run] = {}
        self._plans: dict[tuple[int, ...], _Plan] = {}
        self._lock = threading.Lock()

    @torch.no_grad()
    def __call__(self, *args: Any) -> Any:
        """Call the graph with Dynamo's inputs, and what there is of the weights that it writes."""
        plan = self._plan(args)
        result = plan.run(*args, *_inputs(plan, self._in_graph(args)))
        for weight in plan.weights:
            weight.written()
        return result

    def _in_graph(self, args: Sequence[Any]) -> dict[int, Place]:
        tensors = ((p, args[p] if isinstance(p, int) else attribute(self._module, p)) for p in self._places)
        return {id(x): p for p, x in tensors}

    def _plan(self, args: Sequence[Any]) -> _Plan:
        key = newest(), *(id(args[p]) for p in self._places if isinstance(p, int))
        with self._lock:
            plan = self._plans.get(key)
            if plan is None or not plan.fits():
                plan = self._plans[key] = self._new_plan(args)
        return plan

    def _new_plan(self, args: Sequence[Any]) -> _Plan:
        tensors = [args[p] if isinstance(p, int) else attribute(self._module, p) for p in self._places]
        weights = weights_of(tensors)
        groups = list(dict.fromkeys(w.group for w in weights if w.group is not None))
        places = self._in_graph(args)
        writes = (
            Write(tuple(places.get(id(p)) for p in w.parts), groups.index(w.group), w.index, w.x_t is not None)  # type: ignore[arg-type]
            for w in weights
        )
        states = (State(g.table.delayed, g.table.n_forward, g.table.n_weights) for g in groups)
        key = UpdateKey(tuple(states), tuple(writes))
        plan = _Plan(weights, groups, lambda *_: None)
        if key not in self._runs:
            self._runs[key] = self._compile_for(key, _inputs(plan, places))
        return _Plan(weights, groups, self._runs[key])


def _inputs(plan: _Plan, places: dict[int, Place]) -> list[Tensor]:
    """What `write_weights` gives the graph inputs for."""
    inputs: list[Tensor] = []
    for group in plan.groups:
        t = group.tensors
        inputs += [x.data for x in (t.scale, t.amax_history, t.amax_weights, t.made)]
    for w in plan.weights:
        inputs += [*w.copies, *w.transposes, *(p for p in w.parts if id(p) not in places)]
    return inputs
