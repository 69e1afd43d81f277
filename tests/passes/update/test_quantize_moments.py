"""The passes that store moments in FP8: the tensors that are found to be moments, and the graph that they make."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fp8pass
from fp8pass.graph.annotation import copy_to_edit
from fp8pass.passes.update import find_moments
from fp8pass.passes.update.find_moments import moments_of
from fp8pass.passes.update.read_moments import ReadMoments
from fp8pass.passes.update.write_moments import WriteMoments
from fp8pass.passes.update.written import written
from fp8pass.quant import ops
from fp8pass.quant.moments import NAMED, Fp8Moment
from fp8pass.weights.update_key import UpdateKey, attribute
from tests.helpers.harness import BF16, E4M3, F16, F32, expect_graph, on_update
from tests.helpers.optimizers import Lion

BOTH = {"exp_avg": "first", "exp_avg_sq": "second"}
"""The kinds of AdamW's moments, by name."""


def stored(kind: str, x: Tensor, scale: float) -> Tensor:
    """Return the stored tensor for a moment, by the formula."""
    x = x.double()
    if kind == "first":
        return (x * scale).clamp(-448, 448).float().to(E4M3)
    return (x.sqrt() * scale).clamp(max=65504).float().to(F16)


def read(kind: str, x_q: Tensor, scale: float) -> Tensor:
    """Return the moment in float64 that a stored tensor stands for."""
    x = x_q.double() / scale
    return x if kind == "first" else x.square()


def power_of_2(target: float, amax: float) -> float:
    """Return the largest power of two whose product with amax is at most `target`; 1 for an amax of 0."""
    return min(2.0 ** math.floor(math.log2(target / amax)), 2.0**126) if amax else 1.0


MS_AMP = NAMED["fp8+float16"]


def model(dtype: torch.dtype = F32) -> nn.Sequential:
    """Return a model with gradients, whose first weight is large enough for moments in FP8 and whose second is not."""
    made = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 63, bias=False)).to(dtype)
    made(torch.randn(5, 64, dtype=dtype)).square().sum().backward()
    return made


def kinds(make: Callable[..., Any], dtype: torch.dtype = F32) -> dict[str, str]:
    """Return the kinds of moments found in the optimizer's state of the large weight, by name; check for no others."""
    of = model(dtype)
    optimizer = make(of.parameters())
    optimizer.step()
    found: dict[int, str] = {}

    def backend(module: fx.GraphModule, _: Any) -> Any:
        before = module.code
        moments = moments_of(module, places, MS_AMP) if (places := written(module)) else []
        assert module.code == before, "finding moments changes the graph"

        def run(*args: Any) -> Any:
            for moment in moments:
                x = args[moment.ref] if isinstance(moment.ref, int) else attribute(module, moment.ref)
                assert moment.dtype == x.dtype
                found[id(x)] = moment.kind
            return module.forward(*args)

        return run

    torch.compile(optimizer.step, backend=backend)()
    state = optimizer.state[of[0].weight]
    named = {name: found.pop(id(x)) for name, x in state.items() if id(x) in found}
    assert not found, "found a tensor that is too small or not a moment"
    return named


def adam(p: nn.Parameter, m: Tensor, v: Tensor) -> None:
    """Update a parameter and its moments by hand, as Adam does."""
    with torch.no_grad():
        assert p.grad is not None
        m.lerp_(p.grad, 0.1)
        v.mul_(0.9).add_(p.grad * p.grad * 0.1)
        p.sub_(m / v.sqrt(), alpha=0.1)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> fx.GraphModule:
    """Return Dynamo's graph of `adam`, rewritten."""
    monkeypatch.setattr(find_moments, "MIN_ELEMENTS", 1)
    found: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, _: Any) -> Any:
        found.append(copy_to_edit(module))
        return module.forward

    p = nn.Parameter(torch.randn(4, 8))
    p.grad = torch.randn(4, 8)
    torch.compile(adam, backend=backend, fullgraph=True)(p, torch.zeros(4, 8), torch.zeros(4, 8))
    (module,) = found
    moments = sorted(moments_of(module, written(module), MS_AMP), key=lambda x: x.kind)
    assert [x.kind for x in moments] == ["first", "second"]
    on_update(module, UpdateKey((), (), (), tuple(moments)), ReadMoments(), WriteMoments())
    return module


