"""Write the FP8 copies of weights after an optimizer that runs eagerly, all in one call of compiled code.

torch's fused optimizers update all parameters in a few kernels, which torch does not let Dynamo see. So the copies are
written after them, by an update that changes nothing else: the passes and functions are those of any update.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

from torch import Tensor, fx, nn
from torch.optim import Optimizer

from fp8pass.base._torch import ConstantSource, FakeTensorMode, TracingContext, leave_steps_op_by_op, tracing
from fp8pass.compiler.update_compiler import as_it_is, update_graph
from fp8pass.options.config import Config
from fp8pass.report.report import Report, collect
from fp8pass.weights.freshness import Copies, Freshness
from fp8pass.weights.update_graph import UpdateGraph

_fused: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""The fused optimizers of training steps."""


@functools.cache
def _leave_fused() -> None:
    leave_steps_op_by_op(_fused.__contains__)


def note_fused(optimizers: Sequence[Optimizer]) -> None:
    """Let Dynamo leave fused optimizers alone: it would read all their tensors before it finds that it can't trace."""
    if fused := [o for o in optimizers if any(group.get("fused") for group in o.param_groups)]:
        _leave_fused()
        _fused.update(fused)


class CopyWriter:
    """Writes copies that no compiled update has written in a step. config: of the step."""

    def __init__(self, config: Config) -> None:
        # what an optimizer does to its moments and its parameters is done
        self._config = as_it_is(config)
        self._stale: list[weakref.ref[Freshness]] = []
        self._parts: list[weakref.ref[Tensor]] = []
        self._update: UpdateGraph | None = None

    def write(self, copies: Copies, report: Report) -> None:
        """Write those of the copies that this step has left as they were. report: gets that of what is compiled."""
        stale = [known for known in copies.freshness() if not known.was_written and known.knows_next_scale]
        if not stale:
            return
        if self._update is None or stale != [ref() for ref in self._stale]:
            self._prepare(list({id(p): p for known in stale for p in known.parts}.values()), report)
            self._stale = list(map(weakref.ref, stale))
        assert self._update is not None
        self._update(*[ref() for ref in self._parts])

    def _prepare(self, parts: Sequence[Tensor], report: Report) -> None:
        """Compile an update of these parameters, unless the last one was of the same."""
        if len(parts) == len(self._parts) and all(ref() is p for ref, p in zip(self._parts, parts, strict=True)):
            return
        with collect() as found:
            self._update = self._update_of(parts)
            self._update.compile(parts)
        self._parts = list(map(weakref.ref, parts))
        report.add(found)

    def _update_of(self, parameters: Sequence[Tensor]) -> UpdateGraph:
        graph, mode = fx.Graph(), FakeTensorMode()
        for i, p in enumerate(parameters):
            node = graph.placeholder(f"parameter_{i}")
            node.meta["example_value"] = mode.from_tensor(p)
            node._dynamo_source = ConstantSource(node.name)  # AOTAutograd asserts that each input has its own source
        graph.output(())
        module = fx.GraphModule(nn.Module(), graph)
        with tracing(TracingContext(mode)):
            return update_graph(module, self._config, list(range(len(parameters))), "copies_of_weights")
