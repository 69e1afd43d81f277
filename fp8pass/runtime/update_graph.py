"""What Dynamo calls in place of a graph that updates parameters: it brings the FP8 copies of weights along.

Which weights have copies is known when the graph is called, not when it is compiled: so it is compiled then, and again
when a weight more has a copy.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass._torch import FakeTensor
from fp8pass.dump.writer import Dump
from fp8pass.errors import Fp8Error
from fp8pass.faults import FIRST, Attempt
from fp8pass.quant.moments import Fp8Moment, pack
from fp8pass.runtime.update_key import Moment, Place, State, UpdateKey, Write, attribute
from fp8pass.runtime.weight_cache import Fp8Weight, newest, weights_of
from fp8pass.states.slots import SlotGroup, registry

Run = Callable[..., Any]


@dataclass(frozen=True)
class _Plan:
    """What runs in a call, and what it is called with behind Dynamo's inputs."""

    weights: Sequence[Fp8Weight]
    groups: Sequence[SlotGroup]
    moments: Sequence[Moment]
    run: Run


class _Kept:
    """A plan for the next call with the same tensors. Keeps nothing alive of a model that is gone."""

    def __init__(self, plan: _Plan) -> None:
        self._weights, self._groups = list(map(weakref.ref, plan.weights)), list(map(weakref.ref, plan.groups))
        self._moments, self._run = plan.moments, plan.run

    def plan(self) -> _Plan | None:
        """None if some weights or groups are gone, or the scales of the weights are elsewhere."""
        weights = [w for ref in self._weights if (w := ref()) is not None]
        groups = [g for ref in self._groups if (g := ref()) is not None]
        complete = len(weights) == len(self._weights) and len(groups) == len(self._groups)
        if not complete or any(w.group not in groups for w in weights):
            return None
        return _Plan(weights, groups, self._moments, self._run)


