"""Test `fp8pass.train_step`: forward, backward and update of a step, compiled; and FP8 copies of weights."""

from __future__ import annotations

import copy
import functools
import gc
import math
import re
import sys
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.comptime import comptime
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.base.scaling import E4M3, quantize
from fp8pass.compiler.module_calls import Caught
from fp8pass.recipes import Schedule
from fp8pass.states import steps
from fp8pass.weights.weight_copy import DelayedWeight
from tests.helpers.harness import sqnr
from tests.helpers.models import Block, Parts, make
from tests.helpers.train_step import RECIPE, Decorate, batch, changed_again, decorate, everything, tensors, weights


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    """Return an SGD, which compiles in half the time, for tests in which any optimizer will do."""
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)


def plain(model: Any, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    """Return the most usual step. Tests below call `zero_grad` first, which begins one more graph and takes longer."""

    def step(x: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), x * 0.5)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def assert_same(a: Any, b: Any) -> None:
    found, wanted = dict(tensors(a)), dict(tensors(b))
    assert found.keys() == wanted.keys()
    for name, x in found.items():
        assert torch.equal(x.nan_to_num(7.0), wanted[name].nan_to_num(7.0)), name


def assert_cached_as_uncached(scenario: Callable[[Decorate], Any], **config: Any) -> Any:
    """Check that a scenario has the same numbers with FP8 copies of weights and without, bit for bit."""
    results = []
    for cache in ("fp8+transpose", "off"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        results.append(scenario(lambda f, cache=cache, **more: decorate(f, weight_cache=cache, **config, **more)))
    assert_same(*results)
    return results[0]


# Optimizers
class Lion(torch.optim.Optimizer):
    """An optimizer as many users write one, tensor by tensor. into_data: write to `p.data`, unseen by autograd, as
    older code does.
    """

    def __init__(self, parameters: Any, lr: float = 1e-3, decay: float = 0.1, into_data: bool = False) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay})
        self.into_data = into_data

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                x = p.data if self.into_data else p
                x.mul_(1 - group["lr"] * group["decay"])
                x.add_(m.mul(0.9).add(p.grad, alpha=0.1).sign_(), alpha=-group["lr"])
                m.mul_(0.99).add_(p.grad, alpha=0.01)


class EagerLion(Lion):
    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


COMPILED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "lion": Lion,
    "lion data": lambda p: Lion(p, into_data=True),
}


EAGER: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "eager lion": EagerLion,
    "eager lion data": lambda p: EagerLion(p, into_data=True),
}


VARIANTS = ("sgd", "momentum", "adam", "adamw amsgrad", "lion", "lion data", "eager lion")
"""These are variants, for most tests below have SGD."""


NAMES = [pytest.param(n, marks=pytest.mark.variant) if n in VARIANTS else n for n in (*COMPILED, *EAGER)]


@pytest.mark.compiled
@pytest.mark.parametrize("name", NAMES)
def test_optimizers(name: str) -> None:
    """Compiled updates write the copies; after other optimizers, one call of compiled code writes all."""

    def scenario(decorated: Decorate) -> Any:
        model = make(Block if name == "adamw foreach" else Parts)
        optimizer = {**COMPILED, **EAGER}[name](model.parameters())
        step: Any = decorated(plain(model, optimizer))
        losses = [step(batch(i)) for i in range(5)]
        assert losses[3] < losses[0]
        for w in weights(model):
            assert (w.requantized, w.expected) == (2, 2)
        assert "quantized again" not in str(step.report)
        return losses, everything(model, optimizer)

    assert_cached_as_uncached(scenario)


@pytest.mark.compiled
@pytest.mark.variant
def test_weights_that_are_changed_again_have_the_numbers_of_those_without_copies() -> None:
    """The numbers are equal to the bit through Inductor."""
    assert_cached_as_uncached(lambda decorated: changed_again(decorated)[:2], lowering="inductor")


# Changes that fp8pass does not see
def load(model: nn.Module) -> None:
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})


@torch.no_grad()
def edit(model: nn.Module) -> None:
    model.get_parameter("up.weight").mul_(3)


def replace(model: nn.Module) -> None:
    p = model.get_parameter("up.weight")
    p.data = p.data * 3


def eager_optimizer(model: nn.Module) -> None:
    p = model.get_parameter("up.weight")
    p.grad = torch.ones_like(p)
    Lion([p], lr=0.1, into_data=True).step()
    p.grad = None


def reload_state(model: nn.Module) -> None:
    state = fp8pass.state(model).state_dict()
    state["up.weight.scale"] *= 0.25
    fp8pass.state(model).load_state_dict(state)


