"""The torch.compile backend: annotates a graph, lowers it by AOTAutograd and Inductor, passes state to its calls."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from fp8pass.base._torch import CompileContext, first_call_is_fake, in_aot_compile, instead_of_compiled, trace_again
from fp8pass.base.errors import Fp8Error
from fp8pass.base.names import Names
from fp8pass.compiler.compiled_graph import CompiledGraph
from fp8pass.compiler.ddp_cuts import configured, cut_at_layers
from fp8pass.compiler.dynamo_passes import split_for_all_phases
from fp8pass.compiler.faults import left_out
from fp8pass.compiler.first_step import FirstStep, checked, tell
from fp8pass.compiler.graph_compiler import GraphCompiler
from fp8pass.compiler.retry import take_note_of_graph, watch_compilations
from fp8pass.dump.writer import name_of
from fp8pass.options import overrides
from fp8pass.options.config import Config, make_config
from fp8pass.options.machine import gpu_of, on_machine
from fp8pass.options.unmatched import check_compiled
from fp8pass.passes.dynamo.slow_matmuls import warn_of_slow_matmuls
from fp8pass.passes.update.written import written
from fp8pass.states.model_state import goes_along_with_model
from fp8pass.states.saturation import watch
from fp8pass.states.slots import registry
from fp8pass.states.static_scales import fill
from fp8pass.states.steps import accumulates
from fp8pass.weights.update_key import TensorRef

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
    """Return what `torch.compile` returns with this backend: the compiled function, whose first step is checked."""
    first = FirstStep(function, compiled, functools.partial(make_config, **options), compile_graph)

    def call(*args: Any, **kwargs: Any) -> Any:
        if first.calls is not None or (not first.is_checked and torch.is_grad_enabled()):
            return first.call(*args, **kwargs)
        if checked:  # by the last step, which no eager optimizer has ended
            tell()
        return compiled(*args, **kwargs)

    return call


@functools.cache
def _prepare() -> None:
    """Patch torch where this backend needs it, and register callbacks for new states."""
    instead_of_compiled(fp8pass, _watched)
    watch_compilations()
    cut_at_layers()
    registry.on_new += [goes_along_with_model, fill]
    registry.on_step.append(watch)


# at import: torch calls no function of a backend between its lookup, which imports this file, and the first graph
_prepare()


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
        from fp8pass.compiler.update_compiler import update_graph

        return update_graph(module, config, refs)
    if config.accumulate_in_matmul:
        config = replace(config, accumulate_in_matmul=accumulates() and not config.records_graphs)
    if config.frozen == "fp8" and config.recipe is not None:
        _freeze(module, example_inputs, config)  # may not return: it lets Dynamo trace the code again
    is_reference = trial is not None and trial.way == "reference"
    return _compiled_graph(module, example_inputs, config, is_reference)


def _freeze(module: fx.GraphModule, example_inputs: Sequence[Any], config: Config) -> None:
    """Replace frozen weights by FP8 ones; then let Dynamo trace the code with these."""
    from fp8pass.frozen.replace import freeze_parameters
    from fp8pass.passes.dynamo.frozen_parameters import frozen_parameters

    scales_of = {example_inputs[i]: scales for i, scales in frozen_parameters(module, config).items()}
    # others, such as fake tensors and weights that are in FP8 already, stay as they are
    scales_of = {weight: scales for weight, scales in scales_of.items() if type(weight) is nn.Parameter}
    if frozen := freeze_parameters(scales_of) if scales_of else []:
        log.info("frozen='fp8': %d weights are in FP8 alone now, of %s", len(frozen), ", ".join(frozen))
        trace_again("fp8pass has replaced frozen weights by FP8 ones")


def _compiled_graph(
    module: fx.GraphModule, example_inputs: Sequence[Any], config: Config, is_reference: bool
) -> CompiledGraph:
    """Return the callable for a graph, compiled for the current `autocast`, unless its steps differ."""
    is_fake = first_call_is_fake()
    compiler = GraphCompiler(module, example_inputs, name_of(module), is_reference)
    device = gpu_of(example_inputs)
    placeholders = module.graph.find_nodes(op="placeholder")
    names = Names(placeholders).owned
    owned = {i: names[p] for i, p in enumerate(placeholders) if p in names}
    with_gpu = functools.partial(on_machine, device=device)
    graph = CompiledGraph(config, owned, _code(), with_gpu, compiler.compile_later, is_fake)
    if graph.config.varies:
        with left_out("split_sizes", config, "a graph of Dynamo's"):
            split_for_all_phases(module, graph.config)  # now, while Dynamo takes guards
    if is_fake or not graph.config.varies:
        graph.compile(compiler.compile)
    compiler.forget_inputs()
    return graph


def _code() -> str:
    """Return what identifies the function that Dynamo compiles."""
    compile_id = CompileContext.current_compile_id()
    # The frame's number, which all compilations of a function share; the id's other number counts these.
    return str(compile_id.frame_id) if compile_id is not None else ""


def reference(
    module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Run the annotated graph eagerly, as a backend: the numerical reference for the compiled graph."""
    return _compiled_graph(module, example_inputs, make_config(options), is_reference=True)
