"""Test that a model with FP8 copies of weights has the numbers of one without, and never uses a stale copy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.base.scaling import E4M3, quantize
from fp8pass.recipes import KINDS, DelayedScaling
from fp8pass.weights import weight_cache
from fp8pass.weights.weight_copy import DelayedWeight, WeightCopy
from tests.helpers.harness import BF16, F32
from tests.helpers.models import Block, Parts, batches, make
from tests.helpers.optimizers import Lion

pytestmark = [pytest.mark.compiled, pytest.mark.shares_code]
VARIANT = pytest.mark.variant

CACHES = ["fp8", "fp8+transpose"]
STEPS = 4

Compile = Callable[..., Any]


def copies(model: nn.Module) -> list[WeightCopy]:
    """Return the copies of a model's weights."""
    return weight_cache.weights_of(list(model.parameters()))


def compiling(cache: str, **options: Any) -> Compile:
    """Return a `torch.compile` with copies of weights."""
    options = {"min_speedup": 0, "lowering": "eager", "weight_cache": cache, **options}
    return lambda function: torch.compile(function, backend="fp8pass", options=options)


def loss_of(y: Tensor) -> Tensor:
    return y.float().square().mean()


@dataclass
class Trained:
    """Losses and model of a run."""

    losses: list[float]
    model: nn.Module

    def requantized(self) -> list[int]:
        """Return how often each copy was made outside of an update."""
        assert all(w.is_fresh() or w.requantized == STEPS for w in copies(self.model))
        return [w.requantized for w in copies(self.model)]


def trained(
    cache: str,
    optimizer: Callable[..., Any],
    *,
    kind: Callable[[], nn.Module] = Block,
    dtype: torch.dtype = F32,
    poke: Callable[[nn.Module, int], None] = lambda model, i: None,
    shape: Sequence[int] = (16, 32),
    **options: Any,
) -> Trained:
    """Train a compiled model with an eager optimizer. poke: runs after each step."""
    model = make(kind, dtype)
    run, update = compiling(cache, **options)(model), optimizer(model.parameters())
    losses = []
    for i, x in enumerate(batches(STEPS, *shape, dtype=dtype)):
        loss = loss_of(run(x))
        loss.backward()
        losses.append(loss.item())
        update.step()
        update.zero_grad()
        poke(model, i)
    return Trained(losses, model)


def trained_in_one(cache: str, optimizer: Callable[..., Any], dtype: torch.dtype = F32, **options: Any) -> Trained:
    """Train by a step that is compiled with its update. The model is large enough for quantization in tiles."""
    model = make(lambda: Block(64, 128), dtype)
    update = optimizer(model.parameters())

    def step(x: Tensor) -> Tensor:
        loss = loss_of(model(x))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update.step()
        update.zero_grad()
        return loss.detach()

    run = compiling(cache, **options)(step)
    return Trained([run(x).item() for x in batches(STEPS, 16, 64, dtype=dtype)], model)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, foreach=True)


def check_same(wanted: Trained, got: Trained) -> None:
    """Check that losses and weights are equal to the bit, and that the losses are no NaN."""
    assert got.losses == wanted.losses
    assert len(set(wanted.losses)) == len(wanted.losses), "each step changes the loss"
    for a, b in zip(wanted.model.parameters(), got.model.parameters(), strict=True):
        assert torch.equal(a, b)


RUNS = [("eager", F32, "fp8"), ("eager", BF16, "fp8+transpose")]
THROUGH_INDUCTOR = "inductor", BF16, "fp8+transpose"


@pytest.mark.parametrize(("lowering", "dtype", "cache"), [*RUNS, pytest.param(*THROUGH_INDUCTOR, marks=VARIANT)])
def test_the_same_numbers_under_an_optimizer_that_is_not_compiled(
    lowering: str, dtype: torch.dtype, cache: str
) -> None:
    """The optimizer increments versions: copies are made anew before each forward, outside of the graph."""
    wanted = trained("off", adamw, dtype=dtype, lowering=lowering)
    assert copies(wanted.model) == []
    got = trained(cache, adamw, dtype=dtype, lowering=lowering)
    check_same(wanted, got)
    assert got.requantized() == [STEPS, STEPS]


