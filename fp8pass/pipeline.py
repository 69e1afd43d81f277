"""The passes over the joint graph, in order, and what happens around each of them.

The one file that knows the order. `annotated` comes first: passes on Dynamo's graph, ahead of AOTAutograd.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fp8pass._torch import TAKES_LISTS_OF_PASSES, CustomGraphPass, get_hash_for_files
from fp8pass.dump.writer import Dump
from fp8pass.errors import Fp8Error, faults_of, warn_once
from fp8pass.faults import FIRST, Attempt
from fp8pass.graph.annotation import Annotation, Choice, copy_to_edit
from fp8pass.graph.builder import multiplies
from fp8pass.graph.rule import Context, LeftOut, Pass
from fp8pass.graph.verdict import Gemm
from fp8pass.graph.verify import verify
from fp8pass.hardware import cpu_key
from fp8pass.inductor.choices import ONE_AT_A_TIME
from fp8pass.node_meta import GEMM
from fp8pass.options import overrides
from fp8pass.options.config import Config
from fp8pass.passes import __file__ as passes_file
from fp8pass.passes.annotate.annotate import annotate
from fp8pass.passes.annotate.inline_regions import inline_regions
from fp8pass.passes.annotate.insert_monitors import watch
from fp8pass.passes.annotate.lift_scale_states import lift_scale_states
from fp8pass.passes.annotate.slow_matmuls import warn_of_slow_matmuls as warn_of_slow_matmuls
from fp8pass.passes.collectives.quantize_collectives import QuantizeCollectives
from fp8pass.passes.common.foreach import expand_symbolic
from fp8pass.passes.kernels.batch_amaxes import BatchAmaxes
from fp8pass.passes.kernels.emulate_matmuls import EmulateMatmuls
from fp8pass.passes.kernels.fold_quantizes import FoldQuantizes
from fp8pass.passes.kernels.materialize import Materialize
from fp8pass.passes.kernels.quantize_tiles import QuantizeTiles
from fp8pass.passes.kernels.split_foreach import SplitForeach
from fp8pass.passes.rewrite.blockwise_mm import BlockwiseMM
from fp8pass.passes.rewrite.canonicalize import Canonicalize
from fp8pass.passes.rewrite.expand_blocks import ExpandBlocks
from fp8pass.passes.rewrite.grouped_mm import GroupedMM
from fp8pass.passes.rewrite.list_matmuls import ListMatmuls
from fp8pass.passes.rewrite.scaled_mm import ScaledMM
from fp8pass.passes.share.batch_records import BatchRecords
from fp8pass.passes.share.save_sums import SaveSums
from fp8pass.passes.share.save_transposes import SaveTransposes
from fp8pass.passes.share.use_transposes import UseTransposes
from fp8pass.passes.update.quantize_moments import moments_of as moments_of
from fp8pass.passes.update.quantize_moments import read_moments, write_moments
from fp8pass.passes.update.skip_nonfinite import gradients as gradients
from fp8pass.passes.update.skip_nonfinite import skip_nonfinite
from fp8pass.passes.update.write_weights import at_beginning, inputs_of_states, write_weights
from fp8pass.passes.update.write_weights import real_inputs as real_inputs
from fp8pass.passes.update.write_weights import written as written
from fp8pass.recipes import DelayedScaling
from fp8pass.report.graph_view import drawn, part_of
from fp8pass.report.report import Report, publish
from fp8pass.runtime.update_key import UpdateKey
from fp8pass.states.scale_state import recipe_of

DynamoPass = Callable[[Annotation], tuple[Annotation, int]]


def annotated(module: fx.GraphModule, config: Config) -> Annotation:
    """Dynamo's graph with what the recipe inserts, nothing under recipe None, and the states that the user wrote."""
    annotation = unannotated(module)
    for _, run in dynamo_passes(config):
        annotation, _ = run(annotation)
    return annotation


def unannotated(module: fx.GraphModule, attempt: Attempt = FIRST) -> Annotation:
    """Return Dynamo's graph as the passes on it begin with it."""
    inlines = attempt.form != "plain" and attempt.runs("inline_regions")
    return Annotation(inline_regions(module) if inlines else module, [], [])