@pytest.mark.compiled
def test_no_stale_copy_is_used() -> None:
    """Whatever is changed between two steps, the later losses and weights are those of a model without copies.

    A step that raises has no update to prepare the next copies: weights stay, but the history rolls on, so
    their scale changes. No accumulation is left open.
    """

    def scenario(decorated: Decorate) -> Any:
        model = make(Block)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: Tensor, fails: bool = False) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x * 0.5)
            loss.backward()  # type: ignore[no-untyped-call]
            if fails:
                raise KeyError("lost")
            optimizer.step()
            return loss.detach()

        run, losses = decorated(step), []
        for i in range(6):
            if i in (0, 4):
                with pytest.raises(KeyError, match="lost"):
                    run(batch(90 + i), fails=True)
                assert not steps._accumulations
            losses.append(run(batch(i)))
        assert fp8pass.state(model).steps == 8
        assert all(w.requantized == w.expected for w in weights(model))
        for change in (load, edit, replace, eager_optimizer, reload_state):
            before = [w.requantized - w.expected for w in weights(model)]
            change(model)
            losses += [run(batch(i)) for i in range(2)]
            after = [w.requantized - w.expected for w in weights(model)]
            assert all(x <= y <= x + 1 for x, y in zip(before, after, strict=True)), change.__name__
        return losses, everything(model, optimizer)

    assert_cached_as_uncached(scenario)


@pytest.mark.compiled
def test_a_frozen_weight_is_quantized_once() -> None:
    def scenario(decorated: Decorate) -> Any:
        model = make(Parts)
        model.a.requires_grad_(False)
        optimizer = sgd(model.b)
        step = decorated(plain(model, optimizer))
        losses = [step(batch(i)) for i in range(5)]
        assert all(w.requantized == 1 for w in weights(model.a))
        return losses, everything(model, optimizer)

    assert_cached_as_uncached(scenario)


# Functions that are steps, and their models
@pytest.mark.compiled
def test_an_adversarial_pair() -> None:
    """Two steps train one of two models each and read the other, of which they need other copies."""

    def scenario(decorated: Decorate) -> Any:
        g, d = (make(one_layer, seed=i) for i in range(2))
        of_g, of_d = sgd(g), sgd(d)

        def step_d(z: Tensor, x: Tensor) -> Tensor:
            loss = F.softplus(d(g(z).detach())).mean() + F.softplus(-d(x)).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            of_d.step()
            of_d.zero_grad()
            return loss.detach()

        def step_g(z: Tensor) -> Tensor:
            loss = F.softplus(-d(g(z))).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            of_g.step()
            of_g.zero_grad()
            return loss.detach()

        a, b = decorated(step_d), decorated(step_g)
        losses = [(a(batch(i), batch(i + 50)), b(batch(i + 99))) for i in range(4)]
        assert fp8pass.state(a).slots == fp8pass.state(d).slots  # type: ignore[arg-type]
        assert len(weights(g, d)) in (0, 2)  # one for each weight
        return losses, everything(g, of_g), everything(d, of_d)

    assert_cached_as_uncached(scenario)


def one_layer() -> nn.Linear:
    return nn.Linear(32, 32, bias=False)


class Trainer(nn.Module):
    """A module whose method is the step, with keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make(Parts)
        self.optimizer = sgd(self.net)

    @fp8pass.train_step(recipe=RECIPE, lowering="eager")
    def step(self, x: Tensor, *, target: Tensor) -> Tensor:
        """Run one step."""
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.net(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()


MODEL: Any = None


OPTIMIZER: Any = None


def of_globals(x: Tensor) -> Tensor:
    OPTIMIZER.zero_grad()
    loss = F.mse_loss(MODEL(x), x * 0.5)
    loss.backward()  # type: ignore[no-untyped-call]
    OPTIMIZER.step()
    return loss.detach()


def of_arguments(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    return plain(model, optimizer)(x)


@functools.cache
def trained_as_a_closure() -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return three losses, and all state after them."""
    model = make(Parts)
    optimizer = sgd(model)
    step = decorate(plain(model, optimizer))
    return [step(batch(i)) for i in range(3)], everything(model, optimizer)


