"""Test moments in FP8: what is stored, what reads and saves them, and that the plain tensors are freed."""

from __future__ import annotations

import copy
import functools
import gc
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import fp8pass
from fp8pass.base.errors import Fp8Error
from fp8pass.quant.moments import Format, Fp8Moment, decode, decode_blocks, encode, encode_blocks, nbytes_saved, pack
from tests.helpers.harness import BF16, E4M3, E5M2, F16, F32

pytestmark = [pytest.mark.compiled, pytest.mark.shares_code]
FORMATS = {
    "first": Format("first", E4M3),
    "second": Format("second", F16),
    "first stochastic": Format("first", E4M3, stochastic=True),
    "second e5m2": Format("second", E5M2, stochastic=True),
    "second e4m3": Format("second", E4M3, stochastic=True),
    "first in blocks": Format("first", E4M3, block=48, stochastic=True),
    "second e4m3 in blocks": Format("second", E4M3, block=48, stochastic=True),
    "first expanded": Format("first", E4M3, block=48, expands=True, stochastic=True),
    "second e5m2 expanded": Format("second", E5M2, block=48, expands=True, stochastic=True),
}
KEY = torch.tensor(0x1234567, dtype=torch.int32)
SOME = ["first", "second", "second e5m2 expanded"]
ERRORS = {"first": 2**-4, "second": 2**-9}
"""The largest relative error of large values: half a unit of the last bit, twice that of a square; else see the test."""


def values(kind: str, factor: float = 1.0) -> Tensor:
    """Return values of a moment over many binades; over 6, and in each row over 1, if they are to be expanded."""
    if "expanded" in kind:
        x = (torch.rand(32, 48) + 0.5) * torch.exp2(torch.randint(-6, 1, (32, 1)))
    else:
        x = torch.randn(32, 48) * torch.exp2(torch.randint(-12, 1, (32, 48)))
    return x * factor if kind.startswith("first") else x.square() * factor


# ---------------------------------------------------------------------------------------------------------------------
# The tensor


@pytest.mark.parametrize("factor", [1.0, 0.0, 1e-37, 1e-30, 1e-10, 1e10, 1e30])
@pytest.mark.parametrize("kind", FORMATS)
def test_what_was_stored_is_stored_again_exactly(kind: str, factor: float) -> None:
    for _ in range(5):
        x = values(kind, factor)
        once = Fp8Moment.of(FORMATS[kind], x).value()
        twice = Fp8Moment.of(FORMATS[kind], once)
        assert torch.equal(twice.value(), once)
        assert once.isfinite().all()
        if factor and factor > 1e-30 and kind in ERRORS:
            largest = x.abs() > x.abs().max() / 2**6
            error = ((once - x).abs() / x.abs())[largest].max()
            assert error <= ERRORS[kind]


@pytest.mark.parametrize("scale", [2.0**-8, 1.0, 2.0**5, 2.0**40])
@pytest.mark.parametrize("kind", [kind for kind, of in FORMATS.items() if of.block is None])
def test_what_an_update_stored_is_stored_again_exactly(kind: str, scale: float) -> None:
    """The update's scale leaves room to grow: it is not the best one for the values."""
    of = FORMATS[kind]
    factor = 100 / scale if of.kind == "first" else (200 / scale) ** 2
    x_q = encode(of, values(kind, factor / 4), torch.tensor(scale), key=KEY if of.stochastic else None)
    x = decode(of, x_q, torch.tensor(1 / scale), F32)
    assert torch.equal(Fp8Moment.of(of, x).value(), x)


@pytest.mark.parametrize("factor", [1.0, 1e-30, 1e-10, 1e10])
@pytest.mark.parametrize("kind", [kind for kind, of in FORMATS.items() if of.block is not None])
def test_what_an_update_stored_in_blocks_is_stored_again_exactly(kind: str, factor: float) -> None:
    """A block's power is not saved, and found by trying."""
    of, x = FORMATS[kind], values(kind, factor)
    stored, blocks = encode_blocks(of, x, KEY)
    assert torch.equal(stored.to(of.dtype).float(), stored), "a number of FP8"
    once = decode_blocks(of, stored.to(of.dtype), blocks, F32)
    assert torch.equal(Fp8Moment.of(of, once).value(), once)
    if of.expands:
        assert set(blocks[1].tolist()) <= {4.0, 8.0}


