"""Convolutions in compiled models: those that are matmuls against the float64 oracle, and the report on the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.recipes import KINDS
from tests.helpers import oracle
from tests.helpers.convolutions import FORMS, leaves
from tests.helpers.harness import annotated, compiled, sqnr, train, verdicts


def own(t: Tensor, fmt: str, read: Tensor | None = None) -> Tensor:
    """Quantize by the amax of the tensor, or of what is read of it, and dequantize, in float64."""
    t = t.detach()
    return oracle.qdq(t, oracle.scale_of(float((t if read is None else t[read]).abs().max()), fmt), fmt)


DAILY = ("patches, remainder", "kernel 1, channels last", "transposed")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.variant] * (name not in DAILY)) for name in FORMS]
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


def test_a_filter_leaves_a_convolution_as_it_is() -> None:
    model, x = Net(), torch.randn(2, 3, 16, 20)
    with verdicts() as report, torch.no_grad():
        assert sqnr(model(x), compiled(model, recipe="dynamic", filter=["*"])(x)) > 110
    assert {(g.name, g.rule) for g in report.declined if g.rule != "convolution"} == {(n, "filter") for n in MATMULS}


def test_strict_raises_for_a_convolution_that_can_not_run_in_fp8() -> None:
    """As for a linear layer: blocks of 128 do not divide its sizes."""
    with pytest.raises(BackendCompilerFailed, match=r"strict: output of embed .* blocks of 128"):
        compiled(Net(), recipe="blockwise", strict=True)(torch.randn(2, 3, 16, 20))


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
