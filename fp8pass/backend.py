"""The torch.compile backend: annotate, hand over to AOTAutograd and Inductor, bring the state along at each call."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from fp8pass._torch import (
    CACHEABLE,
    FORCE_STRIDE_ORDER,
    CompileContext,
    aot_autograd,
    as_fakes,
    compile_fx,
    context_for_later,
    detect_fake_mode,
    first_call_is_fake,
    functorch_config,
    inductor_config,
    list_mode_options,
    make_boxed_func,
    select_decomp_table,
    tracing,
)
from fp8pass.dump.writer import Dump
from fp8pass.dynamo.retry import take_note_of_graph
from fp8pass.faults import FIRST, Attempt, Later, fall_back, left_out
from fp8pass.graph.annotation import Annotation
from fp8pass.graph.verdict import Gemm
from fp8pass.inductor.choices import with_choices
from fp8pass.inductor.partition import Partition
from fp8pass.names import Names
from fp8pass.options import overrides
from fp8pass.options.config import Config, make_config
from fp8pass.options.unmatched import check_compiled
from fp8pass.pipeline import (
    KernelPasses,
    Pipeline,
    annotated,
    annotated_update,
    behind,
    gradients,
    known_to_caches,
    moments_of,
    real_inputs,
    warn_of_slow_matmuls,
    written,
)
from fp8pass.quant.kernel_ops import FORMULAS
from fp8pass.quant.monitor_ops import Ring
from fp8pass.recipes import Schedule
from fp8pass.report.graph_view import Drawing, drawn, generating
from fp8pass.report.report import Report, break_of, collect, publish, recompile_of
from fp8pass.runtime.compiled_graph import CompiledGraph, VaryingGraph
from fp8pass.runtime.frozen_weights import frozen_example
from fp8pass.runtime.update_graph import UpdateGraph
from fp8pass.runtime.update_key import Moment, Place, UpdateKey
from fp8pass.runtime.weight_cache import cached_example
from fp8pass.states.amax_reduction import taking_part
from fp8pass.states.slots import SlotTable, registry
from fp8pass.states.steps import Pass, checkpointed_region

log = logging.getLogger(__name__)


def fp8pass(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """`torch.compile(model, backend="fp8pass", options={...})`: `options` are the fields of `fp8pass.Config`.

    Raises ValueError for unknown options and for patterns that match nothing, and Fp8Error under `strict=True` for
    matmuls that can't run in FP8.
    """
    config = make_config(options, mode)
    check_compiled(config, module.graph)
    if config.optimizer_state != "off":
        raise ValueError(
            "optimizer_state is an option of fp8pass.train_step, which knows the optimizer: decorate the step with it"
        )
    return compile_graph(module, example_inputs, config)


def compile_graph(module: fx.GraphModule, example_inputs: Sequence[Any], config: Config) -> Callable[..., Any]:
    """Compile one graph of Dynamo's; returns what Dynamo calls in its place. A fault of fp8pass does not stop it."""
    take_note_of_graph()
    name, places = "a graph of Dynamo's", list[Place]()
    with left_out("slow_matmuls", config, name):
        warn_of_slow_matmuls(module)
    trial = overrides.current()
    if trial is not None:
        config = trial.configured(config)
    with left_out("write_weights", config, name):
        places = written(module)
    if places:
        return _update(module, example_inputs, config, places)
    if trial is not None and trial.way == "reference":
        return _reference(module, example_inputs, config)
    if config.varies:
        return _varying(module, example_inputs, config, compile_graph)
    return _Graph(module, example_inputs, config).compiled()


