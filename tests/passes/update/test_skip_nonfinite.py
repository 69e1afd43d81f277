"""Test the skip_nonfinite pass: an update whose gradients are not finite leaves everything as it was."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fp8pass
from fp8pass.graph.annotation import copy_to_edit
from fp8pass.options.config import Config
from fp8pass.passes.common.state_inputs import state_input
from fp8pass.passes.update.context import UpdateContext
from fp8pass.passes.update.skip_nonfinite import SkipNonfinite, gradients
from fp8pass.passes.update.written import written
from fp8pass.quant import ops
from fp8pass.weights.update_key import UpdateKey
from tests.helpers.harness import BF16, F32, expect_graph
from tests.helpers.optimizers import Lion


def momentum(p: nn.Parameter, m: Tensor) -> None:
    """Update a parameter by hand, with momentum."""
    with torch.no_grad():
        assert p.grad is not None
        m.mul_(0.9).add_(p.grad)
        p.sub_(m, alpha=0.1)


def captured(p: nn.Parameter, m: Tensor) -> fx.GraphModule:
    """Return Dynamo's graph of `momentum`, with an input for running amaxes."""
    found: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, _: Any) -> Any:
        found.append(copy_to_edit(module))
        return module.forward

    torch.compile(momentum, backend=backend, fullgraph=True)(p, m)
    (module,) = found
    return module


def rewritten() -> fx.GraphModule:
    p, m = parameter(), torch.zeros(4, 8)
    module = captured(p, m)
    key = UpdateKey((), (), tuple(written(module)), ())
    amax = state_input(module.graph, "amax")
    context = UpdateContext(Config(), key=key, slot_inputs=[{"amax_forward": amax}])
    SkipNonfinite().run(module.graph, context)
    module.graph.lint()
    module.recompile()
    return module


def parameter() -> nn.Parameter:
    p = nn.Parameter(torch.randn(4, 8))
    p.grad = torch.randn(4, 8)
    return p


@pytest.mark.passes
def test_graph() -> None:
    expect_graph(
        rewritten(),
        """\
L_p_: "f32[4, 8]",
L_p_grad: "f32[4, 8]",
L_m_: "f32[4, 8]",
amax,
fp8pass_counts,
l_p_ = L_p_
l_p_grad = L_p_grad
l_m_ = L_m_
amax_of_part = fp8pass_quant_ops_amax_of_part(l_p_grad)
any_nonfinite = fp8pass_quant_ops_any_nonfinite([amax_of_part], ())
clone_1 = l_m_.clone()
clone = l_p_.clone()
_set_grad_enabled = torch._C._set_grad_enabled(False)
mul_: "f32[4, 8]" = l_m_.mul_(0.9)
add_: "f32[4, 8]" = mul_.add_(l_p_grad)
sub_: "f32[4, 8]" = l_p_.sub_(l_m_, alpha = 0.1)
_set_grad_enabled_1 = torch._C._set_grad_enabled(True)
restore_where = fp8pass_quant_ops_restore_where(any_nonfinite, l_p_, clone)
restore_where_1 = fp8pass_quant_ops_restore_where(any_nonfinite, l_m_, clone_1)
forget_step = fp8pass_quant_ops_forget_step(any_nonfinite, amax)
count_skips = fp8pass_quant_ops_count_skips(any_nonfinite, fp8pass_counts)
return ()
""",
    )


@pytest.mark.passes
def test_gradients_are_those_of_parameters() -> None:
    module = captured(parameter(), torch.zeros(4, 8))
    assert [n.meta["example_value"].shape for n in gradients(module.graph)] == [(4, 8)]
    assert len([n for n in module.graph.nodes if n.op == "placeholder"]) == 3


