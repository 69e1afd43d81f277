"""Run all passes in order: each is timed, verified and dumped. No other file knows the order."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fp8pass._torch import TAKES_LISTS_OF_PASSES, CustomGraphPass, GraphTransformObserver, get_hash_for_files
from fp8pass.dump.writer import Dump
from fp8pass.errors import Fp8Error, faults_of, warn_once
from fp8pass.faults import left_out
from fp8pass.fused.choice import is_pretended
from fp8pass.graph.annotation import Annotation, Body, MatmulChoice, copy_to_edit, generate_code
from fp8pass.graph.attempt import FIRST, Attempt
from fp8pass.graph.builder import multiplies
from fp8pass.graph.inputs import examples_of
from fp8pass.graph.other_libraries import Arguments, arguments_of
from fp8pass.graph.pass_base import C, Context, DynamoContext, Pass
from fp8pass.graph.refusal import LeftOut
from fp8pass.graph.verdict import Gemm
from fp8pass.graph.verify import verify
from fp8pass.hardware import cpu_key
from fp8pass.inductor import timed
from fp8pass.inductor.choices import ONE_AT_A_TIME
from fp8pass.names import Names
from fp8pass.node_meta import GEMM
from fp8pass.options import overrides
from fp8pass.options.config import Config
from fp8pass.options.overrides import REQUIRED
from fp8pass.passes import __file__ as passes_file
from fp8pass.passes.annotate import save_fp8
from fp8pass.passes.annotate.annotate import Annotate
from fp8pass.passes.annotate.convolutions_as_matmuls import ConvolutionsAsMatmuls
from fp8pass.passes.annotate.inline_composites import InlineComposites
from fp8pass.passes.annotate.inline_regions import InlineRegions
from fp8pass.passes.annotate.insert_monitors import InsertMonitors
from fp8pass.passes.annotate.lift_scale_states import LiftScaleStates
from fp8pass.passes.annotate.merge_siblings import MergeSiblings
from fp8pass.passes.annotate.slow_matmuls import warn_of_slow_matmuls as warn_of_slow_matmuls
from fp8pass.passes.annotate.smooth_swiglu import SmoothSwiglu
from fp8pass.passes.annotate.split_sizes import SplitSizes, has_symbols
from fp8pass.passes.annotate.write_matmuls import WriteMatmuls
from fp8pass.passes.collectives.quantize_collectives import QuantizeCollectives
from fp8pass.passes.kernels.batch_amaxes import BatchAmaxes
from fp8pass.passes.kernels.emulate_matmuls import EmulateMatmuls
from fp8pass.passes.kernels.fold_quantizes import FoldQuantizes
from fp8pass.passes.kernels.fuse_matmuls import FuseMatmuls
from fp8pass.passes.kernels.keep_strides import KeepStrides
from fp8pass.passes.kernels.materialize import Materialize
from fp8pass.passes.kernels.quantize_kernels import QuantizeKernels
from fp8pass.passes.kernels.quantize_tiles import QuantizeTiles
from fp8pass.passes.kernels.requantize_saturated import RequantizeSaturated
from fp8pass.passes.kernels.split_foreach import SplitForeach
from fp8pass.passes.kernels.update_tiles import UpdateTiles
from fp8pass.passes.layers.find_layers import FindLayers, Piece, find
from fp8pass.passes.layers.outline_layers import OutlineLayers
from fp8pass.passes.rewrite.align_arguments import AlignArguments
from fp8pass.passes.rewrite.blockwise_mm import BlockwiseMM
from fp8pass.passes.rewrite.canonicalize import Canonicalize
from fp8pass.passes.rewrite.expand_blocks import ExpandBlocks
from fp8pass.passes.rewrite.grouped_mm import GroupedMM
from fp8pass.passes.rewrite.list_matmuls import ListMatmuls
from fp8pass.passes.rewrite.scaled_mm import ScaledMM
from fp8pass.passes.share.batch_records import BatchRecords
from fp8pass.passes.share.read_copies import ReadCopies
from fp8pass.passes.share.save_scales import SaveScales
from fp8pass.passes.share.save_sums import SaveSums
from fp8pass.passes.share.save_transposes import SaveTransposes
from fp8pass.passes.share.use_transposes import UseTransposes
from fp8pass.passes.update.written import written as written
from fp8pass.recipes import Recipe, Schedule
from fp8pass.report.drawing import drawn, part_of
from fp8pass.report.report import Report, Timing, are_judged, publish
from fp8pass.states.scale_state import recipe_of

if TYPE_CHECKING:
    from fp8pass.passes.traced.quantize_traced import TracedContext
    from fp8pass.passes.update.context import UpdateContext
    from fp8pass.quant.wrapper_tensor import Scales
    from fp8pass.runtime.update_inputs import UpdateCall
    from fp8pass.runtime.update_key import UpdateKey

DYNAMO: tuple[Pass[DynamoContext], ...] = (
    InlineRegions(),  # first: the other passes, and torch's autograd, expect the graph in one piece
    InlineComposites(),  # before passes that look for matmuls, which composites contain
    WriteMatmuls(),  # likewise; after InlineComposites, since composites contain einsums
    ConvolutionsAsMatmuls(),  # likewise
    SmoothSwiglu(),  # after the passes that write matmuls; before FindLayers, since it adds nodes
    FindLayers(),  # before MergeSiblings and Annotate, which keep layers apart; after the passes that write matmuls
    MergeSiblings(),  # before Annotate, which gives merged weights one scale
    SplitSizes(),  # after MergeSiblings, whose matmuls pay from other sizes on; before Annotate, which declines by them
    Annotate(),
    LiftScaleStates(),  # after Annotate, whose state inputs come first
    InsertMonitors(),  # after the passes that quantize: it monitors their tensors
    OutlineLayers(),  # last: then layers with different verdicts differ
)
"""The passes over Dynamo's graph, before autograd. They select what runs in FP8, by the user's functions and names."""

JOINT: tuple[Pass[Context], ...] = (
    Canonicalize(),  # first: the other passes know one spelling of quantize and dequantize
    ListMatmuls(),  # before any rewrite, so that every matmul of the user has a verdict
    ReadCopies(),  # before the rewrites, which remove the dequantizes that it lets the backward read
    QuantizeCollectives(),  # before the rewrites, which look for tensors that are dequantized after a collective
    BlockwiseMM(),  # before ExpandBlocks: it finds blocks by their op
    GroupedMM(),  # likewise; and before ScaledMM, which would make a matmul of each group
    ExpandBlocks(),
    ScaledMM(),  # before partitioning, so that tensors saved for the backward are FP8
    AlignArguments(),  # after ScaledMM, which decides on the scales of a matmul
    UseTransposes(),  # after ScaledMM, which lays operands out
    SaveTransposes(),  # likewise; after UseTransposes, which removes copies that need not be saved
    SaveScales(),  # likewise
    SaveSums(),  # after the rewrites: it looks for sums of scaled matmuls
    BatchRecords(),  # last: the rewrites have removed the records of dead quantizes
)
"""The passes over forward and backward in one graph. They change numbers, and what is saved for the backward."""

KERNELS: tuple[Pass[Context], ...] = (
    SplitForeach(),  # first: the tensors that it splits off are quantized by ops that FoldQuantizes folds
    FoldQuantizes(),  # before passes that look for a quantize as one node
    FuseMatmuls(),  # before passes that write kernels for the tensors that it quantizes
    RequantizeSaturated(),  # after FuseMatmuls, which may not fuse such a quantize, and before passes that tile it
    QuantizeKernels(),  # after these two, which have their own kernels; before the next two, which tile the others
    UpdateTiles(),  # before QuantizeTiles, which tiles the kernels that are left
    QuantizeTiles(),  # before BatchAmaxes, which joins the amaxes that these two make
    BatchAmaxes(),
    Materialize(),  # after the passes that change which nodes read a tensor
    KeepStrides(),  # likewise
    EmulateMatmuls(),  # last: the other passes look for `_scaled_mm`
)
"""The passes over forward, backward and update as separate graphs. They change kernels, not numbers."""


@functools.cache
def update_passes() -> tuple[Pass[UpdateContext], ...]:
    """Return the passes over Dynamo's graph of an optimizer's update, in order. Others are loaded with this file."""
    from fp8pass.passes.update.expand_foreach import ExpandForeach
    from fp8pass.passes.update.lift_bfloat16 import LiftBfloat16
    from fp8pass.passes.update.read_moments import ReadMoments
    from fp8pass.passes.update.round_bfloat16 import RoundBfloat16
    from fp8pass.passes.update.skip_nonfinite import SkipNonfinite
    from fp8pass.passes.update.take_states import TakeStates
    from fp8pass.passes.update.write_moments import WriteMoments
    from fp8pass.passes.update.write_weights import WriteWeights

    return (
        ExpandForeach(),  # first: the other passes look for ops on single tensors
        TakeStates(),  # before passes that read or write state
        LiftBfloat16(),
        ReadMoments(),
        SkipNonfinite(),  # after these two: it restores tensors as they were read
        WriteMoments(),  # after SkipNonfinite, which decides whether moments are written
        RoundBfloat16(),  # likewise
        WriteWeights(),  # last: it reads parameters as the update leaves them, restored or not
    )


@functools.cache
def traced_passes() -> tuple[Pass[TracedContext], ...]:
    """Return the passes over a graph of ATen ops that somebody else has traced, before those of `JOINT`."""
    from fp8pass.passes.traced.quantize_traced import QuantizeTraced

    return (QuantizeTraced(),)


_ABOUT_RECIPES = (
    "inline_composites", "write_matmuls", "convolutions_as_matmuls", "smooth_swiglu", "find_layers", "merge_siblings",
    "split_sizes", "annotate", "outline_layers",
)  # fmt: skip
"""The names of passes that have nothing to do without a recipe."""


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
    if not attempt.runs(save_fp8.NAME):
        config = replace(config, save_fp8=False)
    names = Names(annotation.module.graph.find_nodes(op="placeholder"))
    context = DynamoContext(config, declined=attempt.reason, annotation=annotation, names=names)
    todo = _dynamo_passes(config, attempt)
    _run_all(todo, annotation.module, context, dump or Dump(), "dynamo", _lint, lambda: examples(annotation))
    generate_code(annotation.module)
    if context.notes or annotation.saved:
        publish(Report(notes=context.notes, saved=annotation.saved))
    return annotation


def split_for_all_phases(module: fx.GraphModule, config: Config) -> None:
    """Split sizes that vary for each phase of a schedule, whose graphs are compiled when Dynamo takes no guards."""
    if isinstance(config.recipe, Schedule) and has_symbols(module.graph):
        for step, _ in config.recipe.phases:
            annotated(module, config.at_step(step))


def freezable(module: fx.GraphModule, config: Config) -> dict[int, Scales]:
    """Return the positions of inputs of Dynamo's graph that `frozen="fp8"` keeps in FP8, with their scales."""
    if config.frozen != "fp8" or config.recipe is None:
        return {}
    from fp8pass.passes.annotate.frozen_parameters import frozen_parameters

    return frozen_parameters(module, config)