class _Graph:
    """One graph of Dynamo's, whose every call is compiled alike, as it is compiled: perhaps more than once."""

    def __init__(self, module: fx.GraphModule, example_inputs: Sequence[Any], config: Config) -> None:
        self.module = module
        self.example_inputs = example_inputs
        self.config = config
        self.context = context_for_later()
        self.modes = _modes(example_inputs)
        self.is_fake_first = first_call_is_fake()
        self.later: Later | None = None
        self.run: Callable[..., Any]

    def compiled(self) -> Callable[..., Any]:
        collectives = _has_collectives(self.module)
        self.run, _ = fall_back(self.compile, self.config, self.dump_of, has_collectives=collectives)
        # Dynamo keeps this as long as the code: the tensors themselves would keep the first model, and its first batch
        self.example_inputs = as_fakes(self.example_inputs)
        if not torch.is_grad_enabled() or self.later is None:
            return self.run
        self.later.has_run = True
        return lambda *args: self.run(*args)  # which a fault in its backward may replace

    def dump_of(self, config: Config, kind: str) -> Dump:
        return Dump.of(config, self.module, kind)

    def compile(self, attempt: Attempt, dump: Dump) -> Callable[..., Any]:
        """With dumps there, in one of several ways."""
        module, example_inputs, config = self.module, self.example_inputs, self.config

        def examples(annotation: Annotation) -> list[Any]:
            return [*example_inputs, *_fake_state(annotation, example_inputs)]

        annotation = annotated(module, config, attempt, dump, examples)
        state = _fake_state(annotation, example_inputs)
        later = Later(
            self.compile_later, attempt, config, dump, self.dump_of, functools.partial(self.exchange, annotation)
        )
        compiled = _lower(annotation, [*example_inputs, *state], config, dump, attempt, later)
        self.later = later
        if not annotation.has_state:
            return _without_slots(compiled, config, self.is_fake_first)

        def for_cold_slots() -> Callable[..., Any]:
            run, _ = fall_back(compile_cold, config, cold_dump, attempt)
            return run

        def cold_dump(config: Config, kind: str) -> Dump:
            return self.dump_of(config, ".".join(filter(None, ("cold", kind))))

        def compile_cold(attempt: Attempt, dump: Dump) -> Callable[..., Any]:
            of = annotation.bootstrapped()
            if attempt.form != "fp8":
                return of.run
            with tracing(self.context):
                return _lower(of, [*self.example_inputs, *state], config, dump, attempt)

        graph = CompiledGraph(compiled, annotation, for_cold_slots)
        return _fake_first(graph, compiled, state) if self.is_fake_first else graph

    def compile_later(self, attempt: Attempt, dump: Dump) -> Callable[..., Any]:
        """In a backward, which runs without gradients and autocast."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(tracing(self.context))
            for mode in self.modes:
                stack.enter_context(mode())
            return self.compile(attempt, dump)

    def exchange(self, annotation: Annotation, run: Callable[..., Any]) -> None:
        """From the next call on, run what has no state."""
        self.run = run
        registry.drop(annotation.tables)


def _has_collectives(module: fx.GraphModule) -> bool:
    """Return whether a graph of Dynamo's sends something to other ranks: it says so, or its DTensors will."""
    nodes = (n for part in module.modules() if isinstance(part, fx.GraphModule) for n in part.graph.nodes)
    return any("c10d" in str(n.target) or isinstance(n.meta.get("example_value"), DTensor) for n in nodes)


def _modes(example_inputs: Sequence[Any]) -> list[Callable[[], Any]]:
    """Return what makes contexts with the modes of now, which decide what a graph of Dynamo's stands for."""
    kinds = sorted({x.device.type for x in example_inputs if isinstance(x, Tensor)})
    autocasts = [
        functools.partial(
            torch.autocast, kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind)
        )
        for kind in kinds
        if torch.amp.is_autocast_available(kind)
    ]
    return [functools.partial(torch.set_grad_enabled, torch.is_grad_enabled()), *autocasts]


def _without_slots(compiled: Callable[..., Any], config: Config, is_fake_first: bool) -> Callable[..., Any]:
    """The graph; where another rank has slots in its place, that is found out."""
    if config.reduction is None or not torch.is_grad_enabled() or is_fake_first:
        return compiled
    return taking_part(compiled, config.reduction)


