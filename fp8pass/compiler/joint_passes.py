"""Run the passes over forward and backward in one graph, and report the verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from fp8pass.base._torch import CustomGraphPass
from fp8pass.base.errors import Fp8Error, warn_once
from fp8pass.base.node_meta import GEMM
from fp8pass.compiler import order
from fp8pass.compiler.cache_keys import sources_hash
from fp8pass.compiler.cuda_graphs import NoteCompiled
from fp8pass.compiler.run_passes import run_all, verifier
from fp8pass.dump.writer import Dump
from fp8pass.graph.annotation import Body, MatmulChoice
from fp8pass.graph.attempt import FIRST, Attempt
from fp8pass.graph.builder import is_tensor, multiplies
from fp8pass.graph.pass_base import GradientOf, JointContext, Pass
from fp8pass.graph.refusal import LeftOut
from fp8pass.graph.verdict import Gemm
from fp8pass.hardware import cpu_key
from fp8pass.options import overrides
from fp8pass.options.config import Config
from fp8pass.options.overrides import REQUIRED
from fp8pass.passes.joint.read_copies import ReadCopies
from fp8pass.passes.kernels.keep_strides import KeepStrides
from fp8pass.report.drawing import drawn
from fp8pass.report.report import Report, Timing, caller_warns, publish


class JointPasses(CustomGraphPass):
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
        self.passes = _joint_passes(is_update and not any(choice.scaling for choice in choices), attempt)
        self.dump = dump or Dump()
        self.report = Report() if report is None else report
        self.gemms: dict[str, list[Gemm]] = {}
        """The verdicts on the matmuls of the latest graph, by the name that `meta[GEMM]` of its nodes holds: one for
        each layer that the graph stands for."""
        self.is_repeated = False
        """True if a checkpoint around the graph runs its whole forward once more."""
        self.gradients: list[GradientOf | None] = []
        """What each output of the latest graph is the gradient of."""
        self.note: NoteCompiled | None = None
        """Notes the compiled code of a function that is recorded with others in a CUDA graph; None for other graphs."""
        self.parts = 0
        self.timing = Timing("") if timing is None else timing

    def uuid(self) -> bytes:
        """Return a key of the passes' sources, configuration, torch, the CPU, and choices that graphs do not show."""
        choices = [(c.fast_accum, c.wanted, c.scaling, sorted(c.declined)) for c in self.choices]
        settings = self.config.cache_key(), torch.__version__, choices, [p.name for p in self.passes], cpu_key()
        return sources_hash() + repr(settings).encode()

    def __call__(self, graph: fx.Graph) -> None:
        """Run all passes over `graph`; verify, dump and report. Raises Fp8Error under `strict`."""
        context = JointContext(
            self.config, choices=self.choices, declined=self.attempt.reason, is_update=self.is_update
        )
        part = f"joint.{self.parts}" if self.parts else "joint"
        self.parts += 1
        with self.timing.counting("passes"):
            run_all(self.passes, graph, context, self.dump, part, verifier(graph, context))
            self.gradients = gradients_of(graph)
            self.gemms = {node.name: self._of_layers(gemm) for node, gemm in context.gemms.items()}
            if (drawing := drawn()) is not None:
                drawing.verdicts(self.gemms)
            self._publish(context)
        self.dump.report(str(self.report), self.timing.passes)
        if self.config.strict:
            _raise_if_declined(context, self.choices)

    def partitioned(self, forward: fx.Graph, backward: fx.Graph) -> None:
        """Note which matmuls of the forward run again in the backward, for activation checkpointing."""
        first, again = ({n.meta.get(GEMM) for n in graph.nodes if _multiplies(n)} for graph in (forward, backward))
        # by name: where the partitioner recomputes a node, the backward has a copy with the same metadata
        twice = first if self.is_repeated else first & again
        recomputed = [gemm for name, of_layers in self.gemms.items() if name in twice for gemm in of_layers]
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
        # the graph was traced for the first layer: the matmul at the same position of another layer has its verdict
        position, choice = self.body.choices[0].index(gemm.choice), self.choices[gemm.choice]
        indices = (of_layer[position] for of_layer in self.body.choices[1:])
        return [gemm, *(_for_layer(gemm, choice, self.choices, index) for index in indices)]

    def _publish(self, context: JointContext) -> None:
        """Publish the report of one part, and add it to the graph's report.

        Branches and loop bodies are separate parts, and come first.
        """
        gemms = [gemm for of_layer in zip(*self.gemms.values(), strict=True) for gemm in of_layer]
        # graphs: branches and loop bodies do not count as graphs of their own
        part = Report(gemms, graphs=0 if self.report.graphs else 1, notes=context.notes)
        publish(part)
        self.report.add(part)


