"""Test the write_matmuls pass in compiled graphs: matrix products in other spellings become matmuls, and run in FP8."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8pass.passes.common.matmul_calls import signature_of
from fp8pass.passes.dynamo.write_matmuls import WriteMatmuls
from tests.helpers.annotate import annotation
from tests.helpers.harness import annotated, compiled, on_dynamos_graph, sqnr, verdicts

Form = tuple[Callable[..., Any], tuple[tuple[int, ...], ...], int]


def in_place(name: str) -> Callable[..., Tensor]:
    def function(y: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = y.clone()
        result: Tensor = getattr(y, name)(a, b, beta=0.5, alpha=2)
        return result + y

    return function


WRITTEN: dict[str, Form] = {
    "addmm_": (in_place("addmm_"), ((16, 24), (16, 32), (32, 24)), 1),
    "addbmm_": (in_place("addbmm_"), ((16, 24), (3, 16, 32), (3, 32, 24)), 1),
    "baddbmm_": (in_place("baddbmm_"), ((3, 16, 24), (3, 16, 32), (3, 32, 24)), 1),
    "multi_dot": (lambda *x: torch.linalg.multi_dot(x), ((16, 32), (32, 48), (48, 8), (8, 32)), 3),
    "multi_dot of vectors": (lambda *x: torch.linalg.multi_dot(x), ((32,), (32, 48), (48,)), 2),
    "chain_matmul": (lambda *x: torch.chain_matmul(*x), ((16, 32), (32, 48), (48, 8)), 2),
    "matrix_power": (lambda a: torch.linalg.matrix_power(a, 5) + a.matrix_power(-2), ((16, 16),), 4),
    "bilinear": (F.bilinear, ((16, 24), (16, 32), (5, 24, 32), (5,)), 1),
    "bilinear, other side": (F.bilinear, ((2, 8, 32), (2, 8, 24), (5, 32, 24)), 1),
    "lstm_cell": (lambda x, h, c, *w: torch.lstm_cell(x, (h, c), *w), ((4, 32), *[(4, 16)] * 2, (64, 32), (64, 16)), 2),
    "gru_cell": (torch.gru_cell, ((4, 32), (4, 16), (48, 32), (48, 16), (48,), (48,)), 2),
    "rnn_tanh_cell": (torch.rnn_tanh_cell, ((4, 32), (4, 16), (16, 32), (16, 16), (16,), (16,)), 2),
    "rnn_relu_cell": (torch.rnn_relu_cell, ((4, 32), (4, 16), (16, 32), (16, 16)), 2),
    "a list": (lambda *x: torch.einsum("ij,jk", x), ((16, 32), (32, 24)), 1),
    "numbers": (lambda a, b: torch.einsum(a, [..., 30], b, [30, 2], [2, ...]), ((2, 16, 32), (32, 24)), 1),
    "of aten": (lambda *x: torch.ops.aten.einsum("ij,jk->ik", x), ((16, 32), (32, 24)), 1),
    "three": (lambda *x: torch.einsum("ij,jk,kl->il", *x), ((16, 32), (32, 24), (24, 8)), 2),
    "four": (lambda *x: torch.einsum("...ij,jk,kl,lm", *x), ((2, 16, 32), (32, 24), (24, 8), (8, 16)), 3),
    "biaffine": (lambda *x: torch.einsum("bi,nij,bj->bn", *x), ((16, 32), (6, 32, 24), (16, 24)), 2),
    "a sum": (lambda *x: torch.einsum("...ij,jk->ik", *x), ((3, 16, 32), (32, 24)), 1),
    "a sum of both": (lambda *x: torch.einsum("ijb,cjk->ik", *x), ((16, 32, 3), (2, 32, 24)), 1),
    "a diagonal": (lambda *x: torch.einsum("iij,jkk->ik", *x), ((16, 16, 32), (32, 24, 24)), 1),
    "repeated": (lambda *x: torch.einsum("bij,bjk,kl->bil", *x), ((1, 16, 32), (3, 32, 24), (24, 8)), 2),
}


SPELLED: dict[str, Form] = {
    "__rmatmul__": (lambda a, b: b.__rmatmul__(a), ((16, 32), (32, 24)), 1),
    "imatmul": (lambda a, b: imatmul(a, b), ((16, 32), (32, 24)), 1),
    "inner": (lambda a, b: torch.inner(a, b) + a.inner(b), ((2, 16, 32), (24, 32)), 2),
    "addbmm": (lambda y, a, b: torch.addbmm(y, a, b, beta=0.5, alpha=2), ((16, 24), (3, 16, 32), (3, 32, 24)), 1),
    "aten.mm": (lambda a, b: torch.ops.aten.mm(a, b) + torch.ops.aten.mm.default(a, b), ((16, 32), (32, 24)), 2),
    "aten.addmm": (lambda y, a, b: torch.ops.aten.addmm(y, a, b, beta=2), ((16, 24), (16, 32), (32, 24)), 1),
    "an unbound method": (lambda a, b: torch.Tensor.mm(a, b), ((16, 32), (32, 24)), 1),
}


FORMS = {**WRITTEN, **SPELLED}


def imatmul(a: Tensor, b: Tensor) -> Tensor:
    a @= b
    return a


def leaves(form: str) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).div(4).requires_grad_() for shape in FORMS[form][1]]


def total(result: Any) -> Tensor:
    return sum(r.sin().sum() for r in (result if isinstance(result, tuple) else [result]))  # type: ignore[return-value]


def grads(function: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the `total` of the outputs, and the gradients of all inputs."""
    y = total(function(*inputs))
    return [y.detach(), *torch.autograd.grad(y, inputs)]


