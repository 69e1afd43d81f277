"""The add_gradients pass, and training whose weight gradients are added in the matmul."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

import fp8pass
from fp8pass import hardware
from fp8pass.graph.pass_base import GradientOf, KernelsContext
from fp8pass.options.config import Config
from fp8pass.passes.kernels.add_gradients import ADDS, AddGradients
from fp8pass.quant import added_gradient
from fp8pass.quant.added_gradient import ADDED_GRADIENT
from tests.helpers.harness import (
    BF16,
    E4M3,
    E5M2,
    F32,
    capture,
    count,
    expect_graph,
    fp8,
    scale,
    verdicts,
    without_caches,
)


@contextlib.contextmanager
def adds() -> Iterator[Counter[str]]:
    """Let CPUs add in the op, as GPUs do with torch 2.15; count what it did: "added", "" for a first one, or a reason."""
    done: Counter[str] = Counter()
    take = added_gradient._take

    def counted(*args: Any) -> Any:
        held, why = take(*args)
        done["added" if held is not None else why] += 1
        return held, why

    with (
        mock.patch.object(hardware, "adds_products", return_value=True),
        mock.patch.object(added_gradient, "_take", counted),
    ):
        yield done


def product(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
    return torch._scaled_mm(a, b.t(), s, s, out_dtype=BF16)


def operands() -> tuple[Tensor, Tensor, Tensor]:
    return fp8(48, 32, dtype=E5M2), fp8(64, 32, dtype=E4M3), scale()


def add(function: Any, *inputs: Tensor, gradients: Sequence[int | None] = (0,)) -> tuple[Any, list[str]]:
    """Run the pass over a graph, whose results are gradients at these positions. Return the graph and the notes."""
    module = capture(function, *inputs)
    context = KernelsContext(Config(recipe=None))
    context.gradients = [None, *(None if i is None else GradientOf(i, 3) for i in gradients)]
    context.of_weights = {""}  # traced matmuls have no name
    with mock.patch.object(hardware, "adds_products", return_value=True):
        AddGradients().run(module.graph, context)
    module.graph.lint()
    return module, list(context.fused.values())


def merged(a: Tensor, b: Tensor, s: Tensor) -> list[Tensor]:
    """Return the gradients of two weights that share a matmul."""
    y = product(a, b, s).float()
    return [y[:16], y[16:]]


@pytest.mark.passes
def test_graph() -> None:
    module, notes = add(merged, *operands(), gradients=(2, 0))
    assert notes == [ADDS]
    expect_graph(
        module,
        """\
