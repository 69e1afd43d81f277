"""The callable that Dynamo gets for a graph: it chooses the compilation for a call, and adds the instance's state."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8pass.base import scaling
from fp8pass.base._torch import pipeline_call
from fp8pass.base.errors import Fp8Error, warn_once
from fp8pass.graph.annotation import Annotation
from fp8pass.graph.inputs import Call
from fp8pass.options.config import Config, Reduction
from fp8pass.options.setting import Setting, any_entered, current_setting
from fp8pass.states.amax_reduction import Reducer, continues, differentiable, finish, reducer_of, take_part
from fp8pass.states.slots import InstanceState, SlotTable, registry
from fp8pass.states.steps import (
    CheckpointCall,
    RegionPass,
    begin_step,
    checkpointed_region,
    is_shape_inference,
    join_step,
    repeats_forward,
)
from fp8pass.weights.weight_uses import Notes

log = logging.getLogger(__name__)

EAGER_FIRST_STEPS = 3
"""Number of steps that an instance may run eagerly while a slot has no history. Later ones run compiled code."""

Run = Callable[..., Any]


class Variant(NamedTuple):
    """A kind of call that a graph is compiled for. setting: the `autocast` around the call; None for none.

    phase: `Config.variant` of the call's step; None if all steps are the same.
    """

    setting: Setting | None
    phase: Hashable


USUAL = Variant(None, None)
"""The variant of calls outside of `autocast`, if all steps are the same."""


@dataclass
class Compilation:
    """A graph as it is compiled with one configuration. run: takes the inputs of Dynamo's and those of `annotation`.

    config: the options of one step. for_cold_slots: compiles it once more, for slots without history. notes: note how
    the graph quantizes weights. joins: how ranks share amaxes, if other ranks' graphs may have slots though this one
    has none; otherwise None.
    """

    config: Config
    annotation: Annotation
    run: Run
    for_cold_slots: Callable[[], Run]
    notes: Notes
    joins: Reduction | None = None
    cold_run: Run | None = None
    """The function for cold slots; None until a call needs it."""
    replaced_by: Compilation | None = None
    """What later calls run instead: a fault in the backward may replace the compilation."""

    def become(self, other: Compilation) -> None:
        """Run what `other` runs from the next call on; drop the state."""
        registry.drop(self.annotation.tables)
        self.replaced_by = other  # one assignment: another thread may be about to call


@dataclass
class _RegionForward:
    """A call in the forward of a checkpointed region: how the backward repeats it.

    setting, step: of the call. run: the code that ran; None after a no-grad forward, which ran the code of another
    graph. eager: True if that ran op by op. scales: the keys of the slots and their scales f32[T], for each instance
    state. user_scales: the scales f32[] of the `ScaleState`s that the user placed. is_of_step: False if the forward
    only inferred shapes.
    """

    setting: Setting | None
    step: int
    run: Run | None = None
    eager: bool = False
    scales: list[tuple[list[tuple[Any, ...]], Tensor]] = field(default_factory=list)
    user_scales: list[Tensor] = field(default_factory=list)
    is_of_step: bool = True


class Kind(Enum):
    """The kinds of calls of a graph."""

    PLAIN = "outside of checkpointed regions"
    FIRST = "the forward of a checkpointed region, with gradients"
    AHEAD = "the forward of a reentrant region, without gradients, which its backward will repeat with them"
    REPEATED = "run again by the backward of a region"
    SHAPES = "not in a step: a pipeline stage runs once to infer the shapes of its outputs"


@dataclass
class _GraphCall(Call):
    """A call of a graph, of one kind. region: the checkpointed region whose forward it is in.

    forward: the call it repeats; None if unknown. variant, step: see `Variant`. run: the code that runs. eager: True if
    it runs op by op because the repetition will. cold: for a repetition, True if a slot has no scale.
    """

    kind: Kind = Kind.PLAIN
    region: CheckpointCall | None = None
    forward: _RegionForward | None = None
    variant: Variant = USUAL
    step: int = 0
    run: Run | None = None
    eager: bool = False
    cold: bool = False


_newest: dict[str, Setting | None] = {}
"""The setting of the newest forward of each function in a checkpointed region, whose backward runs another graph."""


class CompiledGraph:
    """The compilations of one graph of Dynamo's, one for each `Variant` that it was called in.

    config: the options of the compiled code. owned: {position among Dynamo's inputs: path} of the instance's tensors.
    code: the same for all graphs of a function, with gradients and without. on_machine: puts the GPU into options.
    compile_with: compiles the graph with other options. first_is_fake: True if DDPOptimizer calls the graph first, on
    fake tensors.

    The first step of an instance runs the annotated graph eagerly and scales each slot without history by the amax of
    its current tensor. That needs no second compilation, and leaves every slot that saw data with a history. If some
    slots see no data for several steps (zeros, or no backward yet), the graph is compiled once more with that choice in
    it, at the cost of a pass over each tensor, and this code runs until all slots have a history.
    """

    def __init__(
        self,
        config: Config,
        owned: Mapping[int, str],
        code: str,
        on_machine: Callable[[Config], Config],
        compile_with: Callable[[Config], Compilation],
        first_is_fake: bool = False,
    ) -> None:
        self._config = config
        self._owned = tuple(owned)
        self._code = code
        self._on_machine = on_machine
        self._compile_with = compile_with
        self._first_is_fake = first_is_fake
        self._counter = SlotTable.counter(tuple(owned.values()), code)
        """A table without slots, whose state counts the steps if they vary."""
        self._trains = torch.is_grad_enabled()
        self._configs: dict[Setting | None, Config] = {}
        """The options for each setting, in all steps: to make them takes long."""
        self._compilations: dict[Variant, Compilation] = {}
        self._usual: Compilation | None = None
        """The compilation for `USUAL`, once there is one."""
        self._lock = threading.RLock()

    @property
    def config(self) -> Config:
        """The options for calls with the setting of this thread, in all steps."""
        return self._config_of(current_setting())

    def compile(self, compile_with: Callable[[Config], Compilation]) -> None:
        """Compile for the first step with the setting of this thread."""
        setting = current_setting()
        variant = self._variant(setting, 0)
        self._add(variant, compile_with(self._config_at(setting, 0)))

    def __call__(self, *args: Any) -> Any:
        """Call the graph with Dynamo's inputs and the state of the instance that they belong to."""
        if self._first_is_fake:
            self._first_is_fake = False
            (first,) = self._compilations.values()  # DDPOptimizer calls right after it has compiled
            return first.run(*first.annotation.examples(args))
        # a graph without state is not classified until some thread enters an `autocast`: all its calls are `USUAL`
        compilation, call = self._usual, None
        if compilation is not None and compilation.replaced_by is not None:
            compilation = compilation.replaced_by
        if compilation is None or compilation.annotation.has_state or any_entered():
            call = self._classified(args)
            compilation = self._compilation(call.variant, call.step)
        compilation.notes.note(args)
        result = compilation.run(*args) if call is None else self._run(compilation, call)
        if compilation.joins is not None:
            take_part(result, compilation.joins)
        return result

    def _classified(self, args: Sequence[Any]) -> _GraphCall:
        owned = [args[i] for i in self._owned]
        region, how = checkpointed_region() or (None, None)
        forward = region.next_forward(self._key(owned)) if region is not None and how is RegionPass.REPEATED else None
        setting = self._setting(region, how, forward) if any_entered() else None
        # `_step` begins a step of the counter in training: once per call
        step = self._step(owned, region, how, forward) if self._config_of(setting).varies else 0
        variant = self._variant(setting, step)
        if how is RegionPass.REPEATED:
            kind, region = Kind.REPEATED if forward is None or forward.is_of_step else Kind.SHAPES, None
        elif (region is not None or torch.is_grad_enabled()) and is_shape_inference():
            kind = Kind.SHAPES
        else:
            kind = {None: Kind.PLAIN, RegionPass.FIRST: Kind.FIRST, RegionPass.AHEAD: Kind.AHEAD}[how]
        return _GraphCall(args, owned, kind=kind, region=region, forward=forward, variant=variant, step=step)

    def _key(self, owned: Sequence[Tensor]) -> Hashable:
        """Return the key of the code and the instance: the same for training and evaluation."""
        return (self._code, *map(id, owned))

    def _setting(
        self, region: CheckpointCall | None, how: RegionPass | None, forward: _RegionForward | None
    ) -> Setting | None:
        """Return the setting of this thread; in a repeated forward, that of the first."""
        if region is None and not repeats_forward():
            return current_setting()
        if how in (RegionPass.FIRST, RegionPass.AHEAD):
            setting = _newest[self._code] = current_setting()
            return setting
        if forward is not None:
            return forward.setting
        # a region within a region with use_reentrant=True: the backward repeats both, and torch does not tell which
        # forward it repeats
        if len(self._compilations) > 1:
            warn_once(
                "fp8pass: a forward in nested activation checkpoints with use_reentrant=True is repeated with the "
                "fp8pass.autocast of the newest forward there. Run the backward of each forward before the next one, "
                "or pass use_reentrant=False"
            )
        return _newest.get(self._code)

    def _step(
        self,
        owned: Sequence[Tensor],
        region: CheckpointCall | None,
        how: RegionPass | None,
        forward: _RegionForward | None,
    ) -> int:
        """Return the current step; in evaluation, the last one that began; in a repeated forward, that of the first."""
        counter = registry.of(self._counter, owned)
        if how is not RegionPass.REPEATED and (region is not None or torch.is_grad_enabled()):
            begin_step(counter)
        return max(counter.tracker.steps - 1, 0) if forward is None else forward.step

    def _config_of(self, setting: Setting | None) -> Config:
        if setting not in self._configs:
            self._configs[setting] = self._on_machine(
                self._config if setting is None else setting.applied(self._config)
            )
        return self._configs[setting]

    def _variant(self, setting: Setting | None, step: int) -> Variant:
        config = self._config_of(setting)
        if config.varies:
            return Variant(setting, config.variant(step, self._trains))
        return USUAL if setting is None else Variant(setting, None)

    def _compilation(self, variant: Variant, step: int) -> Compilation:
        compilation = self._compilations.get(variant) or self._compiled(variant, step)
        return compilation.replaced_by or compilation

    def _compiled(self, variant: Variant, step: int) -> Compilation:
        with self._lock:
            if variant in self._compilations:  # another thread has compiled it while this one waited
                return self._compilations[variant]
            config = self._config_at(variant.setting, step)
            with_same_options = (c for c in self._compilations.values() if c.config == config)
            return self._add(variant, next(with_same_options, None) or self._compile_with(config))

    def _add(self, variant: Variant, compilation: Compilation) -> Compilation:
        self._compilations[variant] = compilation
        if variant == USUAL:
            self._usual = compilation
        return compilation

    def _config_at(self, setting: Setting | None, step: int) -> Config:
        config = self._config_of(setting)
        return config.at_step(step, self._trains) if config.varies else config

    def _run(self, compilation: Compilation, call: _GraphCall) -> Any:
        if compilation.annotation.has_state:
            return self._run_with_state(compilation, call)
        result = compilation.run(*call.args)
        if call.region is not None:
            call.region.remember(self._key(call.owned), _RegionForward(call.variant.setting, call.step))
        return result

    def _run_with_state(self, compilation: Compilation, call: _GraphCall) -> Any:
        annotation = compilation.annotation
        call.states = [registry.of(table, call.owned) for table in annotation.tables]
        call.slots = [state.tensors for state in call.states]
        row = _TABLE[call.kind]
        row.roll(self, call)
        call.run = run = row.code(self, compilation, call)
        # only now: `roll` may have replaced `call.slots`, which the inputs read
        args = _with_held_scale_states(annotation, call) if call.repeats else call.args
        result = run(*args, *annotation.values(call))
        return row.record(self, compilation, call, result)

    # `_Row.roll`

    def _roll(self, call: _GraphCall) -> None:
        finish()  # histories roll what all ranks have recorded
        for state in call.states:
            state.begin()  # before the roll, which then merges what other graphs recorded in these slots
            if state.table.training:
                begin_step(state)

    def _roll_trained(self, call: _GraphCall) -> None:
        """Roll these slots in the graph that trains: this no-grad forward belongs to training, and will be repeated."""
        finish()
        for state in call.states:
            state.tracker.expect_recompute()
            state.begin_trained_step(begin_step)
        self._roll(call)

    def _join(self, call: _GraphCall) -> None:
        """Roll nothing, and take the scales of the repeated forward.

        The forward of a region within a region is unknown: its repetition takes the newest scales.
        """
        forward = call.forward
        call.repeats, call.is_counted = True, forward is not None and forward.run is not None
        finish()  # or the result of the reduction would overwrite the amaxes recorded here
        for i, state in enumerate(call.states):
            join_step(state)
            if not state.table.remembers:
                continue
            state.begin_repeated()
            # `again` has buffers for amaxes, so that those of the repetition are not merged a second time
            t, again = state.tensors, state.for_repetition()
            for keys, then in forward.scales if forward else ():
                state.copy_slots(keys, then, again.scale)
            # `warm` first: to ask the device waits for it
            call.cold |= not state.warm and bool((again.scale == 0).any())
            if state.catch_up():
                continues(state)
                if state.table.reduces is not None:
                    state.reduction.complete()  # the repetition runs in the backward
                # its forward has recorded nothing, so what is recorded now is not discarded
                again = again._replace(amax_forward=t.amax_forward, amax_weights=t.amax_weights)
            call.slots[i] = again
            state.tracker.raise_to(1, 1)

    def _discard(self, call: _GraphCall) -> None:
        """Leave all slots as they are; let the call record into buffers that nothing reads."""
        call.repeats = call.is_counted = True
        call.slots = [s.for_shape_inference() if s.table.remembers else s.tensors for s in call.states]

    # `_Row.code`

    def _for_step(self, compilation: Compilation, call: _GraphCall) -> Run:
        waiting = [s for s in call.states if s.table.training and not s.warm]
        return self._for_step_of(compilation, waiting) if waiting else compilation.run

    def _as_its_repetition(self, compilation: Compilation, call: _GraphCall) -> Run:
        """Return code that runs op by op if the repetition will.

        Both must draw the same random numbers (`preserve_rng_state`), and Inductor draws other ones than eager ops do.
        """
        call.eager = not all(s.is_trained() for s in call.states)
        return compilation.annotation.run if call.eager else self._for_step(compilation, call)

    def _as_then(self, compilation: Compilation, call: _GraphCall) -> Run:
        forward = call.forward
        if forward is not None and forward.run is not None:
            return forward.run
        # the forward of a graph without slots says nothing of these
        eager = forward.eager if forward is not None and forward.scales else call.cold
        return compilation.annotation.bootstrapped.run if eager else compilation.run

    def _for_shapes(self, compilation: Compilation, call: _GraphCall) -> Run:
        # the state is not marked as cold: this call belongs to no step
        states = [s for s in call.states if s.table.remembers]
        cold = any(not s.warm and bool((s.tensors.scale == 0).any()) for s in states)
        return compilation.annotation.bootstrapped.run if cold else compilation.run

    # `_Row.record`

    def _record(self, compilation: Compilation, call: _GraphCall, result: Any) -> Any:
        """Note that a forward has recorded amaxes, and watch for its backward, which will record more."""
        recording = [s for s in call.states if s.table.remembers and len(s.tensors.amax_backward)]
        if recording:
            _watch_backward(result, call.states)
        reduced = [s for s in call.states if s.reduces is not None and s.table.training]
        if (reducer := _reducer_of(reduced)) is not None:
            reducer.watch(result, reduced, may_end=pipeline_call() is None)
        return result

    def _remember(self, compilation: Compilation, call: _GraphCall, result: Any) -> Any:
        """Store in the region the scales and the code that ran, for the repetition."""
        assert call.region is not None
        # `Kind.AHEAD` ran the code of evaluation, which the repetition cannot use
        run = call.run if call.kind is Kind.FIRST else None
        # copies: the slots may roll before the backward repeats this forward
        scales = [(s.keys, s.tensors.scale.clone()) for s in call.states]
        user_scales = [call.args[scale].clone() for scale, *_ in compilation.annotation.scale_states]
        forward = _RegionForward(call.variant.setting, call.step, run, call.eager, scales, user_scales)
        call.region.remember(self._key(call.owned), forward)
        return result

    def _remember_and_record(self, compilation: Compilation, call: _GraphCall, result: Any) -> Any:
        return self._record(compilation, call, self._remember(compilation, call, result))

    def _remember_shapes(self, compilation: Compilation, call: _GraphCall, result: Any) -> Any:
        if call.region is not None:
            forward = _RegionForward(call.variant.setting, call.step, is_of_step=False)
            call.region.remember(self._key(call.owned), forward)
        return result

    def _record_nothing(self, compilation: Compilation, call: _GraphCall, result: Any) -> Any:
        return result

    def _for_step_of(self, compilation: Compilation, states: Sequence[InstanceState]) -> Run:
        """Return the code for a step in which slots may have no scale. Synchronizes with the device."""
        cold = [name for state in states for name in state.cold()]
        if not cold:
            return compilation.run
        if max(state.cold_steps for state in states) <= EAGER_FIRST_STEPS:
            return compilation.annotation.bootstrapped.run
        with self._lock:
            if compilation.cold_run is None:
                log.warning(
                    "%d FP8 slots have no scale after %d steps (%s%s): compiling once more, to scale them by their "
                    "own amax until they have. If they never see data, leave them out with filter=",
                    len(cold),
                    EAGER_FIRST_STEPS,
                    ", ".join(cold[:5]),
                    ", ..." if len(cold) > 5 else "",
                )
                compilation.cold_run = compilation.for_cold_slots()
        return compilation.cold_run


class _Row(NamedTuple):
    """The actions for one kind of call, in this order: roll slots, choose code, record the result."""

    roll: Callable[[CompiledGraph, _GraphCall], None]
    code: Callable[[CompiledGraph, Compilation, _GraphCall], Run]
    record: Callable[[CompiledGraph, Compilation, _GraphCall, Any], Any]


_G = CompiledGraph
_TABLE = {
    Kind.PLAIN: _Row(_G._roll, _G._for_step, _G._record),
    Kind.FIRST: _Row(_G._roll, _G._for_step, _G._remember_and_record),
    Kind.AHEAD: _Row(_G._roll_trained, _G._as_its_repetition, _G._remember),
    Kind.REPEATED: _Row(_G._join, _G._as_then, _G._record_nothing),
    Kind.SHAPES: _Row(_G._discard, _G._for_shapes, _G._remember_shapes),
}


def _with_held_scale_states(annotation: Annotation, call: _GraphCall) -> list[Any]:
    """Return Dynamo's inputs with copies of the user's scale states that neither roll nor record.

    Their scales are those of `call.forward`; without it, or if it ran another graph, the current ones.
    """
    args, held = call.args, list(call.args)
    user_scales = call.forward.user_scales if call.forward is not None else []
    for i, (scale, history, amax, step_ended, flag) in enumerate(annotation.scale_states):
        held[scale] = (user_scales[i] if user_scales else args[scale]).clone()
        held[history], held[amax] = args[history].clone(), torch.full_like(args[amax], scaling.NOTHING)
        held[step_ended], held[flag] = torch.zeros_like(args[step_ended]), torch.ones_like(args[flag])
    return held


def _watch_backward(result: Any, states: Sequence[InstanceState]) -> None:
    """Register a hook on the backward of a graph's outputs: it notes that it runs, and rejects `create_graph=True`."""
    hook = functools.partial(_in_backward, [weakref.ref(state) for state in states])
    for node in {x.grad_fn for x in differentiable(result)}:
        assert node is not None
        # of the node, not of the tensors: outputs share nodes, and the hook of a node runs once in a backward
        node.register_prehook(hook)


# in a compiled training step, Dynamo would trace this hook as the user's code
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _in_backward(states: Sequence[weakref.ref[InstanceState]], _: Any) -> None:
    # autograd enables gradients in a backward only for create_graph=True
    if torch.is_grad_enabled():
        raise Fp8Error(
            "backward(create_graph=True) through a graph with delayed scaling: its backward records amaxes, and torch "
            "compiles no second derivatives. Compute this loss with the module as it was before torch.compile"
        )
    for state in (ref() for ref in states):
        if state is not None:
            state.tracker.end_backward()


def _reducer_of(states: Sequence[InstanceState]) -> Reducer | None:
    """Return the reducer of the states' amaxes; None if none of them is reduced, or there are no other ranks."""
    reduced = ((s.reduces, s.table.device) for s in states if s.reduces is not None)
    return next((reducer_of(*key) for key in reduced), None)
