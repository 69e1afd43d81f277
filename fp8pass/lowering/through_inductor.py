"""Lower an annotated graph through Inductor."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import fx

from fp8pass._torch import CACHEABLE, compile_fx, functorch_config, inductor_config, list_mode_options
from fp8pass.faults import Later
from fp8pass.graph.attempt import FIRST, Attempt
from fp8pass.inductor.choices import with_choices
from fp8pass.inductor.partition import Partition
from fp8pass.lowering.eager import op_by_op
from fp8pass.options import overrides
from fp8pass.pipeline import KernelPasses, Pipeline, append_pass, known_to_caches
from fp8pass.report.drawing import drawn


def lower_through_inductor(
    module: fx.GraphModule, inputs: list[Any], pipeline: Pipeline, later: Later | None
) -> Callable[..., Any]:
    """Compile an annotated graph and its backward through Inductor, whose settings for custom passes run ours."""
    dump = pipeline.dump
    kernel_passes = KernelPasses(pipeline.config, dump, pipeline.timing, lambda: pipeline.gemms)

    def compile_inner(module: fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        def lower(module: fx.GraphModule, attempt: Attempt) -> Any:
            kernel_passes.attempt = attempt
            ours = attempt.form == "fp8"
            runs = {"chooses": ours and attempt.runs("choices"), "combines": ours and attempt.runs("combine")}
            cached = {} if attempt == FIRST else {"fx_graph_cache": False}  # not cached: see below
            with inductor_config.patch(cached):
                return with_choices(module, example_inputs, **runs, **kwargs)

        started = time.perf_counter()
        part = "backward" if kwargs.get("is_backward") else "forward"
        with dump.kept(), pipeline.timing.counting("inductor"):
            if later is not None and part == "backward":
                compiled = later.lower(module, lower, op_by_op)
            else:
                compiled = lower(module, pipeline.attempt)
        dump.output_code(part, getattr(compiled, "source_code", ""), time.perf_counter() - started)
        return compiled

    inner: Callable[..., Any] = compile_inner
    if drawn() is not None:
        from fp8pass.report.graph_view import generating

        inner = generating(compile_inner)
    patches, caches = _settings(module, pipeline, kernel_passes)
    with functorch_config.patch(caches):
        compiled = compile_fx(module, inputs, inner_compile=inner, config_patches=patches)
    assert callable(compiled)  # `compile_fx` returns text only if it compiles ahead of time
    return compiled


_MOST_OPS, _MOST_READS = {"realize_opcount_threshold": 60}, {"realize_reads_threshold": 6}
"""Inductor gives a value that takes more ops or loads than this a buffer. Its own limits on GPUs are 30 and 4. The
gradient of rotary positions, which is quantized next, takes 31 ops. With `save_fp8`, the gradient of a gated activation
reads two tensors in FP8, each with its scale, and dequantizes both."""


def _settings(
    module: fx.GraphModule, pipeline: Pipeline, kernel_passes: KernelPasses
) -> tuple[dict[str, Any], dict[str, bool]]:
    """Return the settings of Inductor, with the passes of fp8pass unless the attempt is "plain", and of AOTAutograd."""
    patches: dict[str, Any] = (
        {}
        if pipeline.attempt.form == "plain"
        else {
            "joint_custom_pre_pass": append_pass(inductor_config.joint_custom_pre_pass, pipeline),
            "custom_partitioner_fn": Partition(inductor_config.custom_partitioner_fn, pipeline.partitioned),
            "post_grad_custom_pre_pass": append_pass(inductor_config.post_grad_custom_pre_pass, kernel_passes),
            **_limits(pipeline),
        }
    )
    if pipeline.config.mode is not None:
        patches.update(list_mode_options(pipeline.config.mode))
    caches = {}
    known = known_to_caches(module)
    if known is None:
        caches["enable_autograd_cache"] = False
    else:
        patches[CACHEABLE] = {**getattr(inductor_config, CACHEABLE), **known}
    # a cache hit would skip the passes, which dumps and trials need; and graphs compiled after a fault are not cached
    if pipeline.dump.folder is not None or overrides.current() or pipeline.attempt != FIRST:
        patches["fx_graph_cache"] = False
        caches["enable_autograd_cache"] = False
    return patches, caches


def _limits(pipeline: Pipeline) -> dict[str, int]:
    """Return how many ops and loads a value may take, as many as Inductor is set to or more."""
    limits = _MOST_OPS | (_MOST_READS if pipeline.config.save_fp8 else {})
    return {name: max(most, getattr(inductor_config, name) or 0) for name, most in limits.items()}