def dynamo_passes(config: Config, attempt: Attempt = FIRST) -> list[tuple[str, DynamoPass]]:
    """The order on Dynamo's graph: names, and what also returns how often something was applied."""
    annotating = functools.partial(_annotate, config=config, declined=attempt.reason)
    order: list[tuple[str, DynamoPass]] = [("annotate", annotating), ("lift_scale_states", _lift)]
    if config.monitor and attempt.form == "fp8":
        order.append(("insert_monitors", functools.partial(_watch, config=config)))
    return [] if attempt.form == "plain" else [(name, run) for name, run in order if attempt.runs(name)]


def _annotate(of: Annotation, config: Config, declined: str) -> tuple[Annotation, int]:
    """Return the annotation, and how many matmul calls it took. declined: why it is to take none, if so."""
    annotation = of if config.recipe is None else annotate(of.module, config, declined)
    for choice in annotation.choices:
        if config.strict and choice.rule == "region":
            raise Fp8Error(
                f"strict: output of {choice.name} at {choice.source} does not run in FP8: {choice.reason}. Leave it "
                "out with filter=, or drop strict."
            )
    return annotation, sum(choice.scaling != "" for choice in annotation.choices)


def _lift(annotation: Annotation) -> tuple[Annotation, int]:
    lifted = lift_scale_states(annotation)
    return lifted, len(lifted.states)


def _watch(annotation: Annotation, config: Config) -> tuple[Annotation, int]:
    watching = watch(annotation, config)
    return watching, len(watching.watched.watched) if watching.watched is not None else 0


def annotated_update(module: fx.GraphModule, key: UpdateKey, attempt: Attempt = FIRST) -> Annotation:
    """Dynamo's graph of an update of parameters, with what writes the FP8 copies of weights."""
    if attempt.form == "plain":
        return Annotation(module, [], [], is_update=True)
    module = copy_to_edit(module)
    graph = module.graph
    if attempt.runs("split_foreach"):
        with faults_of("split_foreach"):
            expand_symbolic(graph)
    with faults_of("write_weights"):
        inputs = inputs_of_states(graph, key.states, skips=bool(key.keeps))
    with faults_of("quantize_moments"):
        decoded, skipped = read_moments(graph, key.moments) if key.moments else [], None
    with faults_of("skip_nonfinite"):
        if key.keeps:
            names = "amax_forward", "amax_backward", "amax_weights"
            amaxes = [of[name] for of in inputs for name in of if name in names]
            moments = {m.place for m in key.moments}
            others = at_beginning(graph, [place for place in key.keeps if place not in moments])
            skipped = skip_nonfinite(graph, [*others, *decoded], amaxes)
    with faults_of("quantize_moments"):
        if key.moments:
            write_moments(graph, key.moments, decoded, skipped)
    with faults_of("write_weights"):
        if key.writes:
            write_weights(graph, key.states, inputs, key.writes)
    graph.lint()
    module = copy_to_edit(module)  # without attributes that are not read any more
    module.recompile()
    return Annotation(module, [], [], is_update=True)


def passes(choices: list[Choice]) -> list[Pass]:
    """The order. choices: what the annotate pass made of each call."""
    return [
        Canonicalize(),  # first: the others know one spelling of quantize and dequantize
        ListMatmuls(choices),  # before any rewrite: whatever happens later, every matmul of the user has a verdict
        QuantizeCollectives(),  # before what is dequantized behind a collective is looked for
        BlockwiseMM(),
        GroupedMM(),
        ExpandBlocks(),  # after them, which know blocks and groups by the op
        ScaledMM(),  # before partitioning, so that what is saved for backward is FP8
        UseTransposes(),  # behind it, which lays operands out
        SaveTransposes(),
        SaveSums(),
        BatchRecords(),  # last: dead quantizes have taken their records along
    ]


def _passes(choices: list[Choice], is_update: bool, attempt: Attempt) -> list[Pass]:
    if attempt.form == "fp8":
        return update_passes() if is_update else passes(choices)
    return [ListMatmuls(choices, declined=attempt.reason)] if attempt.form == "declined" else []


def update_passes() -> list[Pass]:
    """Of a graph that updates parameters."""
    return [ListMatmuls([], update=True)]


def kernel_passes() -> list[Pass]:
    """The order of those that see forward and backward as graphs of their own: about kernels, not about numbers."""
    return [SplitForeach(), FoldQuantizes(), QuantizeTiles(), BatchAmaxes(), Materialize(), EmulateMatmuls()]