@pytest.mark.compiled
@pytest.mark.parametrize("how", ["method", "globals", pytest.param("arguments", marks=pytest.mark.variant)])
def test_models_and_optimizers_are_found(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are the same, whatever the function's signature; and the history rolls once for each call.

    `test_models_one_after_the_other_share_code_and_nothing_else` passes both as arguments every day.
    """
    wanted_losses, wanted = trained_as_a_closure()
    torch._dynamo.reset()
    if how == "method":
        trainer = Trainer()
        model, optimizer, own = trainer.net, trainer.optimizer, Trainer.step
        losses = [trainer.step(batch(i), target=batch(i) * 0.5) for i in range(3)]
    else:
        model = make(Parts)
        optimizer = sgd(model)
        monkeypatch.setitem(globals(), "MODEL", model)
        monkeypatch.setitem(globals(), "OPTIMIZER", optimizer)
        own = decorate({"globals": of_globals, "arguments": of_arguments}[how])
        before = (model, optimizer) if how == "arguments" else ()
        losses = [own(*before, batch(i)) for i in range(3)]
    assert_same(losses, wanted_losses)
    assert_same(everything(model, optimizer), wanted)
    state = fp8pass.state(own)
    assert state.steps == 3
    (name,) = (n for n in state.state_dict() if n.endswith("a.input.amax_history"))  # "net.a..." in a `Trainer`
    assert state.state_dict()[name].count_nonzero() == 2


class Called:
    """A step that is an object."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.run = plain(model, optimizer)

    def __call__(self, x: Tensor) -> Tensor:
        return self.run(x)


@pytest.mark.compiled
@pytest.mark.parametrize("partial", [False, True])
def test_what_is_called_need_not_be_a_function(partial: bool) -> None:
    model = make(Parts)
    optimizer = sgd(model)
    called = functools.partial(of_arguments, model, optimizer) if partial else Called(model, optimizer)
    step = decorate(called)
    assert step(batch(0)) > step(batch(0)) > 0
    assert len(step.report.rewritten) == 5
    with pytest.raises(fp8pass.Fp8Error, match=r"(partial|Called) .* has no torch.nn.Module"):
        decorate(functools.partial(abs) if partial else Called.__new__(Called))(1)


@pytest.mark.compiled
def test_models_one_after_the_other_share_code_and_nothing_else() -> None:
    def scenario(decorated: Decorate) -> Any:
        step = decorated(of_arguments)
        models = [make(one_layer, seed=i) for i in range(2)]
        optimizers = [sgd(m) for m in models]
        losses = [step(models[i % 2], optimizers[i % 2], batch(i)) for i in range(6)]
        assert [fp8pass.state(m).steps for m in models] == [3, 3]
        return losses, [everything(m, o) for m, o in zip(models, optimizers, strict=True)]

    assert_cached_as_uncached(scenario)


@pytest.mark.compiled
def test_a_model_that_is_gone_is_not_kept() -> None:
    """Parameters and FP8 copies are freed at once, and state when another model's is made."""
    step, gone = decorate(of_arguments), []
    for seed in range(4):
        model = make(one_layer, seed=seed)
        optimizer = sgd(model)
        for i in range(2):
            step(model, optimizer, batch(i))
        gone.append([weakref.ref(x) for x in (model.weight, *weights(model))])
        del model, optimizer
        gc.collect()
    alive = [[ref() is not None for ref in refs] for refs in gone]
    assert [parameter for parameter, *_ in alive[:3]] == [False, False, False]
    assert sum(copy for _, *copies in alive for copy in copies) < 4
    assert len(alive[0]) == 2


@pytest.mark.compiled
def test_a_step_that_is_gone_does_not_keep_its_model() -> None:
    """The model is in the step's closure. torch itself keeps functions that it compiles, so each step gets its own."""
    model = make(one_layer)
    step = decorate(plain(model, sgd(model)))
    for i in range(2):
        step(batch(i))
    kept = weakref.ref(model)
    del model, step
    gc.collect()
    assert kept() is None


@pytest.mark.compiled
def test_groups_rates_and_a_layer_that_joins() -> None:
    def scenario(decorated: Decorate) -> Any:
        model = make(Parts)
        first = model.a.weight
        groups = [{"params": [first], "lr": 0.1, "weight_decay": 0.0}]
        optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9, weight_decay=0.01)
        step, losses = decorated(plain(model, optimizer)), []
        for i in range(6):
            if i == 3:
                optimizer.add_param_group({"params": [p for p in model.parameters() if p is not first]})
            optimizer.param_groups[0]["lr"] *= 0.5
            losses.append(step(batch(i)))
        return losses, everything(model, optimizer)

    assert_cached_as_uncached(scenario)


class Tied(nn.Module):
    """An embedding whose weight is also the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(64, 32), nn.Linear(32, 32, bias=False)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.middle(self.embedding(tokens)))
        return logits


@pytest.mark.compiled
def test_tied_weights() -> None:
    def scenario(decorated: Decorate) -> Any:
        model = make(Tied)
        optimizer = sgd(model)

        def step(tokens: Tensor) -> Tensor:
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = decorated(step)
        losses = [run(torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(i))) for i in range(4)]
        return losses, everything(model, optimizer)

    assert_cached_as_uncached(scenario)


class Siblings(nn.Module):
    """Layers that read one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.q(x) * self.k(x) + self.v(x)
        return y