class UpdateGraph:
    """An update; what Dynamo calls. places: of the tensors that it writes.

    skips: whether an update with gradients that are not finite is to be skipped. moments: those that are to be kept in
    FP8. compile_for: compiles for a key, and examples of Dynamo's inputs and of those that come behind them. fall_back:
    calls something with what is left out after faults of fp8pass, until it does not fail. counts: i64[2], how many
    updates there were, and how many of them were skipped; None if that is not asked for.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        places: Sequence[Place],
        skips: bool,
        moments: Sequence[Moment],
        compile_for: Callable[[UpdateKey, Sequence[Any], list[Tensor], Attempt, Dump], Run],
        fall_back: Callable[[Callable[[Attempt, Dump], _Plan], Attempt], tuple[_Plan, Attempt]],
    ) -> None:
        self._module: fx.GraphModule | None = module
        self._places = list(places)
        self._compile_for = compile_for
        self._fall_back = fall_back
        self._attempt = FIRST
        self._moments = sorted(moments, key=lambda m: m.kind)  # first ones first
        attributes = [m for m in self._moments if isinstance(m.place, str)]
        self._plain = [m for m in attributes if not isinstance(self._tensor(m.place), Fp8Moment)]
        self._stored: dict[int, tuple[Tensor, Fp8Moment]] = {}
        """What is in FP8 of the moments that the optimizer has as plain tensors: with these, by id."""
        self.counts: Tensor | None = None
        if skips:
            tensors = (x for p in self._places if isinstance(x := self._example(p), Tensor))
            device = max((x.device for x in tensors), key=lambda d: d.type != "cpu")
            with torch.inference_mode(False):
                self.counts = torch.zeros(2, dtype=torch.long, device=device)
        self._runs: dict[UpdateKey, Run] = {}
        self._plans: dict[tuple[int, ...], _Kept] = {}
        self._lock = threading.Lock()

    @torch.no_grad()
    def compile(self, args: Sequence[Any]) -> None:
        """For a call with these inputs of Dynamo's, which are those that it is compiled for."""
        self._plan(args)

    @torch.no_grad()
    def __call__(self, *args: Any) -> Any:
        """Call the graph with Dynamo's inputs, and what there is of the weights that it writes."""
        plan = self._plan(args)
        stored = [m for spec, m in self._stored_moments(args).items() if spec in plan.moments] if plan.moments else []
        result = plan.run(*args, *self._inputs(plan.weights, plan.groups, stored, self._in_graph(args)))
        for weight in plan.weights:
            weight.written()
        return result

    def _tensor(self, place: Place, args: Sequence[Any] = ()) -> Any:
        return args[place] if isinstance(place, int) else attribute(self._module, place)

    def _example(self, place: Place) -> Any:
        if isinstance(place, str):
            return attribute(self._module, place)
        assert self._module is not None
        return [n for n in self._module.graph.nodes if n.op == "placeholder"][place].meta["example_value"]

    def _in_graph(self, args: Sequence[Any]) -> dict[int, Place]:
        return {id(self._tensor(p, args)): p for p in self._places}

    def _plan(self, args: Sequence[Any]) -> _Plan:
        key = newest(), *(id(args[p]) for p in self._places if isinstance(p, int))
        with self._lock:
            kept = self._plans.get(key)
            plan = None if kept is None else kept.plan()
            if plan is None:
                plan = self._new_plan(args)
                self._plans = {k: p for k, p in self._plans.items() if k[0] == key[0]}
                self._plans[key] = _Kept(plan)
        return plan

    def _new_plan(self, args: Sequence[Any]) -> _Plan:
        key, weights, groups, _ = self._found(args)
        if key in self._runs:
            return _Plan(weights, groups, key.moments, self._runs[key])
        plan, self._attempt = self._fall_back(functools.partial(self._compiled, args), self._attempt)
        return plan

    def _compiled(self, args: Sequence[Any], attempt: Attempt, dump: Dump) -> _Plan:
        self._leave_out(attempt, args)
        key, weights, groups, moments = self._found(args)
        inputs = self._inputs(weights, groups, moments, self._in_graph(args))
        self._runs[key] = self._compile_for(key, args, inputs, attempt, dump)
        return _Plan(weights, groups, key.moments, self._runs[key])

    def _found(self, args: Sequence[Any]) -> tuple[UpdateKey, list[Fp8Weight], list[SlotGroup], list[Fp8Moment]]:
        """Return what it is compiled for, the weights, the groups of slots, and the moments in FP8."""
        tensors = [self._tensor(p, args) for p in self._places]
        attempt = self._attempt
        weights = weights_of(tensors) if attempt.form == "fp8" and attempt.runs("write_weights") else []
        groups = list(dict.fromkeys(w.group for w in weights if w.group is not None))
        if self.counts is not None:
            ids = set(map(id, tensors))
            trained = (g for g in registry.groups() if g.table.training and g.table.remembers and g.table.names)
            groups += [g for g in trained if g not in groups and any(id(t) in ids for t in g.owned_tensors())]
        places = self._in_graph(args)
        moments = self._stored_moments(args)
        writes = (
            Write(tuple(places.get(id(p)) for p in w.parts), groups.index(w.group), w.index, w.x_t is not None)  # type: ignore[arg-type]
            for w in weights
        )
        keeps = tuple(self._places) if self.counts is not None else ()
        key = UpdateKey(tuple(map(state_of, groups)), tuple(writes), keeps, tuple(moments))
        return key, weights, groups, list(moments.values())

    def _leave_out(self, attempt: Attempt, args: Sequence[Any]) -> None:
        """After a fault, skip nothing, or leave moments as the optimizer has them.

        Weights need nothing: a copy that no update writes is stale, and made again. Raises Fp8Error where moments are
        in FP8 already, which nothing else can read.
        """
        self._attempt = attempt
        if attempt.form != "fp8" or not attempt.runs("skip_nonfinite"):
            self.counts = None
        if attempt.form != "fp8" or not attempt.runs("quantize_moments"):
            if any(isinstance(self._tensor(m.place, args), Fp8Moment) for m in self._moments):
                raise Fp8Error(
                    "an update of moments in FP8 can't be compiled, for a fault of fp8pass: load the last checkpoint, "
                    "whose moments are plain tensors, with optimizer_state='off'. Please report it; on_fault='raise' "
                    "shows the fault itself"
                )
            self._moments, self._plain = [], []
            self._stored.clear()

    def _stored_moments(self, args: Sequence[Any]) -> dict[Moment, Fp8Moment]:
        """The moments that are stored in FP8: all, but those that are zeros, before their first update."""
        found: dict[Moment, Fp8Moment] = {}
        for m in self._moments:
            x = self._tensor(m.place, args)
            if not isinstance(x, Fp8Moment) and id(x) not in self._stored and _has_values(x):
                self._stored[id(x)] = x, Fp8Moment.of(m.kind, x)
            if isinstance(x, Fp8Moment) or id(x) in self._stored:
                found[m] = x if isinstance(x, Fp8Moment) else self._stored[id(x)][1]
        return found

    def stored(self) -> dict[int, Fp8Moment]:
        """By the ids of the tensors that the optimizer has them in, its moments in FP8, where it has plain tensors.

        Not by this graph any more: once the optimizer has those in their place, it is another graph's turn.
        """
        for m in self._plain:
            x = self._tensor(m.place)
            if id(x) not in self._stored:
                self._stored[id(x)] = x, Fp8Moment.of(m.kind, x)
        return {key: moment for key, (_, moment) in self._stored.items()}

    def retire(self) -> None:
        """Let go of all tensors. Not to be called any more.

        Dynamo goes on holding the plain moments, with the graph that they are attributes of: as empty ones.
        """
        for x, _ in self._stored.values():
            x.data = x.new_empty(0)
        self._stored.clear()
        self._plans.clear()
        self._runs.clear()
        self._moments, self._plain, self._places, self._module = [], [], [], None
        self._compile_for = _retired

    def _inputs(
        self,
        weights: Sequence[Fp8Weight],
        groups: Sequence[SlotGroup],
        moments: Sequence[Fp8Moment],
        places: dict[int, Place],
    ) -> list[Tensor]:
        """What `annotated_update` gives the graph inputs for."""
        inputs: list[Tensor] = []
        for group in groups:
            tensors = group.tensors._asdict()
            inputs += [tensors[name].data for name in state_of(group).inputs(self.counts is not None)]
        if moments:
            inputs += [pack(moments), *(m.x_q for m in moments)]
        if self.counts is not None:
            inputs.append(self.counts)
        for w in weights:
            inputs += [*w.copies, *w.transposes, *(p for p in w.parts if id(p) not in places)]
        return inputs


def _has_values(x: Tensor) -> bool:
    """Return whether it is anything but zeros; a fake tensor, of `inspect`, may be taken to be."""
    return isinstance(x, FakeTensor) or bool(x.any())


def _retired(*_: Any) -> Run:
    raise AssertionError("an update ran in a graph that had moments in full precision, which are in FP8 now")


def state_of(group: SlotGroup) -> State:
    """Of the weights of a group."""
    return State(group.table.delayed, group.table.n_forward, group.table.n_weights)
