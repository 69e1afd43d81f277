"""The callable that replaces a graph that updates parameters: it also writes the FP8 copies of the weights.

Which weights have copies is known only when Dynamo calls the graph, not when the backend gets it. So the graph is
compiled at its first call, and again when another weight has a copy.
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fp8pass.base._torch import FakeTensor
from fp8pass.base.errors import Fp8Error
from fp8pass.base.names import gradients_of
from fp8pass.dump.writer import Dump
from fp8pass.graph.attempt import FIRST, Attempt
from fp8pass.quant.moments import Fp8Moment, moment_of
from fp8pass.quant.sharded import division_of, first_index, part_of, with_part
from fp8pass.states.slots import InstanceState, registry
from fp8pass.weights.freshness import Copies
from fp8pass.weights.parameter_bytes import storages_of
from fp8pass.weights.update_count import Numbers
from fp8pass.weights.update_inputs import Bounds, UpdateCall, UpdateInput
from fp8pass.weights.update_key import Moment, TensorRef, UpdateKey, WeightSlots, WeightWrite, attribute
from fp8pass.weights.weight_cache import newest, weights_of
from fp8pass.weights.weight_copy import DelayedWeight, WeightByItself, WeightCopy

Run = Callable[..., Any]


class CompiledUpdate(NamedTuple):
    """A compiled update, and its inputs after Dynamo's."""

    run: Run
    inputs: Sequence[UpdateInput]


@dataclass(frozen=True)
class _Plan:
    """The compiled function for a call, and the objects that give its inputs: see `UpdateCall`.

    key: what the function is compiled for; `key.writes` goes with `weights`, which `copies` are of. counted: `updates`
    and `seeds`.
    """

    weights: Sequence[WeightCopy]
    copies: Copies
    states: Sequence[InstanceState]
    key: UpdateKey
    compiled: CompiledUpdate
    counted: tuple[Tensor | None, Tensor | None]
    bounds: Mapping[int, Bounds]


class _KeptPlan:
    """A plan for calls with the same tensors, held by weak references, so that a model can be freed.

    known: the number of weights with copies, and of states, that had been made when the plan was. given: the arguments
    that the plan depends on, by position.
    """

    def __init__(self, plan: _Plan, known: tuple[int, int], given: Mapping[int, Any]) -> None:
        self.run, self.copies, self.moments = plan.compiled.run, plan.copies, plan.key.moments
        self._known, self._positions, self._ids = known, list(given), list(map(id, given.values()))
        self._gone = list[Any]()
        """Gets the weak reference of each weight, state or tensor that is freed."""
        self._weights, self._states = list(map(self._ref, plan.weights)), list(map(self._ref, plan.states))
        self._bounds, self._counted = plan.bounds, plan.counted
        call = UpdateCall(plan.weights, plan.states, {}, (), None, None, None)
        self._inputs = [(self._ref(x.value(call)) if x.is_fixed else None, x.value) for x in plan.compiled.inputs]

    def _ref(self, x: Any) -> weakref.ref[Any]:
        return weakref.ref(x, self._gone.append)

    def is_for(self, args: Sequence[Any], known: tuple[int, int]) -> bool:
        """Return whether the plan is for a call with these arguments."""
        ids = map(id, map(args.__getitem__, self._positions))  # in C: there are many
        return self._known == known and all(map(operator.eq, ids, self._ids)) and self.is_current()

    def is_current(self) -> bool:
        """Return whether all objects of the plan exist, and the weights' scales are in the same states."""
        states: Any = [ref() for ref in self._states]
        return not self._gone and all(known.state in (None, *states) for known in self.copies.freshness())

    def values(self, moments: Sequence[Fp8Moment], counts: Tensor | None) -> list[Tensor]:
        """Return the values of the function's inputs after Dynamo's. moments, counts: see `UpdateCall`."""
        weights: Any = [ref() for ref in self._weights]
        states: Any = [ref() for ref in self._states]
        call = UpdateCall(weights, states, self._bounds, moments, *self._counted, counts)
        return [value(call) if ref is None else ref() for ref, value in self._inputs]  # type: ignore[misc]