class Momentum(torch.optim.Optimizer):
    """An optimizer with a moment and another state, whose use `kind` names."""

    def __init__(self, params: Any, kind: str) -> None:
        super().__init__(params, {"lr": 1e-2})
        self.kind = kind
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"momentum": torch.zeros_like(p), "other": p.detach().clone()}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum, other = self.state[p]["momentum"], self.state[p]["other"]
                momentum.lerp_(p.grad, 0.1)
                if self.kind == "average":
                    p.sub_(momentum, alpha=group["lr"])
                    other.lerp_(p, 0.01)
                elif self.kind == "master":
                    other.mul_(1 - 1e-3).sub_(momentum, alpha=group["lr"])
                    p.copy_(other)


OPTIMIZERS: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "SGD": (lambda p, **k: torch.optim.SGD(p, lr=0.1, **k), {}),
    "SGD momentum": (
        lambda p, **k: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, **k),
        {"momentum_buffer": "first"},
    ),
    "SGD nesterov": (
        lambda p, **k: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **k),
        {"momentum_buffer": "first"},
    ),
    "Adam": (lambda p, **k: torch.optim.Adam(p, lr=0.1, **k), BOTH),
    "Adam, weight decay": (lambda p, **k: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, **k), BOTH),
    "AdamW": (lambda p, **k: torch.optim.AdamW(p, lr=0.1, **k), BOTH),
    "AdamW, lr in a tensor": (lambda p, foreach: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False), BOTH),
    "AdamW maximize": (lambda p, **k: torch.optim.AdamW(p, lr=0.1, maximize=True, **k), BOTH),
    "amsgrad": (
        lambda p, **k: torch.optim.Adam(p, lr=0.1, amsgrad=True, **k),
        {**BOTH, "max_exp_avg_sq": "second"},
    ),
    "NAdam": (lambda p, **k: torch.optim.NAdam(p, lr=0.1, **k), BOTH),
    "Adamax": (lambda p, **k: torch.optim.Adamax(p, lr=0.1, **k), {"exp_avg": "first"}),
    "RMSprop": (lambda p, **k: torch.optim.RMSprop(p, lr=0.1, **k), {"square_avg": "second"}),
    "Adagrad": (lambda p, **k: torch.optim.Adagrad(p, lr=0.1, **k), {}),
    "Adafactor": (lambda p, **k: torch.optim.Adafactor(p, lr=0.1, **k), {}),
}


SIMILAR = {"SGD nesterov": "SGD momentum", "Adam, weight decay": "Adam", "AdamW maximize": "AdamW"}
"""Cases that are variants, and cases from which they differ by one term of the formula."""


@pytest.mark.passes
@pytest.mark.parametrize("foreach", [False, True], ids=["each", "foreach"])
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.variant] * (case in SIMILAR)) for case in OPTIMIZERS]
)
def test_moments_of_optimizers(case: str, foreach: bool) -> None:
    make, wanted = OPTIMIZERS[case]
    if case == "Adafactor" and foreach and torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 itself fails: its lists have no dtype in Dynamo")
    if case == "amsgrad" and foreach:  # the pass does not analyze a maximum of lists
        wanted = BOTH
    assert kinds(lambda p: make(p, foreach=foreach)) == wanted


@pytest.mark.passes
def test_moments_of_an_unknown_optimizer() -> None:
    assert kinds(Lion) == {"momentum": "first"}


@pytest.mark.passes
@pytest.mark.parametrize("kind", ["average", "master"])
def test_states_that_are_not_moments(kind: str) -> None:
    """An optimizer may also have averages of parameters, or copies of them in full precision."""
    assert kinds(lambda p: Momentum(p, kind)) == {"momentum": "first"}


@pytest.mark.passes
def test_moments_in_bfloat16() -> None:
    """Only first moments are stored in FP8, because a float16 root of a second moment is as large as bfloat16."""
    assert kinds(lambda p: torch.optim.AdamW(p, foreach=True), BF16) == {"exp_avg": "first"}


