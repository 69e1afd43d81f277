"""Matmuls inside `torch.autograd.Function`s: what each is, its scale, its slot, and the gradients."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.base.node_meta import IN_BACKWARD, IN_FORWARD
from fp8pass.compiler.dynamo_passes import pieces_of
from fp8pass.graph.annotation import graphs_of
from fp8pass.options import overrides
from fp8pass.options.config import Config
from fp8pass.passes.common.matmul_calls import signature_of
from fp8pass.recipes import DelayedScaling, StaticScaling
from tests.helpers import oracle
from tests.helpers.annotate import annotation
from tests.helpers.functions import (
    FunctionBlock,
    FunctionLinear,
    GramFunction,
    LinearFunction,
    Lora,
    LoraFunction,
    OfTwo,
    SignFunction,
    WithLoss,
    WithMainGrad,
)
from tests.helpers.harness import annotated, compiled, sqnr, train, verdicts
from tests.helpers.models import make


class Checkpointed(nn.Module):
    """Two blocks of Functions, the first of which the backward repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = FunctionBlock(), FunctionBlock()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(checkpoint(self.a, x, use_reentrant=False))
        return y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": FunctionBlock,
    "loss": WithLoss,
    "checkpointed": Checkpointed,
    "straight through": functools.partial(OfTwo, SignFunction),
    "two gradients": functools.partial(OfTwo, GramFunction),
    "adapter": Lora,
}


MAKES_ZEROS = torch.__version__.startswith("2.11.")
"""Dynamo of torch 2.11 makes gradients that a forward has written into 0, with any backend: see docs/versions.md."""


def batches(count: int = 3, rows: int = 16) -> list[Tensor]:
    return list(torch.randn(count, rows, 32, generator=torch.Generator().manual_seed(0)))


def kinds(model: nn.Module, **config: Any) -> list[str]:
    """Return the products of the model's Functions, forwards and backwards in the order of the graphs."""
    a = annotation(model, batches()[0], **config)
    told = [
        custom.get(IN_FORWARD, custom.get(IN_BACKWARD, (-1, "")))
        for graph in graphs_of(a.module)
        for node in graph.graph.nodes
        if signature_of(node) is not None and {IN_FORWARD, IN_BACKWARD} & {*(custom := node.meta.get("custom") or {})}
    ]
    return [f"{a.choices[index].name} {kind}" for index, kind in told]


def trained(
    function: Callable[..., Any], kind: str, steps: int = 3, **options: Any
) -> tuple[list[dict[str, Tensor]], nn.Module]:
    model = make(MODELS[kind])
    return list(train(model, function(model, **options), batches(steps))), model


