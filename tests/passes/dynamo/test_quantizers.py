"""Test which operands a recipe quantizes for each matmul of a compiled model, against the float64 oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.base import scaling
from fp8pass.base.errors import warn_once
from fp8pass.base.scaling import E4M3, E5M2
from fp8pass.graph.refusal import LeftOut, Reject
from fp8pass.passes.common.matmul_calls import Dims
from fp8pass.passes.dynamo.quantizers import is_uniform, quantizers
from fp8pass.quant import ops
from fp8pass.recipes import BlockwiseScaling, DelayedScaling, DynamicScaling, MXFP8Scaling, Recipe, RowwiseScaling
from tests.helpers import oracle
from tests.helpers.harness import annotated, compiled, sqnr, verdicts
from tests.helpers.models import Block, make

pytestmark = pytest.mark.filterwarnings("ignore:fp8pass. (blockwise|mxfp8) kernels exist")

ALL = ("output", "grad_input", "grad_weight")


def rows(x: Tensor, dim: int) -> Tensor:
    return oracle.qdq_rows(x, dim)


def blocks(x: Tensor, dim: int) -> Tensor:
    return oracle.qdq_blocks(x, *((1, 128) if dim else (128, 1)))


def mx(x: Tensor, dim: int, fmt: str = "e4m3") -> Tensor:
    return oracle.qdq_mx(x, fmt) if dim else oracle.qdq_mx(x.t(), fmt).t()


LINEAR = Dims(("b", "s", "k"), ("n", "k"), ("b", "s", "n"))


def found(recipe: Recipe, dims: Dims = LINEAR, **shapes: tuple[int, ...]) -> dict[Any, Any]:
    sizes = {"input": (4, 32, 256), "weight": (128, 256), "grad_output": (4, 32, 128), **shapes}
    tensors: Any = {role: torch.empty(shape) for role, shape in sizes.items()}
    return {kind: quantizers(recipe, kind, dims, tensors, record=True) for kind in ALL}


@pytest.mark.passes
def test_tensorwise_recipes_quantize_a_tensor_in_one_way() -> None:
    for recipe in (DynamicScaling(), DelayedScaling()):
        pairs = found(recipe)
        assert is_uniform(pairs, trains=True)
        assert [q.dtype for q in pairs["grad_input"]] == [E5M2, E4M3]
        assert [q.dtype for q in found(type(recipe)(fp8_format="e4m3"))["grad_input"]] == [E4M3, E4M3]


@pytest.mark.passes
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


@pytest.mark.passes
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


@pytest.mark.passes
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


@pytest.mark.passes
@pytest.mark.parametrize("pow2", [True, False])
def test_powers_of_2_are_a_choice(pow2: bool) -> None:
    x = torch.randn(16, 128)
    for recipe, expected in (
        (RowwiseScaling(power_of_2=pow2), oracle.qdq_rows(x, 1, pow2=pow2)),
        (BlockwiseScaling(power_of_2=pow2), oracle.qdq_blocks(x, 1, 128, pow2=pow2)),
    ):
        y = annotated(lambda a, b: a @ b, recipe=recipe)(x, torch.eye(128))
        torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.passes
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


@pytest.mark.passes
@pytest.mark.parametrize("amax", [0.0, 1e-30, 2.0**-100, 1.0, 447.9, 448.0, 448.1, 3e38, math.inf, math.nan])
def test_e8m0_codes(amax: float) -> None:
    assert int(scaling.e8m0_from_amax(torch.tensor([amax]), 448.0)) == oracle.e8m0(amax)


@pytest.mark.passes
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


@pytest.mark.passes
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


class Each(nn.Module):
    """Layers, each with its own input."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 48, bias=False) for _ in range(n))

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        return [layer(x) for layer, x in zip(self.layers, xs, strict=True)]


