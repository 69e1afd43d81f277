"""Test stochastic rounding: of moments in 8 bits, and of bfloat16 parameters."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.quant import random_bits
from fp8pass.quant.moments import Format, Fp8Moment, decode, encode, scale_towards
from fp8pass.quant.random_bits import bits_like, keys_of, round_to_bfloat16, uniform
from tests.helpers.harness import BF16, E4M3, E5M2


class Product(nn.Module):
    """A model whose weight has its input as gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter((torch.rand(64, 64) + 0.5).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


class Training:
    """A `Product` that is trained."""

    def __init__(self, make: Any, **config: Any) -> None:
        torch.manual_seed(0)
        self.of = Product()
        self.optimizer = make(self.of.parameters())
        options = {"lowering": "eager", "recipe": None, "update_rounding": "stochastic", **config}

        @fp8pass.train_step(**options)
        def step(x: Tensor) -> None:
            self.of(x).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

        self.step = step

    def run(self, *grads: Tensor) -> Tensor:
        """Do a step with each gradient; return the weight."""
        for grad in grads:
            self.step(grad)
        return self.of.w.detach().clone()


def sgd(p: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(p, lr=2.0**-14, foreach=True)


def adamw(p: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(p, lr=1e-3, foreach=True)


def gradients(n: int) -> list[Tensor]:
    """Return n gradients bf16[64, 64] that are no small ones."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.rand(64, 64, generator=generator) + 0.5).bfloat16() for _ in range(n)]


FIRST = Format("first", E4M3, stochastic=True)
SECOND = {dtype: Format("second", dtype, stochastic=True) for dtype in (E4M3, E5M2)}


def keys(n: int, seed: int = 0) -> Tensor:
    """Return the keys of one tensor in n updates, i32[n]."""
    return keys_of(torch.arange(n, dtype=torch.int32), torch.tensor([seed], dtype=torch.int32))


# ---------------------------------------------------------------------------------------------------------------------
# Random bits


@pytest.mark.compiled
@pytest.mark.shares_code
def test_mixed_is_lowbias32() -> None:
    """Compare with the hash in Python's integers, which do not wrap around."""

    def lowbias32(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    x = torch.tensor([0, 1, 2, 12345, 2**31 - 1, -1, -(2**31), -77], dtype=torch.int32)
    assert [n % 2**32 for n in random_bits.mixed(x).tolist()] == [lowbias32(n % 2**32) for n in x.tolist()]


@pytest.mark.compiled
@pytest.mark.shares_code
def test_bits_are_uniform_and_independent() -> None:
    """Each bit is set half of the time; bits of other updates, tensors and elements are not correlated with them."""
    n = 1 << 15
    x = torch.empty(n)
    draws = [uniform(bits_like(x, key)) for key in (*keys(4), *keys(4, seed=1))]
    for a in draws:
        assert abs(a.mean().item() - 0.5) < 5 * (1 / 12 / n) ** 0.5 and a.min() >= 0 and a.max() < 1
        assert abs((a.square().mean() - 1 / 3).item()) < 5 * (4 / 45 / n) ** 0.5
    centered = torch.stack([*draws, draws[0].roll(1), draws[0].roll(64)]) - 0.5
    correlation = centered @ centered.t() / n * 12
    assert (correlation - torch.eye(len(centered))).abs().max() < 5 / n**0.5
    bits = bits_like(x, keys(1)[0])
    for i in range(32):
        assert abs(((bits >> i) & 1).float().mean().item() - 0.5) < 5 * 0.5 / n**0.5, i


@pytest.mark.compiled
@pytest.mark.shares_code
def test_the_shape_does_not_matter_and_the_same_bits_come_again() -> None:
    key = keys(1)[0]
    assert torch.equal(bits_like(torch.empty(6, 4), key).flatten(), bits_like(torch.empty(24), key))


# ---------------------------------------------------------------------------------------------------------------------
# Moments


def neighbours(of: Format, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the nearest stored values below and above, in float64, from the list of all numbers of the format."""
    codes = torch.arange(256, dtype=torch.uint8).view(of.dtype).double()
    codes = codes[codes.isfinite() & (codes >= 0)].unique()
    values = codes / scale if of.kind == "first" else (codes / scale).square()
    above = torch.searchsorted(values, x.double(), right=True).clamp(max=len(values) - 1)
    return values[above - 1], values[above]


@pytest.mark.compiled
@pytest.mark.shares_code
@pytest.mark.parametrize("of", [FIRST, *SECOND.values()], ids=str)
def test_a_moment_is_one_of_its_neighbours_and_exact_in_the_mean(of: Format) -> None:
    n, scale = 4000, 2.0**3
    x = torch.rand(48) * 3 + 0.01
    x[:8] *= 2e-3
    low, high = neighbours(of, x, scale)
    x_q = encode(of, x.expand(n, -1), torch.tensor(scale), key=keys(n).unsqueeze(1))
    drawn = decode(of, x_q, torch.tensor(1 / scale), x.dtype).double()
    assert ((drawn == low) | (drawn == high)).all()
    chance = (x.double() - low) / (high - low)
    sigma = (high - low) * (chance * (1 - chance) / n).sqrt()
    counted = low > 0 if of.kind == "second" else torch.ones_like(low, dtype=torch.bool)  # it is never stored as 0
    assert ((drawn.mean(0) - x).abs() <= 5 * sigma + 1e-6 * x)[counted].all()
    assert (drawn > 0).all() or of.kind == "first"


@pytest.mark.compiled
@pytest.mark.shares_code
def test_a_second_moment_above_0_is_never_stored_as_0() -> None:
    """It is divided by. A first moment is, and so does not stay at the least number of FP8."""
    x = torch.full((4096,), 1e-12)
    for of in SECOND.values():
        assert (encode(of, x, torch.tensor(1.0), key=keys(1)[0]).float() > 0).all()
    x = torch.full((4096,), 2.0**-9 * 0.9)
    assert 0.05 < (encode(FIRST, x, torch.tensor(1.0), key=keys(1)[0]).float() == 0).float().mean() < 0.15


@functools.cache
def followed(of: Format, falls: bool, steps: int = 1200, n: int = 256) -> list[float]:
    """Return the mean of stored second moments over the exact one, every 400 steps, with beta2 = 0.999."""
    v, exact = torch.full((n,), 1.0), 1.0
    ratios = []
    x_q, scale = encode(of, v, torch.tensor(8.0)), torch.tensor(8.0)
    for i, key in enumerate(keys(steps)):
        squared = 1e-2 if not falls else 0.9995**i
        v = decode(of, x_q, 1 / scale, v.dtype) * 0.999 + squared * 0.001
        exact = exact * 0.999 + squared * 0.001
        amax = (x_q.float() / scale).amax()
        scale = scale_towards(of.target, amax, scale)
        x_q = encode(of, v, scale, key=key if of.stochastic else None)
        if i % 400 == 399:
            ratios.append((decode(of, x_q, 1 / scale, v.dtype).double().mean() / exact).item())
    return ratios


@pytest.mark.compiled
@pytest.mark.shares_code
@pytest.mark.parametrize("falls", [False, True], ids=["constant", "falling"])
@pytest.mark.parametrize("dtype", SECOND, ids=str)
def test_a_second_moment_follows_that_of_float32(dtype: torch.dtype, falls: bool) -> None:
    """Gradients are constant and smaller than the moment, or fall slowly: means stay those of the exact moment."""
    assert followed(SECOND[dtype], falls) == pytest.approx([1.0] * 3, rel=0.1)


@pytest.mark.compiled
@pytest.mark.shares_code
@pytest.mark.parametrize("falls", [False, True], ids=["constant", "falling"])
def test_to_nearest_it_stays_where_it_was(monkeypatch: pytest.MonkeyPatch, falls: bool) -> None:
    """A step is a thousandth, and the square of the next number of e5m2 is 0.77."""
    monkeypatch.setattr(random_bits, "uniform", lambda bits: torch.full(bits.shape, 0.5))
    monkeypatch.setattr("fp8pass.quant.moments.uniform", lambda bits: torch.full(bits.shape, 0.5))
    ratios = followed.__wrapped__(SECOND[E5M2], falls)
    assert ratios[-1] > 1.2, ratios


# ---------------------------------------------------------------------------------------------------------------------
# Parameters in bfloat16


@pytest.mark.compiled
@pytest.mark.shares_code
def test_round_to_bfloat16() -> None:
    """To one of the two neighbours, and exact in the mean; what bfloat16 can represent stays, infinities and NaN too."""
    x = torch.randn(64) * torch.exp2(torch.randint(-100, 100, (64,)))
    low = (x.view(torch.int32) & -0x10000).view(torch.float32)
    high = ((x.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    n = 4000
    drawn = round_to_bfloat16(x.repeat(n, 1), keys(n).unsqueeze(1)).double()
    assert ((drawn == low) | (drawn == high)).all()
    chance = (x.double() - low) / (high - low)
    sigma = (high.double() - low).abs() * (chance * (1 - chance) / n).sqrt()
    assert ((drawn.mean(0) - x).abs() <= 5 * sigma).all()
    kept = torch.tensor([0.0, -0.0, 1.0, -1.5, torch.inf, -torch.inf, torch.nan])
    got = round_to_bfloat16(kept, keys(1)[0]).float()
    assert torch.equal(got.view(torch.int32)[:6], kept.view(torch.int32)[:6]) and got[6].isnan()


@pytest.mark.compiled
@pytest.mark.shares_code
def test_small_steps_count() -> None:
    """A step is 1/64 of the last bit: to nearest, the weight never changes."""
    grads = [torch.ones(64, 64, dtype=BF16)] * 64
    start = Training(sgd).of.w.detach().clone()
    assert torch.equal(Training(sgd, update_rounding="nearest").run(*grads[:3]), start)
    moved = (Training(sgd).run(*grads).double() - start).mean().item()
    assert moved == pytest.approx(-64 * 2.0**-14, rel=0.05)


@pytest.mark.compiled
@pytest.mark.shares_code
@pytest.mark.parametrize("config", [{}, {"optimizer_state": "fp8"}], ids=str)
def test_updates_by_the_formula(config: dict[str, Any]) -> None:
    """AdamW in float64: every weight is one of the two neighbours of the formula's, and their mean is that."""
    training = Training(adamw, **config)
    before = training.run(*gradients(2))
    state = training.optimizer.state[training.of.w]
    m, v = (state[name].clone().double() for name in ("exp_avg", "exp_avg_sq"))
    if config:
        m, v = (state[n].value().double() for n in ("exp_avg", "exp_avg_sq"))
        assert all(isinstance(state[n], Fp8Moment) for n in ("exp_avg", "exp_avg_sq"))
    grad = gradients(3)[-1]
    after = training.run(grad).double()
    m, v = 0.9 * m + 0.1 * grad.double(), 0.999 * v + 0.001 * grad.double().square()
    step = 1e-3 * (m / (1 - 0.9**3)) / ((v / (1 - 0.999**3)).sqrt() + 1e-8)
    wanted = before.double() * (1 - 1e-3 * 1e-2) - step
    unit = torch.exp2(wanted.abs().log2().floor() - 7)
    assert ((after - wanted).abs() <= unit * (1 + 1e-3)).all()
    assert abs(((after - wanted) / unit).mean().item()) < 5 / (12 * 64 * 64) ** 0.5 * 2


@pytest.mark.compiled
@pytest.mark.shares_code
@pytest.mark.parametrize("config", [{}, {"optimizer_state": "fp8", "skip_nonfinite": True}], ids=str)
def test_resumes_bit_for_bit(config: dict[str, Any]) -> None:
    """The number of updates is saved in a state dict, and a step that is skipped does not count."""
    training, grads = Training(adamw, **config), gradients(6)
    training.run(*grads[:3])
    if config:
        before = copy.deepcopy(training.optimizer.state_dict())
        training.step(torch.full((64, 64), torch.inf, dtype=BF16))
        torch.testing.assert_close(training.optimizer.state_dict(), before, rtol=0, atol=0)
        assert training.step.skipped == 1
    saved = copy.deepcopy([training.of.state_dict(), training.optimizer.state_dict()])
    assert saved[1]["param_groups"][0]["fp8pass_updates"] == 3
    wanted = training.run(*grads[3:])
    resumed = Training(adamw, **config)
    for of, state in zip((resumed.of, resumed.optimizer), saved, strict=True):
        of.load_state_dict(copy.deepcopy(state))  # which would train the loaded tensors
    assert torch.equal(resumed.run(*grads[3:]), wanted)
    plain = adamw(training.of.parameters())
    plain.load_state_dict(saved[1])  # which ignores the number
    training.of.load_state_dict(saved[0])
    training.optimizer.load_state_dict(saved[1])
    assert torch.equal(training.run(*grads[3:]), wanted), "the run that goes on"


@pytest.mark.compiled
@pytest.mark.shares_code
def test_only_in_a_step_and_of_bfloat16() -> None:
    run = torch.compile(nn.Linear(64, 64), backend="fp8pass", options={"update_rounding": "stochastic"})
    with pytest.raises(Exception, match=r"ValueError: update_rounding is an option of fp8pass\.train_step"):
        run(torch.randn(4, 64))


@pytest.mark.inductor
def test_the_compiled_update_has_the_same_bits() -> None:
    """AdamW in bfloat16 with moments in FP8: the last bit of a float32 may decide whether a number is rounded up."""
    eager = Training(adamw, optimizer_state="fp8")
    wanted = eager.run(*gradients(3))
    torch._dynamo.reset()
    compiled = Training(adamw, optimizer_state="fp8", lowering="inductor")
    assert (wanted != compiled.run(*gradients(3))).float().mean() < 1e-3
    for name in ("exp_avg", "exp_avg_sq"):
        a, b = (of.optimizer.state[of.of.w][name].x_q.float() for of in (eager, compiled))
        assert (a != b).float().mean() < 1e-3, name