def alike(mine: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():  # up to float32's rounding: kernels multiply by scales after the sum
            torch.testing.assert_close(value, b[key], rtol=1e-5, atol=1e-7, msg=key)


@pytest.mark.passes
def test_what_each_product_is() -> None:
    assert Counter(kinds(FunctionBlock())) == Counter(
        f"{layer}.matmul {kind}" for layer in ("up", "down") for kind in ("output", "grad_input", "grad_weight")
    )
    assert Counter(kinds(OfTwo(GramFunction))) == {
        "matmul output": 3, "matmul grad_input": 1, "matmul grad_weight": 1,
    }  # fmt: skip
    assert Counter(kinds(Lora())) == {"matmul output": 4, "matmul grad_input": 3, "matmul grad_weight": 2}


@pytest.mark.passes
def test_gradients_that_a_forward_computes() -> None:
    found = Counter(kind for kind in kinds(WithLoss(layers=0)))
    assert found == {"matmul output": 4, "matmul grad_input": 4, "matmul grad_weight": 4}


@pytest.mark.passes
def test_slots_by_module_and_role() -> None:
    """All turns of a loop share slots, and the backward reads those of what the forward has quantized."""
    (table,) = annotation(WithLoss(), batches()[0]).tables
    block = [f"layers.0.{layer}.matmul.{role}" for layer in ("up", "down") for role in ("input", "weight")]
    head = [f"matmul.{role}" for role in ("input", "weight", "grad_output", "input_1")]
    late = [f"layers.0.{layer}.matmul.grad_output" for layer in ("up", "down")]
    assert (sorted(table.names[: table.n_forward]), table.n_weights) == (sorted([*block, *head]), 0)
    assert sorted(table.names[table.n_forward :]) == sorted(late)
    limits = dict(zip(table.names, table.fp8_max, strict=True))
    assert {name for name, limit in limits.items() if limit == 57344} == {"matmul.grad_output", *late}


@pytest.mark.passes
def test_equal_layers_are_found() -> None:
    found: list[str] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.extend(piece.layer for piece in pieces_of(module, Config()) if piece.layer)
        return module.forward

    torch.compile(WithLoss(layers=3), backend=backend)(batches()[0])
    assert found == ["layers.1", "layers.2"]  # the first one's input needs no gradient


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("kind", "recipe"),
    [*((kind, "delayed") for kind in MODELS if kind != "layers"), ("loss", "rowwise"), ("adapter", "dynamic")],
)
def test_compiled_is_like_the_annotated_graph(kind: str, recipe: str) -> None:
    reference, _ = trained(annotated, kind, recipe=recipe)
    with verdicts() as report:
        found, _ = trained(compiled, kind, recipe=recipe, strict=True)
    alike(found, reference)
    assert len(report.rewritten) == len(report.gemms) >= 5
    assert ("which operand is a gradient" in str(report)) == (kind == "two gradients")
    if kind in ("checkpointed", "adapter") or (kind == "loss" and not MAKES_ZEROS):
        (exact, *_), _ = trained(lambda model, **_: model, kind)
        for key, value in exact.items():
            cosine = torch.cosine_similarity(value.flatten().double(), found[0][key].flatten().double(), 0)
            assert cosine > 0.97, key


@pytest.mark.compiled
def test_against_the_oracle() -> None:
    """Each of a layer's products is that of the oracle's values, in float64."""
    model: Any = make(functools.partial(FunctionLinear, 32, 48))
    w = model.weight.detach().clone()
    (found,) = train(model, compiled(model, recipe="dynamic"), batches(1))

    def q(x: Tensor, fmt: str) -> Tensor:
        return oracle.qdq(x, oracle.scale_of(float(x.abs().max()), fmt), fmt)

    (x,), g = batches(1), found["output"] * (2 / found["output"].numel())
    wanted = {
        "output": q(x, "e4m3") @ q(w, "e4m3").t(),
        "input": q(g, "e5m2") @ q(w, "e4m3"),
        "weight": q(g, "e5m2").t() @ q(x, "e4m3"),
    }
    for key, value in wanted.items():
        assert sqnr(value, found[key].double()) > 100, key


@pytest.mark.compiled
def test_delayed_scales_are_those_of_the_formats() -> None:
    """The scale of a slot is its format's maximum by the last step's amax, wherever its tensor is quantized."""
    _, model = trained(compiled, "loss", steps=2)
    found = fp8pass.state(model).state_dict()
    slots = [key.removesuffix(".scale") for key in found if key.endswith(".scale")]
    assert len(slots) == 10
    for slot in slots:
        limit = 57344.0 if "grad_output" in slot else 448.0
        amax = found[f"{slot}.amax_history"].max()
        if MAKES_ZEROS and amax == 0:  # a gradient that Dynamo has made 0 has no scale
            continue
        torch.testing.assert_close(found[f"{slot}.scale"] * amax, torch.tensor(limit), rtol=1e-6, atol=0)


@pytest.mark.compiled
def test_a_resumed_training_goes_on_to_the_bit() -> None:
    whole, _ = trained(compiled, "loss", steps=4)
    _, model = trained(compiled, "loss", steps=2)
    resumed = make(MODELS["loss"])
    resumed.load_state_dict(model.state_dict())
    fp8pass.state(resumed).load_state_dict(fp8pass.state(model).state_dict())
    for mine, theirs in zip(train(resumed, compiled(resumed), batches(4)[2:]), whole[2:], strict=True):
        assert [key for key in theirs if not torch.equal(mine[key], theirs[key])] == []


