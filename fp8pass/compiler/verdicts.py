"""Compile a graph only until each matmul has a verdict: trace it, run the passes over the joint graph, and stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from torch import fx

from fp8pass.compiler.eager import rewrite_all, through_aot
from fp8pass.compiler.faults import Later
from fp8pass.compiler.joint_passes import JointPasses
from fp8pass.compiler.partition import Partition

_only: ContextVar[bool] = ContextVar("fp8pass_only_verdicts", default=False)


@contextmanager
def only_verdicts() -> Iterator[None]:
    """Compile graphs in this context only until each matmul has a verdict; what is compiled cannot run."""
    token = _only.set(True)
    try:
        yield
    finally:
        _only.reset(token)


def wants_only_verdicts() -> bool:
    """Return whether the code runs in `only_verdicts`."""
    return _only.get()


class _Known(BaseException):
    """Raised when all verdicts are known. Not an Exception, because AOTAutograd would handle that as its failure."""


def find_verdicts(
    module: fx.GraphModule, inputs: list[Any], joint_passes: JointPasses, later: Later | None
) -> Callable[..., Any]:
    """Run the passes over the joint graph; return a function that raises RuntimeError."""

    def inference(graph_module: fx.GraphModule, _: Any) -> Any:
        rewrite_all(graph_module, joint_passes)
        raise _Known

    def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        rewrite_all(joint, joint_passes)
        if any("recompute" in n.meta for n in joint.graph.nodes):  # the partition says what the backward repeats
            Partition(seen=joint_passes.partitioned)(joint, joint_inputs, **kwargs)
        raise _Known

    # `inference` as the forward's compiler, too: it is never called, because `partition` raises before
    with suppress(_Known):
        through_aot(inference, None, inference, partition)(module, inputs)
    return _not_compiled


def _not_compiled(*_: Any) -> Any:
    raise RuntimeError("this graph was compiled only until each matmul had a verdict")