class UpdateGraph:
    """An update, as a callable for Dynamo. refs: the tensors that it writes, by position or attribute.

    skips: True if an update with nonfinite gradients is skipped. moments: the moments to store in FP8. rounds: True if
    bfloat16 tensors are rounded stochastically. predicts: True if amaxes of weights may be predicted, since only
    optimizers write them. compile_for: compiles the graph for a key, with the inputs of a call. fall_back: compiles
    with one attempt after another, leaving out what fails by a fault of fp8pass, until an attempt succeeds. counts:
    i64[2], the number of updates, and of skipped ones; None if updates are not skipped.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        refs: Sequence[TensorRef],
        skips: bool,
        moments: Sequence[Moment],
        rounds: bool,
        predicts: bool,
        compile_for: Callable[[UpdateKey, Sequence[Any], UpdateCall, Attempt, Dump], CompiledUpdate],
        fall_back: Callable[[Callable[[Attempt, Dump], _Plan], Attempt], tuple[_Plan, Attempt]],
    ) -> None:
        self._module: fx.GraphModule | None = module
        self._places = list(refs)
        gradients = gradients_of(module.graph)
        clips = {*refs} <= {*gradients}  # no parameter; gradients are other tensors in each call
        self._positions = [] if clips else [p for p in refs if isinstance(p, int)]
        self._predicts = predicts
        self._compile_for = compile_for
        self._fall_back = fall_back
        self._attempt = FIRST
        self._moments = sorted(moments, key=lambda m: m.stored_as.target)  # see `next_moment_scales`
        self._rounds = rounds
        attributes = [m for m in self._moments if isinstance(m.ref, str)]
        self._plain = [m for m in attributes if moment_of(self._tensor(m.ref)) is None]
        self._stored: dict[int, tuple[Tensor, Fp8Moment]] = {}
        """{id of a moment that the optimizer has as a plain tensor: (that tensor, this rank's moment in FP8)}.

        Holds the tensor, so that no other tensor gets its id.
        """
        self.counts: Tensor | None = None
        if skips:
            tensors = (x for p in self._places if isinstance(x := self._example(p), Tensor))
            # the device of `any_nonfinite`, whose result is counted: a GPU, if any tensor is on one
            device = max((x.device for x in tensors), key=lambda d: d.type != "cpu")
            with torch.inference_mode(False):
                self.counts = torch.zeros(2, dtype=torch.long, device=device)
        self._bounds: dict[UpdateKey, dict[int, Bounds]] = {}
        self._compiled: dict[UpdateKey, CompiledUpdate] = {}
        self._plans: dict[tuple[Any, ...], _KeptPlan] = {}
        self._last: _KeptPlan | None = None
        self._numbers = Numbers([])
        self._gradients = [] if clips else gradients  # the update counts them
        self.gradient_bytes: int | None = None
        """Bytes of the gradients at the beginning of the last call that was planned; None before, and once retired."""
        self._lock = threading.Lock()

    @torch.no_grad()
    def compile(self, args: Sequence[Any]) -> None:
        """Compile for a call with these inputs of Dynamo's, before that call."""
        self._plan(args)

    @torch.no_grad()
    def __call__(self, *args: Any) -> Any:
        """Call the graph with Dynamo's inputs, and the FP8 copies, moments and state that it writes."""
        plan = self._plan(args)
        moments = plan.moments
        stored = [m for spec, m in self._stored_moments(args).items() if spec in moments] if moments else []
        result = plan.run(*args, *plan.values(stored, self.counts))
        plan.copies.written()  # after the update: the copies are of the versions that it leaves
        return result

    def _tensor(self, ref: TensorRef, args: Sequence[Any] = ()) -> Any:
        return args[ref] if isinstance(ref, int) else attribute(self._module, ref)

    def _example(self, ref: TensorRef) -> Any:
        if isinstance(ref, str):
            return attribute(self._module, ref)
        assert self._module is not None
        return [n for n in self._module.graph.nodes if n.op == "placeholder"][ref].meta["example_value"]

    def _plan(self, args: Sequence[Any]) -> _KeptPlan:
        # a skipped update forgets what the step has recorded in any state, also in one made since the last call
        known, last = (newest(), 0 if self.counts is None else registry.made), self._last
        if last is not None and last.is_for(args, known):
            return last
        # attributes of the graph are not in the key: they are the same tensors in each call
        key = known, *map(id, map(args.__getitem__, self._positions))
        with self._lock:
            kept = self._plans.get(key)
            if kept is None or not kept.is_current():
                plan = self._new_plan(args)
                # the numbers only grow: plans for earlier ones are not asked for again
                self._plans = {k: p for k, p in self._plans.items() if k[0] == known}
                kept = self._plans[key] = _KeptPlan(plan, known, self._given(plan.key, args))
            self._last = kept
        return kept

    def _given(self, key: UpdateKey, args: Sequence[Any]) -> dict[int, Any]:
        """Return the arguments that a plan depends on, by position: only weights, if it only writes these."""
        parts = [p for write in key.writes for p in write.parts if isinstance(p, int)]
        does_more = key.moments or key.rounded or key.restore_if_skipped
        return {i: args[i] for i in (self._positions if does_more or not parts else parts)}

    def _new_plan(self, args: Sequence[Any]) -> _Plan:
        gradients = (args[i] for i in self._gradients if isinstance(args[i], Tensor))
        self.gradient_bytes = sum(storages_of(gradients).values())
        key, weights, states, _ = self._found(args)
        if key in self._compiled:
            return self._plan_of(weights, states, key, self._compiled[key], args)
        plan, self._attempt = self._fall_back(functools.partial(self._compile, args), self._attempt)
        return plan

    # Dynamo is on where a compiled step calls this: it would trace the copies that compiling makes, of meshes too
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _compile(self, args: Sequence[Any], attempt: Attempt, dump: Dump) -> _Plan:
        self._leave_out(attempt, args)
        key, weights, states, moments = self._found(args)
        plan = self._plan_of(weights, states, key, CompiledUpdate(_retired, ()), args)
        self._compiled[key] = self._compile_for(key, args, self._call(plan, moments), attempt, dump)
        return replace(plan, compiled=self._compiled[key])

    def _plan_of(
        self,
        weights: Sequence[WeightCopy],
        states: Sequence[InstanceState],
        key: UpdateKey,
        compiled: CompiledUpdate,
        args: Sequence[Any],
    ) -> _Plan:
        counted, bounds = self._counted(key, args), self._bounds_of(weights, key)
        return _Plan(weights, Copies(weights), states, key, compiled, counted, bounds)

    def _call(self, plan: _Plan, moments: Sequence[Fp8Moment]) -> UpdateCall:
        return UpdateCall(plan.weights, plan.states, plan.bounds, moments, *plan.counted, self.counts)

    def _counted(self, key: UpdateKey, args: Sequence[Any]) -> tuple[Tensor | None, Tensor | None]:
        if not key.is_random:
            return None, None
        stored = self._stored_moments(args)
        rounded = [self._tensor(p, args) for p in key.rounded]
        seeds = [*(stored[m].seed for m in key.moments), *map(self._numbers.seed, rounded)]
        tensors = [*(self._tensor(m.ref, args) for m in key.moments), *rounded]
        updates = self._numbers.updates
        with torch.inference_mode(False):
            numbers = torch.tensor(seeds, dtype=torch.int32, device=updates.device)
            if any(division_of(x) is not None for x in tensors):
                first = torch.tensor(list(map(first_index, tensors)), device=updates.device)
                # the bits of an index above 2**32 are those of its last 32 bits
                numbers = torch.stack([numbers, first.to(torch.int32)], 1)
            return updates, numbers

    def _found(self, args: Sequence[Any]) -> tuple[UpdateKey, list[WeightCopy], list[InstanceState], list[Fp8Moment]]:
        """Return the key to compile for, the weights with copies, their states, and the moments in FP8."""
        tensors = [self._tensor(p, args) for p in self._places]
        self._numbers = Numbers(tensors)
        attempt = self._attempt
        weights = weights_of(tensors) if attempt.form == "fp8" and attempt.runs("write_weights") else []
        # the others are stale after the update, and are quantized again when the next step begins
        weights = [w for w in weights if w.knows_next_scale]
        states = list(dict.fromkeys(w.state for w in weights if isinstance(w, DelayedWeight)))
        if self.counts is not None:  # a skipped update forgets what its step has recorded, in all states of its tensors
            ids = set(map(id, tensors))
            trained = (s for s in registry.states() if s.table.training and s.table.remembers and s.table.names)
            states += [s for s in trained if s not in states and any(id(t) in ids for t in s.owned_tensors())]
        refs = {id(x): p for x, p in zip(tensors, self._places, strict=True)}
        moments = self._stored_moments(args)
        writes = (self._write(w, refs, states) for w in weights)
        restore_if_skipped = tuple(self._places) if self.counts is not None else ()
        stored = {m.ref for m in moments}
        rounded = [
            p
            for p, x in zip(self._places, tensors, strict=True)
            if self._rounds and x.dtype == torch.bfloat16 and p not in stored
        ]
        slots = tuple(replace(weight_slots_of(s), over=_shared_over(s, weights)) for s in states)
        key = UpdateKey(slots, tuple(writes), restore_if_skipped, tuple(moments), tuple(rounded))
        return key, weights, states, list(moments.values())

    def _write(self, w: WeightCopy, refs: Mapping[int, TensorRef], states: Sequence[InstanceState]) -> WeightWrite:
        write = WeightWrite(tuple(refs.get(id(p)) for p in w.parts), w.stored)
        if isinstance(w, WeightByItself):
            return replace(write, by_itself=w.quantizer)
        assert isinstance(w, DelayedWeight)
        predicted = self._predicts and w.is_predicted
        return replace(write, slots=states.index(w.state), index=w.index, predicted=predicted)

    def _leave_out(self, attempt: Attempt, args: Sequence[Any]) -> None:
        """Turn off skipping, or FP8 moments, if the attempt after a fault leaves them out.

        Weights need nothing: a copy that no update writes is stale, and is refreshed before its next use. Raises
        Fp8Error if moments are in FP8 already, because nothing else can read them.
        """
        self._attempt = attempt
        if attempt.form != "fp8" or not attempt.runs("skip_nonfinite"):
            self.counts = None
        if attempt.form != "fp8" or not (attempt.runs("lift_bfloat16") and attempt.runs("round_bfloat16")):
            self._rounds = False
        if attempt.form != "fp8" or not attempt.runs("quantize_moments"):
            if any(moment_of(self._tensor(m.ref, args)) is not None for m in self._moments):
                raise Fp8Error(
                    "an update of moments in FP8 can't be compiled, for a fault of fp8pass: load the last checkpoint, "
                    "whose moments are plain tensors, with optimizer_state='off'. Please report it; on_fault='raise' "
                    "shows the fault itself"
                )
            self._moments, self._plain = [], []
            self._stored.clear()

    def _stored_moments(self, args: Sequence[Any]) -> dict[Moment, Fp8Moment]:
        """Return the moments that are stored in FP8: all except moments of zeros, before their first update.

        For a DTensor, each rank decides by its own shard: the update has the same collectives either way.
        """
        moments: dict[Moment, Fp8Moment] = {}
        for m in self._moments:
            x = self._tensor(m.ref, args)
            moment = moment_of(x)
            if moment is None and id(x) not in self._stored and _has_values(part_of(x)):
                self._store(m, x)
            if moment is not None or id(x) in self._stored:
                moments[m] = self._stored[id(x)][1] if moment is None else moment
        return moments

    def _store(self, m: Moment, x: Tensor) -> None:
        self._stored[id(x)] = x, Fp8Moment.of(m.stored_as, part_of(x), self._numbers.seed(x))

    def stored(self) -> dict[int, Tensor]:
        """Return {id of a plain tensor that the optimizer has as a moment: the moment in FP8, a DTensor if `x` is one}.

        Once the optimizer has the FP8 moments instead of the tensors, Dynamo compiles another graph; this one is not
        called any more.
        """
        for m in self._plain:
            x = self._tensor(m.ref)
            if id(x) not in self._stored:
                self._store(m, x)
        return {key: with_part(x, moment) for key, (x, moment) in self._stored.items()}

    def retire(self) -> None:
        """Release all tensors. The graph must not be called afterwards.

        Dynamo keeps the graph, whose attributes are the plain moments: they become empty, to free their memory.
        """
        for part in (part_of(x) for x, _ in self._stored.values()):
            part.data = part.new_empty(0)
        self.gradient_bytes = None
        self._stored.clear()
        self._plans.clear()
        self._last = None
        self._compiled.clear()
        self._moments, self._plain, self._places, self._positions, self._module = [], [], [], [], None
        self._compile_for = _retired

    @property
    def overshoot(self) -> float:
        """The most of what a predicted scale made of a weight's amax, as a part of `fp8_max`: more than 1 saturated.

        Waits for the device. 0 if no amax is predicted.
        """
        bounds = [b.tensor for by_slots in self._bounds.values() for b in by_slots.values()]
        return max((float(x[2].max()) for x in bounds), default=0.0)

    def _bounds_of(self, weights: Sequence[WeightCopy], key: UpdateKey) -> dict[int, Bounds]:
        """Return the bounds of weights whose amaxes are predicted, by the index of their `weight_slots` in the key."""
        if key not in self._bounds:
            predicted: dict[int, list[WeightCopy]] = {}
            for w, write in zip(weights, key.writes, strict=True):
                if write.predicted:
                    predicted.setdefault(write.slots, []).append(w)
            self._bounds[key] = {i: Bounds(of_slots) for i, of_slots in predicted.items()}
        return self._bounds[key]


def _has_values(x: Tensor) -> bool:
    """Return whether a moment has nonzero values; True for a fake tensor, as `inspect` has, which holds no data."""
    return isinstance(x, FakeTensor) or bool(x.any())


def _retired(*_: Any) -> Any:
    raise AssertionError("an update ran in a graph that had moments in high precision, which are in FP8 now")


def _shared_over(state: InstanceState, weights: Sequence[WeightCopy]) -> str:
    """Return the name of the group whose ranks share the amaxes of a state's weights; "" if no weight is sharded."""
    of_state = (w for w in weights if isinstance(w, DelayedWeight) and w.state is state)
    if state.reduces is None or not any(w.is_divided for w in of_state):
        return ""
    group = state.reduces.process_group()
    return "" if group is None else str(group.group_name)


def weight_slots_of(state: InstanceState) -> WeightSlots:
    """Return the part of an update's key that describes the weights of an instance state."""
    return WeightSlots(state.table.delayed, state.table.n_forward, state.table.n_weights)