@pytest.mark.compiled
def test_a_gradient_is_added_to_main_grad() -> None:
    """Over three steps, in place; and equal to the annotated graph's."""
    found = []
    for function in (annotated, compiled):
        model: Any = make(WithMainGrad)
        steps = list(train(model, function(model), batches()))
        assert all("weight" not in step for step in steps)
        found.append((steps, model.weight.main_grad))
    alike(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])
    exact: Any = make(WithMainGrad)
    list(train(exact, exact, batches()))
    assert sqnr(exact.weight.main_grad.double(), found[1][1].double()) > 15


@pytest.mark.compiled
@pytest.mark.parametrize("kind", [WithMainGrad, pytest.param(WithLoss, marks=pytest.mark.variant)])
def test_in_a_training_step(kind: Any) -> None:
    """With two microbatches, it trains as the backend does with `accumulate`."""

    def step_of(model: Any, run: Callable[..., Tensor], optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            loss = torch.zeros(())
            for rows in x.chunk(2):
                part = run(rows).square().mean()
                part.backward()
                loss += part.detach()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    found = []
    for whole in (True, False):
        model: Any = make(kind)
        optimizer = torch.optim.SGD([p for p in model.parameters() if not hasattr(p, "main_grad")], lr=0.1)
        step = step_of(model, model if whole else compiled(model), optimizer)
        run: Any = fp8pass.train_step(lowering="eager", strict=True)(step) if whole else step
        losses = []
        for x in batches():
            with contextlib.nullcontext() if whole else fp8pass.accumulate(model):
                losses.append(run(x))
        main = getattr(getattr(model, "weight", None), "main_grad", torch.zeros(()))
        found.append({"losses": torch.stack(losses), "main": main, **dict(model.named_parameters())})
        if whole:
            assert not run.report.declined and len(run.report.rewritten) >= 5
    alike(found[:1], found[1:])


@pytest.mark.compiled
def test_a_function_without_autograd_shares_the_slots() -> None:
    """Evaluation reads the scales of training: the state has no further slot."""
    model = make(FunctionBlock)
    run = compiled(model)
    list(train(model, run, batches(2)))
    slots = list(fp8pass.state(model).slots)
    with torch.no_grad(), verdicts() as report:
        y = compiled(model)(batches(3)[2])
    assert list(fp8pass.state(model).slots) == slots and len(report.rewritten) == 2
    assert sqnr(model(batches(3)[2]).double(), y.double()) > 15


@pytest.mark.compiled
def test_a_function_that_is_passed_a_bare_parameter() -> None:
    """As after a graph break: the model that has the parameter names its slots."""
    layer = make(functools.partial(FunctionLinear, 32, 48, bias=False))
    compiled(lambda x, w: LinearFunction.apply(x, w, None))(batches()[0], layer.weight).sum().backward()  # type: ignore[no-untyped-call]
    slots = ["down.matmul.grad_output", "down.matmul.input", "down.matmul.weight"]
    assert list(fp8pass.state(nn.ModuleDict({"down": layer})).slots) == slots


@pytest.mark.compiled
def test_what_stays_in_high_precision_has_a_reason() -> None:
    with verdicts() as report:
        trained(compiled, "layers", steps=1, filter=["up"], recipe=DelayedScaling(high_precision=("grad_weight",)))
    declined = {(gemm.name, gemm.kind): gemm.rule for gemm in report.declined}
    assert declined == {
        ("up.matmul", "output"): "filter",
        ("up.matmul", "grad_input"): "filter",
        ("up.matmul", "grad_weight"): "filter",
        ("down.matmul", "grad_weight"): "high precision",
    }


@pytest.mark.compiled
def test_amaxes_are_monitored() -> None:
    """The quantized tensors of forward and backward are counted under their slots' names."""
    model = make(FunctionBlock)
    list(train(model, compiled(model, monitor=True), batches(2)))
    for role in ("input", "weight", "grad_output"):
        assert fp8pass.stats(model).of(f"up.matmul.{role}"), role


@pytest.mark.inductor
@pytest.mark.variant
def test_through_inductor() -> None:
    reference, _ = trained(annotated, "loss")
    found, _ = trained(compiled, "loss", lowering="inductor", strict=True)
    for mine, theirs in zip(found, reference, strict=True):
        for key, value in theirs.items():
            assert sqnr(value.double(), mine[key].double()) > 30, key


@pytest.mark.compiled
def test_calibrated_scales() -> None:
    """The backward of a Function records amaxes, too: training with static scales finds one for each tensor."""
    model = make(FunctionBlock)
    scales = fp8pass.calibrate(model, batches(), loss=lambda y: y.square().mean())
    assert len(scales) == 6
    with verdicts() as report:
        (found,) = train(model, compiled(model, recipe=StaticScaling(scales), strict=True), batches(1))
    assert len(report.rewritten) == 6
    (exact,) = train(make(FunctionBlock), make(FunctionBlock), batches(1))
    assert sqnr(exact["output"], found["output"]) > 20


class FrozenBase(nn.Linear):
    """A frozen layer whose forward is a Function, as libraries replace it."""

    def __init__(self) -> None:
        super().__init__(32, 48, bias=False)
        self.weight.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(16, 32) * 0.1), nn.Parameter(torch.randn(48, 16) * 0.1)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        y: Tensor = LoraFunction.apply(input, self.weight, self.a, self.b, 2.0)  # type: ignore[no-untyped-call]
        return y