@pytest.mark.compiled
@pytest.mark.parametrize("kinds_of_recipe", [(DynamicScaling, RowwiseScaling), (DelayedScaling,)])
def test_a_matmul_in_high_precision(kinds_of_recipe: tuple[Any, ...]) -> None:
    """This matmul alone has the exact result; the others stay as they were, and strict raises nothing."""
    cases = [(of, kind) for of in kinds_of_recipe for kind in ALL]
    model = Each(len(cases))
    xs, gs = ([torch.randn(16, n, requires_grad=n == 32) for _ in cases] for n in (32, 48))
    recipes = {
        label: {f"layers.{i}": of(high_precision=(kind,) if but_one else ()) for i, (of, kind) in enumerate(cases)}
        for label, but_one in (("exact", False), ("all", False), ("but one", True), ("run", True))
    }
    results = {}
    for label, how in (("exact", lambda f, **_: f), ("all", annotated), ("but one", annotated), ("run", compiled)):
        for t in (*xs, *model.parameters()):
            t.grad = None
        with verdicts() as report:
            ys = how(model, recipe=recipes[label], **({"strict": True} if how is compiled else {}))(xs)
            torch.autograd.backward(ys, gs)
        found = zip(ys, xs, model.layers, strict=True)
        results[label] = [dict(zip(ALL, (y.detach(), x.grad, m.weight.grad), strict=True)) for y, x, m in found]
    assert len(report.declined) == len(cases)
    for i, (of, kind) in enumerate(cases):
        for other in ALL:
            expected = results["exact" if other == kind else "all"][i][other]
            assert expected is not None
            torch.testing.assert_close(results["but one"][i][other], expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(results["run"][i][other], expected, rtol=1e-5, atol=1e-5)
        (declined,) = (g for g in report.declined if g.name == f"layers.{i}")
        assert (declined.kind, declined.rule) == (kind, "high precision")
        assert declined.reason == f"{of.__name__}(high_precision=('{kind}',)) keeps {kind} in high precision"


FAST: list[tuple[str, ...]] = [(), ("output",), ("grad_weight",), ALL]


@pytest.mark.compiled
@pytest.mark.parametrize(
    "of_rows", [FAST[1:3], pytest.param(FAST, marks=pytest.mark.variant)], ids=["some by rows", "all"]
)
def test_fast_accumulation_is_set_by_matmul(of_rows: list[tuple[str, ...]]) -> None:
    recipes = [*(DynamicScaling(fast_accum=f) for f in FAST), *(RowwiseScaling(fast_accum=f) for f in of_rows)]
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in recipes))
    with verdicts() as report:
        run = compiled(model, recipe={f"{i}": recipe for i, recipe in enumerate(recipes)})
        run(torch.randn(16, 32, requires_grad=True)).sum().backward()
    assert len(report.gemms) == 3 * len(recipes)
    for i, kinds in enumerate([*FAST, *of_rows]):
        assert {g.kind for g in report.gemms if g.name == f"{i}" and g.fast_accum} == set(kinds), recipes[i]


@pytest.mark.compiled
def test_recipes_by_module() -> None:
    with verdicts() as report:
        compiled(
            nn.Sequential(make(Block), nn.Linear(32, 32)), recipe={"0.down": None, "0": "rowwise", "1": "delayed"}
        )(torch.randn(16, 32)).sum().backward()
    assert {(g.name, g.scaling) for g in report.gemms} == {("0.up", "rowwise"), ("0.down", ""), ("1", "delayed")}
    assert {g.reason for g in report.declined} == {"'0.down' matches the pattern '0.down', whose recipe is None"}
    config = fp8pass.Config(recipe={"layers.*.attn.*": "rowwise", "head": DelayedScaling(margin=1)})
    assert config.recipe_of("layers.3.attn.q")[0] == RowwiseScaling()
    assert config.recipe_of("head")[0] == DelayedScaling(margin=1)
    assert config.recipe_of("tail") == (None, "'tail' matches no pattern of recipe={'layers.*.attn.*', 'head'}")


@pytest.mark.compiled
def test_two_delayed_recipes_in_one_graph_have_a_state_each() -> None:
    model = make(Block)
    recipe = {"up": DelayedScaling(amax_history_len=4), "down": DelayedScaling(amax_history_len=8, margin=1)}
    for how in (annotated, compiled):
        run = how(model, recipe=recipe)
        for _ in range(2):
            x = torch.randn(16, 32)
            y = run(x)
            assert sqnr(model(x), y) > 25
            y.square().sum().backward()
        state = fp8pass.state(model).state_dict()
        assert (len(state["up.input.amax_history"]), len(state["down.input.amax_history"])) == (4, 8)
        amax = float(model.down.weight.detach().abs().max())
        assert float(state["down.weight.scale"]) == pytest.approx(448 / amax / 2, rel=1e-6)


@pytest.mark.compiled
@pytest.mark.parametrize("how", [annotated, compiled], ids=["annotated", "compiled"])
@pytest.mark.parametrize("name", ["rowwise", "blockwise", "mxfp8", "mxfp8, hybrid"])
def test_a_linear_layer_against_the_float64_oracle(name: str, how: Callable[..., Any]) -> None:
    """Each matmul's operands are quantized from high precision, along the dimension that the matmul sums."""
    layer = nn.Linear(128, 256)
    x, g = torch.randn(4, 32, 128) * 3, torch.randn(4, 32, 256) * 1e-6
    x[0, 0, :64], x[1] = 1e-3, 0.0
    x.requires_grad_()
    y = how(layer, recipe=MXFP8Scaling(fp8_format="hybrid") if "hybrid" in name else name)(x)
    y.backward(g)
    x2, g2, w = x.detach().view(128, 128), g.view(128, 256), layer.weight.detach()
    along = {"rowwise": rows, "blockwise": blocks}.get(name, mx)
    of_gradient = partial(mx, fmt="e5m2") if "hybrid" in name else along
    if name == "blockwise":
        w_out = w_in = oracle.qdq_blocks(w, 128, 128)
    else:
        w_out, w_in = along(w, 1), along(w, 0)
    assert x.grad is not None
    assert layer.weight.grad is not None
    for actual, expected in (
        (y.view(128, 256), along(x2, 1) @ w_out.t() + layer.bias.double()),
        (x.grad.view(128, 128), of_gradient(g2, 1) @ w_in),
        (layer.weight.grad, of_gradient(g2, 0).t() @ along(x2, 0)),
    ):
        assert sqnr(expected, actual) > 110


