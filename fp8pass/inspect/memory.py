"""Count the memory that generated code holds, by running it on fake tensors: the peak of a step without its GPU.

The code allocates, views and deletes its tensors as it would on the GPU, while its kernels do nothing. So what Inductor
reuses, what autograd saves for the backward, and when each tensor is freed, is not modelled but happens.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8pass.base.errors import first_line
from fp8pass.inspect.fake_cuda import Generated, returns
from fp8pass.inspect.inspector import Held
from fp8pass.inspect.kernels import modules_of, short

Count = Callable[[Tensor, str], None]
GRANULE = 512
"""Bytes of which torch's allocator for CUDA gives out multiples."""


class Memory:
    """Counts the memory of all tensors that generated code has allocated and that still exist."""

    def __init__(self) -> None:
        self.peak = 0
        """The most bytes at once."""
        self.at_peak: tuple[Held, ...] = ()
        """The tensors that existed then, largest first."""
        self.unknown = ""
        """The reason why the peak is not known, a sentence; "" if it is."""
        self._live = 0
        self._held: dict[int, Held] = {}

    def runs(self, code: str, count: Count, constants: Mapping[str, Any]) -> Callable[[list[Any]], Sequence[Any]]:
        """Return a function that runs generated code without its kernels.

        count: called with each tensor that the code allocates, and the name of its buffer.
        """
        space = {**_outside(count), **constants}
        idle = r"^(\w+) = async_compile\.", r"^(assert_\w+) = "  # kernels, and checks, which differ between versions
        space |= {name: _NOTHING for which in idle for name in re.findall(which, code, re.MULTILINE)}
        body = code.partition("del async_compile\n")[2]
        body = body.partition("\ndef get_args")[0].partition("\ndef benchmark_compiled")[0]
        # each allocation gets the name of its buffer as first argument: see `empty` in `_outside`
        exec(re.sub(r"\b(\w+) = (empty_strided\w*)\(", r"\1 = \2('\1', ", body), space)

        def call(args: list[Any]) -> Sequence[Any]:
            results: Sequence[Any] = space["call"](args)
            return results

        call._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd passes boxed functions one list
        return call

    def graph(self, generated: Generated, name: str) -> Callable[[list[Any]], Sequence[Any]]:
        """Return a function that runs the code of a graph, which has this name in `at_peak`."""

        def count(x: Tensor, buffer: str) -> None:
            self.count(x, name, functools.partial(modules_of, generated, buffer))

        @functools.cache
        def run() -> Callable[[list[Any]], Sequence[Any]]:
            return self.runs(generated.code, count, generated.lowering.constants)

        def call(args: list[Any]) -> Sequence[Any]:
            try:
                return run()(args)
            except Exception as error:  # noqa: BLE001  # an op may refuse to run without a GPU: only the peak is lost
                self.unknown = (
                    f"the peak memory is not known: the {name}'s code does not run here ({first_line(error)})"
                )
                results: Sequence[Any] = returns(generated.outputs)(args)
                return results

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def count(self, x: Tensor, graph: str, modules: Callable[[], str]) -> None:
        """Count a tensor, unless it shares the memory of one that is counted."""
        storage = x.untyped_storage()
        key, size = storage._cdata, -(-storage.nbytes() // GRANULE) * GRANULE
        if key in self._held or not size:
            return
        self._held[key] = Held(graph, modules(), short(x.dtype), tuple(x.shape), size)
        # before the address can be that of another storage
        weakref.finalize(storage, self._freed, key)
        self._live += size
        if self._live > self.peak:
            self.peak = self._live
            self.at_peak = tuple(sorted(self._held.values(), key=lambda held: -held.bytes))

    def _freed(self, key: int) -> None:
        self._live -= self._held.pop(key).bytes


class _Nothing:
    """Stands for kernels and streams: whatever is called does nothing."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self


_NOTHING = _Nothing()


class _Torch(types.ModuleType):
    """Stands for the module torch in generated code, without a GPU to select."""

    ops: Any
    cuda = types.SimpleNamespace(_DeviceGuard=lambda _: contextlib.nullcontext(), set_device=_NOTHING)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _CountedOps:
    """Stands for a namespace of ops in generated code: the results of every op are counted."""

    def __init__(self, ops: Any, count: Count) -> None:
        self._ops, self._count = ops, count

    def __getattr__(self, name: str) -> Any:
        return _CountedOps(getattr(self._ops, name), self._count)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (out := kwargs.get("out")) is not None:
            return out
        results = self._ops(*args, **kwargs)
        for x in results if isinstance(results, (list, tuple)) else [results]:
            if isinstance(x, Tensor):
                self._count(x, "")
        return results


def _outside(count: Count) -> dict[str, Any]:
    """Return the names that generated code takes from its imports."""

    def empty(buffer: str, size: Any, stride: Any, dtype: torch.dtype, *_: Any) -> Tensor:
        x = torch.empty_strided(size, stride, dtype=dtype)
        count(x, buffer)
        return x

    def view(x: Tensor, size: Any, stride: Any, offset: int) -> Tensor:
        return x.as_strided(size, stride, x.storage_offset() + offset)

    ops = _CountedOps(torch.ops, count)
    stand_in = _Torch("torch")
    stand_in.ops = ops
    return {
        **dict.fromkeys(("get_raw_stream", "get_cuda_stream"), _NOTHING),
        **{name: getattr(math, name) for name in ("inf", "nan")},
        "math": math,
        "device": lambda *_, **__: torch.device("cpu"),
        **{f"empty_strided_{kind}": empty for kind in ("cpu", "cuda", "cpu_pinned", "xpu")},
        "empty_strided": empty,
        "torch": stand_in,
        "aten": ops.aten,
        "inductor_ops": ops.inductor,
        "extern_kernels": ops.aten,
        "reinterpret_tensor": view,
    }
