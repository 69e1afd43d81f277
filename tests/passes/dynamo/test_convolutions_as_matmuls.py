"""Convolutions in compiled models: those that are matmuls against the float64 oracle, and the report on the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.graph.builder import laid_out_alike
from fp8pass.graph.pass_base import DynamoContext
from fp8pass.graph.refusal import LeftOut, Reject
from fp8pass.options.config import Config
from fp8pass.passes.common.matmul_calls import signature_of
from fp8pass.passes.dynamo.convolutions_as_matmuls import ConvolutionsAsMatmuls
from fp8pass.recipes import KINDS, StaticScaling
from tests.helpers import oracle
from tests.helpers.harness import annotated, compiled, expect_graph, on_dynamos_graph, sqnr, train, verdicts

# their overloads do not know that a starred argument has three tensors
conv1d: Any = F.conv1d
conv2d: Any = F.conv2d
conv3d: Any = F.conv3d
conv_transpose1d: Any = F.conv_transpose1d
conv_transpose2d: Any = F.conv_transpose2d
conv_transpose3d: Any = F.conv_transpose3d
LAST, LAST_3D = torch.channels_last, torch.channels_last_3d


@dataclass(frozen=True)
class Form:
    """A call of a convolution. shapes: of input, weight and bias. x, w: memory formats; None for the usual one."""

    call: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    x: torch.memory_format | None = None
    w: torch.memory_format | None = None
    copies_weight: bool = False


def leaves(form: Form) -> list[Tensor]:
    """Return the input, and weight and bias as parameters, whose sizes are never symbolic."""
    torch.manual_seed(0)
    formats = [form.x, form.w, None]
    tensors = [torch.randn(shape) / 4 for shape in form.shapes]
    kept = [t if f is None else t.to(memory_format=f) for t, f in zip(tensors, formats, strict=False)]
    return [kept[0].requires_grad_(), *map(torch.nn.Parameter, kept[1:])]


FORMS: dict[str, Form] = {
    "kernel 1": Form(conv2d, ((2, 32, 6, 5), (48, 32, 1, 1), (48,))),
    "kernel 1, channels last": Form(conv2d, ((2, 32, 6, 5), (48, 32, 1, 1), (48,)), LAST, LAST),
    "kernel 1, input last": Form(conv2d, ((2, 32, 6, 5), (48, 32, 1, 1)), LAST),
    "kernel 1, same": Form(lambda *x: conv2d(*x, padding="same"), ((2, 32, 6, 5), (48, 32, 1, 1))),
    "kernel 1, stride 2": Form(lambda *x: conv2d(*x, stride=2), ((2, 32, 7, 6), (48, 32, 1, 1), (48,))),
    "kernel 1, dilated": Form(lambda *x: conv2d(*x, dilation=3), ((2, 32, 7, 6), (48, 32, 1, 1))),
    "patches": Form(lambda *x: conv2d(*x, stride=4), ((2, 3, 16, 20), (32, 3, 4, 4), (32,))),
    "patches, remainder": Form(lambda *x: conv2d(*x, stride=4), ((2, 3, 18, 23), (32, 3, 4, 4), (32,))),
    "patches, channels last": Form(lambda *x: conv2d(*x, stride=2), ((2, 16, 8, 9), (32, 16, 2, 2)), LAST, LAST),
    "patches, weight last": Form(lambda *x: conv2d(*x, stride=2), ((2, 16, 8, 8), (32, 16, 2, 2)), None, LAST),
    "patches, input last": Form(lambda *x: conv2d(*x, stride=2), ((2, 16, 8, 8), (32, 16, 2, 2)), LAST),
    "rows": Form(lambda *x: conv2d(*x, stride=(1, 3)), ((2, 16, 5, 9), (32, 16, 1, 3), (32,))),
    "the whole": Form(conv2d, ((4, 16, 3, 3), (32, 16, 3, 3), (32,))),
    "no batch": Form(lambda *x: conv2d(*x, stride=2), ((16, 8, 9), (32, 16, 2, 2), (32,))),
    "1d, kernel 1": Form(conv1d, ((2, 32, 9), (48, 32, 1), (48,))),
    "1d, patches": Form(lambda *x: conv1d(*x, stride=3), ((2, 32, 10), (48, 32, 3), (48,))),
    "1d, no batch": Form(conv1d, ((32, 9), (48, 32, 1))),
    "3d, patches": Form(lambda *x: conv3d(*x, stride=(2, 4, 4)), ((2, 3, 4, 8, 9), (32, 3, 2, 4, 4), (32,))),
    "3d, channels last": Form(
        lambda *x: conv3d(*x, stride=2), ((2, 8, 4, 4, 6), (32, 8, 2, 2, 2), (32,)), LAST_3D, LAST_3D
    ),
    "transposed": Form(lambda *x: conv_transpose2d(*x, stride=2), ((2, 32, 5, 4), (32, 16, 2, 2), (16,))),
    "transposed, kernel 1": Form(conv_transpose2d, ((2, 32, 5, 4), (32, 16, 1, 1), (16,))),
    "transposed, channels last": Form(
        lambda *x: conv_transpose2d(*x, stride=(2, 3)), ((2, 32, 5, 4), (32, 16, 2, 3), (16,)), LAST, LAST
    ),
    "transposed, one dim": Form(lambda *x: conv_transpose2d(*x, stride=(1, 3)), ((2, 32, 5, 4), (32, 16, 1, 3), (16,))),
    "transposed, 1d": Form(lambda *x: conv_transpose1d(*x, stride=4), ((2, 32, 5), (32, 16, 4), (16,))),
    "transposed, 3d": Form(lambda *x: conv_transpose3d(*x, stride=2), ((2, 16, 3, 2, 4), (16, 8, 2, 2, 2), (8,))),
    "transposed, no batch": Form(lambda *x: conv_transpose2d(*x, stride=2), ((32, 5, 4), (32, 16, 2, 2), (16,))),
}

_IMAGE = (2, 16, 8, 8)
OTHERS: dict[str, tuple[Form, str]] = {
    "kernel 3": (Form(conv2d, (_IMAGE, (32, 16, 3, 3))), "a kernel of 3 x 3, stride 1 x 1:"),
    "padding": (Form(lambda *x: conv2d(*x, padding=1), (_IMAGE, (32, 16, 1, 1))), "stride 1 x 1, padding 1 x 1:"),
    "same": (Form(lambda *x: conv2d(*x, padding="same"), (_IMAGE, (32, 16, 3, 3))), "padding same"),
    "groups": (Form(lambda *x: conv2d(*x, groups=2), (_IMAGE, (32, 8, 1, 1))), "2 groups"),
    "overlap": (Form(lambda *x: conv2d(*x, stride=2), (_IMAGE, (32, 16, 4, 4))), "a kernel of 4 x 4, stride 2 x 2"),
    "gaps": (Form(lambda *x: conv2d(*x, stride=4), (_IMAGE, (32, 16, 2, 2))), "a kernel of 2 x 2, stride 4 x 4"),
    "dilation": (Form(lambda *x: conv2d(*x, stride=2, dilation=2), (_IMAGE, (32, 16, 2, 2))), "dilation 2 x 2"),
    "output padding": (
        Form(lambda *x: conv_transpose2d(*x, stride=2, output_padding=1), (_IMAGE, (16, 8, 2, 2))),
        "output padding 1 x 1",
    ),
    "transposed, kernel 3": (
        Form(lambda *x: conv_transpose2d(*x, stride=2), (_IMAGE, (16, 8, 3, 3))),
        "a kernel of 3 x 3, stride 2 x 2",
    ),
    "transposed, kernel 1, stride 2": (
        Form(lambda *x: conv_transpose2d(*x, stride=2), (_IMAGE, (16, 8, 1, 1))),
        "a kernel of 1 x 1, stride 2 x 2",
    ),
}
"""Convolutions that are no matmul, with a part of the reason."""


def graphs_of(function: Callable[..., Any], *inputs: Any, dynamic: bool = False, **options: Any) -> list[Any]:
    """Compile and call; return the graph after the pass, how often it was applied twice, and the result."""
    found: list[Any] = []

    def backend(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        found[:] = on_dynamos_graph(module, ConvolutionsAsMatmuls(), ConvolutionsAsMatmuls(), config=Config(**options))
        result: Callable[..., Any] = found[0].forward
        return result

    torch._dynamo.reset()
    found.append(torch.compile(function, backend=backend, dynamic=dynamic)(*inputs))
    return found


ALL = [(name, dynamic) for dynamic in (False, True) for name in FORMS if not (dynamic and name == "the whole")]
DAILY = {("patches, remainder", True)}
DAILY |= {
    (name, False) for name in FORMS if name.split(", ")[-1] not in ("dilated", "1d", "3d", "patches", "input last")
}


@pytest.mark.passes
@pytest.mark.parametrize(
    ("name", "dynamic"), [pytest.param(*c, marks=[pytest.mark.variant] * (c not in DAILY)) for c in ALL]
)
def test_numbers_gradients_and_strides_are_those_of_the_convolution(name: str, dynamic: bool) -> None:
    """The oracle is the convolution in float64."""
    form = FORMS[name]
    inputs = leaves(form)
    module, applied, y = graphs_of(form.call, *inputs, dynamic=dynamic)
    assert applied == [1, 0]
    (linear,) = (n for n in module.graph.nodes if signature_of(n))
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = form.call(*exact)
    assert laid_out_alike(y, form.call(*inputs))
    gradient = torch.randn_like(expected)
    of_ours = torch.autograd.grad(y, inputs, gradient.float())
    of_oracle = torch.autograd.grad(expected, exact, gradient)
    for ours, exactly in zip((y, *of_ours), (expected, *of_oracle), strict=True):
        torch.testing.assert_close(ours.double(), exactly, rtol=1e-5, atol=1e-5)
    assert linear.meta["example_value"].requires_grad


@pytest.mark.passes
@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if not form.copies_weight])
def test_the_view_of_the_weight_is_free(name: str) -> None:
    inputs = leaves(FORMS[name])
    module, *_ = graphs_of(FORMS[name].call, *inputs)
    (linear,) = (n for n in module.graph.nodes if signature_of(n))
    weight, view = inputs[1], linear.args[1].meta["example_value"]
    assert view._is_view() or view.untyped_storage().nbytes() == weight.untyped_storage().nbytes()
    assert sorted(view.stride())[0] == 1 and view.numel() == weight.numel()


@pytest.mark.passes
def test_a_patch_embedding() -> None:
    form = Form(lambda x, w, b: F.conv2d(x, w, b, stride=4), ((2, 3, 16, 18), (8, 3, 4, 4), (8,)))
    module, *_ = graphs_of(form.call, *leaves(form))
    expect_graph(
        module,
        """\