@pytest.mark.passes
@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf, 3e38], ids=str)
def test_numbers(bad: float | None) -> None:
    """NaN and infinities skip the update; 3e38 is large, but finite."""
    module = rewritten()
    p, m, grad = torch.randn(4, 8), torch.randn(4, 8), torch.randn(4, 8)
    if bad is not None:
        grad[2, 3] = bad
    amax, counts = torch.tensor([3.0, -1.0]), torch.tensor([5, 2])
    inputs = {"p": p, "m": m, "grad": grad}
    names = [str(n.target) for n in module.graph.nodes if n.op == "placeholder"]
    given = [inputs[{"L_p_": "p", "L_m_": "m"}.get(name, "grad")] for name in names[:3]]
    p_, m_ = p.clone(), m.clone()
    with torch.no_grad():
        module(*given, amax, counts)
    skipped = bad is not None and not math.isfinite(bad)
    new = m_ * 0.9 + grad
    torch.testing.assert_close(m, m_ if skipped else new, rtol=1e-6, atol=0)
    torch.testing.assert_close(p, p_ if skipped else p_ - 0.1 * new, rtol=1e-6, atol=1e-6)
    assert torch.equal(m, m_) is skipped and torch.equal(p, p_) is skipped
    assert amax.tolist() == ([-1.0, -1.0] if skipped else [3.0, -1.0])
    assert counts.tolist() == [6, 2 + skipped]


SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (3, 5), (2, 3, 4), (0,), (0, 4)]


@pytest.mark.passes
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16, torch.float64], ids=str)
def test_any_nonfinite(dtype: torch.dtype) -> None:
    """A nonfinite element of any tensor is found, also beside empty tensors; the largest numbers are finite."""
    largest = torch.finfo(dtype).max if dtype != torch.float64 else 1e38  # amaxes are float32
    tensors = [torch.full(shape, largest, dtype=dtype) for shape in SHAPES]

    def found() -> bool:
        return bool(ops.any_nonfinite(list(map(ops.amax_of_part, tensors))))

    assert not found()
    for x in tensors:
        for bad in (math.nan, math.inf, -math.inf):
            if x.numel():
                before = x.clone()
                x.view(-1)[-1] = bad
                assert found(), (x.shape, bad)
                x.copy_(before)
    assert not found()


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "Lion": Lion,
}


class Trained:
    """A small model, trained. bad: the steps before which an extra batch makes gradients inf or NaN.

    layers: 1 or 2; one layer compiles in half the time.
    """

    def __init__(self, optimizer: Callable[..., Any], bad: Iterable[int] = (), layers: int = 2, **config: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        two = nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)
        self.model = nn.Sequential(*(two if layers == 2 else [nn.Linear(64, 64)]))
        self.optimizer = optimizer(self.model.parameters())

        @fp8pass.train_step(**{"min_speedup": 0, "lowering": "eager", "skip_nonfinite": True, **config})
        def step(x: Tensor) -> float:
            loss = F.mse_loss(self.model(x), x.roll(1, 0))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.item()

        generator = torch.Generator().manual_seed(1)
        self.losses, self.skipped = [], []
        for i in range(5):
            x = torch.randn(16, 64, generator=generator)
            if i in bad:
                step(poisoned(x, math.nan if i == 3 else math.inf))
            self.losses.append(step(x))
            self.skipped.append(step.skipped)
        self.step = step
        self.state = fp8pass.state(self.model).state_dict()

    def check_same(self, other: Trained) -> None:
        """Check that the results are equal to the bit, except for the number of steps, which counts begun forwards."""
        assert self.losses == other.losses
        for p, q in zip(self.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(p, q) and p.isfinite().all()
        mine, theirs = (x.optimizer.state_dict()["state"] for x in (self, other))
        assert mine and mine.keys() == theirs.keys()
        for key, of in mine.items():
            assert of.keys() == theirs[key].keys()
            assert all(torch.equal(x, theirs[key][name]) for name, x in of.items())
        assert self.state.keys() == other.state.keys()
        for key in self.state.keys() - {"steps"}:
            assert torch.equal(self.state[key], other.state[key]), key


def poisoned(x: Tensor, value: float) -> Tensor:
    """Return another batch, with one value that makes gradients inf or NaN."""
    bad = x.flip(0) * 3
    bad[3, 4] = value
    return bad


def variant(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.variant)


CASES = [
    variant("AdamW", "off", {}),
    variant("AdamW", "fp8+transpose", {}),
    variant("AdamW foreach", "off", {}),
    variant("AdamW foreach", "fp8", {}),
    variant("AdamW foreach", "fp8+transpose", {}),
    ("SGD", "fp8", {"layers": 1}),
    variant("SGD", "fp8", {}),
    variant("SGD", "fp8+transpose", {}),
    variant("Lion", "fp8+transpose", {}),
    ("AdamW foreach", "fp8+transpose", {"optimizer_state": "fp8", "layers": 1}),
    variant("AdamW foreach", "fp8+transpose", {"optimizer_state": "fp8"}),
    variant("AdamW", "off", {"optimizer_state": "fp8"}),
    variant("AdamW foreach", "fp8+transpose", {"lowering": "inductor"}),
]


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("optimizer", "cache", "config"), CASES, ids=lambda x: " ".join(map(str, x.values())) if isinstance(x, dict) else x
)
def test_as_if_the_batch_had_not_been(optimizer: str, cache: str, config: dict[str, Any]) -> None:
    """Bad batches come after the first step and twice later; one of them has a NaN."""
    config = {"weight_cache": cache, **config}
    wanted = Trained(OPTIMIZERS[optimizer], **config)
    got = Trained(OPTIMIZERS[optimizer], bad=(1, 3, 4), **config)
    assert len(set(wanted.losses)) == len(wanted.losses), "each step changes the loss"
    assert wanted.skipped == [0] * 5 and got.skipped == [0, 1, 1, 2, 3]
    got.check_same(wanted)
    assert int(got.state["steps"]) == int(wanted.state["steps"]) + 3