@pytest.mark.parametrize(
    ("lowering", "dtype", "cache"),
    [RUNS[1], *(pytest.param(*run, marks=VARIANT) for run in (RUNS[0], THROUGH_INDUCTOR, ("inductor", F32, "fp8")))],
)
def test_the_same_numbers_in_a_step_that_is_compiled_with_its_update(
    lowering: str, dtype: torch.dtype, cache: str
) -> None:
    """This runs in bfloat16; `test_any_update_writes_the_copies` runs in float32 every day.

    test_weights_that_are_changed_again_in_the_same_graph in `test_train_step.py` runs through Inductor.
    """
    wanted = trained_in_one("off", adamw, dtype, lowering=lowering)
    got = trained_in_one(cache, adamw, dtype, lowering=lowering)
    check_same(wanted, got)
    assert got.requantized() == [2, 2], "before the first step, and before the first that has scales"


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_numbers_with_a_matmul_in_high_precision(kind: str) -> None:
    """Such a product is computed in several forms, only one of which gives the weight its gradient."""
    recipe = DelayedScaling(high_precision=(kind,))
    check_same(trained("off", sgd, kind=Parts, recipe=recipe), trained("fp8+transpose", sgd, kind=Parts, recipe=recipe))


UPDATES = [
    pytest.param(sgd, "fp8", id="SGD"),
    pytest.param(Lion, "fp8+transpose", id="Lion", marks=VARIANT),  # test_train_step.py runs it every day
]


@pytest.mark.parametrize(("optimizer", "cache"), UPDATES)
def test_any_update_writes_the_copies(optimizer: Callable[..., Any], cache: str) -> None:
    wanted = trained_in_one("off", optimizer)
    got = trained_in_one(cache, optimizer)
    check_same(wanted, got)
    assert got.requantized() == [2, 2]


def load(model: nn.Module, i: int) -> None:
    """Load other weights, as from a checkpoint."""
    model.load_state_dict(make(Block, model.up.weight.dtype, seed=i + 5).state_dict())


def write(model: nn.Module, i: int) -> None:
    with torch.no_grad():
        model.up.weight.mul_(1.5)
        model.down.weight.view(-1)[:64].neg_()


def replace_memory(model: nn.Module, i: int) -> None:
    model.up.weight.data = model.up.weight.detach() * 2
    model.down.weight.data = model.down.weight.detach().clone().neg_()


def replace_parameter(model: nn.Module, i: int) -> None:
    """Replace a parameter by one that the optimizer does not know."""
    model.up.weight = nn.Parameter(model.up.weight.detach() * 2)


def load_scales(model: nn.Module, i: int) -> None:
    """Load other scales and histories for the same weights."""
    if i == 0:
        return
    saved = fp8pass.state(model).state_dict()
    changed = {k: x * 0.5 if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in saved.items()}
    fp8pass.state(model).load_state_dict(changed)


POKES = {f.__name__: f for f in (load, write, replace_memory, replace_parameter, load_scales)}


@functools.cache
def undisturbed() -> list[float]:
    """Return the losses of a run whose weights and scales nobody changes between steps."""
    return trained("off", sgd).losses


@pytest.mark.parametrize("poke", POKES)
def test_never_stale(poke: str) -> None:
    """No copy is stale, whatever changes weights and scales between steps."""
    wanted = trained("off", sgd, poke=POKES[poke])
    check_same(wanted, trained("fp8+transpose", sgd, poke=POKES[poke]))
    assert wanted.losses != undisturbed(), "the change has an effect"


