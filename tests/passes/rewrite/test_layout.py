"""FP8 operands are padded and copied to the layout that `_scaled_mm` takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.harness import (
    BF16,
    RefusedByCuda,
    aten,
    capture,
    check_legal_on_cuda,
    count,
    detect,
    dq,
    fp8,
)


def test_unaligned_sizes_are_padded_with_zeros_and_the_result_is_sliced_back() -> None:
    inputs = fp8(32, 60), fp8(60, 40)
    module, _ = detect(lambda x, w: dq(x, 1.0) @ dq(w, 1.0), *inputs)
    (call,) = (n for n in module.graph.nodes if n.target is aten._scaled_mm.default)
    assert [list(n.meta["val"].shape) for n in (call.args[0], call.args[1], call)] == [[32, 64], [64, 48], [32, 48]]
    actual = module(*inputs)
    assert (actual.shape, actual.stride()) == ((32, 40), (40, 1))
    torch.testing.assert_close(actual, inputs[0].float() @ inputs[1].float(), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_copies_for_every_gpu(target: str) -> None:
    """cuBLASLt needs no copies on sm_100, but torch's check is the same for all GPUs."""
    function, inputs = (lambda a, b: dq(a.t(), 0.5) @ dq(b, 0.5)), (fp8(64, 32), fp8(64, 48))
    module, _ = detect(function, *inputs, target=target)
    assert count(module, aten.clone.default) == 2
    assert check_legal_on_cuda(module.graph) == 1


def test_operands_are_prepared_once() -> None:
    def two(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        wide = dq(x, 0.5).t()
        return wide @ dq(w, 0.5), wide @ dq(v, 0.5)

    module, gemms = detect(two, fp8(64, 32), fp8(64, 48), fp8(64, 16))
    assert [g.status for g in gemms] == ["rewritten"] * 2
    assert count(module, aten.clone.default) == 3  # one for x, one for each of w and v


def test_views_and_scales_are_written_once() -> None:
    def two(x: Tensor, z: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        wide = dq(w, 0.5).t()
        return dq(x, 0.5) @ wide, dq(z, 0.5) @ wide

    inputs = fp8(32, 64), fp8(16, 64), fp8(48, 64)
    module, gemms = detect(two, *inputs)
    assert [g.status for g in gemms] == ["rewritten"] * 2
    assert count(module, aten.permute.default) == 1
    first, second = (n for n in module.graph.nodes if n.target is aten._scaled_mm.default)
    assert first.args[1:] == second.args[1:]
    for wanted, got in zip(two(*inputs), module(*inputs), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-3)


def test_a_product_that_is_written_twice_is_two_calls() -> None:
    """Each call has its own verdict and node; they share their arguments."""
    module, gemms = detect(lambda x, w: (dq(x, 0.5) @ dq(w, 0.5), dq(x, 0.5) @ dq(w, 0.5)), fp8(32, 64), fp8(64, 48))
    assert [g.status for g in gemms] == ["rewritten"] * 2
    first, second = (n for n in module.graph.nodes if n.target is aten._scaled_mm.default)
    assert first.args == second.args


SHAPES = [(32, 64, 48), (31, 64, 48), (32, 63, 48), (32, 64, 47), (7, 5, 3), (1, 64, 48), (32, 1, 48), (32, 64, 1)]


@pytest.mark.parametrize("a_columns", [False, True], ids=["a rows", "a columns"])
@pytest.mark.parametrize("b_columns", [False, True], ids=["b rows", "b columns"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes_and_layouts(shape: tuple[int, int, int], a_columns: bool, b_columns: bool) -> None:
    m, k, n = shape
    a = fp8(k, m).t() if a_columns else fp8(m, k)
    b = fp8(n, k).t() if b_columns else fp8(k, n)

    def product(a: Tensor, b: Tensor) -> Tensor:
        return aten.mm.default(dq(a, 0.5), dq(b, 0.25))

    module, (gemm,) = detect(product, a, b)
    assert gemm.status == "rewritten", gemm.reason
    assert check_legal_on_cuda(module.graph) == 1
    actual = module(a, b)
    assert actual.shape == (m, n)
    torch.testing.assert_close(actual, product(a, b), rtol=1e-5, atol=1e-4)


def test_unrewritten_layouts_are_illegal_on_cuda() -> None:
    """The check fails for operands that a CPU accepts without a copy and CUDA refuses."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        return torch._scaled_mm(a, b, torch.tensor(1.0), torch.tensor(1.0), out_dtype=BF16)

    for inputs in ((fp8(32, 64), fp8(64, 48)), (fp8(32, 40), fp8(48, 40).t()), (fp8(32, 64), fp8(47, 64).t())):
        assert product(*inputs).isfinite().all()
        with pytest.raises(RefusedByCuda):
            check_legal_on_cuda(capture(product, *inputs).graph)
