"""Define the backend of `fp8pass.explain`: it compiles until each matmul has a verdict, and runs the user's graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fp8pass.backend import compile_graph
from fp8pass.base._torch import as_fakes, context_for_later, make_boxed_func, tracing
from fp8pass.base.names import Names
from fp8pass.compiler.bodies import lower_bodies, without_quantizing
from fp8pass.compiler.ddp_cuts import configured
from fp8pass.compiler.dynamo_passes import annotated
from fp8pass.compiler.eager import through_aot
from fp8pass.compiler.faults import left_out
from fp8pass.compiler.graph_compiler import modes_of
from fp8pass.compiler.partition import Partition
from fp8pass.compiler.verdicts import only_verdicts
from fp8pass.graph.annotation import Annotation
from fp8pass.graph.verdict import Gemm
from fp8pass.options.config import Config
from fp8pass.options.machine import gpu_of, on_machine
from fp8pass.options.unmatched import check_compiled
from fp8pass.passes.update.written import written
from fp8pass.recipes import Schedule
from fp8pass.report.drawing import drawn
from fp8pass.report.graph_view import Drawing
from fp8pass.report.report import Report, break_of, collect, publish, recompile_of


def explain_only(
    config: Config, later: list[GraphToDraw], path_of: Callable[[Any], str] = lambda _: ""
) -> Callable[..., Any]:
    """Return a backend that compiles until each matmul has a verdict, and runs the user's graph unchanged.

    For a `Schedule` it compiles with the last phase. later: gets the graphs, unless they are drawn now.
    path_of: returns the path of a parameter in the user's model, "" if it is not known. It is needed because names in a
    graph begin at the graph's root, which after a graph break is some submodule, and several instances of that
    submodule may run the graph.
    """
    notes: list[str] = []
    earlier: set[str] = set()
    all_phases = config
    step = 0
    if isinstance(config.recipe, Schedule):
        step, _ = config.recipe.phases[-1]
        notes.append(f"the verdicts are those of the schedule from step {step} on")
    config = config.at_step(step)  # steps that differ compile lazily, at a call that never comes here

    @configured(lambda: config)
    def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        check_compiled(all_phases, module.graph)
        graph_break, again = break_of(module), recompile_of(module, earlier)
        breaks, recompiles = [] if graph_break is None else [graph_break], [] if again is None else [again]
        publish(Report(notes=notes, breaks=breaks, recompiles=recompiles))
        graph = GraphToDraw(module, example_inputs, config)
        with collect() as of_graph:
            if drawn() is not None:
                graph.draw()
            else:
                with only_verdicts():
                    compile_graph(module, example_inputs, config)
                later.append(graph)
        graph.gemms = list(of_graph.gemms)
        return _Unchanged(module, of_graph.gemms, path_of)

    return backend


class GraphToDraw:
    """A graph of Dynamo's that may be drawn later: it keeps no real tensors. gemms: the verdicts on its matmuls."""

    def __init__(self, module: fx.GraphModule, example_inputs: Sequence[Any], config: Config) -> None:
        self.module = module
        self.example_inputs = as_fakes(example_inputs)
        self.config = replace(on_machine(config, gpu_of(example_inputs)), lowering="eager")
        self.context = context_for_later()
        self.modes = modes_of(example_inputs)
        self.gemms: list[Gemm] = []

    def draw(self) -> None:
        """Draw the user's graph and what becomes of it, in the current `Drawing`; of equal layers only one."""
        drawing = drawn()
        assert drawing is not None
        drawing.begin()
        lowering = "inductor" if drawing.kernels else "eager"
        compile_graph(self.module, self.example_inputs, replace(self.config, lowering=lowering))
        if not written(self.module):  # the graph of an optimizer update has no other form to show
            self._draw_before(drawing)

    def _draw_before(self, drawing: Drawing) -> None:
        # the user wrote no merged matmul
        config = replace(self.config, merge_siblings=False)
        pieces = Annotation(self.module, [], [])
        with left_out("drawing", config, "a graph that is drawn"):
            pieces = annotated(self.module, config)
        if pieces.bodies and drawing.functions() == {name: body.title for name, body in pieces.bodies.items()}:

            def draw(name: str, function: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
                function, inputs = without_quantizing(function, inputs)
                drawing.turn_to(name, pieces.bodies[name].title)
                if any(n.op not in ("placeholder", "output") for n in function.graph.nodes):
                    draw_before(function, inputs, drawing)
                return function.forward

            lower_bodies(pieces, pieces.examples(self.example_inputs), draw)
            return
        pieces = annotated(self.module, Config(recipe=None))
        drawing.turn_to("")
        draw_before(pieces.module, pieces.examples(self.example_inputs), drawing)

    def draw_later(self) -> None:
        """Draw the graph outside of Dynamo, which traced it, and link its matmuls to `gemms`."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(tracing(self.context))
            for mode in self.modes:
                stack.enter_context(mode())
            drawings = stack.enter_context(collect())
            self.draw()
        drawing = drawn()
        assert drawing is not None
        drawing.replace_verdicts(drawings.gemms, self.gemms)


class _Unchanged:
    """A callable that runs the user's graph unchanged; each run gets verdicts with full names in the user's model."""

    def __init__(self, module: fx.GraphModule, gemms: list[Gemm], path_of: Callable[[Any], str]) -> None:
        self.module = module
        self.gemms = gemms
        self.names = [g.name for g in gemms]
        self.path_of = path_of
        placeholders = module.graph.find_nodes(op="placeholder")
        self.owned = {placeholders.index(p): path for p, path in Names(placeholders).owned.items()}
        self.has_run = False

    def __call__(self, *args: Any) -> Any:
        """Run the graph node by node, so that `Outside` can tell for which node an op runs."""
        self._name(self._above(args))
        interpreter = fx.Interpreter(self.module)
        interpreter.extra_traceback = False  # fx.Interpreter would add the node's text to the user's errors
        return interpreter.run(*args)

    def _name(self, above: str) -> None:
        """Set full names on the verdicts. Compilation published those of the first run; later runs publish copies."""
        if self.has_run:
            self.gemms = [replace(g) for g in self.gemms]
            publish(Report(gemms=self.gemms))
        self.has_run = True
        for gemm, name in zip(self.gemms, self.names, strict=True):
            gemm.name = f"{above}{name}" if name else name

    def _above(self, args: Sequence[Any]) -> str:
        """Return the path of the graph's root in the model, with a final dot; "" if unknown or the model itself."""
        full = {path: self.path_of(args[i]) for i, path in self.owned.items()}
        # The dots make only whole names count: "group.weight" does not end with "up.weight".
        above = {
            full_path.removesuffix(path) for path, full_path in full.items() if f".{full_path}".endswith(f".{path}")
        }
        return above.pop() if len(above) == 1 else ""


def draw_before(module: fx.GraphModule, inputs: list[Any], drawing: Drawing) -> None:
    """Draw a graph with its backward, with Inductor's decompositions."""

    def draw(graph_module: fx.GraphModule, _: Any) -> Any:
        drawing.add(graph_module.graph, "before")
        return make_boxed_func(graph_module.forward)

    def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        drawing.add(joint.graph, "before")
        return Partition()(joint, joint_inputs, **kwargs)

    def forward(graph_module: fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(graph_module.forward)

    through_aot(forward, None, draw, partition)(module, inputs)
