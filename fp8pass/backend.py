"""The torch.compile backend: annotate, hand over to AOTAutograd and Inductor, bring the state along at each call."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from fp8pass._torch import (
    TracingContext,
    aot_autograd,
    compile_fx,
    detect_fake_mode,
    functorch_config,
    list_mode_options,
    make_boxed_func,
    min_cut_partition,
    select_decomp_table,
    tracing,
)
from fp8pass.config import Config, make_config
from fp8pass.passes.annotate import Annotation
from fp8pass.pipeline import Pipeline, annotated
from fp8pass.slots import SlotGroup, SlotTable, registry

log = logging.getLogger(__name__)

_numbers = itertools.count()
EAGER_FIRST_STEPS = 3
"""So many steps of an instance may run eagerly, while some slot has no history; then the graph is compiled for it."""


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
    annotation = annotated(module, config)
    inputs = [*example_inputs, *_fake_state(annotation.tables, example_inputs)]
    compiled = _lower(annotation, inputs, config)
    if not annotation.tables:
        return compiled
    context = TracingContext.get()

    def for_cold_slots() -> Callable[..., Any]:
        with tracing(context):
            return _lower(annotation.bootstrapped(), inputs, config)

    return CompiledGraph(compiled, annotation, for_cold_slots)


def _fake_state(tables: Sequence[SlotTable], example_inputs: Sequence[Any]) -> list[Tensor]:
    mode = detect_fake_mode(example_inputs)
    assert mode is not None
    with mode:  # each input a tensor of its own, also where calls pass aliases
        return [x.clone() for table in tables for x in table.new_tensors().inputs()]


def _lower(annotation: Annotation, inputs: list[Any], config: Config) -> Callable[..., Any]:
    pipeline = Pipeline(config, annotation.choices, next(_numbers))
    lower = _lower_eager if config.lowering == "eager" else _lower_inductor
    compiled = lower(annotation.module, inputs, pipeline)
    pipeline.warn_if_nothing()
    return compiled


def _lower_inductor(module: fx.GraphModule, inputs: list[Any], pipeline: Pipeline) -> Callable[..., Any]:
    config = pipeline.config
    patches: dict[str, Any] = {"joint_custom_pre_pass": pipeline}
    if config.mode is not None:
        patches.update(list_mode_options(config.mode))
    caches = {}
    if config.dump_dir:  # a cache hit skips the passes, and there would be nothing to dump
        patches["fx_graph_cache"] = False
        caches["enable_autograd_cache"] = False
    with functorch_config.patch(caches):
        compiled = compile_fx(module, inputs, config_patches=patches)
    if not pipeline.report.graphs:
        log.info("a graph was taken from torch's cache as it is, without its verdicts; fp8pass.explain shows them")
    assert callable(compiled)  # text only where Inductor's C++ wrapper is asked for
    return compiled


def _lower_eager(module: fx.GraphModule, inputs: list[Any], pipeline: Pipeline) -> Callable[..., Any]:
    """The same graphs, run op by op."""

    def boxed(graph_module: fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(functools.partial(_run_unseen, graph_module.forward))

    def rewrite(graph_module: fx.GraphModule) -> None:
        for part in reversed(list(graph_module.modules())):  # branches and loop bodies first, as Inductor does it
            if isinstance(part, fx.GraphModule):
                pipeline(part.graph)
                part.recompile()

    def inference(graph_module: fx.GraphModule, fake_inputs: Any) -> Any:
        rewrite(graph_module)
        return boxed(graph_module, fake_inputs)

    def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        rewrite(joint)
        return min_cut_partition(joint, joint_inputs, **kwargs)

    compiler = aot_autograd(
        fw_compiler=boxed,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    return compiler(module, inputs)


def _run_unseen(forward: Callable[..., Any], *args: Any) -> Any:
    """As compiled code does, write into inputs without autograd counting it: what is saved may be written again."""
    return forward(*(a.data if isinstance(a, Tensor) and not a.requires_grad else a for a in args))


class CompiledGraph:
    """A compiled graph with delayed-scaling state; what Dynamo calls.

    The first step of an instance runs the annotated graph eagerly, each slot without history scaled by its tensor's own
    amax. That needs no second compilation, and leaves every slot that saw data with a history. Where some slots see no
    data for long (zeros, or no backward yet), the graph is compiled once more with that choice in it, which costs a
    pass over each tensor, and is used until the last of them has a history.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        annotation: Annotation,
        for_cold_slots: Callable[[], Callable[..., Any]],
    ) -> None:
        self._compiled = compiled
        self._annotation = annotation
        self._compile_for_cold_slots = for_cold_slots
        self._for_cold_slots: Callable[..., Any] | None = None
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        """Call the graph with Dynamo's inputs and the state of the instance that they belong to."""
        owned = [args[i] for i in self._annotation.owned]
        groups = [registry.of(table, owned) for table in self._annotation.tables]
        for group in groups:
            group.begin()
        waiting = [g for g in groups if g.table.training and not g.warm]
        run = self._for_step_of(waiting) if waiting else self._compiled
        return run(*args, *itertools.chain.from_iterable(g.tensors.inputs() for g in groups))

    def _for_step_of(self, groups: list[SlotGroup]) -> Callable[..., Any]:
        """What runs a step of which some slots may have no scale. Asks the device, until there is none."""
        cold = [name for group in groups for name in group.cold()]
        if not cold:
            return self._compiled
        if max(group.cold_steps for group in groups) <= EAGER_FIRST_STEPS:
            return self._annotation.bootstrapped().run
        with self._lock:
            if self._for_cold_slots is None:
                log.warning(
                    "%d FP8 slots have seen no data in %d steps (%s%s): compiling once more, to scale them by their "
                    "own amax when they do. If they never will, leave them out with filter=",
                    len(cold),
                    EAGER_FIRST_STEPS,
                    ", ".join(cold[:5]),
                    ", ..." if len(cold) > 5 else "",
                )
                self._for_cold_slots = self._compile_for_cold_slots()
        return self._for_cold_slots


def reference(
    module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """A backend that runs the annotated graph eagerly: the numbers that the compiled graph is held to."""
    annotation = annotated(module, make_config(options))
    if not annotation.tables:
        return annotation.run
    return CompiledGraph(annotation.run, annotation, lambda: annotation.bootstrapped().run)


def explain_only(config: Config) -> Callable[..., Any]:
    """A backend that compiles far enough to know every verdict, and runs the user's graph unchanged."""

    def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compile_graph(module, example_inputs, replace(config, lowering="eager"))
        return module.forward

    return backend