@pytest.mark.compiled
@pytest.mark.parametrize(
    "split",
    [pytest.param(False, id="one optimizer", marks=pytest.mark.variant), pytest.param(True, id="two optimizers")],
)
def test_merged_weights(split: bool) -> None:
    """One FP8 copy holds three parameters, which two updates may write one after the other."""

    def scenario(decorated: Decorate) -> Any:
        model = make(Siblings)
        own = [[model.q.weight], [model.k.weight, model.v.weight]]
        parts = own if split else [own[0] + own[1]]
        optimizers = [torch.optim.SGD(p, lr=0.1) for p in parts]

        def step(x: Tensor) -> float:
            loss = F.mse_loss(model(x), x * 0.5)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizers[0].step()
            value = loss.item()
            optimizers[-1].step() if split else None
            model.zero_grad()
            return value

        run = decorated(step, merge_siblings=True)
        losses = [run(batch(i)) for i in range(4)]
        assert "q+k+v.weight" in fp8pass.state(model).slots
        assert len(weights(model)) in (0, 1)
        return losses, everything(model, *optimizers)

    assert_cached_as_uncached(scenario)


# Precision
@pytest.mark.compiled
def test_autocast() -> None:
    def scenario(decorated: Decorate) -> Any:
        model = make(one_layer)
        optimizer = sgd(model)

        def step(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.mse_loss(model(x).float(), x * 0.5)
            loss.backward()  # type: ignore[no-untyped-call]
            assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run: Any = decorated(step)
        losses = [run(batch(i)) for i in range(4)]
        assert {g.dtypes[2] for g in run.report.rewritten} == {"bf16"}
        return losses, everything(model, optimizer)

    assert_cached_as_uncached(scenario)


@pytest.mark.compiled
@pytest.mark.parametrize(
    "masters",
    [pytest.param(False, id="bfloat16", marks=pytest.mark.variant), pytest.param(True, id="float32 masters")],
)
def test_bfloat16(masters: bool) -> None:
    """Masters are copied into the model within the step, and these copies write the FP8 copies."""

    def scenario(decorated: Decorate) -> Any:
        model = make(one_layer, torch.bfloat16)
        mine = list(model.parameters())
        trained = [p.detach().float().requires_grad_() for p in mine] if masters else mine
        optimizer = torch.optim.SGD(trained, lr=0.1)

        def step(x: Tensor) -> Tensor:
            loss = F.mse_loss(model(x), x * 0.5)
            loss.backward()  # type: ignore[no-untyped-call]
            if masters:
                for p, q in zip(mine, trained, strict=True):
                    q.grad = p.grad.float()  # type: ignore[union-attr]
            optimizer.step()
            if masters:
                with torch.no_grad():
                    for p, q in zip(mine, trained, strict=True):
                        p.copy_(q)
            model.zero_grad()
            return loss.detach()

        run = decorated(step)
        losses = [run(batch(i).bfloat16()) for i in range(4)]
        assert all((w.requantized, w.expected) == (2, 2) for w in weights(model))
        return losses, everything(model, optimizer)

    assert_cached_as_uncached(scenario)


@pytest.mark.compiled
def test_training_follows_high_precision() -> None:
    """After forty steps the last losses are within 5% of those of an eager float32 run, and far below the first."""
    losses: dict[bool, list[float]] = {}
    for fp8 in (False, True):
        model = nn.Sequential(make(Block), nn.Linear(32, 32))
        step = plain(model, adamw(model))
        run = decorate(step) if fp8 else step
        losses[fp8] = [float(run(batch(i % 4))) for i in range(40)]
    last = [sum(losses[fp8][-4:]) / 4 for fp8 in (False, True)]
    assert last[1] == pytest.approx(last[0], rel=0.05)
    assert last[0] < 0.5 * losses[False][0]


# Loops and helpers: one call is one step
@pytest.mark.compiled
def test_accumulation_rolls_once_and_quantizes_weights_once() -> None:
    """A loop runs over microbatches; the history has the largest amax of each step, and gradients keep their dtype."""

    def scenario(decorated: Decorate) -> Any:
        model = make(one_layer, torch.bfloat16)
        optimizer = sgd(model)

        def loss_of(x: Tensor) -> Tensor:
            return F.mse_loss(model(x), x * 0.5)

        def step(xs: list[Tensor]) -> Tensor:
            optimizer.zero_grad()
            for x in xs:
                loss = loss_of(x)
                loss.backward()  # type: ignore[no-untyped-call]
            assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())
            optimizer.step()
            return loss.detach()

        run: Any = decorated(step)
        data = [[batch(3 * i + k).bfloat16() * (1 + k) for k in range(3)] for i in range(4)]
        losses = [run(xs) for xs in data]
        state = fp8pass.state(model)
        amaxes = [max(float(x.abs().max()) for x in xs) for xs in data]
        assert state.steps == 4
        assert state.state_dict()["weight.input.amax_history"].tolist() == [*amaxes[2::-1], 0.0]
        assert float(state.state_dict()["weight.input.amax"]) == amaxes[3]
        assert all((w.requantized, w.expected) == (2, 2) for w in weights(model))
        assert "itself runs op by op" in str(run.report)
        return losses, everything(model, optimizer)

    assert_cached_as_uncached(scenario)


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