L_x_: "f32[2, 3, 16, 18]",
L_w_: "f32[8, 3, 4, 4]",
L_b_: "f32[8]",
l_x_ = L_x_
l_w_ = L_w_
l_b_ = L_b_
narrow: "f32[2, 3, 16, 16]" = torch.narrow(l_x_, 3, 0, 16)
unflatten: "f32[2, 3, 16, 4, 4]" = torch.unflatten(narrow, 3, (-1, 4))
unflatten_1: "f32[2, 3, 4, 4, 4, 4]" = torch.unflatten(unflatten, 2, (-1, 4))
permute: "f32[2, 4, 4, 3, 4, 4]" = torch.permute(unflatten_1, [0, 2, 4, 1, 3, 5])
flatten: "f32[2, 4, 4, 48]" = torch.flatten(permute, 3)
flatten_1: "f32[8, 48]" = torch.flatten(l_w_, 1)
linear: "f32[2, 4, 4, 8]" = torch._C._nn.linear(flatten, flatten_1, l_b_)
permute_1: "f32[2, 8, 4, 4]" = torch.permute(linear, [0, 3, 1, 2])
contiguous: "f32[2, 8, 4, 4]" = torch_Tensor_contiguous(permute_1)
return (contiguous,)
""",
    )


def refused(form: Form, **options: Any) -> Reject:
    """Return why the pass leaves the convolution alone, after a check that the graph is unchanged."""
    contexts: list[DynamoContext] = []

    class Watched(ConvolutionsAsMatmuls):
        def run(self, graph: fx.Graph, context: DynamoContext) -> int:
            contexts.append(context)
            before = str(graph)
            applied = super().run(graph, context)
            assert applied == 0 and str(graph) == before
            return applied

    def backend(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        on_dynamos_graph(module, Watched(), config=Config(**options))
        return module.forward

    torch._dynamo.reset()
    torch.compile(form.call, backend=backend)(*leaves(form))
    (reject,) = contexts[0].refused.values()
    return reject


@pytest.mark.passes
@pytest.mark.parametrize("name", OTHERS)
def test_others_are_left_out_with_a_reason(name: str) -> None:
    form, reason = OTHERS[name]
    reject = refused(form)
    assert isinstance(reject, LeftOut) and reject.rule == "convolution" and reason in str(reject)


@pytest.mark.passes
@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"recipe": None}, "recipe"),
        ({"filter": ["*"]}, "filter"),
        ({"target": "h100"}, "min_speedup"),
        ({"recipe": StaticScaling({})}, "not calibrated"),
        ({"recipe": "blockwise"}, "block size"),
    ],
)
def test_what_stays_in_high_precision_stays_a_convolution(options: dict[str, Any], rule: str) -> None:
    assert refused(FORMS["kernel 1"], **options).rule == rule


@pytest.mark.passes
def test_an_input_of_several_is_laid_out_once_until_it_is_written() -> None:
    def function(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        y = F.conv2d(x, a) + F.conv2d(x, b)
        x = x.relu_()
        return y + F.conv2d(x, c)

    inputs = [torch.randn(2, 8, 4, 4), *(torch.randn(16, 8, 1, 1, requires_grad=True) for _ in range(3))]
    expected = function(inputs[0].clone(), *inputs[1:])
    module, applied, y = graphs_of(function, inputs[0].clone(), *inputs[1:])
    assert applied == [3, 0]
    rows = [n.args[0] for n in module.graph.nodes if signature_of(n)]
    assert rows[0] is rows[1] and rows[2] is not rows[0]
    torch.testing.assert_close(y, expected)


def own(t: Tensor, fmt: str, read: Tensor | None = None) -> Tensor:
    """Quantize by the amax of the tensor, or of what is read of it, and dequantize, in float64."""
    t = t.detach()
    return oracle.qdq(t, oracle.scale_of(float((t if read is None else t[read]).abs().max()), fmt), fmt)


COMPILED_DAILY = ("patches, remainder", "kernel 1, channels last", "transposed")


@pytest.mark.compiled
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.variant] * (name not in COMPILED_DAILY)) for name in FORMS]
)
def test_against_the_float64_oracle(name: str) -> None:
    """The convolution of quantized tensors in float64, and its gradients for the quantized gradient."""
    form = FORMS[name]
    x, w, *bias = leaves(form)
    y = annotated(form.call, recipe="dynamic")(x, w, *bias)
    g = torch.randn(y.shape) * 1e-6
    y.backward(g)
    (read,) = torch.autograd.grad(form.call(x, torch.ones_like(w)).sum(), x)
    xq, wq, gq = own(x, "e4m3", read != 0).requires_grad_(), own(w, "e4m3").requires_grad_(), own(g, "e5m2")
    exact = form.call(xq, wq)
    of_x, of_w = torch.autograd.grad(exact, (xq, wq), gq)
    for b in bias:
        exact = exact + b.double().view(-1, *[1] * (w.dim() - 2))
        over = [d for d in range(y.dim()) if d != y.dim() - w.dim() + 1]
        assert b.grad is not None and sqnr(g.double().sum(over), b.grad) > 110
    for expected, actual in ((exact, y), (of_x, x.grad), (of_w, w.grad)):
        assert actual is not None and sqnr(expected, actual) > 110


class Net(nn.Module):
    """A patch embedding, a block of which one convolution is a matmul, and an upsampling."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Conv2d(3, 32, 4, 4)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.pointwise = nn.Conv2d(32, 48, 1)
        self.up = nn.ConvTranspose2d(48, 16, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(nn.functional.gelu(self.pointwise(self.depthwise(self.embed(x)))))
        return y


MATMULS = ("embed", "pointwise", "up")


def net(last: bool) -> nn.Module:
    model: Any = Net()  # the stubs of `to` have no memory_format
    made: nn.Module = model.to(memory_format=torch.channels_last if last else torch.contiguous_format)
    return made


@pytest.mark.compiled
@pytest.mark.parametrize("last", [True, pytest.param(False, marks=pytest.mark.variant)])
def test_compiled_models_are_the_annotated_ones(last: bool) -> None:
    """Steps of delayed scaling agree, the slots are named after the modules, and strict raises nothing."""
    batches = [torch.randn(2, 3, 16, 20) for _ in range(2)]
    batches = [b.to(memory_format=torch.channels_last) if last else b for b in batches]
    ours, reference = net(last), net(last)
    reference.load_state_dict(ours.state_dict())
    with verdicts() as report:
        steps = list(train(ours, compiled(ours, strict=True), batches))
    for step, expected in zip(steps, train(reference, annotated(reference), batches), strict=True):
        assert min(sqnr(expected[name], step[name]) for name in step) > 60
    assert steps[-1]["output"].is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    assert {(g.name, g.kind) for g in report.rewritten} == {(name, kind) for name in MATMULS for kind in KINDS}
    assert {(g.name, g.kind) for g in report.convolutions} == {("depthwise", k) for k in KINDS}
    slots = {f"{name}.{role}" for name in MATMULS for role in ("input", "weight", "grad_output")}
    assert set(fp8pass.state(ours).slots) == slots


@pytest.mark.compiled
def test_the_report_has_both_shares() -> None:
    report = fp8pass.explain(Net(), torch.randn(2, 3, 16, 20))
    positions = 2 * 4 * 5
    depthwise = 2 * positions * 9 * 32
    matmuls = 2 * positions * (48 * 32 + 32 * 48 + 48 * 16 * 16)
    of_images = 2 * positions * 48 * 32  # images need no gradient
    assert report.flops == report.fp8_flops == 3 * matmuls - of_images
    assert report.all_flops == report.flops + 3 * depthwise
    (shown,) = {(g.batches, g.M, g.K, g.N) for g in report.convolutions if (g.name, g.kind) == ("depthwise", "output")}
    assert shown == (32, positions, 9, 1)
    share = f"{report.fp8_flops / report.all_flops:.0%} of those of matmuls and convolutions"
    assert f"8 of 8 matmuls in FP8, 100% of matmul FLOPs, {share} (1 graph); declined: 3 convolution" in str(report)
    assert "a kernel of 3 x 3, stride 1 x 1, padding 1 x 1, 32 groups: a convolution is a matmul where" in str(report)
    assert len(report.matmuls) == 8 and report.to_dict()["all_flops"] == report.all_flops


@pytest.mark.compiled
def test_a_filter_leaves_a_convolution_as_it_is() -> None:
    model, x = Net(), torch.randn(2, 3, 16, 20)
    with verdicts() as report, torch.no_grad():
        assert sqnr(model(x), compiled(model, recipe="dynamic", filter=["*"])(x)) > 110
    assert {(g.name, g.rule) for g in report.declined if g.rule != "convolution"} == {(n, "filter") for n in MATMULS}


@pytest.mark.compiled
def test_strict_raises_for_a_convolution_that_can_not_run_in_fp8() -> None:
    """As for a linear layer: blocks of 128 do not divide its sizes."""
    with pytest.raises(BackendCompilerFailed, match=r"strict: output of embed .* blocks of 128"):
        compiled(Net(), recipe="blockwise", strict=True)(torch.randn(2, 3, 16, 20))


@pytest.mark.compiled
@pytest.mark.variant
def test_a_size_that_varies_is_compiled_once() -> None:
    """The remainder of a size is cut off, whatever it is."""
    model = nn.Conv2d(16, 32, 4, 4)
    run = compiled(model, recipe="dynamic", dynamic=True)
    with verdicts() as report, torch.no_grad():
        for height, width in ((16, 20), (23, 41), (18, 22)):
            x = torch.randn(2, 16, height, width)
            torch._dynamo.mark_dynamic(x, (2, 3))
            y = run(x)
            assert y.shape == (2, 32, height // 4, width // 4) and sqnr(model(x), y) > 20
    assert report.graphs == 1


@pytest.mark.compiled
@pytest.mark.variant
def test_a_recomputed_convolution_counts_twice() -> None:
    model = Net()

    def function(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(model, x, use_reentrant=False)
        return y

    x = torch.randn(2, 3, 16, 20)
    with verdicts() as report:
        compiled(function, recipe="dynamic")(x).sum().backward()
    of = {g.name: g.recomputed for g in report.convolutions if g.kind == "output"}
    assert of == {"depthwise": True}


@pytest.mark.compiled
def test_cells_run_in_fp8_and_recurrent_layers_are_left_out() -> None:
    """Neither is an error under strict."""

    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.gru = nn.LSTMCell(16, 32), nn.GRUCell(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            h = c = g = x.new_zeros(x.shape[1], 32)
            for step in x:
                h, c = self.lstm(step, (h, c))
                g = self.gru(h, g)
            return g

    with verdicts() as report:
        compiled(Cells(), recipe="dynamic", strict=True)(torch.randn(2, 16, 16)).sum().backward()
    assert {g.name for g in report.rewritten} == {f"{c}.weight_{k}" for c in ("lstm", "gru") for k in ("ih", "hh")}
    assert not report.declined
    layer = nn.LSTM(16, 32)
    strict = fp8pass.explain(lambda x: layer(x)[0], torch.randn(2, 16, 16), config=fp8pass.Config(strict=True))
    assert set(strict.rules()) == {"recurrent"}