a_1: "f8e5m2[48, 32]",
b_1: "f8e4m3fn[64, 32]",
s_1: "f32[]",
permute: "f8e4m3fn[32, 64]" = aten.permute.default(b_1, [1, 0])
slice_tensor: "f8e5m2[32, 32]" = aten.slice.Tensor(a_1, 0, 16, 48)
added_gradient_default: "f32[32, 64]" = fp8pass.added_gradient.default(slice_tensor, permute, s_1, s_1, False, 0, 3)
slice_tensor_1: "f8e5m2[16, 32]" = aten.slice.Tensor(a_1, 0, 0, 16)
added_gradient_default_1: "f32[16, 64]" = fp8pass.added_gradient.default(slice_tensor_1, permute, s_1, s_1, False, 2, 3)
return [added_gradient_default_1, added_gradient_default]
""",
    )


@pytest.mark.passes
def test_products_that_are_returned_as_they_are() -> None:
    for function in (
        lambda a, b, s: [torch._scaled_mm(a, b.t(), s, s, out_dtype=F32)],
        lambda *x: [product(*x).float()],
        lambda *x: [product(*x).t().t().float()],
        lambda *x: [product(*x).view(48, 64).float()],
    ):
        module, notes = add(function, *operands())
        assert (count(module, ADDED_GRADIENT), notes) == (1, [ADDS])


@pytest.mark.passes
def test_products_that_stay() -> None:
    read = "something else reads the product"
    bias = torch.zeros(64, dtype=BF16)
    many = torch.ones(48, 1), torch.ones(1, 64)
    for function, gradients, reason in (
        (lambda *x: [product(*x).float(), product(*x)], (0, None), ""),  # one matmul for each: only the first adds
        (lambda *x: [product(*x)], (0,), "the sum is in bfloat16"),
        (lambda *x: [(y := product(*x)).float(), y.relu()], (0, None), read),
        (lambda *x: [(y := product(*x).float())[:16], y[16:]], (0, None), read),
        (lambda *x: [product(*x).float()[:16]], (0,), ""),
        (lambda *x: [product(*x).t().float()], (0,), None),
        (lambda *x: [product(*x).float() * 2], (0,), None),
        (lambda *x: [product(*x).float()] * 2, (0, 1), None),
        (lambda *x: [product(*x).float()], (None,), None),
        (lambda a, b, s: [torch._scaled_mm(a, b.t(), s, s, bias, out_dtype=BF16).float()], (0,), "the matmul adds a b"),
        (lambda a, b, s: [torch._scaled_mm(a, b.t(), *many, out_dtype=BF16).float()], (0,), "only matmuls with one sc"),
    ):
        module, notes = add(function, *operands(), gradients=gradients)
        assert count(module, ADDED_GRADIENT) == (reason == ""), module.graph
        assert len(notes) == (reason is not None) and (not reason or reason in notes[0])


@pytest.mark.passes
def test_matmuls_add_on_gpus_from_torch_2_15_on() -> None:
    since = TorchVersion(torch.__version__) >= (2, 15)
    assert [hardware.adds_products(torch.device(kind)) for kind in ("cpu", "cuda")] == [False, since]


class Layers(nn.Module):
    """Layers that are merged, one whose weight is tied to another, and one whose parameter is in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(32, 48), nn.Linear(32, 16)
        self.first, self.tied = nn.Linear(48, 48), nn.Linear(48, 48)
        self.tied.weight = self.first.weight
        self.last = nn.Linear(48, 16, bias=False, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.q(x) * torch.cat([self.k(x)] * 3, -1)
        y = self.tied(torch.relu(self.first(y)))
        z: Tensor = self.last(y.to(BF16))
        return z


def gradients(model: nn.Module, run: Any, batches: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the sums of the gradients of all batches, after steps that give every slot a history."""
    for _ in range(3):
        model.zero_grad()
        with fp8pass.accumulate(model):
            for x in batches:
                run(x).float().square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.inductor
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_sums_of_microbatches(lowering: str) -> None:
    batches, found = [torch.randn(32, 32) for _ in range(3)], []
    options: dict[str, Any] = {"min_speedup": 0, "merge_siblings": True, "lowering": lowering, "strict": True}
    for on in (False, True):
        torch.manual_seed(0)
        model = Layers()
        with without_caches(), adds() as done:
            run = torch.compile(model, backend="fp8pass", options={**options, "accumulate_in_matmul": on})
            found.append(gradients(model, run, batches))
        # q and k share a matmul; the tied weight's gradient is a sum in the graph, the last one's in bfloat16
        assert done == ({"": 4, "added": 8} if on else {})
    for name, g in found[0].items():
        assert torch.equal(g, found[1][name]), name


@pytest.mark.compiled
def test_products_are_added_before_they_are_rounded() -> None:
    """Autograd adds what the matmul has rounded to bfloat16. Without autocast nothing is rounded, and the rest equal."""
    batches, factors, found = torch.randn(8, 32, 32).to(BF16).float(), torch.randn(32, 48).to(BF16), []
    for on, dtype in ((True, F32), (False, BF16), (True, BF16)):
        with without_caches(), adds():
            model, run = linear(accumulate_in_matmul=on)
            with fp8pass.accumulate(model):
                for x in batches:
                    with torch.autocast("cpu", dtype, enabled=dtype == BF16):
                        y = run(x)
                    (y * factors).sum().backward()
        assert model.weight.grad is not None
        found.append(model.weight.grad)
    exact, rounded, added = found
    assert (added - exact).norm() < 1e-6 * exact.norm() < 1e-3 * (rounded - exact).norm()


def linear(**options: Any) -> tuple[nn.Linear, Any]:
    model = nn.Linear(32, 48, bias=False)
    options = {"min_speedup": 0, "recipe": "dynamic", "lowering": "eager", **options}
    return model, torch.compile(model, backend="fp8pass", options=options)


def backward(run: Any, x: Tensor) -> None:
    run(x).square().sum().backward()


@pytest.fixture
def accumulating() -> Iterator[tuple[nn.Linear, Any, Tensor, Tensor, Counter[str]]]:
    """A layer within `accumulate`, compiled, its input, and the gradient of one microbatch, with which `.grad` begins."""
    with without_caches(), adds() as done:
        model, run = linear()
        x = torch.randn(32, 32)
        with fp8pass.accumulate(model):
            backward(run, x)
            assert model.weight.grad is not None
            one = model.weight.grad.clone()
            done.clear()
            yield model, run, x, one, done


@pytest.mark.compiled
def test_the_memory_of_grad_stays(accumulating: Any) -> None:
    model, run, x, one, done = accumulating
    place = model.weight.grad.data_ptr()
    for n in (2, 3):
        backward(run, x)
        assert torch.allclose(model.weight.grad, n * one) and model.weight.grad.data_ptr() == place
    assert done == {"added": 2}
    model.zero_grad(set_to_none=False)
    backward(run, x)
    assert torch.equal(model.weight.grad, one) and model.weight.grad.data_ptr() == place


@pytest.mark.compiled
def test_two_calls_in_one_backward(accumulating: Any) -> None:
    model, run, x, one, done = accumulating
    (run(x).square().sum() + run(x).square().sum()).backward()
    assert torch.allclose(model.weight.grad, 3 * one) and done == {"added": 1, "": 1}


@pytest.mark.compiled
def test_a_backward_for_some_parameters(accumulating: Any) -> None:
    model, run, x, one, done = accumulating
    loss = run(x).square().sum()
    loss.backward(inputs=[model.weight])
    assert torch.allclose(model.weight.grad, 2 * one) and done == {"added": 1}


@pytest.mark.compiled
def test_gradients_that_are_asked_for(accumulating: Any) -> None:
    model, run, x, one, done = accumulating
    (g,) = torch.autograd.grad(run(x).square().sum(), [model.weight])
    assert torch.equal(g, one) and torch.equal(model.weight.grad, one)
    assert done == {"torch.autograd.grad asks for the gradient itself": 1}


@pytest.mark.compiled
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_get_the_gradient_of_one_microbatch(accumulating: Any, kind: str) -> None:
    model, run, x, one, done = accumulating
    seen: list[Tensor] = []
    handle = getattr(model.weight, kind)(lambda x: seen.append(x.grad.clone() if x.is_leaf and x.requires_grad else x))
    backward(run, x)
    assert torch.equal(seen[0], one if kind == "register_hook" else 2 * one)
    assert torch.equal(model.weight.grad, 2 * one) and set(done) == {"a hook reads the gradient of each microbatch"}
    handle.remove()
    backward(run, x)
    assert torch.allclose(model.weight.grad, 3 * one) and done["added"] == 1


@pytest.mark.compiled
def test_a_grad_that_can_not_be_added_to(accumulating: Any) -> None:
    model, run, x, one, done = accumulating
    model.weight.grad = torch.cat([torch.zeros(1), one.flatten()])[1:].view(48, 32)  # from 4 bytes on
    backward(run, x)
    assert torch.equal(model.weight.grad, 2 * one)
    model.weight.grad = one.t().contiguous().t()
    with pytest.warns(match="layout contract"):  # by autograd
        backward(run, x)
    assert torch.equal(model.weight.grad, 2 * one)
    assert done == {".grad is not laid out as the product: row by row, from a multiple of 16 bytes on": 2}


@pytest.mark.compiled
def test_a_grad_that_shares_its_memory(accumulating: Any) -> None:
    """Autograd would add a second gradient to a new tensor, and a buffer for all gradients would miss it."""
    model, run, x, one, done = accumulating
    flat = torch.cat([one.flatten(), torch.zeros(16)])
    model.weight.grad = flat[: one.numel()].view_as(one)
    (run(x).square().sum() + run(x).square().sum()).backward()
    assert torch.allclose(flat[: one.numel()].view_as(one), 3 * one)
    assert set(done) == {".grad shares its memory with other tensors, which may be read meanwhile"}


@pytest.mark.compiled
def test_a_weight_that_is_frozen_before_the_backward(accumulating: Any) -> None:
    """Autograd drops its gradient, so it must find the one of earlier microbatches."""
    model, run, x, one, done = accumulating
    loss = run(x).square().sum()
    model.weight.requires_grad_(False)
    loss.backward()
    assert torch.equal(model.weight.grad, one)
    assert done == {"the weight was frozen after the forward, and autograd drops its gradient": 1}


class Halved(torch.autograd.Function):
    """Returns a weight, and half of its gradient; keeps the weight under a name that torch's own nodes have."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.variable = weight
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


@pytest.mark.compiled
@pytest.mark.parametrize("before", [lambda w: w * 2, Halved.apply], ids=["op", "function"])
def test_a_weight_that_is_computed_outside(before: Any) -> None:
    with without_caches(), adds() as done:
        w = nn.Parameter(torch.randn(48, 32))
        run = torch.compile(
            lambda x, w: x @ w.t(),
            backend="fp8pass",
            options={"min_speedup": 0, "recipe": "dynamic", "lowering": "eager"},
        )
        x, one = torch.randn(32, 32), None
        with fp8pass.accumulate(nn.ParameterList([w])):
            for n in (1, 2):
                run(x, before(w)).square().sum().backward()
                one = w.grad.clone() if one is None else one
                assert torch.equal(w.grad, n * one)
    assert done == {"the weight is not a parameter, but computed outside of the graph": 2}


@pytest.mark.compiled
def test_gradients_of_inputs_are_not_added() -> None:
    """Only the matmul of the weight's gradient adds, though the input is a leaf and has a gradient too."""
    with without_caches(), adds() as done:
        model, run = linear()
        with fp8pass.accumulate(model), verdicts() as report:
            for _ in range(2):
                backward(run, torch.randn(32, 32, requires_grad=True))
    notes = {gemm.kind: gemm.note for gemm in report.gemms}
    assert notes == {"output": "", "grad_input": "", "grad_weight": ADDS} and done == {"": 1, "added": 1}


@pytest.mark.compiled
def test_sizes_that_vary_do_not_confuse_positions() -> None:
    """Sizes are inputs, too, but not among the tensors whose gradients autograd counts."""
    with without_caches(), adds() as done:
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        options = {"min_speedup": 0, "recipe": "dynamic", "lowering": "eager"}
        run = torch.compile(model, backend="fp8pass", options=options, dynamic=True)
        batches, found = [torch.randn(n, 32) for n in (32, 48, 64)], []
        for of in (run, model):
            model.zero_grad()
            with fp8pass.accumulate(model):
                for x in batches:
                    of(x).square().sum().backward()
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert done == {"": 2, "added": 4}
    assert all(
        torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.98 for a, b in zip(*found, strict=True)
    )


@pytest.mark.compiled
def test_where_gradients_are_not_added() -> None:
    for context, options in (
        (contextlib.nullcontext(), {}),
        (None, {"accumulate_in_matmul": False}),
        (None, {"mode": "reduce-overhead"}),
    ):
        with without_caches(), adds() as done:
            model, run = linear(**options)
            with context or fp8pass.accumulate(model):
                for _ in range(2):
                    backward(run, torch.randn(32, 32))
        assert not done


@pytest.mark.compiled
def test_a_step_that_loops_adds_and_another_does_not() -> None:
    for microbatches in (1, 2):
        with without_caches(), adds() as done:
            model = nn.Linear(32, 48)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def one(x: Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> None:
                model(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

            def loop(x: Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> None:
                for part in x.chunk(2):
                    model(part).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

            step = fp8pass.train_step(one if microbatches == 1 else loop, min_speedup=0, lowering="eager")
            for _ in range(3):
                step(torch.randn(64, 32))
            notes = {gemm.note for gemm in step.report.gemms if gemm.kind == "grad_weight"}
        assert done == ({} if microbatches == 1 else {"": 2, "added": 2})
        assert notes == ({""} if microbatches == 1 else {ADDS})