class KernelPasses(CustomGraphPass):
    """Inductor's `post_grad_custom_pre_pass`. attempt: how the graph at hand is compiled."""

    def __init__(self, config: Config, dump: Dump | None = None) -> None:
        self.config = config
        self.dump = dump or Dump()
        self.attempt = FIRST
        self.seen: Counter[str] = Counter()

    def uuid(self) -> bytes:
        """Changes with the passes' sources, which of them are left out after a fault, and the CPU."""
        return _sources_hash() + repr((self.attempt.form, sorted(self.attempt.without), cpu_key())).encode()

    def __call__(self, graph: fx.Graph) -> None:
        """Run the passes over the graph of a forward or of a backward."""
        backward = any(n.name.startswith("tangents") for n in graph.nodes if n.op == "placeholder")
        part = "backward" if backward else "forward"
        number = f".{self.seen[part]}" if self.seen[part] else ""  # branches and loop bodies are graphs of their own
        self.seen[part] += 1
        drawing = drawn()
        draws = drawing is not None and not drawing.kernels  # with kernels Inductor has the last word
        todo = [p for p in kernel_passes() if self.attempt.form == "fp8" and self.attempt.runs(p.name)]
        if draws:  # what a GPU would run
            todo = [p for p in todo if not isinstance(p, EmulateMatmuls)]
        with ONE_AT_A_TIME:
            _run_all(todo, graph, Context(self.config), self.dump, f"{part}{number}")
        if drawing is not None and draws:
            drawing.add(graph, part_of(graph))


class Pipeline(CustomGraphPass):
    """Inductor's `joint_custom_pre_pass`: forward and backward in one graph, before anything else has touched it.

    Keeps nothing that outlives the compilation but the report: where Inductor's caches hit, it does not run.
    """

    def __init__(
        self,
        config: Config,
        choices: list[Choice],
        dump: Dump | None = None,
        is_update: bool = False,
        attempt: Attempt = FIRST,
    ) -> None:
        self.config = config
        self.choices = choices
        self.attempt = attempt
        self.passes = [p for p in _passes(choices, is_update, attempt) if attempt.runs(p.name)]
        self.dump = dump or Dump()
        self.report = Report()
        self.gemms: dict[str, Gemm] = {}
        """Holds the matmuls of the latest graph, by what `GEMM` says in its nodes."""
        self.is_repeated = False
        """Whether a checkpoint around the graph runs all of its forward once more."""
        self.parts = 0
        self.seconds = 0.0

    def uuid(self) -> bytes:
        """Changes with the passes' sources, configuration, torch, the CPU, and what a graph does not say of choices."""
        choices = [(c.fast_accum, c.wanted, c.scaling, sorted(c.declined)) for c in self.choices]
        own = self.config.cache_key(), torch.__version__, choices, [p.name for p in self.passes], cpu_key()
        return _sources_hash() + repr(own).encode()

    def __call__(self, graph: fx.Graph) -> None:
        """Run all passes over `graph`; verify, dump and report. Raises Fp8Error under `strict`."""
        context, started = Context(self.config), time.perf_counter()
        _run_all(self.passes, graph, context, self.dump, f"joint.{self.parts}" if self.parts else "joint")
        if (drawing := drawn()) is not None:
            drawing.verdicts(context.gemms)
        self._publish(Report(list(context.gemms.values()), graphs=0 if self.parts else 1, notes=context.notes))
        self.gemms = {node.name: gemm for node, gemm in context.gemms.items()}
        self.seconds += time.perf_counter() - started
        self.dump.report(str(self.report), self.seconds)
        self.parts += 1
        if self.config.strict:
            _raise_if_declined(context, self.choices)

    def partitioned(self, forward: fx.Graph, backward: fx.Graph) -> None:
        """Note which matmuls of the forward run again in the backward, as activation checkpointing wants it."""
        first, again = ({n.meta.get(GEMM) for n in graph.nodes if multiplies(n)} for graph in (forward, backward))
        twice = first if self.is_repeated else first & again
        recomputed = [gemm for name, gemm in self.gemms.items() if name in twice]
        for gemm in recomputed:
            gemm.recomputed = True
        if recomputed:
            self.dump.report(str(self.report), self.seconds)

    def _publish(self, part: Report) -> None:
        """Branches and loop bodies are graphs of their own, which come first; a graph's report has all its parts."""
        publish(part)
        self.report.add(part)

    def warn_if_nothing(self) -> None:
        """When all is compiled: a model that was meant to run in FP8, of which nothing does. Said once per reason."""
        reasons = [c.reason for c in self.choices if c.wanted or c.rule == "min_speedup"]
        if (
            self.attempt.form == "fp8"
            and reasons
            and self.report.graphs
            and not self.report.rewritten
            and not overrides.current()
        ):
            warn_once(
                f"fp8pass: a graph has no matmul in FP8: {reasons[0]}. Everything in it stays in high precision; "
                "print(fp8pass.explain(model, *inputs)) has all reasons"
            )