def gradients_of(joint: fx.Graph) -> list[GradientOf | None]:
    """Return, for each output of a joint graph, the input whose gradient it is; None for other outputs."""
    # AOTAutograd describes inputs and outputs; a gradient's description holds that of its input
    inputs = [p for p in joint.find_nodes(op="placeholder") if is_tensor(p) and not p.name.startswith("tangents")]
    positions = {p.meta.get("desc"): i for i, p in enumerate(inputs)}
    descriptions = joint.output_node().meta.get("desc") or []
    found = (positions.get(getattr(description, "grad_of", None)) for description in descriptions)
    return [None if position is None else GradientOf(position, len(inputs)) for position in found]


def _joint_passes(is_listed: bool, attempt: Attempt) -> list[Pass[JointContext]]:
    if attempt.form == "plain":
        return []
    # where nothing runs in FP8, only passes that give verdicts, or that what runs needs: see `REQUIRED`
    only_listed = is_listed or attempt.form == "declined"
    left = set() if attempt.runs(KeepStrides.name) else {ReadCopies.name}  # whose changes need it
    return [
        p
        for p in order.JOINT
        if attempt.runs(p.name) and p.name not in left and (not only_listed or p.name in REQUIRED)
    ]


def _multiplies(node: fx.Node) -> bool:
    return multiplies(node) or node.target is torch.ops.aten.convolution.default


def _for_layer(gemm: Gemm, choice: MatmulChoice, choices: Sequence[MatmulChoice], index: int) -> Gemm:
    """Return the verdict of a matmul, made for `choice`, for the equal matmul of another layer, `choices[index]`."""
    other = choices[index]
    reason = gemm.reason.replace(choice.name, other.name) if choice.name else gemm.reason
    return replace(gemm, name=other.name, source=other.source or gemm.source, choice=index, reason=reason)


def _raise_if_declined(context: JointContext, choices: list[MatmulChoice]) -> None:
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


def warn_if_nothing(choices: Sequence[MatmulChoice], report: Report) -> None:
    """Warn, once per reason, if no matmul of a graph runs in FP8 although some were selected.

    Not where `first_step.py` will warn, for all graphs of a step together. Call it after the graph is compiled. report:
    of that graph.
    """
    reasons = [c.reason for c in choices if c.wanted or (c.rule == "min_speedup" and not _pays_elsewhere(c))]
    trains = any(gemm.kind != "output" for gemm in report.gemms)
    is_checked_later = caller_warns() and trains  # by `first_step.py`, with the other graphs of the step
    if reasons and report.graphs and not report.rewritten and not overrides.current() and not is_checked_later:
        warn_once(
            f"fp8pass: a graph has no matmul in FP8: {reasons[0]}. Everything in it stays in high precision; "
            "print(fp8pass.explain(model, *inputs)) has all reasons"
        )


def _pays_elsewhere(choice: MatmulChoice) -> bool:
    """Return whether FP8 pays for other sizes, for which there is another compilation."""
    return choice.prediction is not None and choice.prediction.ends is not None and bool(choice.prediction.pays)
