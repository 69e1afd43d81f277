"""Compile the graph of an optimizer's update: when it is called, for the FP8 copies that parameters have then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fp8pass.base._torch import context_for_later, tracing
from fp8pass.base.names import gradients_of
from fp8pass.compiler.faults import fall_back, left_out
from fp8pass.compiler.lower import lower
from fp8pass.compiler.update_passes import annotated_update
from fp8pass.dump.writer import Dump, name_of
from fp8pass.graph.attempt import Attempt
from fp8pass.options.config import Config
from fp8pass.passes.update.find_moments import moments_of
from fp8pass.passes.update.skip_nonfinite import gradients
from fp8pass.passes.update.written import in_bfloat16, real_inputs, written_only_by_optimizers
from fp8pass.weights.update_graph import CompiledUpdate, UpdateGraph
from fp8pass.weights.update_inputs import UpdateCall
from fp8pass.weights.update_key import Moment, TensorRef, UpdateKey


def as_it_is(config: Config) -> Config:
    """Return options with which an update computes what it says: for one that is not an optimizer's."""
    return replace(config, skip_nonfinite=False, optimizer_state="off", update_rounding="nearest")


def update_graph(module: fx.GraphModule, config: Config, refs: Sequence[TensorRef], name: str = "") -> UpdateGraph:
    """Return the callable for an update. refs: what it writes, by position or attribute. name: in dumps and reports."""
    context, name = context_for_later(), name or name_of(module)
    if {*refs} <= {*gradients_of(module.graph)}:
        config = as_it_is(config)

    def compile_for(
        key: UpdateKey, args: Sequence[Any], call: UpdateCall, attempt: Attempt, dump: Dump
    ) -> CompiledUpdate:
        with tracing(context), torch.no_grad():
            annotation = annotated_update(module, key, config, attempt, dump, args, call)
            annotation.written = frozenset(ref for ref in refs if isinstance(ref, int))
            run = lower(annotation, annotation.examples(args, call), config, dump, attempt)
            inputs: Any = annotation.inputs  # passes add no others to an update
            return CompiledUpdate(run, inputs)

    def falling_back(compile_with: Callable[[Attempt, Dump], Any], attempt: Attempt) -> Any:
        return fall_back(compile_with, config, dump_of, attempt)

    def dump_of(config: Config, kind: str) -> Dump:
        return Dump.of(config, name, ".".join(filter(None, ("update", kind))))

    # each option is tried separately, so that a fault in one leaves the others on
    skips, moments = False, list[Moment]()
    with left_out("skip_nonfinite", config, "an update"):
        skips = config.skip_nonfinite and bool(gradients(module.graph))
    without = Attempt(without=frozenset({"expand_foreach"}))
    rounded = list[TensorRef]()
    with left_out("round_bfloat16", config, "an update"):
        in_16_bits = in_bfloat16(module, refs) if config.rounds_stochastically else []
        annotated_update(module, UpdateKey((), (), (), (), tuple(in_16_bits)), config, without)
        rounded = in_16_bits
    if config.moments is not None:
        with left_out("quantize_moments", config, "an update"):
            candidates = moments_of(module, refs, config.moments, in_float32=bool(rounded))
            # try the passes now, while moments can still stay in high precision if they fail
            annotated_update(module, UpdateKey((), (), (), tuple(candidates)), config, without)
            moments = candidates
    predicts = config.weight_amax == "predicted" and written_only_by_optimizers(module)
    graph = UpdateGraph(module, refs, skips, moments, bool(rounded), predicts, compile_for, falling_back)
    examples = real_inputs(module)
    # compile now, not in the first call: torch may raise TensorifyScalarRestartAnalysis, so that Dynamo traces again
    if examples is not None:
        graph.compile(examples)
    return graph
