"""Run passes over a graph in order: each is timed, verified and dumped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fp8pass.base._torch import GraphTransformObserver
from fp8pass.base.errors import faults_of
from fp8pass.dump.writer import Dump
from fp8pass.graph.other_libraries import Arguments, arguments_of
from fp8pass.graph.pass_base import C, Context, Pass
from fp8pass.graph.verify import verify
from fp8pass.options import overrides
from fp8pass.options.overrides import REQUIRED


def run_all(
    passes: Sequence[Pass[C]],
    module: fx.GraphModule,
    context: C,
    dump: Dump,
    part: str,
    check: Callable[[fx.GraphModule, C], Callable[[str], None]],
    examples: Callable[[], Sequence[Any]] = tuple,
) -> None:
    """Run passes in order. part: the name of the graph in dumps.

    check: called before the first pass; what it returns is called with the name of each pass that changed something.
    """
    trial, changed = overrides.current(), check(module, context)
    for p in passes:
        if trial is not None and not trial.runs(p.name, part):
            continue
        with dump.step(part, p.name, module, examples) as step, faults_of(p.name):
            step.applied = _run(p, module, context)
            if step.applied:
                changed(p.name)
            if step.applied and trial is not None:
                trial.applied.add(p.name)
    module.recompile()


def _run(p: Pass[C], module: fx.GraphModule, context: C) -> int:
    """Run a pass as torch runs its own: timed, with provenance, and not if `disabled_passes` names it."""
    if p.name in REQUIRED:
        return p.run(module.graph, context)
    observer = GraphTransformObserver(module, p.name)
    return observer.apply_graph_pass(lambda graph: p.run(graph, context)) or 0


def verifier(module: fx.GraphModule, context: Context) -> Callable[[str], None]:
    """Return `_verify`, which compares with the graph as it is now."""
    return functools.partial(_verify, module, context, arguments_of(module.graph))


def _verify(module: fx.GraphModule, context: Context, before: Arguments, made_by: str) -> None:
    verify(module.graph, context.computed, before, made_by)


def lint(module: fx.GraphModule, context: Context) -> Callable[[str], None]:
    """Check that Dynamo's graph, and the graphs in it, are well formed. Their nodes have no values to verify."""

    def lint(_: str) -> None:
        for part in module.modules():
            if isinstance(part, fx.GraphModule):
                part.graph.lint()

    return lint


def module_of(graph: fx.Graph) -> fx.GraphModule:
    """Return the module that a graph belongs to."""
    module = graph.owning_module
    assert module is not None
    return module
