"""The quantizers that a recipe puts around a matmul, and their numbers against the float64 oracle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8pass.base import scaling
from fp8pass.base.scaling import E4M3, E5M2
from fp8pass.graph.refusal import LeftOut, Reject
from fp8pass.passes.common.matmul_calls import Dims
from fp8pass.passes.dynamo.quantizers import is_uniform, quantizers
from fp8pass.quant import ops
from fp8pass.recipes import BlockwiseScaling, DelayedScaling, DynamicScaling, MXFP8Scaling, Recipe, RowwiseScaling
from tests.helpers import oracle
from tests.helpers.harness import annotated
from tests.helpers.quantizers import ALL

pytestmark = pytest.mark.filterwarnings("ignore:fp8pass. (blockwise|mxfp8) kernels exist")


LINEAR = Dims(("b", "s", "k"), ("n", "k"), ("b", "s", "n"))


def found(recipe: Recipe, dims: Dims = LINEAR, **shapes: tuple[int, ...]) -> dict[Any, Any]:
    sizes = {"input": (4, 32, 256), "weight": (128, 256), "grad_output": (4, 32, 128), **shapes}
    tensors: Any = {role: torch.empty(shape) for role, shape in sizes.items()}
    return {kind: quantizers(recipe, kind, dims, tensors, record=True) for kind in ALL}


def test_tensorwise_recipes_quantize_a_tensor_in_one_way() -> None:
    for recipe in (DynamicScaling(), DelayedScaling()):
        pairs = found(recipe)
        assert is_uniform(pairs, trains=True)
        assert [q.dtype for q in pairs["grad_input"]] == [E5M2, E4M3]
        assert [q.dtype for q in found(type(recipe)(fp8_format="e4m3"))["grad_input"]] == [E4M3, E4M3]


def test_rows_lie_along_the_dimension_that_each_matmul_sums() -> None:
    recipe = RowwiseScaling()
    pairs = found(recipe)
    assert not is_uniform(pairs, trains=True)
    assert is_uniform({"output": pairs["output"]}, trains=False)
    rows = lambda *dims: ops.Rowwise(recipe, E4M3, dims)  # noqa: E731
    assert pairs == {
        "output": (rows(2), rows(1)),
        "grad_input": (rows(2), rows(0)),
        "grad_weight": (rows(0, 1), rows(0, 1)),
    }


def test_blocks_of_weights_are_square_and_serve_twice() -> None:
    recipe = BlockwiseScaling()
    pairs = found(recipe)
    square, blocks = ops.Blockwise(recipe, E4M3, 128, square=True), lambda *d: ops.Blockwise(recipe, E4M3, 128, dims=d)
    assert pairs == {
        "output": (blocks(2), square),
        "grad_input": (blocks(2), square),
        "grad_weight": (blocks(0, 1), blocks(0, 1)),
    }
    mx = MXFP8Scaling()
    blocks = lambda *d: ops.Blockwise(mx, E4M3, 32, dims=d)  # noqa: E731
    assert found(mx) == {
        "output": (blocks(2), blocks(1)),
        "grad_input": (blocks(2), blocks(0)),
        "grad_weight": (blocks(0, 1), blocks(0, 1)),
    }


@pytest.mark.parametrize(
    ("recipe", "shapes", "kinds", "reason"),
    [
        (BlockwiseScaling(), {"input": (4, 31, 256), "grad_output": (4, 31, 128)}, {"grad_weight"}, r"input \[4, 31, 256\] has 124 elements along the sum, not a multiple of 128"),
        (BlockwiseScaling(), {"weight": (100, 256), "grad_output": (4, 32, 100)}, {"output", "grad_input"}, "blocks of 128, and (weight|grad_output)"),
        (MXFP8Scaling(), {"weight": (128, 40), "input": (4, 32, 40)}, {"output"}, r"mxfp8 scales blocks of 32, and input \[4, 32, 40\] has 40 elements"),
    ],
)  # fmt: skip
def test_sizes_that_are_not_multiples_of_blocks(
    recipe: Recipe, shapes: dict[str, Any], kinds: set[str], reason: str
) -> None:
    import re

    rejects = {k: r for k, r in found(recipe, **shapes).items() if isinstance(r, Reject)}
    assert set(rejects) == kinds
    for reject in rejects.values():
        assert not isinstance(reject, LeftOut)
        assert re.search(reason, str(reject)), reject


@pytest.mark.parametrize("pow2", [True, False])
def test_powers_of_2_are_a_choice(pow2: bool) -> None:
    x = torch.randn(16, 128)
    for recipe, expected in (
        (RowwiseScaling(power_of_2=pow2), oracle.qdq_rows(x, 1, pow2=pow2)),
        (BlockwiseScaling(power_of_2=pow2), oracle.qdq_blocks(x, 1, 128, pow2=pow2)),
    ):
        y = annotated(lambda a, b: a @ b, recipe=recipe)(x, torch.eye(128))
        torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["dynamic", "rowwise", "blockwise", "mxfp8"])
def test_nan_and_inf_are_never_hidden(name: str) -> None:
    """The row that holds one becomes NaN, or everything if there is a single scale."""
    run = annotated(lambda a, b: a @ b, recipe=name)
    for value in (math.nan, math.inf, -math.inf):
        x = torch.randn(16, 256)
        x[3, 5] = value
        hit = run(x, torch.eye(256)).isnan().any(1)
        assert hit[3], value
        assert hit.all() if name == "dynamic" else not hit[[*range(3), *range(4, 16)]].any(), value


@pytest.mark.parametrize("amax", [0.0, 1e-30, 2.0**-100, 1.0, 447.9, 448.0, 448.1, 3e38, math.inf, math.nan])
def test_e8m0_codes(amax: float) -> None:
    assert int(scaling.e8m0_from_amax(torch.tensor([amax]), 448.0)) == oracle.e8m0(amax)


def test_e8m0_codes_of_subnormal_numbers() -> None:
    """Where amax / 448 is subnormal or 0 in float32, the codes are the smallest ones, and no element saturates."""
    amaxes = torch.tensor([2.0**-126, 1e-40, 1e-45])
    assert scaling.e8m0_from_amax(amaxes, 448.0).tolist() == [1, 1, 0]


EMPTY: dict[str, tuple[ops.Quantizer, tuple[Tensor, ...]]] = {
    "delayed": (ops.Delayed(DelayedScaling(), E4M3, 0, 0, False, True), (torch.tensor([2.0]), torch.tensor([3.0]))),
    "bootstrap": (ops.Delayed(DelayedScaling(), E4M3, 0, 0, True, True), (torch.zeros(1), torch.tensor([3.0]))),
    "dynamic": (ops.Dynamic(DynamicScaling(), E4M3), ()),
    "rowwise": (ops.Rowwise(RowwiseScaling(), E4M3, (1,)), ()),
    "columns": (ops.Rowwise(RowwiseScaling(), E4M3, (0,)), ()),
    "blockwise": (ops.Blockwise(BlockwiseScaling(), E4M3, 128, dims=(1,)), ()),
    "blockwise columns": (ops.Blockwise(BlockwiseScaling(), E4M3, 128, dims=(0,)), ()),
    "squares": (ops.Blockwise(BlockwiseScaling(), E4M3, 128, square=True), ()),
    "mxfp8": (ops.Blockwise(MXFP8Scaling(), E4M3, 32, dims=(1,)), ()),
    "grouped": (ops.Groupwise(RowwiseScaling(), E4M3), (torch.zeros(4, dtype=torch.int32),)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_tensor_without_rows(name: str) -> None:
    """An expert without tokens has such a tensor. It records nothing."""
    quantizer, state = EMPTY[name]
    before = [t.clone() for t in state]
    x = torch.empty(0, 128, dtype=torch.bfloat16, requires_grad=True)
    y = ops.qdq_operand(x, quantizer, *state)
    ops.qdq_gradient(y, quantizer, *state).sum().backward()
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert x.grad is not None
    assert all(torch.equal(a, b) for a, b in zip(before, state, strict=True))
