"""The passes over the joint graph, in order, and what happens around each of them.

The one file that knows the order. The annotate pass is not here: it runs on Dynamo's graph, before AOTAutograd.
"""

from __future__ import annotations

import difflib
import logging
import time
from pathlib import Path

import torch
from torch import fx

from fp8pass._torch import CustomGraphPass, get_hash_for_files, trace_structured
from fp8pass.config import Config
from fp8pass.errors import Fp8Error
from fp8pass.graph import readable
from fp8pass.passes.annotate import Annotation
from fp8pass.passes.annotate import __file__ as annotate_file
from fp8pass.passes.delayed_scaling import DelayedScaling
from fp8pass.passes.matmuls import Matmuls, operands
from fp8pass.passes.patterns import dequantize
from fp8pass.passes.scaled_mm import ScaledMM
from fp8pass.report import Report, publish
from fp8pass.rewrite import Context, Pass, Reject
from fp8pass.verify import verify

log = logging.getLogger(__name__)


def passes(annotation: Annotation) -> list[Pass]:
    """The order."""
    return [
        Matmuls(annotation.choices),  # first: whatever later passes do, every matmul of the user has a verdict
        ScaledMM(),  # before partitioning, so that what is saved for backward is FP8
        DelayedScaling(),  # last: dead quantizes have taken their records along
    ]


class Pipeline(CustomGraphPass):
    """Inductor's `joint_custom_pre_pass`: forward and backward in one graph, before anything else has touched it.

    Keeps nothing that outlives the compilation but the report: where Inductor's caches hit, it does not run.
    """

    def __init__(self, config: Config, annotation: Annotation, number: int) -> None:
        self.config = config
        self.annotation = annotation
        self.number = number
        self.report = Report()

    def uuid(self) -> bytes:
        """Changes with the passes' sources, the configuration and torch."""
        return _sources_hash() + repr((self.config.cache_key(), torch.__version__)).encode()

    def __call__(self, graph: fx.Graph) -> None:
        """Run all passes over `graph`; verify, dump and report. Raises Fp8Error under `strict`."""
        inputs = (n.name for n in graph.nodes if n.op == "placeholder")
        names = _state_inputs(self.annotation, list(inputs))
        context = Context(self.config, state_inputs=names)
        module = graph.owning_module
        assert module is not None
        for i, p in enumerate(passes(self.annotation)):
            before = readable(module) if self.config.dump_dir else ""
            started = time.perf_counter()
            applied = p.run(graph, context)
            seconds = time.perf_counter() - started
            if applied:
                verify(graph)
                module.recompile()
            self._dump(i, p.name, applied, seconds, before, module)
        self.report = Report(list(context.gemms.values()), graphs=1)
        publish(self.report)
        _artifact(f"fp8pass.{self.number}.report", str(self.report))
        if self.config.strict:
            _raise_if_declined(context, self.annotation)

    def _dump(self, i: int, name: str, applied: int, seconds: float, before: str, module: fx.GraphModule) -> None:
        log.debug("%s applied %d times in %.1f ms", name, applied, seconds * 1e3)
        if not self.config.dump_dir:
            return
        folder = Path(self.config.dump_dir) / f"graph_{self.number:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        head = f"# made by {name}: applied {applied} times in {seconds * 1e3:.1f} ms\n"
        after = readable(module)
        diff = "".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), "before", "after"))
        for suffix, text in (("before.py", before), ("after.py", after), ("diff", diff)):
            (folder / f"{i:02d}.{name}.{suffix}").write_text(head + text)


def _state_inputs(annotation: Annotation, joint_inputs: list[str]) -> frozenset[str]:
    """The joint graph's placeholders of the state: AOTAutograd keeps the order of the primals, not their names."""
    mine = [n.name for n in annotation.module.graph.nodes if n.op == "placeholder"]
    return frozenset(joint for joint, name in zip(joint_inputs, mine, strict=False) if name.startswith("fp8pass_"))


def _raise_if_declined(context: Context, annotation: Annotation) -> None:
    """Strict: what the recipe and filter chose, or the user quantized, must have been rewritten."""
    for node, gemm in context.gemms.items():
        if gemm.status == "rewritten":
            continue
        try:
            for operand in operands(node):
                dequantize(operand)
        except Reject:
            continue
        where = f" at {gemm.source}" if gemm.source else ""
        raise Fp8Error(
            f"strict: {gemm.kind} of {gemm.name or 'a matmul'}{where}, [{gemm.M}, {gemm.K}] by [{gemm.K}, {gemm.N}], "
            f"is quantized but not rewritten: {gemm.reason}. Leave it out with filter=, or drop strict."
        )


def _artifact(name: str, text: str) -> None:
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text)


_hash: list[bytes] = []


def _sources_hash() -> bytes:
    if not _hash:
        files = sorted(str(f) for of in (__file__, annotate_file) for f in Path(of).parent.glob("*.py"))
        _hash.append(get_hash_for_files(tuple(files)))
    return _hash[0]