Step = Callable[[Tensor], Tensor]


Loop = Callable[[nn.Module, torch.optim.Optimizer], Step]


def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return a step with a usual loop over microbatches, which breaks the graph: torch runs the function op by op."""

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        for micro in x.split(8):
            loss = F.mse_loss(model(micro), micro * 0.5)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def loop_of_functions(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return a step with the same numbers whose loop calls a function, which Dynamo compiles."""

    def loss_of(x: Tensor) -> Tensor:
        return F.mse_loss(model(x), x * 0.5)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        for micro in x.split(8):
            loss = loss_of(micro)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def run(make_step: Loop, model: nn.Module, **config: Any) -> tuple[Any, Any]:
    """Run four calls; return their losses and all state after them, and the step."""
    torch._dynamo.reset()
    optimizer = sgd(model)
    step = decorate(make_step(model, optimizer), strict=True, **config)
    losses = [step(batch(i)) for i in range(4)]
    return [losses, everything(model, optimizer)], step


@pytest.mark.compiled
@pytest.mark.parametrize(
    "of",
    [
        pytest.param(two_layers, id="seq"),
        pytest.param(lambda: nn.Linear(32, 32), id="linear", marks=pytest.mark.variant),  # other loops have it
        pytest.param(lambda: make(Parts), id="user"),
    ],
)
def test_a_loop_over_microbatches_is_compiled_whatever_the_module(of: Callable[[], nn.Module]) -> None:
    """It has the numbers of the step that calls model and loss in a function, and the slots of one without a loop."""
    torch.manual_seed(0)
    model = of()
    straight, compared = copy.deepcopy(model), copy.deepcopy(model)
    numbers, step = run(loop, model)
    assert_same(numbers, run(loop_of_functions, compared)[0])
    _, of_straight = run(plain, straight)
    assert fp8pass.state(model).slots == fp8pass.state(straight).slots
    assert len(step.report.rewritten) == len(of_straight.report.rewritten) > 1
    assert fp8pass.state(model).steps == 4
    assert all((w.requantized, w.expected) == (2, 2) for w in weights(model))
    line = loop(model, sgd(model)).__code__.co_firstlineno + 3
    assert f"step (test_train_step.py:{line}) itself runs op by op" in str(step.report)
    assert "op by op" not in str(of_straight.report)
    if not isinstance(model, Parts):
        assert {gemm.source for gemm in step.report.gemms} == {f"test_train_step.py:{line}"}