@pytest.mark.passes
def test_graph(module: fx.GraphModule) -> None:
    expect_graph(
        module,
        """\
L_p_: "f32[4, 8]",
L_p_grad: "f32[4, 8]",
L_m_: "f32[4, 8]",
L_v_: "f32[4, 8]",
fp8pass_moment_scales,
fp8pass_moment_0,
fp8pass_moment_1,
l_p_ = L_p_
l_p_grad = L_p_grad
l_m_ = L_m_
l_v_ = L_v_
decode_moment = fp8pass_quant_ops_decode_moment(Format(kind='first', dtype=torch.float8_e4m3fn, block=None, expands=False, stochastic=False), fp8pass_moment_0, fp8pass_moment_scales, 0, torch.float32)
decode_moment_1 = fp8pass_quant_ops_decode_moment(Format(kind='second', dtype=torch.float16, block=None, expands=False, stochastic=False), fp8pass_moment_1, fp8pass_moment_scales, 1, torch.float32)
_set_grad_enabled = torch._C._set_grad_enabled(False)
lerp_: "f32[4, 8]" = decode_moment.lerp_(l_p_grad, 0.1)
mul_: "f32[4, 8]" = decode_moment_1.mul_(0.9)
mul: "f32[4, 8]" = l_p_grad * l_p_grad
mul_1: "f32[4, 8]" = mul * 0.1
add_: "f32[4, 8]" = mul_.add_(mul_1)
sqrt: "f32[4, 8]" = decode_moment_1.sqrt()
truediv: "f32[4, 8]" = decode_moment / sqrt
sub_: "f32[4, 8]" = l_p_.sub_(truediv, alpha = 0.1)
_set_grad_enabled_1 = torch._C._set_grad_enabled(True)
next_moment_scales = fp8pass_quant_ops_next_moment_scales((224.0, 256.0), fp8pass_moment_scales, None)
write_moment = fp8pass_quant_ops_write_moment(Format(kind='first', dtype=torch.float8_e4m3fn, block=None, expands=False, stochastic=False), decode_moment, fp8pass_moment_0, next_moment_scales, 0, None)
write_moment_1 = fp8pass_quant_ops_write_moment(Format(kind='second', dtype=torch.float16, block=None, expands=False, stochastic=False), decode_moment_1, fp8pass_moment_1, next_moment_scales, 1, None)
write_moment_scales = fp8pass_quant_ops_write_moment_scales(fp8pass_moment_scales, next_moment_scales, [write_moment, write_moment_1])
return ()
""",
    )


@pytest.mark.passes
def test_written_moments(module: fx.GraphModule) -> None:
    """Moments are stored with scales from the stored amaxes; the plain moments, which are still inputs, stay."""
    p, grad = torch.randn(4, 8), torch.randn(4, 8)
    m_q, v_q = stored("first", torch.randn(4, 8), 16.0), stored("second", torch.rand(4, 8), 128.0)
    moment_scales = torch.tensor([[1 / 16, 1 / 128], [5.0, 0.75]])
    given = {"L_p_": p.clone(), "L_p_grad": grad, "L_m_": torch.zeros(4, 8), "L_v_": torch.zeros(4, 8)}
    rest = {
        "fp8pass_moment_scales": moment_scales.clone(),
        "fp8pass_moment_0": m_q.clone(),
        "fp8pass_moment_1": v_q.clone(),
    }
    inputs = {**given, **rest}
    fx.Interpreter(module).run(*(inputs[str(n.target)] for n in module.graph.nodes if n.op == "placeholder"))
    m = read("first", m_q, 16.0) * 0.9 + grad.double() * 0.1
    v = read("second", v_q, 128.0) * 0.9 + grad.double().square() * 0.1
    torch.testing.assert_close(inputs["L_p_"].double(), p - 0.1 * m / v.sqrt(), rtol=1e-5, atol=1e-6)
    assert not inputs["L_m_"].any() and not inputs["L_v_"].any()
    scales = power_of_2(224, 5.0), power_of_2(256, 0.75)
    assert scales == (32.0, 256.0)
    for kind, x, scale, x_q in (
        ("first", m, scales[0], rest["fp8pass_moment_0"]),
        ("second", v, scales[1], rest["fp8pass_moment_1"]),
    ):
        wanted = stored(kind, x, scale).float()
        assert (x_q.float() - wanted).abs().max() <= wanted.abs().max() * 2**-10, (
            "differs by more than float32's last bit"
        )
    got = rest["fp8pass_moment_scales"]
    assert got[0].tolist() == [1 / 32, 1 / 256]
    amaxes = [rest[f"fp8pass_moment_{i}"].float().abs().max() * got[0, i] for i in range(2)]
    assert torch.equal(got[1], torch.stack(amaxes))


@pytest.mark.passes
def test_scales_of_a_step_that_is_skipped() -> None:
    moment_scales = torch.tensor([[0.5, 0.25], [100.0, 1e-3]])
    assert ops.next_moment_scales((224.0, 256.0), moment_scales, torch.tensor(True)).tolist() == [2.0, 4.0]
    assert ops.next_moment_scales((224.0, 256.0), moment_scales, torch.tensor(False)).tolist() == [2.0, 131072.0]


@pytest.mark.passes
@pytest.mark.parametrize("amax", [0.0, math.nan, math.inf])
def test_scales_stay_where_the_amax_is_not_usable(amax: float) -> None:
    moment_scales = torch.tensor([[0.5], [amax]])
    assert ops.next_moment_scales((224.0,), moment_scales, None).tolist() == [2.0]