PRODUCTS: list[tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = [
    (lambda a, b: torch.einsum("...k,kn->...n", a, b), (2, 3, 16, 32), (32, 24)),
    (lambda a, b: torch.einsum("bshd,hdm->bsm", a, b), (2, 16, 4, 8), (4, 8, 24)),
    (lambda a, b: torch.einsum("bij,bjk->bik", a, b), (1, 16, 32), (2, 32, 48)),
    (lambda a, b: a @ b, (16, 32), (2, 32, 24)),
    (lambda a, b: torch.tensordot(a, b, dims=([0, 2], [1, 0])), (8, 16, 4), (4, 8, 24)),
    (lambda a, b: torch.einsum("bij,bjk->bik", a, b), (3, 16, 32), (1, 32, 48)),
    (lambda a, b: torch.einsum("bik,bjk->bij", a, b), (2, 16, 32), (2, 24, 32)),
    (lambda a, b: a @ b, (2, 1, 16, 32), (3, 32, 24)),
]


@pytest.mark.compiled
@pytest.mark.parametrize("cases", [PRODUCTS[:5], pytest.param(PRODUCTS, marks=pytest.mark.variant)], ids=len)
def test_einsum_and_broadcast_operands(cases: list[Any]) -> None:
    """If an operand is repeated for the other's batches, its gradient is the sum over them."""
    inputs = [[torch.randn(shape, requires_grad=True) for shape in shapes] for _, *shapes in cases]

    def everything(inputs: list[list[Tensor]]) -> list[Tensor]:
        return [function(a, b) for (function, _, _), (a, b) in zip(cases, inputs, strict=True)]

    results = []
    for how in (lambda f, **_: f, annotated, compiled):
        with verdicts() as report:
            ys = how(everything, recipe="rowwise")(inputs)
            loss = sum((y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum() for y in ys)
            results.append([*ys, *torch.autograd.grad(loss, [x for of in inputs for x in of])])
    assert [g.reason for g in report.declined] == []
    assert sum(g.kind == "output" for g in report.rewritten) == len(cases)
    for i, (exact, reference, actual) in enumerate(zip(*results, strict=True)):
        assert sqnr(exact, reference) > 24, i
        assert sqnr(reference, actual) > 100, i


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["blockwise", "mxfp8"])
def test_a_recipe_without_kernels_says_so_before_compiling_once(name: str) -> None:
    warn_once.cache_clear()
    layer, x = nn.Linear(128, 128), torch.randn(128, 128)
    with pytest.warns(
        UserWarning, match=f"{name} kernels exist on sm_.* not on cpu. .* correct, but not faster"
    ) as caught:
        compiled(layer.requires_grad_(False), recipe=name)(x)
    assert len([w for w in caught if "kernels exist" in str(w.message)]) == 1
    with pytest.raises(Exception, match=f"strict: output of .* does not run in FP8: {name} kernels exist"):
        compiled(nn.Linear(128, 128), recipe=name, strict=True)(x)


@pytest.mark.compiled
def test_a_call_of_which_nothing_is_left_stays_as_it_is() -> None:
    x, layer = torch.randn(16, 40, requires_grad=True), nn.Linear(40, 24)
    for recipe in ("blockwise", RowwiseScaling(high_precision=ALL)):
        with verdicts() as report:
            y = annotated(layer, recipe=recipe)(x)
            compiled(layer, recipe=recipe)(x).sum().backward()
        assert torch.equal(y, layer(x))
        assert {g.rule for g in report.gemms} == {"block size" if recipe == "blockwise" else "high precision"}


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:fp8pass. a graph has no matmul")
def test_sums_and_many_products_are_left_out_before_anything_is_quantized() -> None:
    cases: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = {
        "takes a sum before": (lambda a, b: torch.tensordot(a, b, dims=([1], [0])), (16, 32), (1, 48)),
        "1600 products of": (lambda a, b: a @ b, (40, 1, 16, 32), (40, 32, 48)),
    }
    for reason, (function, shape_a, shape_b) in cases.items():
        a, b = torch.randn(shape_a), torch.randn(shape_b)
        with verdicts() as report:
            y = compiled(function, recipe="rowwise")(a, b)
        assert sqnr(function(a, b), y) > 100
        assert {reason in g.reason for g in report.gemms} == {True}, report.reasons()