def in_a_helper(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return a compiled step that calls a helper, which runs op by op."""

    def accumulate(micros: tuple[Tensor, ...]) -> Tensor:
        for micro in micros:
            loss = F.mse_loss(model(micro), micro * 0.5)
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(x: Tensor) -> Tensor:
        loss = accumulate(x.split(8))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def of_many_kinds(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return a step with a while loop over a generator, checkpoints, a module as criterion, a scaler, and clipping."""
    criterion, scaler = nn.MSELoss(), torch.amp.GradScaler("cpu", init_scale=1.0, enabled=True)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        micros = (micro for micro in x.split(8))
        while (micro := next(micros, None)) is not None:
            loss = criterion(checkpoint(model, micro, use_reentrant=False), micro * 0.5)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()  # type: ignore[no-any-return]

    return step


@pytest.mark.compiled
@pytest.mark.parametrize("kind", [pytest.param(in_a_helper, marks=pytest.mark.variant), of_many_kinds])
def test_loops_of_every_kind(kind: Loop) -> None:
    torch.manual_seed(0)
    model = nn.Linear(32, 32)
    compared = copy.deepcopy(model)
    numbers, step = run(kind, model)
    assert_same(numbers, run(loop_of_functions, compared)[0])
    assert len(step.report.rewritten) == 2 and not step.report.declined


@pytest.mark.compiled
def test_two_models_in_a_loop() -> None:
    """Each of three calls in a loop is compiled, and each call of the step is one step of each model."""
    torch.manual_seed(0)
    g, d = nn.Linear(32, 32), nn.Linear(32, 16)
    of_g, of_d = sgd(g), sgd(d)

    def step(zs: Tensor) -> None:
        for z in zs.split(8):
            of_d.zero_grad()
            (F.softplus(d(g(z).detach())) + F.softplus(-d(z))).mean().backward()  # type: ignore[no-untyped-call]
            of_d.step()
            of_g.zero_grad()
            F.softplus(-d(g(z))).mean().backward()  # type: ignore[no-untyped-call]
            of_g.step()

    decorated = decorate(step, strict=True)
    for i in range(3):
        decorated(batch(i))
    assert not decorated.report.declined
    assert {(gemm.M, gemm.K, gemm.N) for gemm in decorated.report.rewritten} == {
        (8, 32, 32), (8, 32, 16), (32, 8, 32), (16, 8, 32), (8, 16, 32),
    }  # fmt: skip
    assert fp8pass.state(g).steps == fp8pass.state(d).steps == 3


class Broken(nn.Module):
    """A model whose graph breaks in a loop, so that torch runs its forward op by op; one layer is disabled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])
        self.last = torch.compiler.disable(nn.Linear(32, 32))  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return self.last(x)  # type: ignore[no-any-return]


@pytest.mark.compiled
def test_layers_of_a_forward_that_runs_op_by_op() -> None:
    """The layers share compiled code. Layers for which the user has disabled compilation are not compiled."""
    torch.manual_seed(0)
    model = Broken()
    optimizer = sgd(model)
    step = decorate(plain(model, optimizer))
    with pytest.warns(UserWarning, match=r"3 matmuls of .* \(last\): outside of any graph: .* torch.compiler.disable"):
        losses = [step(batch(0)) for _ in range(3)]
    assert losses[2] < losses[0]
    assert len(fp8pass.state(model).slots) == 3 * 3
    assert len(step.report.rewritten) == 2 + 3  # the first layer's input needs no gradient
    assert re.search(r"forward \(test_train_step.py:\d+\) itself runs op by op", str(step.report))
    assert all("_compiled_call_impl" not in vars(m) for m in model.modules())
    filtered = Broken()
    step = decorate(plain(filtered, sgd(filtered)), filter=["layers.1", "last"])
    step(batch(0))
    assert {slot[:8] for slot in fp8pass.state(filtered).slots} == {"layers.0", "layers.2"}


@pytest.mark.compiled
def test_a_step_that_is_all_compiled_catches_no_calls() -> None:
    """Dynamo traces the whole call of a module that has hooks, and compiles anew if its hooks change."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    step = decorate(plain(model, sgd(model)))
    for i in range(2):  # the second step has scales, and is compiled
        step(batch(i))
    with mock.patch.object(Caught, "_catch") as caught:
        step(batch(2))
    hooked = copy.deepcopy(model)
    hooked[0].register_forward_hook(lambda *_: None)
    step = decorate(plain(hooked, sgd(hooked)))
    step(batch(0))
    compiled = counters["stats"]["unique_graphs"]
    step(batch(1))
    assert not caught.called
    assert counters["stats"]["unique_graphs"] == compiled
    assert step.report.recompiles == []
    assert {g.name for g in step.report.gemms} == {"0", "1"}
    assert not any("module_calls.py" in g.source for g in step.report.gemms)


traced = list[None]()


class Traced(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        comptime(lambda _: traced.append(None))  # Dynamo calls it where it traces this
        return x.relu()


@pytest.mark.compiled
def test_the_model_is_traced_once() -> None:
    """Dynamo would trace it again for each of the calls that it can't trace, such as these backwards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), Traced())
    optimizer = sgd(model)

    def function(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward(gradient=torch.ones(()), retain_graph=True)
        first = model[0].weight.grad.clone()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return first

    traced.clear()
    step, plain_model = decorate(function), copy.deepcopy(model)
    first = step(batch(0))
    if sys.version_info >= (3, 11):  # calls have other opcodes in Python 3.10, where Dynamo still goes back
        assert len(traced) == 1
    (expected,) = torch.autograd.grad(plain_model(batch(0)).square().mean(), plain_model[0].weight)
    assert sqnr(first, expected) > 20 and len(step.report.breaks) == 2


@pytest.mark.compiled
@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.variant)])
def test_checkpointed_layers(reentrant: bool) -> None:
    def scenario(decorated: Decorate) -> Any:
        model = nn.Sequential(make(one_layer), one_layer())
        optimizer = sgd(model)

        def forward(x: Tensor) -> Tensor:
            hidden = checkpoint(model[0], x, use_reentrant=reentrant)
            out: Tensor = model[1](hidden)
            return out

        run = decorated(plain(forward, optimizer))
        losses = [run(batch(i).requires_grad_()) for i in range(4)]
        assert fp8pass.state(model).steps == 4
        return losses, everything(model, optimizer)

    assert_cached_as_uncached(scenario)


@pytest.mark.compiled
def test_batches_of_many_sizes() -> None:
    def scenario(decorated: Decorate) -> Any:
        model = make(one_layer)
        optimizer = sgd(model)
        step = decorated(plain(model, optimizer))
        counters.clear()
        losses = [step(batch(i, rows, 32)) for i, rows in enumerate((16, 32, 48, 16, 64, 80, 16))]
        assert counters["stats"]["unique_graphs"] <= 2 * 2 + 1  # a fixed size, and any size; one update
        assert fp8pass.state(model).steps == 7
        return losses, everything(model, optimizer)

    assert_cached_as_uncached(scenario)


@pytest.mark.compiled
@pytest.mark.parametrize("foreach", [pytest.param(False, marks=pytest.mark.variant), True])
def test_clipping_and_a_schedule_compile_nothing_anew(foreach: bool) -> None:
    """A learning rate that changes becomes an input, once."""

    def scenario(decorated: Decorate) -> Any:
        model = make(one_layer)
        optimizer = adamw(model, foreach=foreach)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))

        def step(x: Tensor) -> Tensor:
            loss = F.mse_loss(model(x), x * 0.5)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            return loss.detach()

        run = decorated(step)
        losses = [run(batch(i)) for i in range(3)]
        compiled = counters["stats"]["unique_graphs"]
        losses += [run(batch(i)) for i in range(3, 8)]
        assert counters["stats"]["unique_graphs"] == compiled
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 / 9)
        return losses, everything(model, optimizer)

    assert_cached_as_uncached(scenario)


@pytest.mark.compiled
def test_a_teacher_that_follows() -> None:
    """An EMA copy of the model is updated within the step; its FP8 copies are updated, too."""

    def scenario(decorated: Decorate) -> Any:
        model = make(one_layer)
        teacher, optimizer = copy.deepcopy(model).requires_grad_(False), sgd(model)

        def step(x: Tensor) -> Tensor:
            loss = F.mse_loss(model(x), teacher(x).detach() * 0.5)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            with torch.no_grad():
                for p, q in zip(teacher.parameters(), model.parameters(), strict=True):
                    p.lerp_(q, 0.1)
            optimizer.zero_grad()
            return loss.detach()

        run = decorated(step)
        losses = [run(batch(i)) for i in range(5)]
        assert all((w.requantized, w.expected) == (2, 2) for w in weights(model, teacher))
        return losses, everything(model, optimizer), everything(teacher)

    assert_cached_as_uncached(scenario)


@pytest.mark.compiled
@pytest.mark.parametrize(
    "recipe",
    [
        *(pytest.param(r, marks=pytest.mark.variant) for r in ("rowwise", None)),
        Schedule({0: None, 2: RECIPE, 4: "dynamic"}),
    ],
    ids=str,
)
def test_other_recipes(recipe: Any) -> None:
    """Delayed scaling keeps copies of weights; other recipes train as well."""

    def scenario(decorated: Decorate) -> Any:
        model = make(one_layer)
        optimizer = sgd(model)
        step = decorated(plain(model, optimizer), recipe=recipe)
        losses = [step(batch(i)) for i in range(6)]
        return losses, dict(tensors([model.state_dict(), optimizer.state_dict()["state"]]))

    assert_cached_as_uncached(scenario)


# Graph breaks, and gradients that are not finite
@pytest.mark.compiled
def test_the_report_says_where_graphs_break_and_what_is_handed_over() -> None:
    model = make(Parts)
    optimizer = sgd(model)

    def step(x: Tensor) -> float:
        optimizer.zero_grad()
        hidden = model.a(x)
        torch._dynamo.graph_break()
        loss = F.mse_loss(model.b(hidden), x * 0.5)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    run = decorate(step)
    losses = [run(batch(i, 512, 32)) for i in range(3)]
    assert all(loss > 0 for loss in losses)
    found = {b.source: b for b in run.report.breaks}
    first = step.__code__.co_firstlineno
    by_line = {line - first: found.get(f"test_train_step.py:{line}") for line in range(first, first + 9)}
    assert by_line[3] is not None
    assert by_line[3].nbytes >= 512 * 32 * 4
    assert by_line[5] is not None
    assert "backward" in by_line[5].reason
    assert "0.1 MB passed on; one more graph to call" in str(run.report)
    assert "Optimizer.zero_grad" in str(run.report)  # nothing before it is to be compiled


def scaler_step(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), x * 0.5)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step


@pytest.mark.compiled
def test_a_gradient_scaler_that_skips() -> None:
    """The first call skips, too, and updates nothing. The copy of a weight follows its scale, without an update."""

    def scenario(decorated: Decorate) -> Any:
        model = make(one_layer)
        optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        step, losses = decorated(scaler_step(model, optimizer, scaler)), []
        for i in range(6):
            before, bad = [p.clone() for p in model.parameters()], i in (0, 3)
            losses.append(step(batch(i).index_fill(1, torch.tensor(3), math.inf if bad else 1.0)))
            assert bad == all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        return losses, scaler.get_scale(), everything(model, optimizer)

    assert_cached_as_uncached(scenario)


@pytest.mark.compiled
@pytest.mark.variant
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("value", [math.nan])
def test_a_step_with_bad_gradients_leaves_no_trace(foreach: bool, value: float) -> None:
    """Weights, moments and FP8 state are, after every good step, those of a run without the bad steps.

    test_as_if_the_batch_had_not_been in test_skip_nonfinite.py checks this every day, after the last step only.
    """

    def run(bad: tuple[int, ...]) -> tuple[list[Any], Any]:
        torch._dynamo.reset()
        model = make(Block)
        optimizer = adamw(model, foreach=foreach)
        step: Any = decorate(plain(model, optimizer), skip_nonfinite=True)
        after = []
        for i in range(6):
            if i in bad:
                x = batch(70 + i)
                x[2, 3] = value
                step(x)
            loss = step(batch(i))
            state = everything(model, optimizer)
            after.append([loss, {k: v for k, v in state.items() if not k.endswith(".steps")}])
        return after, step.skipped

    good, none = run(())
    skipping, skipped = run((3, 4))
    assert (none, skipped) == (0, 2)
    assert_same(skipping, good)


# Errors
@pytest.mark.compiled
def test_errors_of_the_first_call() -> None:
    model, other = make(Parts), make(Parts, seed=1)
    optimizer, of_other = adamw(model), adamw(other)

    def no_backward(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        optimizer.step()
        return loss  # type: ignore[no-any-return]

    def forward_only(model: nn.Module, x: Tensor) -> None:
        model(x).square().mean().backward()

    def nothing(x: Tensor) -> Tensor:
        return x

    here = r"\(test_train_step.py:\d+\)"
    x = batch(0)
    with pytest.raises(fp8pass.Fp8Error, match=rf"no_backward {here} computed no gradient of any parameter"):
        decorate(no_backward)(model, optimizer, x)
    with pytest.raises(
        fp8pass.Fp8Error, match=rf"forward_only {here} has no torch.optim.Optimizer among its arguments"
    ):
        decorate(forward_only)(model, x)
    with pytest.raises(fp8pass.Fp8Error, match=rf"nothing {here} has no torch.nn.Module among its arguments"):
        decorate(nothing)(x)
    with pytest.raises(fp8pass.Fp8Error, match=r"updates 2 other parameters, of shapes \(32, 32\), \(32, 32\)"):
        decorate(of_arguments)(model, of_other, x)
    model.b.to("meta")
    with pytest.raises(fp8pass.Fp8Error, match=r"Parts is on several devices: a.weight on cpu, b.weight on meta"):
        decorate(of_arguments)(model, optimizer, x)
    with pytest.raises(ValueError, match="weight_cache"):
        decorate(of_arguments, weight_cahce="fp8")
    with pytest.raises(TypeError, match="the step trains 0 models"):
        fp8pass.state(decorate(nothing))


@pytest.mark.inductor
def test_weights_that_are_changed_again_in_the_same_graph() -> None:
    """Inductor's CPU code generation fails on this with two weights, unless `choices.can_fuse` declines a fusion.

    The copies are those of the weights as they are stored; losses and state are close to those op by op without copies.
    """
    losses, state, model = changed_again(functools.partial(decorate, lowering="inductor"))
    for layer in model.children():
        (w,) = weights(layer)
        assert w.is_fresh() and w.requantized == 2, "the updates have not written the copy"
        assert isinstance(w, DelayedWeight) and w.x_q is not None
        scale_inv = w.state.tensors.weight_copy_scales[0, w.index]
        stored = layer.get_parameter("weight").detach()
        assert torch.equal(w.x_q.float(), quantize(stored, 1 / scale_inv, E4M3).float())
        assert (w.x_t is None) == (layer is next(model.children())), (
            "only the first layer, whose input needs no gradient, has no transposed copy"
        )
        assert w.x_t is None or torch.equal(w.x_t.float(), w.x_q.float().t())
    wanted, other, _ = changed_again(functools.partial(decorate, weight_cache="off"))
    found = dict(tensors([losses, state]))
    for name, x in tensors([wanted, other]):
        assert sqnr(x, found[name]) > 50, name