def _fake_first(graph: Callable[..., Any], compiled: Callable[..., Any], state: Sequence[Any]) -> Callable[..., Any]:
    """The graph, of which the first call is on fake tensors: it is none of an instance, and gets a state of fakes."""
    calls = itertools.count()

    def run(*args: Any) -> Any:
        return compiled(*args, *state) if next(calls) == 0 else graph(*args)

    return run


def _update(
    module: fx.GraphModule, example_inputs: Sequence[Any], config: Config, places: Sequence[Place]
) -> Callable[..., Any]:
    """A graph that writes into parameters: compiled when it is called, for the FP8 copies that they have then."""
    context, mode = context_for_later(), detect_fake_mode(example_inputs)

    def compile_for(
        key: UpdateKey, args: Sequence[Any], inputs: list[Tensor], attempt: Attempt, dump: Dump
    ) -> Callable[..., Any]:
        with tracing(context), torch.no_grad():
            with mode or contextlib.nullcontext():
                fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in inputs]
            examples = [*args, *fakes]
            annotation = annotated_update(module, key, config, attempt, dump, examples)
            # not Dynamo's: gradients would be kept for ever
            return _lower(annotation, examples, config, dump, attempt)

    def falling_back(compile_with: Callable[[Attempt, Dump], Any], attempt: Attempt) -> Any:
        return fall_back(compile_with, config, dump_of, attempt)

    def dump_of(config: Config, kind: str) -> Dump:
        return Dump.of(config, module, ".".join(filter(None, ("update", kind))))

    skips, moments = False, list[Moment]()
    with left_out("skip_nonfinite", config, "an update"):
        skips = config.skip_nonfinite and bool(gradients(module.graph))
    if config.optimizer_state == "fp8":
        with left_out("quantize_moments", config, "an update"):
            found = moments_of(module, places)
            # now, while moments can stay as they are
            without = Attempt(without=frozenset({"expand_foreach"}))
            annotated_update(module, UpdateKey((), (), (), tuple(found)), config, without)
            moments = found
    graph = UpdateGraph(module, places, skips, moments, compile_for, falling_back)
    examples = real_inputs(module)
    if examples is not None:  # now, and not in the first call, for Dynamo may have to think again
        graph.compile(examples)
    return graph


def _varying(
    module: fx.GraphModule, example_inputs: Sequence[Any], config: Config, compile_one: Callable[..., Any]
) -> Callable[..., Any]:
    """The graph as it is for each step, compiled when the first such step comes."""
    context = context_for_later()
    example_inputs = as_fakes(example_inputs)  # which are kept: see `_Graph.compiled`
    if not torch.is_grad_enabled():
        config = replace(config, monitor=False)  # which has nothing to count there
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    owned = Names(placeholders).owned
    compile_id = CompileContext.current_compile_id()
    code = str(compile_id.frame_id) if compile_id is not None else ""
    counter = SlotTable.counter(tuple(owned.values()), code)

    def compile_at(step: int) -> Callable[..., Any]:
        with tracing(context):
            run: Callable[..., Any] = compile_one(module, example_inputs, config.at_step(step))
        return run

    graph = VaryingGraph(config.variant, [i for i, p in enumerate(placeholders) if p in owned], counter, compile_at)
    if not first_call_is_fake():
        return graph
    first = compile_one(module, example_inputs, config.at_step(0))
    graph.has(0, first)
    return _fake_first(graph, first, [])


