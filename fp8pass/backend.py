"""The torch.compile backend: annotates a graph, lowers it by AOTAutograd and Inductor, passes state to its calls."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from fp8pass._torch import (
    CompileContext,
    as_fakes,
    context_for_later,
    first_call_is_fake,
    in_aot_compile,
    instead_of_compiled,
    trace_again,
    tracing,
)
from fp8pass.dump.writer import Dump
from fp8pass.dynamo.first_step import FirstStep, judged, tell
from fp8pass.dynamo.retry import take_note_of_graph
from fp8pass.errors import Fp8Error
from fp8pass.faults import Attempt, Later, fall_back, left_out
from fp8pass.frozen.replace import freeze_parameters
from fp8pass.graph.annotation import Annotation
from fp8pass.lowering.ddp_cuts import configured
from fp8pass.lowering.lower import lower
from fp8pass.names import Names
from fp8pass.options import overrides
from fp8pass.options.config import Config, make_config
from fp8pass.options.machine import gpu_of, on_machine
from fp8pass.options.setting import current_setting
from fp8pass.options.unmatched import check_compiled
from fp8pass.pipeline import (
    annotated,
    annotated_update,
    freezable,
    gradients,
    in_bfloat16,
    moments_of,
    real_inputs,
    split_for_all_phases,
    warn_of_slow_matmuls,
    written,
    written_only_by_optimizers,
)
from fp8pass.recipes import Disabled
from fp8pass.runtime.compiled_graph import CompiledGraph, VaryingGraph
from fp8pass.runtime.setting_graph import SettingGraph
from fp8pass.runtime.update_graph import Compiled, UpdateGraph
from fp8pass.runtime.update_inputs import UpdateCall
from fp8pass.runtime.update_key import Moment, TensorRef, UpdateKey
from fp8pass.runtime.weight_uses import noting
from fp8pass.states.amax_reduction import join_reduction
from fp8pass.states.slots import SlotTable, registry

log = logging.getLogger(__name__)


@configured(make_config)
def fp8pass(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph for `torch.compile(model, backend="fp8pass", options={...})`.

    `options` are fields of `fp8pass.Config`, and `mode` is one of Inductor's modes.

    Raises ValueError for unknown options and for patterns that match nothing, and Fp8Error for `aot_compile`, and under
    `strict=True` for matmuls that can't run in FP8.
    """
    config = make_config(options, mode)
    if in_aot_compile():
        raise Fp8Error(
            "aot_compile saves a function without its model, and fp8pass keeps state for each model. Call the result "
            "of torch.compile instead; so that it starts without compiling, save torch.compiler.save_cache_artifacts() "
            "and load them with torch.compiler.load_cache_artifacts"
        )
    check_compiled(config, module.graph)
    for option, off in (("optimizer_state", "off"), ("update_rounding", "nearest")):
        if getattr(config, option) != off:
            raise ValueError(
                f"{option} is an option of fp8pass.train_step, which knows the optimizer: decorate the step with it"
            )
    return compile_graph(module, example_inputs, config)