def pieces_of(module: fx.GraphModule, config: Config) -> list[Piece]:
    """Return the pieces that Dynamo's graph can be cut into: its equal layers, and the rest; [] if it has no layers."""
    pieces = list[Piece]()
    with left_out(FindLayers.name, config, "a graph of Dynamo's"):
        pieces += find(module, Names(module.graph.find_nodes(op="placeholder")), config, [])
    return pieces


def _dynamo_passes(config: Config, attempt: Attempt) -> list[Pass[DynamoContext]]:
    leave = {*attempt.without, *(() if config.monitor else (InsertMonitors.name,))}
    if config.recipe is None:
        leave.update(_ABOUT_RECIPES)
    if attempt.form == "declined":  # Annotate still runs, to record the reason
        leave.update({*_ABOUT_RECIPES, "insert_monitors"} - {"annotate"})
    return [p for p in DYNAMO if p.name not in leave]


def annotated_update(
    module: fx.GraphModule,
    key: UpdateKey,
    config: Config,
    attempt: Attempt = FIRST,
    dump: Dump | None = None,
    args: Sequence[Any] = (),
    call: UpdateCall | None = None,
) -> Annotation:
    """Return a copy of Dynamo's graph of an update that also writes FP8 copies of weights, and moments in FP8.

    args, call: Dynamo's inputs, and what the others are read from, for dumps.
    """
    if attempt.form == "plain":
        return Annotation(module, [], [], is_update=True)
    from fp8pass.passes.update.context import UpdateContext

    module = copy_to_edit(module)
    todo, context = [p for p in update_passes() if attempt.runs(p.name)], UpdateContext(config, key=key)

    def of_now() -> Sequence[Any]:
        return [*args, *(examples_of(context.inputs, call, args) if call is not None else ())]

    _run_all(todo, module, context, dump or Dump(), "dynamo", _lint, of_now)
    module = copy_to_edit(module)  # drops attributes that no node reads any more
    module.recompile()
    return Annotation(module, [], [], inputs=[*context.inputs], is_update=True)