@pytest.mark.parametrize("kind", [kind for kind, of in FORMATS.items() if of.block is None])
def test_values_that_are_not_finite(kind: str) -> None:
    """NaN stays NaN; an infinity saturates; other values keep what scale 1 can represent."""
    x = torch.tensor([1.0, 0.25, math.nan, 0.0])
    got = Fp8Moment.of(FORMATS[kind], x).value()
    assert got.isnan().tolist() == [False, False, True, False] and got[[0, 1, 3]].tolist() == [1.0, 0.25, 0.0]
    x[2] = math.inf
    got = Fp8Moment.of(FORMATS[kind], x).value()
    assert got.isfinite().all() and got[2] == got.max() and got[:2].tolist() == [1.0, 0.25]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("kind", SOME)
def test_reads_as_a_plain_tensor(kind: str, dtype: torch.dtype) -> None:
    of = FORMATS[kind]
    moment = Fp8Moment.of(of, values(kind).to(dtype))
    plain = moment.value()
    assert (moment.dtype, moment.shape, moment.stride(), moment.device) == (dtype, (32, 48), (48, 1), plain.device)
    assert moment.x_q.dtype == of.dtype
    for function in (
        torch.clone,
        torch.sum,
        lambda x: x + 1,
        lambda x: torch.ones(32, 48, dtype=dtype).addcmul_(x, x),
        lambda x: x.t().contiguous(),
        lambda x: x[3, 4:7],
        lambda x: torch.stack([x, x]),
        lambda x: x.double().norm(),
        lambda x: torch._foreach_mul([x, x], 2.0)[1],
        lambda x: torch.zeros(32, 48, dtype=dtype).copy_(x),
    ):
        result = function(moment)
        assert torch.equal(result.clone(), function(plain))
    assert type(moment + 1) is Tensor
    detached = moment.detach()
    assert isinstance(detached, Fp8Moment) and detached.x_q is moment.x_q
    assert repr(moment) == f"Fp8Moment({of.kind}, [32, 48], {moment.x_q.dtype})"


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda x: x.mul_(0.9),
    "add_": lambda x: x.add_(1),
    "lerp_": lambda x: x.lerp_(torch.ones(32, 48), 0.1),
    "fill_": lambda x: x.fill_(1),
    "foreach": lambda x: torch._foreach_mul_([torch.ones(3), x], 0.9),
    "out": lambda x: torch.add(torch.ones(32, 48), 1, out=x),
}


@pytest.mark.parametrize("case", WRITES)
def test_writes_are_refused(case: str) -> None:
    moment = Fp8Moment.of(FORMATS["first"], values("first"))
    before = moment.value()
    with pytest.raises(Fp8Error, match=r"optimizer_state='fp8'.*foreach=True, not fused=True.*drop the option"):
        WRITES[case](moment)
    assert torch.equal(moment.value(), before)


@pytest.mark.parametrize("kind", SOME)
def test_copy_and_zero(kind: str) -> None:
    """Both write in place, also if one tensor holds the numbers of several moments."""
    of = FORMATS[kind]
    moments = [Fp8Moment.of(of, values(kind, 10.0**i)) for i in range(3)]
    pack(moments)
    others = [m.value() for m in (moments[0], moments[2])]
    middle, x_q = moments[1], moments[1].x_q
    new = values(kind, 1e-3)
    assert middle.copy_(new) is middle and middle.x_q is x_q
    assert torch.equal(middle.value(), Fp8Moment.of(of, new).value())
    assert middle.zero_() is middle
    assert not middle.value().any()
    assert all(torch.equal(m.value(), x) for m, x in zip((moments[0], moments[2]), others, strict=True))


