"""Run the passes over a graph that comes from a tracer other than Dynamo."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from fp8pass.base.names import Names
from fp8pass.compiler import order
from fp8pass.compiler.run_passes import run_all, verifier
from fp8pass.dump.writer import Dump
from fp8pass.graph.annotation import graphs_of
from fp8pass.graph.pass_base import KernelsContext
from fp8pass.options.config import Config
from fp8pass.passes.kernels.emulate_matmuls import EmulateMatmuls

if TYPE_CHECKING:
    from fp8pass.passes.traced.quantize_traced import TracedContext


def quantized(module: fx.GraphModule, config: Config, names: Names, bootstrap: bool, dump: Dump) -> TracedContext:
    """Insert quantize-dequantize into a traced graph, in place; return choices and slots: see `TracedContext`."""
    from fp8pass.passes.traced.quantize_traced import TracedContext

    context = TracedContext(config, names=names, bootstrap=bootstrap)
    todo = order.TRACED if config.recipe is not None else ()
    part = "traced.cold" if bootstrap else "traced"
    run_all(todo, module.graph, context, dump, part, verifier(module.graph, context))
    return context


def runs_anywhere(module: fx.GraphModule, config: Config, dump: Dump) -> None:
    """Replace the FP8 matmuls of a traced graph that this device has no kernel for, in place."""
    for graph in [part.graph for part in graphs_of(module)]:
        context = KernelsContext(config)
        run_all((EmulateMatmuls(),), graph, context, dump, "traced", verifier(graph, context))