def quantized(module: fx.GraphModule, config: Config, names: Names, bootstrap: bool, dump: Dump) -> TracedContext:
    """Insert quantize-dequantize into a traced graph, in place; return choices and slots: see `TracedContext`."""
    from fp8pass.passes.traced.quantize_traced import TracedContext

    context = TracedContext(config, names=names, bootstrap=bootstrap)
    todo = traced_passes() if config.recipe is not None else ()
    _run_all(todo, module, context, dump, "traced.cold" if bootstrap else "traced", _verifier)
    return context


def runs_anywhere(module: fx.GraphModule, config: Config, dump: Dump) -> None:
    """Replace the FP8 matmuls of a traced graph that this device has no kernel for, in place."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            _run_all((EmulateMatmuls(),), part, Context(config), dump, "traced", _verifier)


def _joint_passes(is_update: bool, attempt: Attempt) -> list[Pass[Context]]:
    if attempt.form == "plain":
        return []
    only_listed = is_update or attempt.form == "declined"
    left = set() if attempt.runs(KeepStrides.name) else {ReadCopies.name}  # whose changes need it
    return [p for p in JOINT if attempt.runs(p.name) and p.name not in left and (not only_listed or p.name in REQUIRED)]


class KernelPasses(CustomGraphPass):
    """Inductor's `post_grad_custom_pre_pass`. attempt: the way in which the current graph is compiled.

    gemms: returns the verdicts of the graph's matmuls, as `Pipeline.gemms` has them; they get notes.
    """

    def __init__(
        self,
        config: Config,
        dump: Dump | None = None,
        timing: Timing | None = None,
        gemms: Callable[[], Mapping[str, Sequence[Gemm]]] = dict,
    ) -> None:
        self.config = config
        self.dump = dump or Dump()
        self.timing = Timing("") if timing is None else timing
        self.gemms = gemms
        self.attempt = FIRST
        self.seen: Counter[str] = Counter()

    def uuid(self) -> bytes:
        """Return a key of the passes' sources, what they read, the passes left out after a fault, and the CPU."""
        read = self.config.epilogues, self.config.target
        return _sources_hash() + repr((read, self.attempt.form, sorted(self.attempt.without), cpu_key())).encode()

    def __call__(self, graph: fx.Graph) -> None:
        """Run the passes over the graph of a forward or of a backward."""
        # AOTAutograd names the gradients of a graph's outputs tangents_1, tangents_2, ...
        backward = any(n.name.startswith("tangents") for n in graph.nodes if n.op == "placeholder")
        part = "backward" if backward else "forward"
        number = f".{self.seen[part]}" if self.seen[part] else ""  # branches and loop bodies are separate graphs
        self.seen[part] += 1
        drawing = drawn()
        draws = drawing is not None and not drawing.kernels  # with kernels, graphs are drawn after Inductor
        todo = [p for p in KERNELS if self.attempt.form == "fp8" and self.attempt.runs(p.name)]
        if draws:  # show what a GPU would run
            todo = [p for p in todo if p.name != EmulateMatmuls.name]
        times = timed.autotunes() and not is_pretended()
        context = Context(self.config, seconds_of=self._seconds if times else None)
        with ONE_AT_A_TIME, self.timing.counting("passes"):
            _run_all(todo, _module_of(graph), context, self.dump, f"{part}{number}", _verifier)
        for name, note in context.fused.items():
            for gemm in self.gemms().get(name, ()):
                gemm.note = gemm.note or note
        if drawing is not None and draws:
            drawing.add(graph, part_of(graph))

    def _seconds(self, module: fx.GraphModule) -> float:
        """Time a graph that is compiled with the same passes, of which none fuses matmuls."""
        return timed.seconds(module, KernelPasses(replace(self.config, epilogues="off")))


