"""Test frozen weights that are kept in FP8 alone: `fp8pass.freeze`, the option `frozen`, and LoRA by hand."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8pass
from fp8pass.base.errors import Fp8Error
from fp8pass.frozen.weight import FrozenWeight
from tests.helpers.harness import BF16, E4M3, annotated, compiled, sqnr

pytestmark = pytest.mark.compiled

SCALES = ["tensor", "row", "block"]


class Adapted(nn.Module):
    """A linear layer with a LoRA adapter."""

    def __init__(self, inputs: int, outputs: int, rank: int = 16) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Adapted(128, 256), Adapted(256, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x)))  # type: ignore[no-any-return]


def make(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def inputs(n: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(64, 128, generator=generator).to(dtype).requires_grad_() for _ in range(n)]


def passed(model: nn.Module, run: Callable[..., Tensor], x: Any) -> dict[str, Tensor]:
    """Run forward and backward; return the output and all gradients, by name."""
    model.zero_grad()
    x.grad = None
    y = run(x)
    y.float().square().mean().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"output": y.detach(), "input": x.grad.clone(), **grads}


def frozen_of(model: Net) -> FrozenWeight:
    weight: Any = model.first.base.weight
    return weight  # type: ignore[no-any-return]


def byte_count(model: nn.Module) -> int:
    """Return the bytes of all tensors that belong to a model, as the garbage collector sees them."""
    gc.collect()
    weights: list[Any] = list(model.parameters())
    own = {id(p) for p in weights}
    own |= {id(t) for p in weights if isinstance(p, FrozenWeight) for t in (p._x_q, p._scale_inv)}
    tensors = [t for t in gc.get_objects() if isinstance(t, Tensor) and id(t) in own]
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if type(t) in (nn.Parameter, Tensor)
    }
    return sum(storages.values())


@pytest.mark.parametrize("scales", SCALES)
def test_every_op_reads_the_dequantized_weight(scales: Any) -> None:
    """Also the backward: results are those of the dequantized model, up to the order of sums, where FP8 is not enabled."""
    model = make()
    assert fp8pass.freeze(model, scales) == ["first.base", "second.base"]
    plain = copy.deepcopy(model)
    assert fp8pass.unfreeze(plain) == ["first.base", "second.base"]
    run = compiled(model, compile_once=False)
    for x in inputs(2):
        expected = passed(plain, plain, x)
        for way in model, run:
            with fp8pass.enabled(False):
                found = passed(model, way, x)
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scales", SCALES)
def test_scales_are_those_of_an_own_computation(scales: Any) -> None:
    w = make().first.base.weight.detach()
    frozen = FrozenWeight.of(w, scales)
    blocks = w.double().reshape(2, 128, 1, 128)
    amax = {
        "tensor": w.double().abs().max(),
        "row": w.double().abs().amax(1, keepdim=True),
        "block": blocks.abs().amax((1, 3)),
    }[scales]
    scale = 448 / amax
    if scales == "block":
        scale = 2 ** scale.log2().floor()
    torch.testing.assert_close(frozen._scale_inv.double(), 1 / scale, rtol=1e-6, atol=0)
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1) if scales == "block" else scale
    q = (w.double() * spread).float().to(E4M3)
    assert (
        q.view(torch.uint8) != frozen._x_q.view(torch.uint8)
    ).float().mean() < 1e-3  # ties, by the last bit of a scale
    torch.testing.assert_close(frozen.dequantized().double(), q.double() / spread, rtol=0.07, atol=1e-4)


@pytest.mark.filterwarnings("ignore:fp8pass. blockwise kernels exist on sm_90:UserWarning")
@pytest.mark.parametrize(
    ("scales", "recipe", "rewritten"),
    [
        ("tensor", "delayed", {"output", "grad_input"}),
        pytest.param("tensor", "rowwise", {"output", "grad_input"}, marks=pytest.mark.variant),
        pytest.param("row", "delayed", {"output"}, marks=pytest.mark.variant),
        ("block", "delayed", {"output", "grad_input"}),
    ],
)
def test_matmuls_of_frozen_weights_run_in_fp8(scales: Any, recipe: str, rewritten: set[str]) -> None:
    """Their verdicts name the recipe that has the weight's scales, and gradients are those of the dequantized model."""
    models = [make(), make(), make()]
    for model in models:
        fp8pass.freeze(model, scales)
    fp8pass.unfreeze(models[2])
    report = fp8pass.explain(models[0], inputs(1)[0], config=fp8pass.Config(recipe=recipe))
    of_base = [g for g in report.gemms if g.name.endswith("base")]
    assert {g.kind for g in of_base} == {"output", "grad_input"}
    used = {"row": "rowwise", "block": "blockwise"}.get(scales, "dynamic" if recipe == "rowwise" else recipe)
    assert {g.scaling for g in of_base if g.kind == "output"} == {used}
    if scales != "block":  # whose kernels a CPU does not have
        assert {g.kind for g in of_base if g.status == "rewritten"} == rewritten
    ways = [compiled(models[0], recipe=recipe), annotated(models[1], recipe=recipe), models[2]]
    for x in inputs(3):
        found, reference, high = (passed(m, run, x) for m, run in zip(models, ways, strict=True))
    assert set(found) == set(reference) == set(high) and len(found) == 6
    for name in found:
        # not closer: a sum in another order may round to the neighbour in FP8
        assert sqnr(reference[name], found[name]) > 40, name
        assert sqnr(high[name], found[name]) > 18, name