def _fake_state(annotation: Annotation, example_inputs: Sequence[Any]) -> list[Tensor]:
    """Examples of what the graph is called with behind Dynamo's inputs."""
    mode = detect_fake_mode(example_inputs)
    if mode is None:
        return []
    with mode, torch.no_grad():  # each input a tensor of its own, also where calls pass aliases
        state = [x.clone() for table in annotation.tables for x in table.inputs(table.new_tensors())]
        watched = [] if annotation.watched is None else [x.clone() for x in Ring(annotation.watched).inputs()]
        late = (torch.empty((), device=example_inputs[i].device) for i in annotation.late)
        frozen = (frozen_example(f, example_inputs[f.position]) for f in annotation.frozen)
        cached = (x for c in annotation.cached for x in cached_example(c, [example_inputs[i] for i in c.positions]))
        return [*state, *frozen, *cached, *late, *watched]


def _lower(
    annotation: Annotation,
    inputs: list[Any],
    config: Config,
    dump: Dump,
    attempt: Attempt = FIRST,
    later: Later | None = None,
) -> Callable[..., Any]:
    """Compile an annotated graph. later: compiles its backward, which may fail when the forward has run."""
    pipeline = Pipeline(config, annotation.choices, dump, annotation.is_update, attempt)
    pipeline.is_repeated = (around := checkpointed_region()) is not None and around[1] is Pass.FIRST
    lower = _lower_eager if config.lowering == "eager" else _lower_inductor
    with dump.compiling(lambda: pipeline.report.summary() if pipeline.report.graphs else _CACHED):
        compiled = lower(annotation.module, inputs, pipeline, later)
    pipeline.warn_if_nothing()
    return compiled


_CACHED = "taken from torch's cache as it is, without its verdicts; fp8pass.explain shows them"