def test_never_stale_after_a_compiled_update() -> None:
    """Each change of weights or scales comes after a compiled update, and a step after the change."""
    pokes = [load, write, replace_memory, load_scales]

    def run(cache: str) -> Trained:
        model = make(Block)
        update = sgd(model.parameters())
        compiled = compiling(cache)
        forward, step = compiled(model), compiled(update.step)
        losses = []
        for i, x in enumerate(batches(len(pokes) + 1, 16, 32)):
            if i:
                pokes[i - 1](model, i)
            loss = loss_of(forward(x))
            loss.backward()
            losses.append(loss.item())
            step()
            update.zero_grad()
        return Trained(losses, model)

    check_same(run("off"), run("fp8+transpose"))


def test_memory_that_is_used_again_for_other_numbers() -> None:
    """A weight is cast to half precision and back: it is another tensor, which may have the address of the first."""

    def poke(model: nn.Module, i: int) -> None:
        for p in model.parameters():
            p.data = p.data.bfloat16()
        for p in model.parameters():
            p.data = p.data.float()

    wanted = trained("off", lambda p: torch.optim.SGD(p, lr=0.0), poke=poke)
    check_same(wanted, trained("fp8", lambda p: torch.optim.SGD(p, lr=0.0), poke=poke))


def test_an_optimizer_is_still_one_graph() -> None:
    """Copies are forgotten at an optimizer's step by a hook, which Dynamo sees and compiles."""
    model = make(Block)
    run, optimizer = compiling("fp8")(model), Lion(model.parameters())
    loss_of(run(batches(1, 16, 32)[0])).backward()
    assert copies(model)
    before = model.up.weight.clone()
    torch.compile(optimizer.step, backend="eager", fullgraph=True)()
    assert (model.up.weight != before).any()


def test_two_instances_of_a_class() -> None:
    def run(cache: str) -> tuple[list[float], list[nn.Module]]:
        models = [make(Block, seed=i) for i in range(2)]
        runs, updates = [compiling(cache)(m) for m in models], [sgd(m.parameters()) for m in models]
        losses = []
        for i, x in enumerate(batches(STEPS, 16, 32)):
            for k in (0, 1) if i % 2 else (1, 0):
                loss = loss_of(runs[k](x))
                loss.backward()
                losses.append(loss.item())
                updates[k].step()
                updates[k].zero_grad()
        return losses, models

    (wanted, _), (got, models) = run("off"), run("fp8")
    assert got == wanted and len(set(got)) == len(got)
    assert [len(copies(m)) for m in models] == [2, 2]
    assert not set(copies(models[0])) & set(copies(models[1]))


class Siblings(nn.Module):
    """Layers that read one tensor; merged, they have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(32, 64, bias=False), nn.Linear(32, 48, bias=False)
        self.norm, self.down = nn.RMSNorm(32), nn.Linear(48, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = self.down(F.silu(self.gate(y)[..., :48]) * self.up(y))
        return x + y


def test_merged_siblings_have_one_copy() -> None:
    wanted = trained("off", sgd, kind=Siblings, merge_siblings=True)
    got = trained("fp8+transpose", sgd, kind=Siblings, merge_siblings=True)
    check_same(wanted, got)
    merged = [w for w in copies(got.model) if len(w.parts) == 2]
    (w,) = merged
    assert w.x_q is not None and tuple(w.x_q.shape) == (112, 32)
    assert w.x_t is not None and torch.equal(w.x_t.float(), w.x_q.float().t())


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(F.gelu(self.a(x)) * 3)
        return y


class Checkpointed(nn.Module):
    """Layers in regions that are computed again for the backward."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class CheckpointedReentrant(Checkpointed):
    """The same with reentrant regions, torch's older kind."""

    reentrant = True


@pytest.mark.parametrize("kind", [Tied, Checkpointed, pytest.param(CheckpointedReentrant, marks=VARIANT)])
def test_weights_that_are_read_more_than_once(kind: Callable[[], nn.Module]) -> None:
    wanted = trained("off", sgd, kind=kind)
    got = trained("fp8+transpose", sgd, kind=kind)
    check_same(wanted, got)
    assert copies(got.model)


