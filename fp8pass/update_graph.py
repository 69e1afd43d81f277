"""What Dynamo calls in place of a graph that updates parameters: it brings the FP8 copies of weights along.

Which weights have copies is known when the graph is called, not when it is compiled: so it is compiled then, and again
when a weight more has a copy.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass.passes.skip_nonfinite import gradients
from fp8pass.passes.write_weights import Place, State, Write, attribute
from fp8pass.slots import SlotGroup, registry
from fp8pass.weights import Fp8Weight, newest, weights_of

Run = Callable[..., Any]


@dataclass(frozen=True)
class UpdateKey:
    """What an update graph is compiled for. keeps: what stays as it is if a gradient is not finite; if empty, nothing."""

    states: tuple[State, ...]
    writes: tuple[Write, ...]
    keeps: tuple[Place, ...]


@dataclass(frozen=True)
class _Plan:
    """What a call does with tensors like those of the last one. Keeps nothing alive of a model that is gone."""

    weights: list[weakref.ref[Fp8Weight]]
    groups: list[weakref.ref[SlotGroup]]
    run: Run

    def found(self) -> tuple[list[Fp8Weight], list[SlotGroup]] | None:
        """The weights and groups; None if some are gone, or the scales of the weights are elsewhere."""
        weights = [w for ref in self.weights if (w := ref()) is not None]
        groups = [g for ref in self.groups if (g := ref()) is not None]
        complete = len(weights) == len(self.weights) and len(groups) == len(self.groups)
        return (weights, groups) if complete and all(w.group in groups for w in weights) else None


class UpdateGraph:
    """An update; what Dynamo calls. places: of the tensors that it writes.

    skips: whether an update with gradients that are not finite is to be skipped. compile_for: compiles for a key and
    examples of the inputs that come behind Dynamo's. counts: i64[2], how many updates there were, and how many of them
    were skipped; None if that is not asked for.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        places: Sequence[Place],
        skips: bool,
        compile_for: Callable[[UpdateKey, list[Tensor]], Run],
    ) -> None:
        self._module = module
        self._places = list(places)
        self._compile_for = compile_for
        self.counts: Tensor | None = None
        if skips and gradients(module.graph):
            tensors = (x for p in self._places if isinstance(x := self._example(p), Tensor))
            device = max((x.device for x in tensors), key=lambda d: d.type != "cpu")
            with torch.inference_mode(False):
                self.counts = torch.zeros(2, dtype=torch.long, device=device)
        self._runs: dict[UpdateKey, Run] = {}
        self._plans: dict[tuple[int, ...], _Plan] = {}
        self._lock = threading.Lock()

    @torch.no_grad()
    def compile(self, args: Sequence[Any]) -> None:
        """For a call with these inputs of Dynamo's, which are those that it is compiled for."""
        self._plan(args)

    @torch.no_grad()
    def __call__(self, *args: Any) -> Any:
        """Call the graph with Dynamo's inputs, and what there is of the weights that it writes."""
        weights, groups, run = self._plan(args)
        result = run(*args, *self._inputs(weights, groups, self._in_graph(args)))
        for weight in weights:
            weight.written()
        return result

    def _example(self, place: Place) -> Any:
        if isinstance(place, str):
            return attribute(self._module, place)
        return [n for n in self._module.graph.nodes if n.op == "placeholder"][place].meta["example_value"]

    def _in_graph(self, args: Sequence[Any]) -> dict[int, Place]:
        tensors = ((p, args[p] if isinstance(p, int) else attribute(self._module, p)) for p in self._places)
        return {id(x): p for p, x in tensors}

    def _plan(self, args: Sequence[Any]) -> tuple[list[Fp8Weight], list[SlotGroup], Run]:
        key = newest(), *(id(args[p]) for p in self._places if isinstance(p, int))
        with self._lock:
            plan = self._plans.get(key)
            found = None if plan is None else plan.found()
            if plan is not None and found is not None:
                return *found, plan.run
            self._plans = {k: p for k, p in self._plans.items() if k[0] == key[0]}
            weights, groups, run = self._new_plan(args)
            self._plans[key] = _Plan(list(map(weakref.ref, weights)), list(map(weakref.ref, groups)), run)
        return weights, groups, run

    def _new_plan(self, args: Sequence[Any]) -> tuple[list[Fp8Weight], list[SlotGroup], Run]:
        tensors = [args[p] if isinstance(p, int) else attribute(self._module, p) for p in self._places]
        weights = weights_of(tensors)
        groups = list(dict.fromkeys(w.group for w in weights if w.group is not None))
        if self.counts is not None:
            ids = set(map(id, tensors))
            trained = (g for g in registry.groups() if g.table.training and g.table.remembers)
            groups += [g for g in trained if g not in groups and any(id(t) in ids for t in g.owned_tensors())]
        places = self._in_graph(args)
        writes = (
            Write(tuple(places.get(id(p)) for p in w.parts), groups.index(w.group), w.index, w.x_t is not None)  # type: ignore[arg-type]
            for w in weights
        )
        key = UpdateKey(
            tuple(map(state_of, groups)), tuple(writes), tuple(self._places) if self.counts is not None else ()
        )
        if key not in self._runs:
            self._runs[key] = self._compile_for(key, self._inputs(weights, groups, places))
        return weights, groups, self._runs[key]

    def _inputs(
        self, weights: Sequence[Fp8Weight], groups: Sequence[SlotGroup], places: dict[int, Place]
    ) -> list[Tensor]:
        """What `annotated_update` gives the graph inputs for."""
        inputs: list[Tensor] = []
        for group in groups:
            tensors = group.tensors._asdict()
            inputs += [tensors[name].data for name in state_of(group).inputs(self.counts is not None)]
        if self.counts is not None:
            inputs.append(self.counts)
        for w in weights:
            inputs += [*w.copies, *w.transposes, *(p for p in w.parts if id(p) not in places)]
        return inputs


def state_of(group: SlotGroup) -> State:
    """Of the weights of a group."""
    return State(group.table.delayed, group.table.n_forward, group.table.n_weights)
