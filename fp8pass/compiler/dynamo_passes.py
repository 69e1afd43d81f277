"""Run the passes over Dynamo's graph: annotate it, or find out what they would decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fp8pass.base.names import Names
from fp8pass.compiler import order
from fp8pass.compiler.faults import left_out
from fp8pass.compiler.run_passes import linter, run_all
from fp8pass.dump.writer import Dump
from fp8pass.graph.annotation import Annotation, copy_to_edit, generate_code
from fp8pass.graph.attempt import FIRST, Attempt
from fp8pass.graph.pass_base import DynamoContext, Pass
from fp8pass.options.config import Config
from fp8pass.passes.dynamo import save_fp8
from fp8pass.passes.dynamo.find_layers import FindLayers, Piece, find
from fp8pass.passes.dynamo.split_sizes import has_symbols
from fp8pass.recipes import Schedule
from fp8pass.report.report import Report, publish


def annotated(
    module: fx.GraphModule,
    config: Config,
    attempt: Attempt = FIRST,
    dump: Dump | None = None,
    examples: Callable[[Annotation], Sequence[Any]] = lambda _: (),
) -> Annotation:
    """Return an annotated copy of Dynamo's graph: with quantize-dequantize as the recipe says, and the user's states.

    Without a recipe it gets only the states. examples: returns inputs of the graph so far, for dumps.
    """
    if attempt.form == "plain":
        return Annotation(module, [], [])
    annotation = Annotation(copy_to_edit(module), [], [])
    # `save_fp8` is not in the list of passes: the annotate pass runs it, unless the option is off
    if not attempt.runs(save_fp8.NAME):
        config = replace(config, save_fp8=False)
    names = Names(annotation.module.graph.find_nodes(op="placeholder"))
    context = DynamoContext(config, declined=attempt.reason, annotation=annotation, names=names)
    todo = _dynamo_passes(config, attempt)
    graph, check = annotation.module.graph, linter(annotation.module)
    run_all(todo, graph, context, dump or Dump(), "dynamo", check, lambda: examples(annotation))
    generate_code(annotation.module)
    if context.notes or annotation.saved:
        publish(Report(notes=context.notes, saved=annotation.saved))
    return annotation


def split_for_all_phases(module: fx.GraphModule, config: Config) -> None:
    """Split dynamic sizes for each phase of a schedule now: when its graphs are compiled, Dynamo takes no guards."""
    if isinstance(config.recipe, Schedule) and has_symbols(module.graph):
        for step, _ in config.recipe.phases:
            annotated(module, config.at_step(step))  # for its guards alone: the copy is dropped


def pieces_of(module: fx.GraphModule, config: Config) -> list[Piece]:
    """Return the pieces that Dynamo's graph can be cut into: its equal layers, and the rest; [] if it has no layers."""
    pieces = list[Piece]()
    with left_out(FindLayers.name, config, "a graph of Dynamo's"):
        pieces += find(module, Names(module.graph.find_nodes(op="placeholder")), config, [])
    return pieces


def _dynamo_passes(config: Config, attempt: Attempt) -> list[Pass[DynamoContext]]:
    leave = {*attempt.without}
    for option, names in order.ONLY_WITH.items():
        if not getattr(config, option):
            leave.update(names)
        elif attempt.form == "declined":
            leave.update({*names} - {"annotate"})  # which records the reason
    return [p for p in order.DYNAMO if p.name not in leave]