class Pipeline(CustomGraphPass):
    """Inductor's `joint_custom_pre_pass`: runs on forward and backward in one graph, before any change by Inductor.

    Only its report outlives the compilation, since it does not run if Inductor's caches hit.
    """

    def __init__(
        self,
        config: Config,
        choices: list[MatmulChoice],
        dump: Dump | None = None,
        is_update: bool = False,
        attempt: Attempt = FIRST,
        body: Body | None = None,
        report: Report | None = None,
        timing: Timing | None = None,
    ) -> None:
        self.config = config
        self.choices = choices
        self.body = body
        self.attempt = attempt
        self.is_update = is_update
        self.passes = _joint_passes(is_update, attempt)
        self.dump = dump or Dump()
        self.report = Report() if report is None else report
        self.gemms: dict[str, list[Gemm]] = {}
        """The verdicts on the matmuls of the latest graph, by the name that `meta[GEMM]` of its nodes holds: one for
        each layer that the graph stands for."""
        self.is_repeated = False
        """True if a checkpoint around the graph runs its whole forward once more."""
        self.parts = 0
        self.timing = Timing("") if timing is None else timing

    def uuid(self) -> bytes:
        """Return a key of the passes' sources, configuration, torch, the CPU, and choices that graphs do not show."""
        choices = [(c.fast_accum, c.wanted, c.scaling, sorted(c.declined)) for c in self.choices]
        own = self.config.cache_key(), torch.__version__, choices, [p.name for p in self.passes], cpu_key()
        return _sources_hash() + repr(own).encode()

    def __call__(self, graph: fx.Graph) -> None:
        """Run all passes over `graph`; verify, dump and report. Raises Fp8Error under `strict`."""
        with self.timing.counting("passes"):
            context = self._rewritten(graph)
        self.dump.report(str(self.report), self.timing.passes)
        self.parts += 1
        if self.config.strict:
            _raise_if_declined(context, self.choices)

    def _rewritten(self, graph: fx.Graph) -> Context:
        """Run the passes, and publish the verdicts."""
        context = Context(self.config, self.choices, self.attempt.reason, self.is_update)
        part = f"joint.{self.parts}" if self.parts else "joint"
        _run_all(self.passes, _module_of(graph), context, self.dump, part, _verifier)
        self.gemms = {node.name: self._of_layers(gemm) for node, gemm in context.gemms.items()}
        if (drawing := drawn()) is not None:
            drawing.verdicts(self.gemms)
        gemms = [gemm for of in zip(*self.gemms.values(), strict=True) for gemm in of]  # layer by layer
        self._publish(Report(gemms, graphs=0 if self.report.graphs else 1, notes=context.notes))
        return context

    def partitioned(self, forward: fx.Graph, backward: fx.Graph) -> None:
        """Note which matmuls of the forward run again in the backward, for activation checkpointing."""
        first, again = ({n.meta.get(GEMM) for n in graph.nodes if _multiplies(n)} for graph in (forward, backward))
        twice = first if self.is_repeated else first & again
        recomputed = [gemm for name, of in self.gemms.items() if name in twice for gemm in of]
        for gemm in recomputed:
            gemm.recomputed = True
        if recomputed:
            self.dump.report(str(self.report), self.timing.passes)

    def _of_layers(self, gemm: Gemm) -> list[Gemm]:
        """Return the verdict for each layer that the graph stands for."""
        if self.body is None:
            return [gemm]
        if gemm.choice is None:
            return [gemm, *(replace(gemm) for _ in self.body.layers[1:])]
        position, own = self.body.choices[0].index(gemm.choice), self.choices[gemm.choice]
        return [gemm, *(_for_layer(gemm, own, self.choices, of[position]) for of in self.body.choices[1:])]

    def _publish(self, part: Report) -> None:
        """Publish the report of one part, and add it to the graph's report.

        Branches and loop bodies are separate parts, and come first.
        """
        publish(part)
        self.report.add(part)