class Product(nn.Module):
    """A model whose weight has its input as gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


class Oracle:
    """The formulas of optimizers and stored moments, in float64. kinds: of the moments, by name."""

    def __init__(self, w: Tensor, kinds: dict[str, str]) -> None:
        self.w, self.kinds, self.steps = w.detach().double(), kinds, 0
        self.moments = {name: torch.zeros_like(self.w) for name in kinds}
        self.amaxes: dict[str, float] = {}
        self.scales: dict[str, float] = {}
        self.x_q: dict[str, Tensor] = {}

    def store(self) -> None:
        for name, kind in self.kinds.items():
            x, first = self.moments[name], kind == "first"
            if not self.steps:  # the first step stores with the scale of its own amax
                root = float((x if first else x.sqrt()).abs().max())
                scale = power_of_2(448 if first else 65504, root)
            else:
                amax = self.amaxes[name]
                scale = power_of_2(224 if first else 256, amax) if amax else self.scales[name]
            x_q = self.x_q[name] = stored(kind, x, scale)
            self.moments[name], self.scales[name] = read(kind, x_q, scale), scale
            self.amaxes[name] = float(x_q.double().abs().max()) / scale
        self.steps += 1

    def adamw(self, grad: Tensor) -> None:
        m, v, t = self.moments["exp_avg"], self.moments["exp_avg_sq"], self.steps + 1
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad.square()
        self.moments = {"exp_avg": m, "exp_avg_sq": v}
        denominator = (v / (1 - 0.999**t)).sqrt() + 1e-8
        self.w = self.w * (1 - 0.01 * 0.1) - 0.01 * (m / (1 - 0.9**t)) / denominator

    def sgd(self, grad: Tensor) -> None:
        m = self.moments["momentum_buffer"]
        self.moments = {"momentum_buffer": grad if not self.steps else 0.9 * m + grad}
        self.w = self.w - 0.01 * self.moments["momentum_buffer"]


ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


TRAINED: dict[str, tuple[Callable[..., Any], dict[str, str], Callable[[Oracle, Tensor], None]]] = {
    "AdamW": (lambda p: torch.optim.AdamW(p, **ADAMW, foreach=False), BOTH, Oracle.adamw),
    "AdamW foreach": (lambda p: torch.optim.AdamW(p, **ADAMW, foreach=True), BOTH, Oracle.adamw),
    "SGD": (
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, foreach=True),
        {"momentum_buffer": "first"},
        Oracle.sgd,
    ),
}


RANGES = [1.0, 1.5, 0.5, 40.0, 1.0, 1e-3, 0.0, 1.0]
"""Factors of the gradients. Some make a first moment saturate, and some make moments small."""


SKIPS: dict[str, Any] = {"skip_nonfinite": True}


FORMULAS: list[Any] = [("AdamW", SKIPS), ("AdamW foreach", {"lowering": "inductor"})]


OTHERS: list[Any] = [("SGD", {}), ("AdamW", {}), ("AdamW foreach", {}), ("AdamW foreach", SKIPS), ("SGD", SKIPS)]


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("case", "config"), [*FORMULAS, *(pytest.param(*case, marks=pytest.mark.variant) for case in OTHERS)], ids=str
)
def test_training_by_the_formulas(case: str, config: dict[str, Any]) -> None:
    make, kinds_, update = TRAINED[case]
    torch.manual_seed(0)
    of = Product()
    optimizer, oracle = make(of.parameters()), Oracle(of.w, kinds_)

    @fp8pass.train_step(**{"lowering": "eager", "recipe": None, "optimizer_state": "fp8+float16", **config})
    def step(x: Tensor) -> None:
        of(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    for factor in RANGES:
        grad = torch.randn(64, 64) * factor
        step(grad)
        update(oracle, grad.double())
        oracle.store()
        torch.testing.assert_close(of.w.detach().double(), oracle.w, rtol=0, atol=2e-4)
        for name, kind in kinds_.items():
            got = optimizer.state[of.w][name]
            if (
                name == "momentum_buffer" and oracle.steps == 1
            ):  # after one step it is the gradient, which no update has quantized
                continue
            assert isinstance(got, Fp8Moment) and got.kind == kind
            assert float(got.moment_scales[0, got.column]) == 1 / oracle.scales[name], name
            differ = (got.x_q.float() != oracle.x_q[name].float()).float().mean()
            assert differ < 0.01, "more than values that float32 rounds to the other side"
