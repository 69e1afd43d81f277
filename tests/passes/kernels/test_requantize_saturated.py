"""The requantize_saturated pass: which quantizes get a second kernel, and what stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fp8pass import hardware
from fp8pass.base import scaling
from fp8pass.base._torch import kernel_called, triton_kernel_wrapper_functional
from fp8pass.hardware import TARGETS
from fp8pass.options.config import Config
from fp8pass.passes.common.gpu import Gpu
from fp8pass.passes.common.transposed_copies import is_count
from fp8pass.passes.kernels import fused_matmul, requantize_saturated
from fp8pass.passes.kernels.fold_quantizes import FoldQuantizes
from fp8pass.passes.kernels.fuse_matmuls import FuseMatmuls
from fp8pass.passes.kernels.fused_matmul import REQUANTIZES
from fp8pass.passes.kernels.quantize_tiles import QuantizeTiles
from fp8pass.passes.kernels.requantize_kernel import Requantize, source_of
from fp8pass.passes.kernels.requantize_saturated import RequantizeSaturated
from fp8pass.quant import ops
from fp8pass.quant.kernel_ops import QUANTIZE, SATURATED
from fp8pass.recipes import DelayedScaling
from tests.helpers.harness import BF16, E4M3, E5M2, aten, capture, count, on_kernels, text

pytestmark = pytest.mark.passes

AGAIN, ONCE = DelayedScaling(on_saturation="requantize"), DelayedScaling()
H100 = Gpu(90, 132, 232448)


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fused_matmul, requantize_saturated):
        monkeypatch.setattr(module, "gpu_of", lambda _: H100)
    monkeypatch.setattr(fused_matmul, "target_of", lambda *_: TARGETS["h100"])
    monkeypatch.setattr(hardware, "pretended_device", torch.device("cuda"))


def quantizing(
    recipe: DelayedScaling, dtype: torch.dtype = E4M3, turned: bool = True, bootstrap: bool = False
) -> Callable[..., Any]:
    quantizer = ops.Delayed(recipe, dtype, slot=0, index=0, bootstrap=bootstrap, record=False)

    def both(x: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
        x_q, scale_inv, amax = quantizer.with_amax(x, scales[quantizer.slot])
        return (x_q, x_q.t().contiguous(), scale_inv, amax) if turned else (x_q, scale_inv, amax)

    return both


def captured(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> fx.GraphModule:
    module = capture(function, *inputs, dynamic=dynamic)
    on_kernels(module, FoldQuantizes())
    return module


X, SCALES = torch.randn(128, 96).to(BF16), torch.tensor([3.0, 5.0])


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("turned", [True, False])
def test_quantized_by_the_delayed_scale_and_again_by_a_kernel(dtype: torch.dtype, turned: bool) -> None:
    module = captured(quantizing(AGAIN, dtype, turned), X, SCALES)
    on_kernels(module, RequantizeSaturated())
    (call,) = module.graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional)
    of = kernel_called(call).requantize
    assert of == Requantize(128, 96, dtype, turned, programs=4) and of.tiles == 4
    given: Any = call.kwargs["kwargs"]
    assert given["x"].op == "placeholder" and given["scale"].target is aten.where.self
    assert given["scale"].args[0] is given["flag"]
    (q,) = module.graph.find_nodes(op="call_function", target=QUANTIZE)
    assert given["out0"] is q and q.args[1] is given["scale"].args[2]  # by the delayed scale
    assert list(given) == ["x", "scale", "flag", "out0", *(["out1"] if turned else [])]
    assert call.kwargs["tensors_to_clone"] == ["out0", "out1"][: 1 + turned]
    results: Any = module.graph.output_node().args[0]
    assert all(n.target.__name__ == "getitem" and n.args[0] is call for n in results[: 1 + turned])


def test_the_count_is_taken_in_tiles_with_the_amax() -> None:
    """So that the kernel that quantizes takes both, and reads the tensor once."""
    module = captured(quantizing(AGAIN), X, SCALES)
    assert sum(is_count(n) for n in module.graph.nodes) == 1
    on_kernels(module, RequantizeSaturated(), QuantizeTiles())
    (saturated,) = module.graph.find_nodes(op="call_function", target=SATURATED)
    assert list(saturated.meta["val"].shape) == [2, 64, 96]
    (columns,) = saturated.users
    assert columns.target is aten.sum.dim_IntList and columns.args[1] == [1]


def symbolic(x: Tensor, scales: Tensor) -> Any:
    return quantizing(AGAIN, turned=False)(x, scales)


UNCHANGED: dict[str, tuple[Callable[..., Any], Tensor, bool]] = {
    "without the option": (quantizing(ONCE), X, False),
    "a tensor that is not contiguous": (quantizing(AGAIN, turned=False), X.t(), False),
    "symbolic sizes": (symbolic, X, True),
    "a choice that is not by this tensor": (
        lambda x, s: scaling.quantize(x, torch.where(s[0] > 1, s[0], s[1]), E4M3), X, False,
    ),
    "a tensor without history": (quantizing(AGAIN, bootstrap=True), X, False),
    "the own amax first": (
        lambda x, s: scaling.quantize(x, scaling.scale_from_amax(scaling.amax(x), 448.0, s[0]), E4M3), X, False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNCHANGED)
def test_what_stays_as_it_is(case: str) -> None:
    function, x, dynamic = UNCHANGED[case]
    module = captured(function, x, SCALES, dynamic=dynamic)
    before = text(module)
    on_kernels(module, RequantizeSaturated())
    assert text(module) == before


def test_not_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "pretended_device", None)
    module = captured(quantizing(AGAIN), X, SCALES)
    before = text(module)
    on_kernels(module, RequantizeSaturated())
    assert text(module) == before


@pytest.mark.parametrize(("recipe", "note"), [(AGAIN, REQUANTIZES), (ONCE, "")])
def test_a_matmul_does_not_quantize_its_result_and_says_so(
    recipe: DelayedScaling, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_matmul, "shared_memory", lambda _: 0)

    def whole(a: Tensor, b: Tensor, s: Tensor, scales: Tensor) -> Any:
        y = torch._scaled_mm(a, b.t(), s, s, None, None, BF16, True)
        return quantizing(recipe)(torch.relu(y), scales)

    a, b = torch.zeros(128, 64, dtype=E4M3), torch.zeros(256, 64, dtype=E4M3)
    module = captured(whole, a, b, torch.tensor(1.0), SCALES)
    context = on_kernels(module, FuseMatmuls(), config=Config(recipe=None, epilogues="always"))
    assert count(module, aten._scaled_mm.default) == bool(note)
    (said,) = context.fused.values()
    assert said == note if note else said.startswith("its kernel computes the ops after it and quantizes")


def test_the_source_returns_before_it_reads_the_tensor() -> None:
    lines = source_of(Requantize(128, 96, E4M3, True, 4)).splitlines()
    loads = [line.strip() for line in lines if "tl.load(" in line]
    assert loads[0] == "if tl.load(flag) != 0:" and len(loads) == 3
    assert all(line.startswith(" " * 8) for line in lines[lines.index("    if tl.load(flag) != 0:") + 1 :] if line)