def _multiplies(node: fx.Node) -> bool:
    return multiplies(node) or node.target is torch.ops.aten.convolution.default


def _for_layer(gemm: Gemm, of: MatmulChoice, choices: Sequence[MatmulChoice], index: int) -> Gemm:
    """Return the verdict of a matmul, whose choice is `of`, for the equal matmul of another layer."""
    own = choices[index]
    reason = gemm.reason.replace(of.name, own.name) if of.name else gemm.reason
    return replace(gemm, name=own.name, source=own.source or gemm.source, choice=index, reason=reason)


def warn_if_nothing(choices: Sequence[MatmulChoice], report: Report) -> None:
    """Warn, once per reason, if no matmul of a graph runs in FP8 although some were selected, unless others judge it.

    Call it after the graph is compiled. report: of that graph.
    """
    reasons = [c.reason for c in choices if c.wanted or (c.rule == "min_speedup" and not _pays_elsewhere(c))]
    is_judged = are_judged() and any(gemm.kind != "output" for gemm in report.gemms)  # a graph that trains
    if reasons and report.graphs and not report.rewritten and not overrides.current() and not is_judged:
        warn_once(
            f"fp8pass: a graph has no matmul in FP8: {reasons[0]}. Everything in it stays in high precision; "
            "print(fp8pass.explain(model, *inputs)) has all reasons"
        )


