"""CUDA graphs on a CPU: a tape records the ops of a function, and replays them in the same memory, without its Python."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fp8pass.compiler import cuda_graphs, lower
from fp8pass.compiler.cuda_graphs import Boxed, Recorder
from fp8pass.compiler.line import Line


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a CUDA graph can't wait for the device"
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


@dataclass
class Tape:
    """Ops, the inputs that they read, and the results that they write. pointers: of the inputs that are not copied."""

    calls: list[tuple[Any, Any, Any, Any]]
    inputs: list[Any]
    static: Sequence[int]
    pointers: list[int]
    results: Sequence[Any]

    def replay(self, inputs: list[Any]) -> Sequence[Any]:
        for i, (kept, x) in enumerate(zip(self.inputs, inputs, strict=True)):
            if i not in self.static and isinstance(x, Tensor):
                kept.copy_(x)
        inputs.clear()
        for func, args, kwargs, recorded in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(pytree.tree_leaves(recorded), pytree.tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)
        return self.results


@dataclass
class Log:
    """The kinds of graphs, in order: of those that were recorded, and of those that were replayed."""

    recordings: list[str] = field(default_factory=list)
    replays: list[str] = field(default_factory=list)


@contextmanager
def taped() -> Iterator[Log]:
    """Record tapes of what is compiled with `lowering="eager"` and equal layers once; return what is done."""
    log = Log()

    class Taped(Recorder):
        def accepts(self, line: Line, trains: bool) -> bool:
            self._written = defaultdict(tuple)
            return True

    def cudagraphify(run: Boxed, static: Sequence[int], *, is_backward: bool, is_inference: bool, **_: Any) -> Boxed:
        return _replaying(run, static, "backward" if is_backward else "update" if is_inference else "forward", log)

    with (
        mock.patch.multiple(lower, Recorder=Taped, _records=lambda *_: True),
        mock.patch.object(cuda_graphs, "cudagraphify", cudagraphify),
    ):
        yield log


def _replaying(run: Boxed, static: Sequence[int], kind: str, log: Log) -> Boxed:
    """Return what calls `run` once, as torch warms up, and then records a tape for each set of addresses."""
    tapes, calls = list[Tape](), itertools.count()

    def call(inputs: list[Any]) -> Sequence[Any]:
        if next(calls) == 0:
            return run(inputs)
        pointers = [inputs[i].data_ptr() for i in static]
        found = next((tape for tape in tapes if tape.pointers == pointers), None)
        if found is not None:
            log.replays.append(kind)
            return found.replay(inputs)
        kept = [x if i in static or not isinstance(x, Tensor) else x.clone() for i, x in enumerate(inputs)]
        taken = [*kept]
        inputs.clear()
        with _Ops() as ops:
            results = run(taken)
        assert taken == []
        log.recordings.append(kind)
        tapes.append(Tape(ops.calls, kept, static, pointers, results))
        return results

    return call
