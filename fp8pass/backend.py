"""The torch.compile backend: annotate, hand over to AOTAutograd and Inductor, bring the state along at each call."""

from __future__ import annotations

import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass import hardware
from fp8pass._torch import (
    aot_autograd,
    compile_fx,
    detect_fake_mode,
    inductor_config,
    list_mode_options,
    make_boxed_func,
    min_cut_partition,
    select_decomp_table,
)
from fp8pass.config import Config, make_config
from fp8pass.errors import Fp8Error
from fp8pass.passes.annotate import Annotation, annotate
from fp8pass.pipeline import Pipeline
from fp8pass.state import SlotGroup, SlotTable, registry

log = logging.getLogger(__name__)

_numbers = itertools.count()
MAX_COLD_STEPS = 2
"""Further first steps that are granted while no slot gets any warmer: see `CompiledGraph`."""


def fp8pass(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """`torch.compile(model, backend="fp8pass", options={...})`: `options` are the fields of `fp8pass.Config`.

    Raises ValueError for unknown options, and Fp8Error under `strict=True` for matmuls that can't run in FP8.
    """
    return compile_graph(module, example_inputs, make_config(options, mode))


def compile_graph(module: fx.GraphModule, example_inputs: Sequence[Any], config: Config) -> Callable[..., Any]:
    """Compile one graph of Dynamo's; returns what Dynamo calls in its place."""
    number = next(_numbers)
    reason = _why_no_fp8(example_inputs, config)
    annotation = _annotate(module, config, reason)
    pipeline = Pipeline(config, annotation, number)
    table = annotation.table
    inputs = [*example_inputs, *(_fake_state(table, example_inputs) if table else ())]
    compiled = _lower(annotation.module, inputs, pipeline)
    return CompiledGraph(compiled, annotation) if table else compiled


def _annotate(module: fx.GraphModule, config: Config, no_fp8: str) -> Annotation:
    if config.recipe is None:
        return Annotation(module, [], None, torch.is_grad_enabled())
    if no_fp8:
        config = Config(recipe=config.recipe, filter=lambda *_: False)
    annotation = annotate(module, config, training=torch.is_grad_enabled())
    if no_fp8:
        for choice in annotation.choices:
            choice.reason = no_fp8
    return annotation


def _why_no_fp8(example_inputs: Sequence[Any], config: Config) -> str:
    """Why nothing of this graph can run in FP8, said once; raises Fp8Error under strict."""
    devices = {t.device for t in example_inputs if isinstance(t, Tensor)}
    accelerators = sorted((d for d in devices if d.type != "cpu"), key=str)
    for device in accelerators or devices:
        reason = hardware.why_no_fp8(device, hardware.target_of(device, config.target))
        if reason and config.strict:
            raise Fp8Error(f"strict: {reason}")
        if reason:
            _warn_once(f"fp8pass: {reason}. Everything stays in high precision.")
            return reason
    return ""


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def _fake_state(table: SlotTable, example_inputs: Sequence[Any]) -> list[Tensor]:
    mode = detect_fake_mode(example_inputs)
    assert mode is not None
    return [mode.from_tensor(t, static_shapes=True) for t in table.new_tensors()]


def _lower(module: fx.GraphModule, inputs: list[Any], pipeline: Pipeline) -> Callable[..., Any]:
    if pipeline.config.lowering == "eager":
        return _lower_eager(module, inputs, pipeline)
    patches: dict[str, Any] = {"joint_custom_pre_pass": pipeline}
    if pipeline.config.mode is not None:
        patches.update(list_mode_options(pipeline.config.mode))
    if pipeline.config.dump_dir:
        patches["fx_graph_cache"] = False  # a cache hit skips the passes, and there would be nothing to dump
    compiled = compile_fx(module, inputs, config_patches=patches)
    assert callable(compiled)  # text only where Inductor's C++ wrapper is asked for
    return compiled


def _lower_eager(module: fx.GraphModule, inputs: list[Any], pipeline: Pipeline) -> Callable[..., Any]:
    """The same graphs, run op by op."""

    def boxed(graph_module: fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(graph_module.forward)

    def inference(graph_module: fx.GraphModule, fake_inputs: Any) -> Any:
        pipeline(graph_module.graph)
        graph_module.recompile()
        return boxed(graph_module, fake_inputs)

    def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        pipeline(joint.graph)
        joint.recompile()
        return min_cut_partition(joint, joint_inputs, **kwargs)

    compiler = aot_autograd(
        fw_compiler=boxed,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    return compiler(module, inputs)


class CompiledGraph:
    """A compiled graph with delayed-scaling state; what Dynamo calls.

    The first step of an instance runs the annotated graph eagerly, with the scale of each slot that has no history from
    the tensor's own amax. That needs no second compilation, and leaves every slot that saw data with a history. Slots
    that saw only zeros get another such step, as long as that brings any of them further.
    """

    def __init__(self, compiled: Callable[..., Any], annotation: Annotation) -> None:
        assert annotation.table is not None
        self._compiled = compiled
        self._annotation = annotation
        self._table = annotation.table
        self._parameters = annotation.parameter_inputs

    def __call__(self, *args: Any) -> Any:
        """Call the graph with Dynamo's inputs and the state of the instance that they belong to."""
        group = registry.of(self._table, self, [args[i] for i in self._parameters])
        group.claim()
        if self._annotation.training and not group.warm and self._is_cold(group):
            return self._annotation.run(*args, *group.tensors, bootstrap=True)
        return self._compiled(*args, *group.tensors)

    def _is_cold(self, group: SlotGroup) -> bool:
        """Whether this step must be a first step. Once a group is warm it is not asked again."""
        cold = group.cold()
        stuck = group.cold_steps >= MAX_COLD_STEPS and len(cold) >= group.cold_slots >= 0
        group.cold_steps = group.cold_steps + 1 if len(cold) >= group.cold_slots else 0
        group.cold_slots = len(cold)
        group.warm = stuck or not cold
        if stuck:
            log.warning(
                "%d FP8 slots have seen nothing but zeros so far (%s%s); the first other values they see are quantized "
                "with scale 1",
                len(cold),
                ", ".join(cold[:5]),
                ", ..." if len(cold) > 5 else "",
            )
        return not group.warm


def reference(
    module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """A backend that runs the annotated graph eagerly: the numbers that the compiled graph is held to."""
    annotation = annotate(module, make_config(options), training=torch.is_grad_enabled())
    return CompiledGraph(annotation.run, annotation) if annotation.table else annotation.run


def explain_only(config: Config) -> Callable[..., Any]:
    """A backend that compiles far enough to know every verdict, and runs the user's graph unchanged."""

    def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        with inductor_config.patch(fx_graph_cache=False):
            eager = Config(**{**config.__dict__, "lowering": "eager"})
            compile_graph(module, example_inputs, eager)
        return module.forward

    return backend