def _pays_elsewhere(choice: MatmulChoice) -> bool:
    """Return whether FP8 pays for other sizes, for which there is another compilation."""
    return choice.prediction is not None and choice.prediction.ends is not None and bool(choice.prediction.pays)


def append_pass(own: Any, ours: CustomGraphPass) -> Any:
    """Return a value for a setting of Inductor's: the user's own pass, or passes, if any, and then ours."""
    if own is None:
        return ours
    if TAKES_LISTS_OF_PASSES:
        return [*(own if isinstance(own, (list, tuple)) else (own,)), ours]
    return _Both(own, ours)


class _Both(CustomGraphPass):
    """Runs two passes as one, for versions of torch whose settings take only one pass."""

    def __init__(self, own: Any, ours: CustomGraphPass) -> None:
        self.own = own
        self.ours = ours

    def uuid(self) -> Any:
        """Return a key of both passes; None, with which Inductor caches nothing, if the user's pass has no key."""
        own = self.own.uuid() if isinstance(self.own, CustomGraphPass) else None
        return None if own is None else repr((own, self.ours.uuid())).encode()

    def __call__(self, graph: fx.Graph) -> None:
        self.own(graph)
        self.ours(graph)


def _module_of(graph: fx.Graph) -> fx.GraphModule:
    module = graph.owning_module
    assert module is not None
    return module


def _run_all(
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


def _verifier(module: fx.GraphModule, context: Context) -> Callable[[str], None]:
    """Return `_verify`, which compares with the graph as it is now."""
    return functools.partial(_verify, module, context, arguments_of(module.graph))


def _verify(module: fx.GraphModule, context: Context, before: Arguments, made_by: str) -> None:
    verify(module.graph, context.computed, before, made_by)


def _lint(module: fx.GraphModule, context: Context) -> Callable[[str], None]:
    """Check that Dynamo's graph, and the graphs in it, are well formed. Their nodes have no values to verify."""

    def lint(_: str) -> None:
        for part in module.modules():
            if isinstance(part, fx.GraphModule):
                part.graph.lint()

    return lint


def _raise_if_declined(context: Context, choices: list[MatmulChoice]) -> None:
    """Raise Fp8Error for a matmul that is not rewritten although the recipe and filter, or the user, chose it."""
    for gemm in context.gemms.values():
        if gemm.status == "rewritten" or not (_chosen(gemm, choices) or gemm.quantized):
            continue
        where = f" at {gemm.source}" if gemm.source else ""
        raise Fp8Error(
            f"strict: {gemm.kind} of {gemm.name or 'a matmul'}{where}, [{gemm.M}, {gemm.K}] by [{gemm.K}, {gemm.N}], "
            f"does not run in FP8: {gemm.reason}. Leave it out with filter=, or drop strict."
        )


def _chosen(gemm: Gemm, choices: list[MatmulChoice]) -> bool:
    if gemm.choice is None:
        return gemm.rule == "composite"
    choice = choices[gemm.choice]
    left_out = isinstance(choice.declined.get(gemm.kind), LeftOut)
    return choice.wanted or (choice.scaling != "" and not left_out)


def known_to_caches(module: fx.GraphModule) -> dict[str, str] | None:
    """Return {function of fp8pass that an annotated graph calls: hash}, with which AOTAutograd may cache the graph.

    Sorted, since the order is part of the cache's key. None if a recipe has code of the user's: the graph's text, which
    is part of the key too, contains only the name of the function or class, so the graph must not be cached.
    """
    parts = (part.graph.nodes for part in module.modules() if isinstance(part, fx.GraphModule))
    calls = [n for nodes in parts for n in nodes if n.op == "call_function" and _is_ours(n.target)]
    recipes = (recipe_of(a) for n in calls for a in n.args)
    if any(isinstance(r, Recipe) and r.has_own_code for r in recipes):
        return None
    names = {f"{n.target.__module__}.{n.target.__name__}" for n in calls}
    return dict.fromkeys(sorted(names), _sources_hash().hex())


def _is_ours(target: object) -> bool:
    return inspect.isfunction(target) and target.__module__.split(".")[0] == "fp8pass"


@functools.cache
def _sources_hash() -> bytes:
    own, passes = Path(__file__).parent, Path(passes_file).parent  # the installed package has passes/ in fp8pass/
    files = [f for f in sorted(own.rglob("*.py")) if own / "passes" not in f.parents]
    return get_hash_for_files(tuple(map(str, [*files, *sorted(passes.rglob("*.py"))])))
