"""Record the calls of a graph's functions as one CUDA graph: of the forward, of the backward, or of an update.

A function is compiled once and called for each layer, with other addresses, so Inductor would record a CUDA graph of it
for each layer. Instead it compiles functions without CUDA graphs, and torch's trees of CUDA graphs record what calls
them all, as they would record a graph that is compiled in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import increment_version

from fp8pass.base._torch import (
    CompileContext,
    CompiledFxGraph,
    PlaceholderInfo,
    compile_context,
    cudagraphify,
    first_op_without_cuda_graphs,
)
from fp8pass.base.errors import warn_once
from fp8pass.compiler.line import Line
from fp8pass.graph.annotation import Annotation, keeps_address

DEVICE_TYPE = "cuda"

Boxed = Callable[[list[Any]], Sequence[Any]]
"""A function that takes one list, and empties it."""

NoteCompiled = Callable[[fx.GraphModule, Any, bool], None]
"""Notes a function's graph, its compiled code, and whether that is its backward."""


class Recorder:
    """Records the calls of one graph's functions, unless one of these can't be recorded. inputs: examples."""

    def __init__(self, annotation: Annotation, inputs: Sequence[Any]) -> None:
        nodes = annotation.module.graph.find_nodes(op="placeholder")
        self._names = [node.name for node in nodes]
        self._moved = _scalars_on_cpu(annotation, inputs)
        self._device = next((x.device for x in inputs if _is_on(DEVICE_TYPE, x)), torch.device("cpu"))
        self._static = [i for i, node in enumerate(nodes) if keeps_address(node) and i not in self._moved]
        self._context = CompileContext.try_get()
        self._device_index = 0
        self._written: dict[str, Sequence[int]] = {}
        """The arguments that the forward of each function writes, by position."""
        self._refusal = ""

    def note(self, name: str, title: str, module: fx.GraphModule, compiled: Any, is_backward: bool) -> None:
        """Note what the compiled code of a function runs on, and what it writes. title: the function, in words."""
        if not isinstance(compiled, CompiledFxGraph):
            self._refusal = f"{title} runs op by op, after a fault"
        elif (node := first_op_without_cuda_graphs(module)) is not None:
            self._refusal = f"{title} calls {node.target}, which CUDA graphs can't record"
        elif (devices := {*compiled.device_types} - {"meta"}) != {DEVICE_TYPE} or len(compiled.device_idxs) > 1:
            self._refusal = f"{title} runs on several devices, of types {', '.join(sorted(devices))}"
        else:
            self._device_index = next(iter(compiled.device_idxs), 0)
        if not is_backward:
            self._written[name] = tuple(getattr(compiled, "mutated_input_idxs", ()))

    def moved(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the inputs, with scalars that an update only reads, such as its learning rate, on the GPU."""
        moved = [*inputs]
        for i in self._moved:
            moved[i] = moved[i].to(self._device, non_blocking=True)
        return moved

    def taking(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return what calls `run` with `moved` inputs."""
        return (lambda *inputs: run(*self.moved(inputs))) if self._moved else run

    def accepts(self, line: Line, trains: bool) -> bool:
        """Return whether the line can be recorded, now that all is compiled; warn if it can't.

        trains: True if it has a backward.
        """
        if not self._refusal and trains:
            moving = [self._names[i] for i in line.written(self._written) if i not in self._all_static(line)]
            self._refusal = f"it writes {moving[0]}, whose address changes" if moving else ""
        if self._refusal:
            self.refuse(self._refusal)
        return not self._refusal

    def refuse(self, reason: str) -> None:
        """Warn that nothing is recorded."""
        warn_once(
            f"fp8pass: no CUDA graph is recorded of a graph whose equal layers are compiled once, since {reason}. It "
            "runs without; compile_once=False compiles it in one piece, of which torch records what it can"
        )

    def forward(self, run: Boxed, line: Line, trains: bool) -> Boxed:
        """Return the line's forward, recorded from its second call on. trains: True if it has a backward."""
        names, written = [*self._names, *line.attributes], line.written(self._written)
        recorded = self._recorded(run, names, self._all_static(line), written, is_inference=not trains)

        def call(inputs: list[Any]) -> Sequence[Any]:
            changed = [inputs[i] for i in written]
            results = recorded(inputs)
            increment_version(changed)  # a replay does not, and copies of weights are stale once their versions change
            return results

        return recorded if trains else call

    def backward(self, run: Boxed, saved: int, given: int) -> Boxed:
        """Return the backward, recorded from its second call on. saved, given: the numbers of its inputs.

        saved: parameters, state, and results of the forward, which keep their addresses. given: gradients of outputs.
        """
        return self._recorded(run, [""] * (saved + given), range(saved), is_backward=True)

    def _all_static(self, line: Line) -> list[int]:
        return [*self._static, *range(len(self._names), line.inputs)]

    def _recorded(
        self,
        run: Boxed,
        names: Sequence[str],
        static: Sequence[int],
        written: Sequence[int] = (),
        is_backward: bool = False,
        is_inference: bool = False,
    ) -> Boxed:
        stack_traces = list[str | None]()

        def traced(inputs: list[Any]) -> Sequence[Any]:
            results = run(inputs)
            stack_traces[:] = [None] * len(results)  # torch wants one for each result, and reads them afterwards
            return results

        with compile_context(self._context):
            recorded: Boxed = cudagraphify(
                traced,
                static,
                device_index=self._device_index,
                stack_traces=stack_traces,
                is_backward=is_backward,
                is_inference=is_inference,
                placeholders=[PlaceholderInfo(name, None, [], None) for name in names],
                mutated_input_idxs=tuple(written),
            )
        return recorded


def _is_on(device_type: str, x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == device_type


def _scalars_on_cpu(annotation: Annotation, inputs: Sequence[Any]) -> list[int]:
    """Return the scalars on the CPU that an update reads without writing them, if it returns nothing, by position."""
    if not annotation.is_update or annotation.module.graph.output_node().all_input_nodes:
        return []
    scalars = (i for i, x in enumerate(inputs) if _is_on("cpu", x) and x.dim() == 0)
    return [i for i in scalars if i not in annotation.written]