def behind(own: Any, ours: CustomGraphPass) -> Any:
    """A setting of Inductor's: the user's own pass, or passes, if any, and then ours."""
    if own is None:
        return ours
    if TAKES_LISTS_OF_PASSES:
        return [*(own if isinstance(own, (list, tuple)) else (own,)), ours]
    return _Both(own, ours)


class _Both(CustomGraphPass):
    def __init__(self, own: Any, ours: CustomGraphPass) -> None:
        self.own = own
        self.ours = ours

    def uuid(self) -> Any:
        """Of both; None, no caching, if the user's has none."""
        own = self.own.uuid() if isinstance(self.own, CustomGraphPass) else None
        return None if own is None else repr((own, self.ours.uuid())).encode()

    def __call__(self, graph: fx.Graph) -> None:
        self.own(graph)
        self.ours(graph)


def _run_all(passes: list[Pass], graph: fx.Graph, context: Context, dump: Dump, part: str) -> None:
    """Run passes in order. part: what the graph is called in dumps."""
    module = graph.owning_module
    assert module is not None
    trial = overrides.current()
    for p in passes:
        if trial is not None and not trial.runs(p.name):
            continue
        with dump.step(part, p.name, module) as step:
            step.applied = _run(p, graph, context)
    module.recompile()


def _run(p: Pass, graph: fx.Graph, context: Context) -> int:
    """Run a pass, and check what it leaves. Returns how often it was applied."""
    with faults_of(p.name):
        applied = p.run(graph, context)
        if applied:
            verify(graph, context.computed)
    return applied


def _raise_if_declined(context: Context, choices: list[Choice]) -> None:
    """Strict: what the recipe and filter chose, or the user quantized, must have been rewritten."""
    for gemm in context.gemms.values():
        if gemm.status == "rewritten" or not (_chosen(gemm, choices) or gemm.quantized):
            continue
        where = f" at {gemm.source}" if gemm.source else ""
        raise Fp8Error(
            f"strict: {gemm.kind} of {gemm.name or 'a matmul'}{where}, [{gemm.M}, {gemm.K}] by [{gemm.K}, {gemm.N}], "
            f"does not run in FP8: {gemm.reason}. Leave it out with filter=, or drop strict."
        )


def _chosen(gemm: Gemm, choices: list[Choice]) -> bool:
    if gemm.choice is None:
        return gemm.rule == "composite"
    choice = choices[gemm.choice]
    left_out = isinstance(choice.declined.get(gemm.kind), LeftOut)
    return choice.wanted or (choice.scaling != "" and not left_out)


def known_to_caches(module: fx.GraphModule) -> dict[str, str] | None:
    """The functions of fp8pass that an annotated graph calls, by name, with a hash: so AOTAutograd may cache the graph.

    Sorted, for the order is part of the key. None if a recipe has a function of the user's, of which the graph's text
    has only the name: then nothing may be cached by that text.
    """
    parts = (part.graph.nodes for part in module.modules() if isinstance(part, fx.GraphModule))
    calls = [n for nodes in parts for n in nodes if n.op == "call_function" and _is_ours(n.target)]
    recipes = (recipe_of(a) for n in calls for a in n.args)
    if any(isinstance(r, DelayedScaling) and callable(r.amax_compute_algo) for r in recipes):
        return None
    names = {f"{n.target.__module__}.{n.target.__name__}" for n in calls}
    return dict.fromkeys(sorted(names), _sources_hash().hex())


def _is_ours(target: object) -> bool:
    return inspect.isfunction(target) and target.__module__.split(".")[0] == "fp8pass"


@functools.cache
def _sources_hash() -> bytes:
    own, passes = Path(__file__).parent, Path(passes_file).parent  # which are within each other where it is installed
    files = [f for f in sorted(own.rglob("*.py")) if own / "passes" not in f.parents]
    return get_hash_for_files(tuple(map(str, [*files, *sorted(passes.rglob("*.py"))])))