def test_pack() -> None:
    moments = [Fp8Moment.of(FORMATS[kind], values(kind)) for kind in ("first", "first", "second")]
    before = [m.value() for m in moments]
    moment_scales = pack(moments)
    assert moment_scales.shape == (2, 3) and moment_scales.is_contiguous()
    assert [m.column for m in moments] == [0, 1, 2] and all(m.moment_scales is moment_scales for m in moments)
    assert all(torch.equal(m.value(), x) for m, x in zip(moments, before, strict=True))
    assert pack(moments) is moment_scales, "packed moments stay as they are"
    assert pack(moments[:2]).shape == (2, 2) and pack(moments[::-1]).shape == (2, 3)
    assert all(torch.equal(m.value(), x) for m, x in zip(moments, before, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Steps


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=True)


class Training:
    """A small model and its training step."""

    def __init__(self, optimizer: Callable[..., Any] = adamw, **config: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.optimizer = optimizer(self.model.parameters())

        @fp8pass.train_step(**{"min_speedup": 0, "lowering": "eager", "optimizer_state": "fp8", **config})
        def step(x: Tensor) -> Tensor:
            loss = F.mse_loss(self.model(x), x.roll(1, 0) * 0.1 + x.roll(1, 1))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.detach()

        self.step = step

    def run(self, steps: range) -> list[float]:
        """Train; return the losses."""
        return [self.step(torch.randn(32, 64, generator=torch.Generator().manual_seed(i))).item() for i in steps]

    def checkpoint(self) -> list[dict[str, Any]]:
        """Return the states of the model, its optimizer, and FP8."""
        states = self.model.state_dict(), self.optimizer.state_dict(), fp8pass.state(self.model).state_dict()
        return copy.deepcopy(list(states))

    def load(self, states: list[dict[str, Any]]) -> None:
        """Load what `checkpoint` returned."""
        for of, state in zip((self.model, self.optimizer, fp8pass.state(self.model)), states, strict=True):
            of.load_state_dict(state)

    def moments(self) -> list[Any]:
        """Return the moments of the large weights."""
        states = [self.optimizer.state[self.model[i].weight] for i in (0, 2)]
        return [x for state in states for name, x in state.items() if name != "step"]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)


def alive() -> int:
    """Count plain float32 tensors as large as the weights, among which are the weights and their gradients."""
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) is Tensor and x.dtype == F32 and x.numel() == 64 * 128]
    return len([x for x in found if x.device.type == "cpu" and x.untyped_storage().nbytes()])


def test_moments_that_an_optimizer_has_already() -> None:
    """The optimizer has trained eagerly before: its moments get their best scales, and the plain ones are freed."""
    training = Training()
    model, optimizer = training.model, training.optimizer
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = alive()
    training.run(range(2))
    assert all(isinstance(x, Fp8Moment) for x in training.moments())
    assert alive() == before - 4


class Trained(NamedTuple):
    """A training after its first steps. alive: what `alive` returned before the first, after it, and at the end."""

    training: Training
    losses: list[float]
    alive: list[int]


@functools.cache
def trained() -> Trained:
    """Train 30 steps; several tests go on from there, in any order."""
    training = Training()
    counts = [alive()]
    losses = training.run(range(1))
    counts.append(alive())
    losses += training.run(range(1, 30))
    return Trained(training, losses, [*counts, alive()])


def test_a_state_dict_is_plain_and_loads_into_any_optimizer() -> None:
    training = trained().training
    assert all(isinstance(x, Fp8Moment) for x in training.moments())
    state = training.optimizer.state_dict()
    for of in state["state"].values():
        assert all(type(x) is Tensor and x.dtype == F32 for x in of.values())
    plain = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    other = adamw(plain.parameters())
    other.load_state_dict(state)
    for moment, x in zip(
        training.moments(),
        [x for i in (0, 2) for n, x in other.state[plain.get_parameter(f"{i}.weight")].items() if n != "step"],
        strict=True,
    ):
        assert type(x) is Tensor and torch.equal(x, moment.value())
    plain(torch.randn(4, 64)).sum().backward()
    other.step()
    assert all(isinstance(x, Fp8Moment) for x in training.moments()), "saving and loading leave the moments in FP8"


def test_the_plain_tensors_are_gone() -> None:
    training, _, counts = trained()
    assert all(isinstance(x, Fp8Moment) for x in training.moments())
    assert counts[1] == counts[2] == counts[0]


def test_the_report_says_what_is_saved() -> None:
    training = trained().training
    assert nbytes_saved([training.optimizer]) == (4, 2 * 64 * 128 * (3 + 3))
    assert "4 moments of optimizers are in FP8, which saves 0.1 MB" in training.step.report.notes