def test_frozen_weights_take_a_byte_per_element() -> None:
    model = make(BF16)
    n = sum(p.numel() for name, p in model.named_parameters() if name.endswith("base.weight"))
    rest = sum(2 * p.numel() for name, p in model.named_parameters() if not name.endswith("base.weight"))
    assert byte_count(model) == 2 * n + rest
    run = compiled(model, frozen="fp8")
    passed(model, run, inputs(1, BF16)[0])
    assert byte_count(model) == n + rest + 2 * 4  # and two scales
    assert sum(isinstance(p, FrozenWeight) for p in model.parameters()) == 2


def test_the_option_gives_what_freeze_gives() -> None:
    by_option, by_hand = make(), make()
    fp8pass.freeze(by_hand)
    runs = [compiled(by_option, frozen="fp8", strict=True), compiled(by_hand, strict=True)]
    for x in inputs(3):
        a, b = (passed(m, run, x) for m, run in zip((by_option, by_hand), runs, strict=True))
        assert all(torch.equal(a[name], b[name]) for name in b)
    names = set(fp8pass.state(by_option).state_dict())
    assert names == set(fp8pass.state(by_hand).state_dict())
    assert "first.base.weight.input.scale" in names or "first.base.input.scale" in names
    assert not any(name.startswith("first.base.weight.weight") for name in names)  # a frozen weight needs no slot


def test_an_optimizer_trains_the_adapters_alone() -> None:
    model = make()
    fp8pass.freeze(model)
    before = [frozen_of(model)._x_q.clone(), model.first.up.weight.detach().clone()]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    @fp8pass.train_step(lowering="eager")
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = [float(step(x)) for x in inputs(1) * 6]
    assert losses[-1] < losses[0]
    assert torch.equal(frozen_of(model)._x_q.view(torch.uint8), before[0].view(torch.uint8))
    assert not torch.equal(model.first.up.weight, before[1])


def test_a_frozen_weight_takes_no_gradient() -> None:
    model = make()
    fp8pass.freeze(model)
    model.requires_grad_(False)
    with pytest.raises(Fp8Error, match=r"takes no gradient: call fp8pass\.unfreeze"):
        model.requires_grad_(True)
    fp8pass.unfreeze(model)
    model.requires_grad_(True)


def test_merged_adapters_are_quantized_again_with_a_warning() -> None:
    model = make()
    fp8pass.freeze(model)
    layer = model.first
    expected = frozen_of(model).dequantized() + layer.up.weight.detach() @ layer.down.weight.detach()
    with pytest.warns(UserWarning, match=r"is quantized again: small changes may be lost. Call fp8pass\.unfreeze"):
        layer.base.weight.data += (layer.up.weight @ layer.down.weight).detach()
    assert isinstance(layer.base.weight, FrozenWeight) and isinstance(layer.base.weight, nn.Parameter)
    assert sqnr(expected, frozen_of(model).dequantized()) > 25


def test_saved_and_loaded_with_torch() -> None:
    model, other = make(), make()
    fp8pass.freeze(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    x = inputs(1)[0]
    assert torch.equal(other(x), model(x))  # into high precision: the dequantized values


def test_what_cannot_be_frozen_stays() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head, self.odd = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False), nn.Linear(16, 16)
            self.head.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.odd(self.embedding(x)))  # type: ignore[no-any-return]

    model = Tied().requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"2 layers can't be frozen in FP8; the weight of 'head': \[32, 16\] has no whole"
    ):
        fp8pass.freeze(model, "block")
    assert fp8pass.freeze(model) == ["odd"]
    with pytest.raises(ValueError, match=r"call model\.requires_grad_\(False\)"):
        fp8pass.freeze(nn.Linear(16, 16))
    with pytest.raises(ValueError, match=r"unknown scales 'rows'.*did you mean 'row'"):
        fp8pass.freeze(model, "rows")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes a module or a compiled module, not dict"):
        fp8pass.freeze({})
