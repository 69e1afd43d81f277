"""Programs like those that users of other libraries reported: each test names the thread, and what failed there."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8pass
from tests.helpers.harness import compiled, verdicts
from tests.helpers.models import make

pytestmark = pytest.mark.compiled


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def error(got: Tensor, wanted: Tensor) -> float:
    """Return the relative error."""
    wanted = wanted.detach().double()
    return float((got.detach() - wanted).norm() / wanted.norm())


class Normed(nn.Module):
    """A layer with a normed weight, whose gradient is a reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.utils.parametrizations.weight_norm(nn.Linear(144, 64)), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@pytest.mark.parametrize("inside", [False, True])
def test_dynamic_sizes_under_autocast(inside: bool) -> None:
    """pytorch#194329: a backward under autocast gave garbage with dynamic=True, as its ops ran in another dtype."""
    model = make(Normed)

    def step(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        model.zero_grad()
        x = torch.randn(48, 144, generator=torch.Generator().manual_seed(0))
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(x).float().square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return gradients(model)

    found = []
    for dynamic in (True, False):
        torch._dynamo.reset()
        found.append(step(compiled(model, dynamic=dynamic, recipe="dynamic")))
    for wanted, *got in zip(step(model), *found, strict=True):
        assert torch.equal(*got) and got[0].dtype is wanted.dtype and error(got[0], wanted) < 0.12


def test_a_checkpoint_that_another_thread_recomputes() -> None:
    """pytorch#186537, unsloth#7019: settings of the main thread were not those of the thread of the backward."""

    def trained(in_thread: bool) -> list[Tensor]:
        torch._dynamo.reset()
        model = make(lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
        run = compiled(model, dynamic=False)
        with verdicts() as report:
            for rows in (32, 48):
                y = checkpoint(run, torch.ones(rows, 64, requires_grad=True), use_reentrant=True)
                if in_thread:
                    thread = threading.Thread(target=y.sum().backward)
                    thread.start()
                    thread.join()
                else:
                    y.sum().backward()
        assert report.rewritten and not report.faults
        return gradients(model)

    assert all(map(torch.equal, trained(False), trained(True)))


class Fold(nn.Module):
    """Adds an adapter to the weights of all experts, in float32 whatever autocast says."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 64, 16) / 8), nn.Parameter(torch.randn(4, 16, 96) / 8)

    def forward(self, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.baddbmm(weight, self.a, self.b, alpha=0.5)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 64, 96) / 8, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight)


def test_an_adapter_that_is_folded_into_experts_outside_of_autocast() -> None:
    """peft#3601: LoRA of `target_parameters` failed under autocast, and lost precision once it did not."""

    def adapted() -> nn.Module:
        model = Experts()
        nn.utils.parametrize.register_parametrization(model, "weight", Fold())
        return model

    model = make(adapted)
    x = torch.randn(4, 32, 64)

    def step(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(x).float().square().mean()
        loss.backward()
        return gradients(model)

    with verdicts() as report:
        found = step(compiled(model, recipe="dynamic"))
    assert [g.status for g in report.gemms] == ["rewritten"] * 5
    for got, wanted in zip(found, step(model), strict=True):
        assert got.dtype is wanted.dtype and error(got, wanted) < 0.12


@pytest.mark.filterwarnings("ignore:fp8pass. .* kernels exist on")
@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
@pytest.mark.parametrize(("k", "n"), [(272, 144), (130, 36), (72, 8)])
def test_blocks_of_sizes_that_no_block_divides(recipe: str, k: int, n: int) -> None:
    """unsloth#8953: kernels of blocks crashed for such sizes, and their backward took the blocks of others."""
    for m in (0, 1, 17, 130):
        model, x = make(lambda: nn.Linear(k, n)), torch.randn(1, m, k, requires_grad=True)
        y = compiled(model, recipe=recipe)(x)
        y.square().sum().backward()
        exact, wide = copy.deepcopy(model).double(), x.detach().double().requires_grad_()
        exact.zero_grad()
        wanted = exact(wide)
        wanted.square().sum().backward()
        pairs = [(y, wanted), (x.grad, wide.grad), (model.weight.grad, exact.weight.grad)]
        assert all(error(got, right) < 0.06 for got, right in pairs if m and got is not None and right is not None)


def test_a_norm_that_counts_its_batches() -> None:
    """pytorch#194504: BatchNorm1d(momentum=None) reads a tensor's number, which breaks the graph."""
    model = make(lambda: nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96, momentum=None), nn.Linear(96, 64)))
    eager = copy.deepcopy(model)
    run = compiled(model)
    with verdicts() as report:
        for _ in range(4):
            x = torch.randn(64, 64)
            for call in (run, eager):
                call(x).square().mean().backward()
    state = fp8pass.state(model).state_dict()
    assert len(report.rewritten) == 5 and int(state["steps"]) == 3  # the fourth is under way
    assert torch.equal(model[1].num_batches_tracked, eager[1].num_batches_tracked)
    assert error(model[1].running_var, eager[1].running_var) < 0.02


@pytest.mark.filterwarnings("ignore:fp8pass. .* kernels exist on")
@pytest.mark.parametrize("recipe", ["mxfp8", "blockwise", "delayed"])
def test_a_half_frozen_model_resumes_to_the_bit(recipe: str) -> None:
    """Megatron-LM#6666: weights were quantized again from dequantized ones, whose blocks take other scales."""
    x = torch.randn(128, 256)

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.ReLU(), nn.Linear(256, 128, bias=False))
        model[0].requires_grad_(False)
        return model

    def train(model: nn.Module, optimizer: Any) -> None:
        run = compiled(model, recipe=recipe, frozen="fp8")
        for _ in range(2):
            run(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, other = make(build), build()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, other)]
    train(model, optimizers[0])
    saved = copy.deepcopy((model.state_dict(), optimizers[0].state_dict(), fp8pass.state(model).state_dict()))
    train(model, optimizers[0])
    torch._dynamo.reset()
    other.load_state_dict(saved[0])
    optimizers[1].load_state_dict(saved[1])
    fp8pass.state(other).load_state_dict(saved[2])
    train(other, optimizers[1])
    assert torch.equal(model.get_submodule("2").weight, other.get_submodule("2").weight)


def test_scales_of_blocks_of_32_saturate_nothing() -> None:
    """mlx#4353: scales that were rounded to nearest clipped the largest elements by up to 29%."""
    layer = make(lambda: nn.Linear(32, 512, bias=False))
    weight = torch.randn(512, 32) * torch.exp2(8 * torch.rand(512, 1))
    layer.weight.data = weight
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that this machine lacks
        read = compiled(layer, recipe="mxfp8")(torch.eye(32)).T
    largest = weight.abs().argmax(1, keepdim=True)
    lost = 1 - read.gather(1, largest) / weight.gather(1, largest)
    assert 0 < lost.max() <= 2**-4  # half a step of e4m3
    assert F.cosine_similarity(read.flatten(), weight.flatten(), dim=0) > 0.999