@pytest.mark.compiled
def test_a_frozen_weight_in_fp8_is_read_in_high_precision() -> None:
    model = make(FrozenBase)
    exact = copy.deepcopy(model)
    assert fp8pass.freeze(model)
    with verdicts() as report:
        (found,) = train(model, compiled(model), batches(1))
    assert {gemm.rule for gemm in report.declined} == {"gathered in FP8"} and len(report.declined) == 2
    (wanted,) = train(exact, exact, batches(1))
    for key, value in wanted.items():
        assert torch.cosine_similarity(value.flatten(), found[key].flatten(), 0) > 0.97, key


@pytest.mark.compiled
def test_a_trial_of_bisect_leaves_out_single_matmuls_and_operands() -> None:
    def tried(trial: overrides.Trial) -> tuple[list[str], dict[str, Tensor]]:
        model = make(FunctionBlock)
        with overrides.trying(trial), verdicts() as report:
            (found,) = train(model, compiled(model, recipe="dynamic"), batches(1))
        return [f"{gemm.name} {gemm.kind}" for gemm in report.rewritten], found

    every = overrides.Trial()
    names, whole = tried(every)
    assert len(names) == len(every.seen) == 6
    (unit,) = (unit for unit in every.seen if (unit.name, unit.kind) == ("up.matmul", "grad_weight"))
    names, one = tried(overrides.Trial(units={unit}))
    assert names == ["up.matmul grad_weight"]
    _, without = tried(overrides.Trial(instead={(unit, "input"): None}))
    assert [key for key in whole if not torch.equal(whole[key], without[key])] == ["up.weight"]
    assert not torch.equal(one["up.weight"], without["up.weight"])


class Repeated(torch.autograd.Function):
    """A reentrant checkpoint by hand, whose backward Dynamo can't trace."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, g)
        return None, x.grad


class RepeatedByHand(nn.Module):
    """A layer in such a checkpoint, between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(Repeated.apply(lambda x: self.b(x).relu(), self.a(x)))  # type: ignore[no-untyped-call]
        return y


@pytest.mark.compiled
def test_a_checkpoint_by_hand_has_right_gradients() -> None:
    model, exact = make(RepeatedByHand), make(RepeatedByHand)
    with verdicts() as report:
        found = list(train(model, compiled(model), batches(2)))
    wanted = list(train(exact, exact, batches(2)))
    assert len(report.rewritten) == len(report.gemms) >= 6
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            cosine = torch.cosine_similarity(value.flatten(), mine[key].flatten(), 0)
            assert cosine > 0.97, key