@pytest.mark.compiled
@pytest.mark.parametrize(("cache", "layers"), [("fp8+transpose", 1), variant("fp8+transpose", 2), variant("off", 2)])
def test_the_very_first_batch(cache: str, layers: int) -> None:
    """Parameters and moments stay; the first scales are made from the bad batch.

    On finite gradients, the option changes no number; without it, a batch with an infinity makes the loss NaN.
    """
    got = Trained(OPTIMIZERS["AdamW"], bad=(0,), weight_cache=cache, layers=layers)
    without = Trained(OPTIMIZERS["AdamW"], skip_nonfinite=False, weight_cache=cache, layers=layers)
    assert got.skipped == [1] * 5 and without.skipped == [0] * 5
    assert all(p.isfinite().all() for p in got.model.parameters())
    got.check_same(without)
    x = torch.randn(16, 64)
    without.step(poisoned(x, math.inf))
    assert math.isnan(without.step(x)) and without.step.skipped == 0


class Deepens(nn.Module):
    """Two layers, of which a call runs one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        """Run the first layer, or both."""
        x = self.first(x)
        return self.second(x) if both else x


@pytest.mark.compiled
def test_a_graph_that_is_compiled_after_the_update() -> None:
    """Its amaxes of a skipped step are dropped, too. The update that is compiled knows nothing of it yet."""

    def trained(batches: str) -> dict[str, Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Deepens()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)  # so that there is one update, of all parameters

        @fp8pass.train_step(min_speedup=0, lowering="eager", skip_nonfinite=True, weight_cache="off")
        def step(x: Tensor, both: bool) -> None:
            F.mse_loss(model(x, both), x).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        x = torch.randn(16, 64)
        for name in batches:
            step(poisoned(x, math.inf) if name == "!" else x, name != "1")
        assert step.skipped == batches.count("!")
        return {**fp8pass.state(model).state_dict(), **model.state_dict()}

    wanted, got = trained("1122"), trained("112!2")
    assert wanted.keys() == got.keys()
    for key in wanted.keys() - {"steps"}:
        assert torch.equal(wanted[key], got[key]), key
