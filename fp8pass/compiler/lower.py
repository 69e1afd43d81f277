"""Compile an annotated graph with the lowering that the user chose."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from fp8pass.base import collector
from fp8pass.base._torch import context_of_one_graph
from fp8pass.base.frames import with_room
from fp8pass.base.node_meta import QUANTIZED
from fp8pass.compiler.bodies import lower_bodies
from fp8pass.compiler.cuda_graphs import DEVICE_TYPE, Recorder
from fp8pass.compiler.eager import lower_eager
from fp8pass.compiler.faults import Later, lowering_functions
from fp8pass.compiler.joint_passes import JointPasses, warn_if_nothing
from fp8pass.compiler.through_inductor import lower_through_inductor
from fp8pass.compiler.verdicts import find_verdicts, wants_only_verdicts
from fp8pass.dump.writer import Dump
from fp8pass.graph.annotation import COND, Annotation, graphs_of, is_state_input
from fp8pass.graph.attempt import FIRST, Attempt
from fp8pass.options.config import Config
from fp8pass.passes.common.checkpoint_regions import graphs_of_call
from fp8pass.passes.joint.expand_quantizers import ExpandQuantizers
from fp8pass.quant.one_op import one_op_each
from fp8pass.report.drawing import drawn
from fp8pass.report.report import Report, Timing, publish
from fp8pass.states.steps import RegionPass, checkpointed_region

log = logging.getLogger(__name__)


@with_room
@collector.paused()
def lower(
    annotation: Annotation,
    inputs: list[Any],
    config: Config,
    dump: Dump,
    attempt: Attempt = FIRST,
    later: Later | None = None,
) -> Callable[..., Any]:
    """Compile an annotated graph. later: compiles its backward, which may fail after the forward has run."""
    with_lowering = lower_eager if config.lowering == "eager" else lower_through_inductor
    if wants_only_verdicts():
        with_lowering = find_verdicts
    report = Report()
    recorder = Recorder(annotation, inputs) if annotation.bodies and _records(config, inputs) else None

    def compile_one(name: str, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        body = annotation.bodies.get(name)
        title = "" if body is None else body.title
        timing = Timing(dump.title if body is None else f"{dump.title}, {name}: {title}")
        if (drawing := drawn()) is not None:
            positions = enumerate(module.graph.find_nodes(op="placeholder"))
            drawing.turn_to(name, title, [i for i, node in positions if is_state_input(node)])
        part_dump = dump.of_body(name, module, inputs) if body is not None else dump
        joint_passes = JointPasses(
            config, annotation.choices, part_dump, annotation.is_update, attempt, body, report, timing
        )
        joint_passes.note = None if recorder is None else functools.partial(recorder.note, name, title)
        # Dynamo compiles a graph in its first call, so the region that runs now is the one around the graph
        joint_passes.is_repeated = (around := checkpointed_region()) is not None and around[1] is RegionPass.FIRST
        has_one_op = attempt.runs(ExpandQuantizers.name) and not _quantizes_in_branches(module)
        one_op = one_op_each() if has_one_op else nullcontext()
        with timing.counting("tracing"), context_of_one_graph(), one_op:
            compiled = with_lowering(module, inputs, joint_passes, later)
        if not wants_only_verdicts():
            publish(Report(timings=[timing]))
            log.log(logging.DEBUG if body is None else logging.INFO, "%s", timing)
        return compiled

    with dump.compiling(lambda: report.summary() if report.graphs else _CACHED):
        if annotation.bodies:
            with lowering_functions():
                joins = torch.is_grad_enabled() and not (annotation.is_update or config.update_in_backward)
                inputs = inputs if recorder is None else recorder.moved(inputs)
                compiled = lower_bodies(annotation, inputs, compile_one, joins, recorder)
                compiled = compiled if recorder is None else recorder.taking(compiled)
        else:
            compiled = compile_one("", annotation.module, inputs)
    if attempt.form == "fp8":
        warn_if_nothing(annotation.choices, report)
    return compiled


def _quantizes_in_branches(module: fx.GraphModule) -> bool:
    """Return whether a branch quantizes: AOTAutograd runs its code, which would have to know recipes."""
    calls = ((part, n) for part in graphs_of(module) for n in part.graph.find_nodes(op="call_function", target=COND))
    branches = (branch for part, call in calls for branch in graphs_of_call(part, call))
    return any(QUANTIZED in n.meta for branch in branches for part in graphs_of(branch) for n in part.graph.nodes)


def _records(config: Config, inputs: list[Any]) -> bool:
    """Return whether CUDA graphs are recorded of a graph with these examples of inputs."""
    on_gpu = any(isinstance(x, torch.Tensor) and x.device.type == DEVICE_TYPE for x in inputs)
    return config.records_graphs and config.lowering == "inductor" and on_gpu and not wants_only_verdicts()


_CACHED = "taken from torch's cache as it is, without its verdicts; fp8pass.explain shows them"
