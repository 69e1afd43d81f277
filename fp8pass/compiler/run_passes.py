"""Run passes over a graph in order: each is timed, verified and dumped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fp8pass.base._torch import GraphTransformObserver
from fp8pass.base.errors import faults_of
from fp8pass.base.node_meta import MADE_BY
from fp8pass.compiler.memory_budget import in_region
from fp8pass.dump.writer import Dump
from fp8pass.graph.annotation import graphs_of
from fp8pass.graph.builder import all_of
from fp8pass.graph.other_libraries import arguments_of
from fp8pass.graph.pass_base import C, Context, Pass
from fp8pass.graph.verify import verify
from fp8pass.options import overrides
from fp8pass.options.overrides import REQUIRED


def run_all(
    passes: Sequence[Pass[C]],
    graph: fx.Graph,
    context: C,
    dump: Dump,
    part: str,
    check: Callable[[str], None],
    examples: Callable[[], Sequence[Any]] = tuple,
) -> None:
    """Run passes in order. part: the name of the graph in dumps.

    check: called with the name of each pass that changed something. Each pass runs as torch runs its own: timed, with
    provenance, and not if `disabled_passes` names it, unless other passes require it.
    """
    module, trial = graph.owning_module, overrides.current()
    assert module is not None
    todo = [p for p in passes if trial is None or trial.runs(p.name, part)]
    with in_region(module):
        for p in todo:
            with dump.step(part, p.name, module, examples) as step, faults_of(p.name):
                if p.name in REQUIRED:
                    step.applied = p.run(module.graph, context)
                else:
                    observer = GraphTransformObserver(module, p.name)
                    step.applied = observer.apply_graph_pass(lambda graph: p.run(graph, context)) or 0  # noqa: B023
                if step.applied:
                    check(p.name)
                if step.applied and trial is not None:
                    trial.applied.add(p.name)


def verifier(graph: fx.Graph, context: Context) -> Callable[[str], None]:
    """Return a check that verifies the graph, and compares it with the graph as it is now: see `verify`.

    What passes have made until now is not checked again: it was checked in the graph that this one was cut from.
    """
    context.computed.update({node: all_of(node) for node in graph.nodes if MADE_BY in node.meta})
    return functools.partial(verify, graph, context.computed, arguments_of(graph))


def linter(module: fx.GraphModule) -> Callable[[str], None]:
    """Return a check that Dynamo's graph and the graphs in it are well formed; their nodes have no values to verify."""

    def lint(_: str) -> None:
        for part in graphs_of(module):
            part.graph.lint()

    return lint