def test_bytes_per_parameter() -> None:
    """Weights have moments of 1 byte, biases of 4; the first weight has one FP8 copy, the second two."""
    training = trained().training
    weights, biases = 2 * 64 * 128, 128 + 64
    found = training.step.bytes_per_parameter()
    scales = found.steady.pop("scales and counts")
    assert found.elements == weights + biases and 8 * 4 <= scales < 1024
    assert found.steady == {
        "parameters": 4 * (weights + biases),
        "FP8 copies": 3 * 64 * 128,
        "exp_avg": weights + 4 * biases,
        "exp_avg_sq": weights + 4 * biases,
    }
    assert found.gradients == 4 * (weights + biases)
    assert 11.5 < found.peak < 11.7
    assert training.step.report.notes[-1].startswith(
        "bytes per parameter: parameters 4.00, FP8 copies 1.48, exp_avg 1.0"
    )


def test_the_loss_is_about_the_same() -> None:
    """The losses are compared after 30 steps."""
    off, fp8 = Training(optimizer_state="off").run(range(30)), trained().losses
    assert off != fp8 and off[0] == fp8[0]
    assert fp8[-1] < 0.9 * fp8[0]
    assert fp8[-1] == pytest.approx(off[-1], rel=0.03)  # roots of second moments have 2 bits


def test_a_copy_of_an_optimizer_has_its_own_moments() -> None:
    training = trained().training
    before = [x.value() for x in training.moments()]
    states = list(copy.deepcopy(training.optimizer).state.values())
    copies = [x for of in states for x in of.values() if isinstance(x, Fp8Moment)]
    assert [x.x_q.data_ptr() for x in copies] != [x.x_q.data_ptr() for x in training.moments()]
    training.run(range(2, 4))
    assert all(torch.equal(x.value(), y) for x, y in zip(copies, before, strict=True))


@pytest.mark.parametrize(
    ("cache", "optimizer"),
    [
        pytest.param("off", adamw, id="off-AdamW", marks=pytest.mark.variant),
        pytest.param("off", sgd, id="off-SGD", marks=pytest.mark.variant),
        pytest.param("fp8+transpose", adamw, id="fp8+transpose-AdamW"),
        pytest.param("fp8+transpose", sgd, id="fp8+transpose-SGD", marks=pytest.mark.variant),
    ],
)
def test_resumes_bit_for_bit(optimizer: Callable[..., Any], cache: str) -> None:
    """A new run, with everything compiled anew, loads the checkpoint; and so does the run that goes on."""
    is_trained = optimizer is adamw and cache == "fp8+transpose"
    training = trained().training if is_trained else Training(optimizer, weight_cache=cache)
    before = training.run(range(4))
    states = training.checkpoint()
    wanted = training.run(range(4, 7))
    assert len({*before, *wanted}) == 7
    training.load(copy.deepcopy(states))
    assert training.run(range(4, 7)) == wanted
    final = training.checkpoint()
    torch._dynamo.reset()
    resumed = Training(optimizer, weight_cache=cache)
    resumed.load(states)
    assert resumed.run(range(4, 7)) == wanted
    assert all(isinstance(x, Fp8Moment) for x in resumed.moments())
    for a, b in zip(final[:2], resumed.checkpoint()[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_an_eager_step_between_compiled_ones_says_what_to_do() -> None:
    training = trained().training
    training.model(torch.randn(4, 64)).sum().backward()
    with pytest.raises(Fp8Error, match="let train_step compile it"):
        training.optimizer.step()
    training.optimizer.zero_grad()


def test_only_in_a_step() -> None:
    run = torch.compile(nn.Linear(64, 64), backend="fp8pass", options={"optimizer_state": "fp8"})
    with pytest.raises(BackendCompilerFailed, match=r"ValueError: optimizer_state is an option of fp8pass\.train_step"):
        run(torch.randn(4, 64))


@pytest.mark.filterwarnings("ignore:.*its first call updated no parameter")  # a fused one increments no version
def test_optimizers_that_are_not_compiled_and_those_without_moments() -> None:
    for optimizer in (
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    ):
        training = Training(optimizer)
        training.run(range(2))
        assert not any(isinstance(x, Fp8Moment) for x in training.moments())
        assert any(note.startswith("optimizer_state='fp8' has had no effect") for note in training.step.report.notes)
