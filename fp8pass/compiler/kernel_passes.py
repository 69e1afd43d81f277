"""Run the passes over forward, backward and update as separate graphs, before Inductor makes kernels of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from fp8pass.base._torch import CustomGraphPass
from fp8pass.compiler import order, time_on_gpu
from fp8pass.compiler.cache_keys import sources_hash
from fp8pass.compiler.heuristics import ONE_AT_A_TIME
from fp8pass.compiler.joint_passes import JointPasses
from fp8pass.compiler.run_passes import run_all, verifier
from fp8pass.dump.writer import Dump
from fp8pass.graph.attempt import FIRST
from fp8pass.graph.pass_base import GradientOf, KernelsContext
from fp8pass.graph.verdict import Gemm
from fp8pass.hardware import cpu_key
from fp8pass.options.config import Config
from fp8pass.passes.kernels.emulate_matmuls import EmulateMatmuls
from fp8pass.passes.kernels.when_to_fuse import is_pretended
from fp8pass.report.drawing import drawn, part_of
from fp8pass.report.report import Timing


class KernelPasses(CustomGraphPass):
    """Inductor's `post_grad_custom_pre_pass`. attempt: that of the current graph; a backward may have another one.

    joint: the passes that ran over forward and backward in one graph; the verdicts of its matmuls get notes.
    """

    def __init__(
        self,
        config: Config,
        dump: Dump | None = None,
        timing: Timing | None = None,
        joint: JointPasses | None = None,
    ) -> None:
        self.config = config
        self.dump = dump or Dump()
        self.timing = Timing("") if timing is None else timing
        self.joint = joint
        self.attempt = FIRST
        self.seen: Counter[str] = Counter()

    def uuid(self) -> bytes:
        """Return a key of the passes' sources, what they read, the passes left out after a fault, and the CPU."""
        read = self.config.epilogues, self.config.target, self.config.accumulate_in_matmul, self._gradients()
        return sources_hash() + repr((read, self.attempt.form, sorted(self.attempt.without), cpu_key())).encode()

    def __call__(self, graph: fx.Graph) -> None:
        """Run the passes over the graph of a forward or of a backward."""
        # AOTAutograd names the gradients of a graph's outputs tangents_1, tangents_2, ...
        backward = any(n.name.startswith("tangents") for n in graph.nodes if n.op == "placeholder")
        part = "backward" if backward else "forward"
        number = f".{self.seen[part]}" if self.seen[part] else ""  # branches and loop bodies are separate graphs
        self.seen[part] += 1
        drawing = drawn()
        draws = drawing is not None and not drawing.kernels  # with kernels, graphs are drawn after Inductor
        todo = [p for p in order.KERNELS if self.attempt.form == "fp8" and self.attempt.runs(p.name)]
        if draws:  # show what a GPU would run
            todo = [p for p in todo if p.name != EmulateMatmuls.name]
        times = time_on_gpu.autotunes() and not is_pretended()  # a pretended GPU runs nothing
        context = KernelsContext(self.config, seconds_of=self._seconds if times else None)
        if backward and (gradients := self._gradients()):
            context.gradients = gradients
            context.of_weights = {name for name, (g, *_) in self._gemms().items() if g.kind == "grad_weight"}
        with ONE_AT_A_TIME, self.timing.counting("passes"):
            run_all(todo, graph, context, self.dump, f"{part}{number}", verifier(graph, context))
        for name, note in context.fused.items():
            for gemm in self._gemms().get(name, ()):
                gemm.note = gemm.note or note
        if drawing is not None and draws:
            drawing.add(graph, part_of(graph))

    def _gemms(self) -> Mapping[str, Sequence[Gemm]]:
        return self.joint.gemms if self.joint is not None else {}

    def _gradients(self) -> list[GradientOf | None]:
        return self.joint.gradients if self.joint is not None and self.config.accumulate_in_matmul else []

    def _seconds(self, module: fx.GraphModule) -> float:
        """Time a graph that is compiled with the same passes, of which none fuses matmuls."""
        return time_on_gpu.seconds(module, KernelPasses(replace(self.config, epilogues="off")))