def test_gradient_accumulation() -> None:
    """Microbatches of one step have one scale, and one copy of each weight."""

    def run(cache: str) -> Trained:
        model = make(Block)
        forward, update = compiling(cache)(model), sgd(model.parameters())
        losses = []
        for x in batches(STEPS, 32, 32):
            total = 0.0
            with fp8pass.accumulate(model):
                for part in x.split(16):
                    loss = loss_of(forward(part))
                    loss.backward()
                    total += loss.item()
            losses.append(total)
            update.step()
            update.zero_grad()
        return Trained(losses, model)

    got = run("fp8+transpose")
    check_same(run("off"), got)
    assert got.requantized() == [STEPS, STEPS], "once a step, for any number of microbatches"


def test_a_copy_that_is_younger_than_the_history() -> None:
    """A model trains without copies; then its weights are set to others, while its history has the old amaxes."""

    def losses(cache: str) -> list[float]:
        model = make(lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))
        options: dict[str, Any] = {"recipe": DelayedScaling(amax_history_len=2)}
        for run, factor in ((compiling("off", **options)(model), 0.013), (compiling(cache, **options)(model), 1.0)):
            found = []
            for x in batches(STEPS, 16, 32, dtype=F32):
                loss = loss_of(run(x))
                loss.backward()
                found.append(loss.item())
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(factor)
        return found

    assert losses("fp8") == losses("off")


def test_memory() -> None:
    """A copy takes one byte for each element, two with the transposed copy; without the option, none."""
    elements = 2 * 32 * 56
    for cache, each in (("off", 0), ("fp8", 1), ("fp8+transpose", 2)):
        model = trained(cache, sgd).model
        assert sum(w.nbytes for w in copies(model)) == each * elements, cache


STORED = [("eager", F32), ("eager", BF16), *(pytest.param("inductor", dtype, marks=VARIANT) for dtype in (F32, BF16))]


@pytest.mark.parametrize(("lowering", "dtype"), STORED)
def test_the_copy_is_that_of_the_weight_as_it_is_stored(lowering: str, dtype: torch.dtype) -> None:
    """It is equal to the bit, with the scale of the next step, which comes from the largest amax of its forwards."""
    model = make(lambda: nn.Linear(64, 128, bias=False), dtype)
    update = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
    compiled = compiling("fp8+transpose", lowering=lowering)
    forward, step = compiled(model), compiled(update.step)
    amaxes = []
    for x in batches(STEPS, 16, 64, dtype=dtype):
        amaxes.append(model.weight.detach().float().abs().max())
        loss_of(forward(x.requires_grad_())).backward()  # this backward reads the transposed copy
        step()
    (w,) = copies(model)
    assert w.requantized == 2 and w.is_fresh(), "the update has written it"
    stored = model.weight.detach()
    scale = 448 / torch.stack(amaxes).max()
    assert w.x_q is not None and torch.equal(w.x_q.float(), quantize(stored, scale, E4M3).float())
    assert w.x_t is not None and torch.equal(w.x_t.float(), w.x_q.float().t())
    assert isinstance(w, DelayedWeight)
    scale_inv, amax = w.state.tensors.weight_copy_scales[:, w.index]
    assert torch.equal(amax, stored.float().abs().max())
    torch.testing.assert_close(scale_inv, 1 / scale, rtol=1e-6, atol=0)


def test_a_copy_of_a_freed_parameter_is_not_used_for_another() -> None:
    """Something may still hold the old copy, and a new parameter may have the id of a freed one."""
    model, x = make(lambda: nn.Linear(32, 32)), torch.randn(16, 32)
    compiling("fp8")(model)(x)
    (old,) = copies(model)
    assert old.is_of([model.weight])
    model.weight = nn.Parameter(model.weight.detach())
    assert not old.is_of([model.weight])
