"""Lower an annotated graph through Inductor."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import fx

from fp8pass.base._torch import (
    CACHEABLE,
    TAKES_LISTS_OF_PASSES,
    CustomGraphPass,
    TracingContext,
    compile_fx,
    functorch_config,
    inductor_config,
    list_mode_options,
)
from fp8pass.compiler.cache_keys import known_to_caches
from fp8pass.compiler.eager import op_by_op
from fp8pass.compiler.faults import Later
from fp8pass.compiler.heuristics import with_choices
from fp8pass.compiler.joint_passes import JointPasses
from fp8pass.compiler.kernel_passes import KernelPasses
from fp8pass.compiler.one_node import without_wrappers
from fp8pass.compiler.partition import Partition
from fp8pass.graph.attempt import FIRST, Attempt
from fp8pass.options import overrides
from fp8pass.report.drawing import drawn


def lower_through_inductor(
    module: fx.GraphModule, inputs: list[Any], joint_passes: JointPasses, later: Later | None
) -> Callable[..., Any]:
    """Compile an annotated graph and its backward through Inductor, whose settings for custom passes run ours."""
    dump, codes = joint_passes.dump, list[Any]()
    kernel_passes = KernelPasses(joint_passes.config, dump, joint_passes.timing, joint_passes)

    def compile_inner(module: fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        def lower(module: fx.GraphModule, attempt: Attempt) -> Any:
            kernel_passes.attempt = attempt
            ours = attempt.form == "fp8"
            runs = {"chooses": ours and attempt.runs("choices"), "combines": ours and attempt.runs("combine")}
            # after a fault, a backward has another attempt than the graph, for which `_settings` has decided
            cached = {} if attempt == FIRST else {"fx_graph_cache": False}
            with inductor_config.patch(cached):
                return with_choices(module, example_inputs, **runs, **kwargs)

        started = time.perf_counter()
        part = "backward" if kwargs.get("is_backward") else "forward"
        with dump.kept(), joint_passes.timing.counting("inductor"):
            if later is not None and part == "backward":
                compiled = later.lower(module, lower, op_by_op)
            else:
                compiled = lower(module, joint_passes.attempt)
        if joint_passes.note is not None:
            joint_passes.note(module, compiled, part == "backward")
        if kwargs.get("is_inference"):
            codes.append(compiled)
        dump.output_code(part, getattr(compiled, "source_code", ""), time.perf_counter() - started)
        return compiled

    inner: Callable[..., Any] = compile_inner
    if drawn() is not None:
        from fp8pass.report.graph_view import generating

        inner = generating(compile_inner)
    patches, caches = _settings(joint_passes, kernel_passes, known_to_caches(module))
    with functorch_config.patch(caches):
        compiled = compile_fx(module, inputs, inner_compile=inner, config_patches=patches)
    assert callable(compiled)  # `compile_fx` returns text only if it compiles ahead of time
    context = TracingContext.try_get()
    if codes and context is not None:  # not if AOTAutograd had it in its cache
        without_wrappers(compiled, codes[0], context.fw_metadata, inputs)
    return compiled


_MOST_OPS, _MOST_READS = {"realize_opcount_threshold": 60}, {"realize_reads_threshold": 6}
"""Inductor gives a value that takes more ops or loads than this a buffer. Its own limits on GPUs are 30 and 4. The
gradient of rotary positions, which is quantized next, takes 31 ops. With `save_fp8`, the gradient of a gated activation
reads two tensors in FP8, each with its scale, and dequantizes both."""


def _settings(
    joint_passes: JointPasses, kernel_passes: KernelPasses, cacheable: dict[str, str] | None
) -> tuple[dict[str, Any], dict[str, bool]]:
    """Return the settings of Inductor, with the passes of fp8pass unless the attempt is "plain", and of AOTAutograd.

    cacheable: what `known_to_caches` returns.
    """
    patches: dict[str, Any] = (
        {}
        if joint_passes.attempt.form == "plain"
        else {
            "joint_custom_pre_pass": append_pass(inductor_config.joint_custom_pre_pass, joint_passes),
            "custom_partitioner_fn": Partition(inductor_config.custom_partitioner_fn, joint_passes.partitioned),
            "post_grad_custom_pre_pass": append_pass(inductor_config.post_grad_custom_pre_pass, kernel_passes),
            **_limits(joint_passes),
        }
    )
    if joint_passes.config.mode is not None:
        patches.update(list_mode_options(joint_passes.config.mode))
    caches = {}
    if joint_passes.note is not None:
        # AOTAutograd's cache would not say what the compiled code runs on and writes
        patches["triton.cudagraphs"] = caches["enable_autograd_cache"] = False
    if cacheable is None:
        caches["enable_autograd_cache"] = False
    else:
        patches[CACHEABLE] = {**getattr(inductor_config, CACHEABLE), **cacheable}
    # a cache hit would skip the passes, which dumps and trials need; and graphs compiled after a fault are not cached
    if joint_passes.dump.folder is not None or overrides.current() or joint_passes.attempt != FIRST:
        patches["fx_graph_cache"] = False
        caches["enable_autograd_cache"] = False
    return patches, caches


def _limits(joint_passes: JointPasses) -> dict[str, int]:
    """Return how many ops and loads a value may take, as many as Inductor is set to or more."""
    limits = _MOST_OPS | (_MOST_READS if joint_passes.config.save_fp8 else {})
    return {name: max(most, getattr(inductor_config, name) or 0) for name, most in limits.items()}


def append_pass(configured: Any, ours: CustomGraphPass) -> Any:
    """Return a value for a setting of Inductor's: the pass, or passes, that the user has set, if any, and then ours."""
    if configured is None:
        return ours
    if TAKES_LISTS_OF_PASSES:
        return [*(configured if isinstance(configured, (list, tuple)) else (configured,)), ours]
    return _Both(configured, ours)


class _Both(CustomGraphPass):
    """Runs two passes as one, for versions of torch whose settings take only one pass."""

    def __init__(self, configured: Any, ours: CustomGraphPass) -> None:
        self.configured = configured
        self.ours = ours

    def uuid(self) -> Any:
        """Return a key of both passes; None, with which Inductor caches nothing, if the user's pass has no key."""
        key = self.configured.uuid() if isinstance(self.configured, CustomGraphPass) else None
        return None if key is None else repr((key, self.ours.uuid())).encode()

    def __call__(self, graph: fx.Graph) -> None:
        self.configured(graph)
        self.ours(graph)