def _watched(function: Callable[..., Any], compiled: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Return what `torch.compile` returns with this backend: the compiled function, whose first step is judged."""
    first = FirstStep(function, compiled, functools.partial(make_config, **options), compile_graph)

    def call(*args: Any, **kwargs: Any) -> Any:
        if first.calls is not None or (not first.is_judged and torch.is_grad_enabled()):
            return first.call(*args, **kwargs)
        if judged:  # by the last step, which no eager optimizer has ended
            tell()
        return compiled(*args, **kwargs)

    return call


instead_of_compiled(fp8pass, _watched)


def compile_graph(module: fx.GraphModule, example_inputs: Sequence[Any], config: Config) -> Callable[..., Any]:
    """Compile one graph of Dynamo's; return the function that replaces it. Faults of fp8pass do not stop it."""
    take_note_of_graph()
    name, refs = "a graph of Dynamo's", list[TensorRef]()
    with left_out("slow_matmuls", config, name):
        warn_of_slow_matmuls(module)
    trial = overrides.current()
    if trial is not None:
        config = trial.configured(config)
    with left_out("write_weights", config, name):
        refs = written(module)
    if refs:
        return _update(module, example_inputs, config, refs)
    _freeze(module, example_inputs, config)
    is_reference = trial is not None and trial.way == "reference"
    return _by_setting(module, example_inputs, config, _reference if is_reference else _compiled)


def _freeze(module: fx.GraphModule, example_inputs: Sequence[Any], config: Config) -> None:
    """Replace weights by FP8 ones as the option `frozen` says; then let Dynamo trace the code with these."""
    found = {example_inputs[i]: scales for i, scales in freezable(module, config).items()}
    found = {weight: scales for weight, scales in found.items() if type(weight) is nn.Parameter}
    if found and (frozen := freeze_parameters(found)):
        log.info("frozen='fp8': %d weights are in FP8 alone now, of %s", len(frozen), ", ".join(frozen))
        trace_again("fp8pass has replaced frozen weights by FP8 ones")


def _by_setting(
    module: fx.GraphModule, example_inputs: Sequence[Any], config: Config, compile_one: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a callable that compiles the graph for each `autocast` setting; it is compiled now for the current one."""
    context, fakes = context_for_later(), as_fakes(example_inputs)  # for the reason in `_Graph.compiled`
    device = gpu_of(example_inputs)

    def compile_with(config: Config) -> Callable[..., Any]:
        with tracing(context):
            run: Callable[..., Any] = compile_one(module, fakes, on_machine(config, device))
        return run

    graph, setting = SettingGraph(config, _code(), compile_with), current_setting()
    first = config if setting is None else setting.applied(config)
    graph.has(setting, compile_one(module, example_inputs, on_machine(first, device)))
    return graph


def _compiled(module: fx.GraphModule, example_inputs: Sequence[Any], config: Config) -> Callable[..., Any]:
    if config.varies:
        return _varying(module, example_inputs, config, _compiled)
    return _Graph(module, example_inputs, config).compiled()


class _Graph:
    """The compilations of one graph of Dynamo's with one configuration: several if one of them fails."""

    def __init__(self, module: fx.GraphModule, example_inputs: Sequence[Any], config: Config) -> None:
        self.module = module
        self.example_inputs = example_inputs
        self.config = config
        self.context = context_for_later()
        self.modes = modes_of(example_inputs)
        self.is_fake_first = first_call_is_fake()
        self.later: Later | None = None
        self.run: Callable[..., Any]

    def compiled(self) -> Callable[..., Any]:
        collectives = _has_collectives(self.module)
        self.run, _ = fall_back(self.compile, self.config, self.dump_of, has_collectives=collectives)
        # Dynamo keeps this object as long as the code; with real tensors it would keep the first model and batch alive
        self.example_inputs = as_fakes(self.example_inputs)
        if not torch.is_grad_enabled() or self.later is None:
            return self.run
        self.later.has_run = True
        return lambda *args: self.run(*args)  # a fault in the backward may replace `self.run`

    def dump_of(self, config: Config, kind: str) -> Dump:
        return Dump.of(config, self.module, kind)

    def compile(self, attempt: Attempt, dump: Dump) -> Callable[..., Any]:
        """Compile the graph in the way of `attempt`, and write its dumps."""
        module, example_inputs, config = self.module, self.example_inputs, self.config
        annotation = annotated(module, config, attempt, dump, lambda of: of.examples(example_inputs))
        state = annotation.examples(example_inputs)[len(example_inputs) :]
        later = Later(
            self.compile_later, attempt, config, dump, self.dump_of, functools.partial(self.exchange, annotation)
        )
        compiled = lower(annotation, [*example_inputs, *state], config, dump, attempt, later)
        self.later = later
        # a call within `enabled(False)` does not say how the model trains
        weights = [] if isinstance(config.recipe, Disabled) else annotation.weights
        if not annotation.has_state:
            return noting(weights, _without_slots(compiled, config, self.is_fake_first))

        def for_cold_slots() -> Callable[..., Any]:
            run, _ = fall_back(compile_cold, config, cold_dump, attempt)
            return run

        def cold_dump(config: Config, kind: str) -> Dump:
            return self.dump_of(config, ".".join(filter(None, ("cold", kind))))

        def compile_cold(attempt: Attempt, dump: Dump) -> Callable[..., Any]:
            of = annotation.bootstrapped
            if attempt.form != "fp8":
                return of.run
            with tracing(self.context):
                return lower(of, [*self.example_inputs, *state], config, dump, attempt)

        graph: Callable[..., Any] = CompiledGraph(compiled, annotation, for_cold_slots)
        if not annotation.tables:
            graph = _without_slots(graph, config, self.is_fake_first)
        return noting(weights, _fake_first(graph, compiled, state) if self.is_fake_first else graph)

    def compile_later(self, attempt: Attempt, dump: Dump) -> Callable[..., Any]:
        """Compile the graph again in a backward, which runs without grad mode and autocast: restore both."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(tracing(self.context))
            for mode in self.modes:
                stack.enter_context(mode())
            return self.compile(attempt, dump)

    def exchange(self, annotation: Annotation, run: Callable[..., Any]) -> None:
        """Replace the graph from its next call on by `run`, which has no state; drop the graph's state."""
        self.run = run
        registry.drop(annotation.tables)


def _has_collectives(module: fx.GraphModule) -> bool:
    """Return whether a graph of Dynamo's communicates with other ranks: it has collectives, or DTensors."""
    nodes = (n for part in module.modules() if isinstance(part, fx.GraphModule) for n in part.graph.nodes)
    return any("c10d" in str(n.target) or isinstance(n.meta.get("example_value"), DTensor) for n in nodes)


def modes_of(example_inputs: Sequence[Any]) -> list[Callable[[], Any]]:
    """Return functions that make contexts of the current grad and autocast modes, which graphs of Dynamo's rely on."""
    kinds = sorted({x.device.type for x in example_inputs if isinstance(x, Tensor)})
    autocasts = [
        functools.partial(
            torch.autocast, kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind)
        )
        for kind in kinds
        if torch.amp.is_autocast_available(kind)
    ]
    return [functools.partial(torch.set_grad_enabled, torch.is_grad_enabled()), *autocasts]


def _without_slots(compiled: Callable[..., Any], config: Config, is_fake_first: bool) -> Callable[..., Any]:
    """Return the graph; if another rank's graph may have slots, wrapped to take part in the reductions of amaxes."""
    if config.reduction is None or not torch.is_grad_enabled() or is_fake_first:
        return compiled
    return join_reduction(compiled, config.reduction)


def _fake_first(graph: Callable[..., Any], compiled: Callable[..., Any], state: Sequence[Any]) -> Callable[..., Any]:
    """Return the graph for DDPOptimizer, whose first call is on fake tensors, of no instance, and gets fake state."""
    calls = itertools.count()

    def run(*args: Any) -> Any:
        return compiled(*args, *state) if next(calls) == 0 else graph(*args)

    return run


def _update(
    module: fx.GraphModule, example_inputs: Sequence[Any], config: Config, refs: Sequence[TensorRef]
) -> Callable[..., Any]:
    """Return an update graph, which is compiled when it is called, for the FP8 copies that parameters have then."""
    context = context_for_later()

    def compile_for(key: UpdateKey, args: Sequence[Any], call: UpdateCall, attempt: Attempt, dump: Dump) -> Compiled:
        with tracing(context), torch.no_grad():
            annotation = annotated_update(module, key, config, attempt, dump, args, call)
            # no reference to `example_inputs` in here: it would keep Dynamo's first gradients for ever
            run = lower(annotation, annotation.examples(args, call), config, dump, attempt)
            return Compiled(run, annotation.inputs)

    def falling_back(compile_with: Callable[[Attempt, Dump], Any], attempt: Attempt) -> Any:
        return fall_back(compile_with, config, dump_of, attempt)

    def dump_of(config: Config, kind: str) -> Dump:
        return Dump.of(config, module, ".".join(filter(None, ("update", kind))))

    skips, moments = False, list[Moment]()
    with left_out("skip_nonfinite", config, "an update"):
        skips = config.skip_nonfinite and bool(gradients(module.graph))
    without = Attempt(without=frozenset({"expand_foreach"}))
    rounded = list[TensorRef]()
    with left_out("round_bfloat16", config, "an update"):
        found_rounded = in_bfloat16(module, refs) if config.rounds_stochastically else []
        annotated_update(module, UpdateKey((), (), (), (), tuple(found_rounded)), config, without)
        rounded = found_rounded
    if config.moments is not None:
        with left_out("quantize_moments", config, "an update"):
            found = moments_of(module, refs, config.moments, in_float32=bool(rounded))
            # try the passes now, while moments can still stay in high precision if they fail
            annotated_update(module, UpdateKey((), (), (), tuple(found)), config, without)
            moments = found
    predicts = config.weight_amax == "predicted" and written_only_by_optimizers(module)
    graph = UpdateGraph(module, refs, skips, moments, bool(rounded), predicts, compile_for, falling_back)
    examples = real_inputs(module)
    # compile now, not in the first call: torch may raise TensorifyScalarRestartAnalysis, for Dynamo to trace anew
    if examples is not None:
        graph.compile(examples)
    return graph


def _varying(
    module: fx.GraphModule, example_inputs: Sequence[Any], config: Config, compile_one: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a callable that compiles the graph for each variant of the configuration at that variant's first step."""
    with left_out("split_sizes", config, "a graph of Dynamo's"):
        split_for_all_phases(module, config)  # now, while Dynamo takes guards
    context = context_for_later()
    example_inputs = as_fakes(example_inputs)  # for the reason in `_Graph.compiled`
    if not torch.is_grad_enabled():
        config = replace(config, monitor=False)  # the monitor counts nothing without gradients
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    owned = Names(placeholders).owned
    counter = SlotTable.counter(tuple(owned.values()), _code())

    def compile_at(step: int) -> Callable[..., Any]:
        with tracing(context):
            run: Callable[..., Any] = compile_one(module, example_inputs, config.at_step(step))
        return run

    graph = VaryingGraph(config.variant, [i for i, p in enumerate(placeholders) if p in owned], counter, compile_at)
    if not first_call_is_fake():
        return graph
    first = compile_one(module, example_inputs, config.at_step(0))
    graph.has(0, first)
    return _fake_first(graph, first, [])


def _code() -> str:
    """Return what identifies the function that Dynamo compiles."""
    compile_id = CompileContext.current_compile_id()
    # The frame's number, which all compilations of a function share; the id's other number counts these.
    return str(compile_id.frame_id) if compile_id is not None else ""


def reference(
    module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Run the annotated graph eagerly, as a backend: the numerical reference for the compiled graph."""
    return _reference(module, example_inputs, make_config(options))


def _reference(module: fx.GraphModule, example_inputs: Sequence[Any], config: Config) -> Callable[..., Any]:
    if config.varies:
        return _varying(module, example_inputs, config, _reference)
    annotation = annotated(module, config)
    if not annotation.has_state:
        return annotation.run
    return CompiledGraph(annotation.run, annotation, lambda: annotation.bootstrapped.run)
