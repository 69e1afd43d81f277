"""The memory that `fp8pass inspect` counts is what the same code allocates when it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fp8pass.base._torch import inductor_compile_fx
from fp8pass.inspect.inspector import Held, InspectedRun
from fp8pass.inspect.kernel_table import memory_table
from fp8pass.inspect.memory import Memory
from tests.helpers.harness import without_caches

pytestmark = pytest.mark.inductor


class Gated(nn.Module):
    def __init__(self, width: int = 256, hidden: int = 1024) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


def allocated(step: Callable[[], None]) -> int:
    """Return the most bytes that torch's allocator has given out at once during a call, above those before it.

    Without what the CPU's FP8 matmul needs inside: it multiplies in float32, unlike a GPU.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        step()
    results: Any = profiled.profiler
    events = results.kineto_results.events()
    matmuls = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == "aten::_scaled_mm"]
    live = peak = 0
    for change in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        if not any(start <= change.start_ns() <= end for start, end in matmuls):
            live += change.nbytes()
            peak = max(peak, live)
    return peak


@pytest.mark.parametrize("backend", ["fp8pass", pytest.param("inductor", marks=pytest.mark.variant)])
@pytest.mark.parametrize("repeat", [1, pytest.param(2, marks=pytest.mark.variant)])
def test_counted_memory_is_that_of_a_run(backend: str, repeat: int) -> None:
    """Two equal layers are compiled once with fp8pass, so that a graph holds the tensors of several calls."""
    memory, codes = Memory(), list[tuple[str, str]]()
    compile_inner = inductor_compile_fx._compile_fx_inner
    counts = False

    def compiled(*args: Any, **kwargs: Any) -> Any:
        real: Any = compile_inner(*args, **kwargs)
        codes.append((real.source_code, "backward" if kwargs.get("is_backward") else "forward"))
        code, name = codes[-1]
        pretended = memory.runs(code, lambda x, _: memory.count(x, name, str), {})

        def call(inputs: list[Any]) -> Any:
            return (pretended if counts else real)(inputs)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    torch.manual_seed(0)
    model = nn.Sequential(*(Gated() for _ in range(repeat)))
    x = torch.randn(2048, 256, requires_grad=True)
    gradient = torch.randn(2048, 256)

    def step() -> None:
        y = run(x)
        y.backward(gradient)

    def clear() -> None:
        for t in (x, *model.parameters()):
            t.grad = None

    with without_caches(), mock.patch.object(inductor_compile_fx, "_compile_fx_inner", compiled):
        run = torch.compile(model, backend=backend, dynamic=False)
        for _ in range(3):
            step()
            clear()
        real = allocated(step)
        clear()
        counts = True
        step()
    assert {name for _, name in codes} == {"forward", "backward"}
    assert real > 3 * x.nbytes
    assert memory.peak == pytest.approx(real, rel=1e-3)
    assert sum(held.bytes for held in memory.at_peak) == memory.peak


def test_tensors_of_one_kind_are_one_row() -> None:
    def held(n: int, dtype: str = "bf16") -> Held:
        return Held("forward", "mlp", dtype, (n,), n)

    run = InspectedRun(
        "fp8pass", (), 0, (), 2007, (held(900), held(500), held(500), held(100, "e4m3"), held(4), held(3))
    )
    _, rows = memory_table(run)
    assert [(dtype, shape, count) for _, dtype, shape, _, count, _ in rows] == [
        ("bf16", "[500]", "2"),
        ("bf16", "[900]", "1"),
        ("e4m3", "[100]", "1"),
        ("", "", "2"),
    ]


def test_code_that_does_not_run_here_costs_only_the_peak() -> None:
    memory = Memory()
    code = "async_compile.wait(globals())\ndel async_compile\ndef call(args):\n    raise RuntimeError('no GPU')\n"
    generated: Any = mock.Mock(code=code, outputs=[torch.ones(2)])
    generated.lowering.constants = {}
    (result,) = memory.graph(generated, "backward")([])
    assert result.shape == (2,)
    assert memory.unknown == "the peak memory is not known: the backward's code does not run here (no GPU)"