@pytest.mark.passes
@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize("form", FORMS)
def test_numbers_and_gradients_are_the_same(form: str) -> None:
    function, _, matmuls = FORMS[form]
    found: list[int] = []

    def backend(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        count = (form in WRITTEN) * (1 + (form == "matrix_power"))
        module, applied = on_dynamos_graph(module, WriteMatmuls(), WriteMatmuls())
        assert applied == [count, 0]
        calls = [n for n in module.graph.nodes if signature_of(n)]
        assert all(tuple(n.meta["example_value"].shape) for n in calls if "of vectors" not in form)
        found.append(len(calls))
        return module.forward

    torch._dynamo.reset()
    inputs = leaves(form)
    for a, b in zip(grads(torch.compile(function, backend=backend), inputs), grads(function, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert found == [matmuls]


IN_FP8 = [form for form in FORMS if form not in ("multi_dot of vectors", "matrix_power")]


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize(
    "forms",
    [
        ["addmm_", "gru_cell", "three", "addbmm"],
        pytest.param(IN_FP8, marks=pytest.mark.variant),
    ],
    ids=len,
)
def test_they_run_in_fp8(forms: list[str]) -> None:
    """One graph has them all; results are those of the annotated graph, run eagerly."""
    inputs = [leaves(form) for form in forms]

    def function(inputs: list[list[Tensor]]) -> list[Tensor]:
        return [total(FORMS[form][0](*of)) for form, of in zip(forms, inputs, strict=True)]

    with verdicts() as report:
        actual = compiled(function, recipe="dynamic", strict=True)(inputs)
        of_ours = torch.autograd.grad(sum(actual), [x for of in inputs for x in of])  # type: ignore[arg-type]
    assert report.declined == []
    assert sum(g.kind == "output" for g in report.rewritten) == sum(FORMS[form][2] for form in forms)
    expected = annotated(function, recipe="dynamic")(inputs)
    of_reference = torch.autograd.grad(sum(expected), [x for of in inputs for x in of])
    pairs = [*zip(expected, actual, strict=True), *zip(of_reference, of_ours, strict=True)]
    assert min(sqnr(e, a) for e, a in pairs) > 100


@pytest.mark.compiled
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_one_graph_serves_all_batch_sizes(kind: Callable[..., nn.Module]) -> None:
    with verdicts() as report:
        run = compiled(kind(32, 32), recipe="dynamic", dynamic=True, strict=True)
        for rows in (16, 48, 64):
            total(run(torch.randn(rows, 32))).backward()
    assert sum(g.kind == "output" for g in report.rewritten) == 2


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.pair = nn.LSTMCell(32, 32), nn.Bilinear(32, 32, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, c = self.cell(x, (x + 1, x))
        out: Tensor = self.pair(h, c)
        return out


@pytest.mark.compiled
def test_layers_keep_the_names_and_types_that_they_have_under_autocast() -> None:
    model, x = Layers(), torch.randn(16, 32)

    def under_autocast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)  # type: ignore[no-any-return]

    with verdicts() as report:
        y = compiled(under_autocast, strict=True)(x)
    assert {g.name for g in report.rewritten} == {"cell.weight_ih", "cell.weight_hh", "pair"}
    expected = under_autocast(x)
    assert y.dtype == expected.dtype
    assert sqnr(expected, y) > 15


@pytest.mark.compiled
def test_what_is_in_place_under_autocast_is_declined() -> None:
    """Autocast would cast the operands of the matmul that replaces the op."""

    def function(y: Tensor, a: Tensor) -> Tensor:
        return y.clone().addmm_(a, a)

    y, a = torch.randn(2, 16, 16)
    with verdicts() as report, torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        with pytest.warns(UserWarning, match="no matmul in FP8"):
            actual = compiled(function, recipe="dynamic")(y, a)
        assert torch.equal(actual, function(y, a))
    assert report.reasons() == {
        "addmm_ is not cast by autocast; assign the result of torch.addmm instead": 1,
    }


@pytest.mark.compiled
def test_attention_of_torch_raises_nothing_under_strict() -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    with verdicts() as report:
        compiled(layer, strict=True)(torch.randn(2, 8, 32)).sum().backward()
    assert {(g.rule, g.name) for g in report.declined} <= {("attention", "self_attn.scaled_dot_product_attention")}
    assert len(report.rewritten) == 11


@pytest.mark.compiled
def test_a_product_that_is_written_into_out() -> None:
    """The tensor that the caller gave, or a part of it, gets the product."""

    def function(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        torch.mm(a, b, out=y[:16])
        torch.addmm(y[:16], a, b, out=y[16:], alpha=0.5)
        return y * 2

    torch.manual_seed(0)
    a, b = torch.randn(16, 32), torch.randn(32, 24)
    exact, found = torch.zeros(2, 32, 24)
    with torch.no_grad(), verdicts() as report:
        wanted = function(a, b, exact)
        actual = compiled(function, recipe="dynamic", strict=True)(a, b, found)
    assert len(report.rewritten) == 2
    assert 25 < sqnr(wanted, actual) < 60 and 25 < sqnr(exact, found) < 60


@pytest.mark.passes
@pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="no graph has such a call on torch 2.11: its addmm raises TypeError for out_dtype on the fake tensors of Dynamo",
)
def test_a_product_keeps_the_dtype_that_it_was_asked_for() -> None:
    """Only GPUs have `out_dtype`: float32 here, into which the bias is added, of products of bfloat16."""
    with FakeTensorMode():
        y, a, b = (torch.empty(32, 32, device="cuda", dtype=dtype) for dtype in (torch.float32, *[torch.bfloat16] * 2))
        function = functools.partial(torch.addmm, out_dtype=torch.float32)
        module = annotation(function, y, a, b, training=False, recipe="dynamic", target="h100", min_speedup=0).module
    (product,) = module.graph.find_nodes(op="call_function", target=torch.mm)
    assert product.kwargs == {"out_dtype": torch.float32}