def _lower_inductor(
    module: fx.GraphModule, inputs: list[Any], pipeline: Pipeline, later: Later | None
) -> Callable[..., Any]:
    config, dump, kernel_passes = pipeline.config, pipeline.dump, KernelPasses(pipeline.config, pipeline.dump)
    is_plain = pipeline.attempt.form == "plain"

    def compile_inner(module: fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        def lower(module: fx.GraphModule, attempt: Attempt) -> Any:
            kernel_passes.attempt = attempt
            ours = attempt.form == "fp8"
            runs = {"chooses": ours and attempt.runs("choices"), "combines": ours and attempt.runs("combine")}
            cached = {} if attempt == FIRST else {"fx_graph_cache": False}
            with inductor_config.patch(cached):
                return with_choices(module, example_inputs, **runs, **kwargs)

        started = time.perf_counter()
        part = "backward" if kwargs.get("is_backward") else "forward"
        with dump.kept():
            if later is not None and part == "backward":
                compiled = later.lower(module, lower, op_by_op)
            else:
                compiled = lower(module, pipeline.attempt)
        dump.output_code(part, getattr(compiled, "source_code", ""), time.perf_counter() - started)
        return compiled

    patches: dict[str, Any] = (
        {}
        if is_plain
        else {
            "joint_custom_pre_pass": behind(inductor_config.joint_custom_pre_pass, pipeline),
            "custom_partitioner_fn": Partition(inductor_config.custom_partitioner_fn, pipeline.partitioned),
            "post_grad_custom_pre_pass": behind(inductor_config.post_grad_custom_pre_pass, kernel_passes),
        }
    )
    if config.mode is not None:
        patches.update(list_mode_options(config.mode))
    caches = {}
    known = known_to_caches(module)
    if known is None:
        caches["enable_autograd_cache"] = False
    else:
        patches[CACHEABLE] = {**getattr(inductor_config, CACHEABLE), **known}
    # a cache hit skips the passes, and there would be nothing to dump, or to try; nor is a fault to be kept
    if dump.folder is not None or overrides.current() or pipeline.attempt != FIRST:
        patches["fx_graph_cache"] = False
        caches["enable_autograd_cache"] = False
    with functorch_config.patch(caches):
        compiled = compile_fx(module, inputs, inner_compile=generating(compile_inner), config_patches=patches)
    assert callable(compiled)  # text only where Inductor's C++ wrapper is asked for
    return compiled


def _lower_eager(
    module: fx.GraphModule, inputs: list[Any], pipeline: Pipeline, later: Later | None
) -> Callable[..., Any]:
    """The same graphs, run op by op."""

    kernel_passes = KernelPasses(pipeline.config, pipeline.dump)

    def boxed(graph_module: fx.GraphModule, attempt: Attempt) -> Any:
        kernel_passes.attempt = attempt
        kernel_passes(graph_module.graph)
        _call_directly(graph_module)
        return op_by_op(graph_module)

    def forward(graph_module: fx.GraphModule, _: Any) -> Any:
        return boxed(graph_module, pipeline.attempt)

    def backward(graph_module: fx.GraphModule, inputs: Any) -> Any:
        return forward(graph_module, inputs) if later is None else later.lower(graph_module, boxed, op_by_op)

    def rewrite(graph_module: fx.GraphModule) -> None:
        for part in reversed(list(graph_module.modules())):  # branches and loop bodies first, as Inductor does it
            if isinstance(part, fx.GraphModule):
                pipeline(part.graph)
                part.recompile()

    def inference(graph_module: fx.GraphModule, fake_inputs: Any) -> Any:
        rewrite(graph_module)
        return forward(graph_module, fake_inputs)

    def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        rewrite(joint)
        return Partition(seen=pipeline.partitioned)(joint, joint_inputs, **kwargs)

    compiler = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    return compiler(module, inputs)


def op_by_op(module: fx.GraphModule) -> Any:
    """Stands for a compiled graph where AOTAutograd calls it: the graph itself."""
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    replaced = {placeholders.index(n.args[0]) for n in module.graph.nodes if _replaces_input(n)}
    return make_boxed_func(functools.partial(_run_unseen, module.forward, replaced))


def _call_directly(graph_module: fx.GraphModule) -> None:
    """Call functions where kernel passes have put ops that are meant for Inductor.

    Its own op copies whatever it gets when it is run by itself, and ours take several times as long as their formulas.
    """
    for op, function in {FORCE_STRIDE_ORDER: _laid_out, **FORMULAS}.items():
        for node in graph_module.graph.find_nodes(op="call_function", target=op):
            node.target = function
    graph_module.recompile()


def _laid_out(x: Tensor, strides: Sequence[int]) -> Tensor:
    """Compute what FORCE_STRIDE_ORDER does."""
    if x.stride() == tuple(strides):
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _replaces_input(node: fx.Node) -> bool:
    """`input.data = ...`: gives the tensor object itself another storage."""
    source = node.args[0] if node.args else None
    replaces = str(node.target).startswith(("aten.set_.", "aten.shallow_copy_data_."))  # the latter from 2.15 on
    return replaces and isinstance(source, fx.Node) and source.op == "placeholder"


def _run_unseen(forward: Callable[..., Any], replaced: set[int], *args: Any) -> Any:
    """As compiled code does, write into inputs without autograd counting it: what is saved may be written again.

    replaced: the inputs that get another storage, which an alias would get in their place.
    """

    def unseen(i: int, x: Any) -> Any:
        return x.data if isinstance(x, Tensor) and not x.requires_grad and i not in replaced else x

    return forward(*(unseen(i, x) for i, x in enumerate(args)))


def reference(
    module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """A backend that runs the annotated graph eagerly: the numbers that the compiled graph is held to."""
    return _reference(module, example_inputs, make_config(options))


def _reference(module: fx.GraphModule, example_inputs: Sequence[Any], config: Config) -> Callable[..., Any]:
    if config.varies:
        return _varying(module, example_inputs, config, _reference)
    annotation = annotated(module, config)
    if not annotation.has_state:
        return annotation.run
    return CompiledGraph(annotation.run, annotation, lambda: annotation.bootstrapped().run)


def explain_only(config: Config, path_of: Callable[[Any], str] = lambda _: "") -> Callable[..., Any]:
    """A backend that compiles far enough to know every verdict, and runs the user's graph unchanged.

    Of a schedule it shows the last phase. path_of: returns the path of a parameter in the user's model, "" if it is
    not known: a graph has names from its own root on, which after a break is some module, and several instances of
    that may run it.
    """
    notes: list[str] = []
    earlier: set[str] = set()
    all_phases = config
    if isinstance(config.recipe, Schedule):
        step, _ = config.recipe.phases[-1]
        notes.append(f"the verdicts are those of the schedule from step {step} on")
        config = config.at_step(step)
    config = replace(config, monitor_interval=1)  # else graphs would be compiled when they are called, which none is

    def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        check_compiled(all_phases, module.graph)
        found, again = break_of(module), recompile_of(module, earlier)
        breaks, recompiles = [] if found is None else [found], [] if again is None else [again]
        publish(Report(notes=notes, breaks=breaks, recompiles=recompiles))
        drawing = drawn()
        if drawing is not None:
            drawing.begin(len(example_inputs))
            if not written(module):  # of an update there is no other form to show
                _draw_before(module, example_inputs, drawing)
        kernels = drawing is not None and drawing.kernels
        with collect() as of_graph:
            compile_graph(module, example_inputs, replace(config, lowering="inductor" if kernels else "eager"))
        return _Unchanged(module, of_graph.gemms, path_of)

    return backend


class _Unchanged:
    """Runs the user's graph as it is. Each run has verdicts of its own, with names from the user's model on."""

    def __init__(self, module: fx.GraphModule, gemms: list[Gemm], path_of: Callable[[Any], str]) -> None:
        self.module = module
        self.gemms = gemms
        self.names = [g.name for g in gemms]
        self.path_of = path_of
        placeholders = module.graph.find_nodes(op="placeholder")
        self.owned = {placeholders.index(p): path for p, path in Names(placeholders).owned.items()}
        self.has_run = False

    def __call__(self, *args: Any) -> Any:
        """Run it node by node, so that `Outside` can tell which one an op that it looks into runs for."""
        self._name(self._above(args))
        interpreter = fx.Interpreter(self.module)
        interpreter.extra_traceback = False  # it would put the node into errors of the user's
        return interpreter.run(*args)

    def _name(self, above: str) -> None:
        """Name the verdicts of the first run, which compilation has published, and publish those of a later one."""
        if self.has_run:
            self.gemms = [replace(g) for g in self.gemms]
            publish(Report(gemms=self.gemms))
        self.has_run = True
        for gemm, name in zip(self.gemms, self.names, strict=True):
            gemm.name = f"{above}{name}" if name else name

    def _above(self, args: Sequence[Any]) -> str:
        """Return the path of the graph's root in the model, and a dot; "" if it is not known, or the model itself."""
        full = {path: self.path_of(args[i]) for i, path in self.owned.items()}
        above = {of.removesuffix(path) for path, of in full.items() if f".{of}".endswith(f".{path}")}
        return above.pop() if len(above) == 1 else ""


def _draw_before(module: fx.GraphModule, example_inputs: Sequence[Any], drawing: Drawing) -> None:
    """The user's graph with its backward, as Inductor would decompose it."""
    annotation = annotated(module, Config(recipe=None))
    inputs = [*example_inputs, *_fake_state(annotation, example_inputs)]

    def draw(graph_module: fx.GraphModule, _: Any) -> Any:
        drawing.add(graph_module.graph, "before")
        return make_boxed_func(graph_module.forward)

    def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        drawing.add(joint.graph, "before")
        return Partition()(joint, joint_inputs, **kwargs)

    compiler = aot_autograd(
        fw_compiler=lambda graph_module, _: make_boxed_func(graph_module.forward),
        inference_compiler=draw,
        partition_fn=partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    compiler(annotation.module, inputs)
