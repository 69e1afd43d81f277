"""The blockwise_mm pass: which GPUs get a kernel with scales for blocks, the layouts of the scales, and the numbers.

No CPU can run these kernels: their calls are repeated on fake CUDA tensors, and a stand-in reads the layouts by
cuBLASLt's documentation.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fp8pass import hardware
from fp8pass.gpu.trial import tiles
from fp8pass.graph.builder import val
from fp8pass.options.config import Config
from fp8pass.passes.joint.blockwise_mm import BlockwiseMM
from fp8pass.passes.joint.expand_blocks import ExpandBlocks
from fp8pass.passes.joint.list_matmuls import ListMatmuls
from fp8pass.passes.joint.scaled_mm import ScaledMM
from fp8pass.quant import ops
from fp8pass.recipes import BlockwiseScaling, MXFP8Scaling
from tests.helpers.harness import BF16, E4M3, E5M2, F16, F32, aten, capture, check_legal_on_cuda, count, run, text

pytestmark = pytest.mark.passes

BLOCKWISE, MX = BlockwiseScaling(), MXFP8Scaling()
TARGET = {BLOCKWISE: "sm_90", MX: "sm_100"}


def quantizer(recipe: Any, dim: int, square: bool = False, dtype: torch.dtype = E4M3) -> ops.Blockwise:
    return ops.Blockwise(recipe, dtype, 32 if recipe is MX else 128, square, () if square else (dim,))


def product(of_a: ops.Blockwise, of_b: ops.Blockwise, b_is_rows: bool) -> Any:
    """Return a function that multiplies a: [M, K] by b: [K, N], which is given as [N, K] if `b_is_rows`."""

    def function(a: Tensor, b: Tensor) -> Tensor:
        b_ = of_b(b)
        return torch.mm(of_a(a), b_.t() if b_is_rows else b_)

    return function


CASES: dict[str, tuple[Any, bool, tuple[int, int, int], torch.dtype]] = {
    "1x128 by 128x128": ((quantizer(BLOCKWISE, 1), quantizer(BLOCKWISE, 1, True)), True, (48, 512, 256), BF16),
    "1x128 by 128x128, transposed": ((quantizer(BLOCKWISE, 1), quantizer(BLOCKWISE, 1, True)), False, (48, 512, 256), F32),
    "128x128 by 1x128": ((quantizer(BLOCKWISE, 1, True), quantizer(BLOCKWISE, 0)), False, (256, 512, 48), BF16),
    "1x128 by 1x128": ((quantizer(BLOCKWISE, 1), quantizer(BLOCKWISE, 0)), False, (48, 384, 80), F16),
    "1x128 by 128x128, a last batch": ((quantizer(BLOCKWISE, 1), quantizer(BLOCKWISE, 1, True)), True, (41, 512, 256), BF16),
    "1x128 by 1x128, a last batch": ((quantizer(BLOCKWISE, 1), quantizer(BLOCKWISE, 0)), False, (3, 384, 80), F16),
    "1x32 by 1x32, a last batch": ((quantizer(MX, 1), quantizer(MX, 1)), True, (129, 96, 160), BF16),
    "1x32 by 1x32": ((quantizer(MX, 1), quantizer(MX, 1)), True, (48, 96, 160), BF16),
    "1x32 by 1x32 of columns": ((quantizer(MX, 1), quantizer(MX, 0)), False, (144, 352, 48), F32),
    "1x32 of e5m2 by 1x32": ((quantizer(MX, 1, dtype=E5M2), quantizer(MX, 0)), False, (48, 96, 160), BF16),
    "1x32 by 1x32 of e5m2": ((quantizer(MX, 1), quantizer(MX, 0, dtype=E5M2)), False, (48, 96, 160), BF16),
}  # fmt: skip


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decide by the target's kernels, although the graph is captured on a CPU."""

    def why(recipe: str, _: torch.device, target: Any) -> str:
        return hardware.why_no_block_kernel(recipe, torch.device("cuda"), target)

    monkeypatch.setattr("fp8pass.passes.joint.blockwise_mm.why_no_block_kernel", why)
    monkeypatch.setattr("torch.version.cuda", None)  # whatever CUDA version this torch was built with


def rewritten(case: str) -> tuple[fx.GraphModule, list[Any], tuple[Tensor, Tensor], Any]:
    (of_a, of_b), b_is_rows, (m, k, n), dtype = CASES[case]
    a, b = torch.randn(m, k).to(dtype), torch.randn(*((n, k) if b_is_rows else (k, n))).to(dtype)
    function = product(of_a, of_b, b_is_rows)
    module = capture(function, a, b)
    context = run(module, ListMatmuls(), BlockwiseMM(), config=Config(recipe=None, target=TARGET[of_a.recipe]))
    return module, list(context.gemms.values()), (a, b), function


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("case", CASES)
def test_rewritten_for_the_gpu_that_has_the_kernel(case: str) -> None:
    module, (gemm,), _, _ = rewritten(case)
    assert (gemm.status, gemm.reason) == ("rewritten", "")
    assert gemm.dtypes[:2] == tuple({E4M3: "e4m3", E5M2: "e5m2"}[q.dtype] for q in CASES[case][0])
    assert check_legal_on_cuda(module.graph) == 1
    assert count(module, ops.DEQUANTIZE_BLOCKS) == 0
    (node,) = (n for n in module.graph.nodes if n.target is aten._scaled_mm.default)
    a, b, scale_a, scale_b = map(val, node.args[:4])
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    assert node.args[7] is False
    if scale_a.dtype == torch.float8_e8m0fnu:
        assert (scale_a.dim(), scale_b.dim()) == (1, 1)
        return
    m, k, n = CASES[case][2]
    m = -(-m // 16) * 16  # padded
    strides = {"1x128": ((1, m), (n, 1)), "128x128": ((k // 128, 1), (1, k // 128))}
    kinds = case.partition(",")[0].split(" by ")
    assert (scale_a.stride(), scale_b.stride()) == (strides[kinds[0]][0], strides[kinds[1]][1])


def stand_in(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *rest: Any) -> Tensor:
    """Compute `_scaled_mm` in float64, with scales read by their layouts: f32 for each block, or e8m0 in tiles."""

    def spread(scale: Tensor, rows: int, k: int) -> Tensor:
        """Return the scales as [rows, k]; b's are those of its transpose."""
        if scale.dtype == torch.float8_e8m0fnu:
            codes, wide = scale.view(torch.uint8).tolist(), -(-k // 128)
            at = lambda r, c: (r // 128 * wide + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4  # noqa: E731
            values = [[2.0 ** (codes[at(r, c)] - 127) for c in range(k // 32)] for r in range(rows)]
            return torch.tensor(values, dtype=torch.float64).repeat_interleave(32, 1)
        tall = scale.double().repeat_interleave(rows // scale.shape[0], 0)
        return tall.repeat_interleave(k // scale.shape[1], 1)

    of_b = spread(scale_b if scale_b.dim() == 1 else scale_b.t(), b.shape[1], b.shape[0])
    return ((a.double() * spread(scale_a, *a.shape)) @ (b.double() * of_b.t())).to(rest[2])


class WithStandIn(fx.Interpreter):
    """Runs a graph, with the stand-in instead of its scaled matmuls."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        target = stand_in if target is aten._scaled_mm.default else target
        return super().call_function(target, args, kwargs)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("case", CASES)
def test_the_scales_are_where_the_kernel_reads_them(case: str) -> None:
    module, _, inputs, function = rewritten(case)
    actual, expected = WithStandIn(module).run(*inputs), function(*(x.double() for x in inputs))
    assert actual.dtype == CASES[case][3]
    rounding = {BF16: 2**-8, F16: 2**-10, F32: 1e-6}[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=rounding, atol=rounding)


def test_tiles() -> None:
    codes = torch.randint(0, 255, (300, 9), dtype=torch.uint8)
    flat = tiles(codes).view(torch.uint8)
    assert flat.shape == (384 * 12,)
    for r, c in ((0, 0), (1, 0), (31, 3), (32, 0), (127, 3), (128, 4), (299, 8)):
        assert flat[(r // 128 * 3 + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] == codes[r, c]


@pytest.mark.parametrize("case", ["1x128 by 128x128", "1x32 by 1x32"])
def test_elsewhere_it_stays_a_matmul_of_the_same_values(case: str) -> None:
    module, (gemm,), inputs, function = rewritten(case)
    assert gemm.status == "declined"
    assert gemm.rule == "no kernel"
    name, gpu, cuda = (
        ("mxfp8", "sm_100, sm_103, sm_120", "12.8") if "32" in case.split(" ")[0] else ("blockwise", "sm_90", "12.9")
    )
    assert gemm.reason == (
        f"{name} kernels exist on {gpu} with CUDA {cuda} or later, not on cpu; the same FP8 values are multiplied in "
        "high precision"
    )
    run(module, ListMatmuls(), ExpandBlocks(), ScaledMM())
    assert count(module, ops.DEQUANTIZE_BLOCKS) == 0
    assert torch.equal(module(*inputs), function(*inputs))


ROWS, COLUMNS, SQUARE = quantizer(BLOCKWISE, 1), quantizer(BLOCKWISE, 0), quantizer(BLOCKWISE, 1, True)
REFUSALS: dict[str, tuple[Any, tuple[tuple[int, int], tuple[int, int]], str, str]] = {
    "another GPU": (lambda a, b: torch.mm(ROWS(a), COLUMNS(b)), ((32, 256), (256, 32)), "b200 is sm_100", "b200"),
    "one side": (lambda a, b: torch.mm(ROWS(a), b), ((32, 256), (256, 32)), "one operand has a scale for each block", "h100"),
    "N": (lambda a, b: torch.mm(ROWS(a), COLUMNS(b)), ((32, 256), (256, 24)), r"\[32, 256\] by \[256, 24\]: .* a multiple of 16", "h100"),
    "both square": (lambda a, b: torch.mm(SQUARE(a), SQUARE(b)), ((128, 512), (512, 128)), "both operands have 128x128 blocks", "h100"),
    "K of square": (lambda a, b: torch.mm(ROWS(a), SQUARE(b)), ((32, 256), (256, 128)), "K a multiple of 512", "h100"),
    "one block": (lambda a, b: torch.mm(ROWS(a), COLUMNS(b)), ((32, 128), (128, 32)), "one block along K", "h100"),
    "across the sum": (lambda a, b: torch.mm(COLUMNS(a), COLUMNS(b)), ((128, 256), (256, 32)), "do not lie along the sum", "h100"),
    "scaled again": (lambda a, b: torch.mm(ROWS(a) * 2, COLUMNS(b)), ((32, 256), (256, 32)), "is scaled once more", "h100"),
    "sizes of blocks": (lambda a, b: torch.mm(ROWS(a), quantizer(MX, 0)(b)), ((32, 256), (256, 32)), "blocks of 128 can't be multiplied with blocks of 32", "h100"),
    "rearranged": (lambda a, b: torch.mm(ROWS(a).view(16, 2, 256).transpose(0, 1).reshape(32, 256), COLUMNS(b)), ((32, 256), (256, 32)), "copied to another layout", "h100"),
    "e5m2 twice": (lambda a, b: torch.mm(quantizer(MX, 1, dtype=E5M2)(a), quantizer(MX, 0, dtype=E5M2)(b)), ((32, 256), (256, 32)), "both operands are float8_e5m2", "sm_100"),
    "e5m2 in blocks of 128": (lambda a, b: torch.mm(quantizer(BLOCKWISE, 1, dtype=E5M2)(a), COLUMNS(b)), ((32, 256), (256, 32)), "not float8_e4m3fn in rows", "h100"),
    "batches": (lambda a, b: torch.bmm(ROWS(a).view(2, 16, 256), COLUMNS(b).view(2, 256, 32)), ((32, 256), (512, 32)), "one of 2 matrices", "h100"),
}  # fmt: skip


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("case", REFUSALS)
def test_a_declined_matmul_does_not_change_the_graph(case: str) -> None:
    function, shapes, reason, target = REFUSALS[case]
    inputs = [torch.randn(shape) for shape in shapes]
    before = text(capture(function, *inputs))
    module = capture(function, *inputs)
    context = run(module, ListMatmuls(), BlockwiseMM(), config=Config(recipe=None, target=target))
    (gemm,) = context.gemms.values()
    assert gemm.status == "declined"
    assert re.search(reason, gemm.reason), gemm.reason
    assert text(module) == before
