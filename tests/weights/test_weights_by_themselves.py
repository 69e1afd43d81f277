"""Test FP8 copies of weights whose scales need no history: with dynamic, rowwise and static scaling."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8pass
from fp8pass.quant import ops
from fp8pass.recipes import DynamicScaling, Recipe, RowwiseScaling, StaticScaling
from fp8pass.weights.weight_cache import weights_of
from fp8pass.weights.weight_copy import WeightByItself, WeightCopy
from tests.helpers.harness import BF16, F32
from tests.helpers.models import batches, make
from tests.helpers.own_recipes import LessScaling

pytestmark = [pytest.mark.compiled, pytest.mark.shares_code]
VARIANT = pytest.mark.variant

STEPS, PARTS = 3, 2
RECIPES = {"dynamic": DynamicScaling(), "static": StaticScaling(12.0), "rowwise": RowwiseScaling()}
OF_RECIPE = [pytest.param(r, marks=[VARIANT] * (name == "static"), id=name) for name, r in RECIPES.items()]
RECIPE = pytest.mark.parametrize("recipe", OF_RECIPE)


class Attention(nn.Module):
    """Three siblings, a layer after them, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.q, self.k, self.v = (nn.Linear(32, n, bias=False) for n in (32, 16, 32))
        self.o = nn.Linear(32, 32)
        self.again = nn.Linear(32, 32, bias=False)
        self.again.weight = self.o.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = self.q(y), self.k(y), self.v(y)
        y = self.o(torch.tanh(q) * v + F.pad(k, (0, 16)))
        return x + F.gelu(y) + 0.5 * self.again(y)


@dataclass
class Run:
    """A training: losses and outputs, gradients of the last step, and the model."""

    losses: list[float] = field(default_factory=list)
    others: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    model: Any = None
    step: Any = None

    @property
    def copies(self) -> list[WeightCopy]:
        """The FP8 copies of the model's weights."""
        return weights_of(list(self.model.parameters()))


Poke = Callable[[Run, Any, int], None]
"""Something that is done after a step: gets the run, the compiled forward and the number of the step."""


def loss_of(y: Tensor) -> Tensor:
    return y.float().square().mean()


def trained(
    cache: str,
    recipe: Recipe,
    poke: Poke = lambda run, forward, i: None,
    kind: Callable[[], nn.Module] = Attention,
    dtype: torch.dtype = F32,
    in_step: bool = True,
    **options: Any,
) -> Run:
    """Train with several forwards in each step. in_step: with `train_step`; else the optimizer is not compiled."""
    torch._dynamo.reset()
    options = {"recipe": recipe, "min_speedup": 0, "lowering": "eager", "weight_cache": cache, **options}
    run = Run(model=make(kind, dtype))
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.05, momentum=0.9, foreach=False)

    def forward(x: Tensor) -> Tensor:
        return loss_of(run.model(x))

    if not in_step:
        forward = torch.compile(forward, backend="fp8pass", options=options)

    def step(parts: Sequence[Tensor]) -> Tensor:
        losses = []
        for part in parts:
            loss = forward(part)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        run.gradients = [p.grad.clone() for p in run.model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    run.step = fp8pass.train_step(step, **options) if in_step else step
    for i, x in enumerate(batches(STEPS, 16 * PARTS, 32, dtype=dtype)):
        run.losses.append(run.step(x.split(16)).item())
        poke(run, forward, i)
    return run


def check_same(wanted: Run, got: Run) -> None:
    """Check that losses, outputs, gradients and weights are equal to the bit, and that each step changes the loss."""
    assert got.losses == wanted.losses and len(set(wanted.losses)) == STEPS
    assert wanted.gradients
    pairs = [(wanted.others, got.others), (wanted.gradients, got.gradients)]
    pairs.append((list(wanted.model.parameters()), list(got.model.parameters())))
    for of_wanted, of_got in pairs:
        assert len(of_wanted) == len(of_got)
        assert all(map(torch.equal, of_wanted, of_got))


def number_of_copies(cache: str, recipe: Recipe, merged: bool) -> int:
    """Return how many copies `Attention` has: of q, k and v, merged or not, and of the shared weight."""
    both = cache == "fp8+transpose" and isinstance(recipe, RowwiseScaling)
    has_siblings = merged and isinstance(recipe, DynamicScaling)  # the others are not merged
    return (2 if has_siblings else 4) * (2 if both else 1)


def scale_of(x: Tensor, recipe: Recipe, dims: tuple[int, ...]) -> Tensor:
    """Return the scale in float64, of the whole matrix or by rows or columns."""
    if isinstance(recipe, StaticScaling):
        return torch.tensor(12.0, dtype=torch.float64)
    amax = x.double().abs().amax(dims if isinstance(recipe, RowwiseScaling) else (0, 1), keepdim=True)
    scale = 448 / amax
    return 2.0 ** scale.log2().floor() if isinstance(recipe, RowwiseScaling) else scale


def check_copies(run: Run, recipe: Recipe) -> set[tuple[str, tuple[int, ...]]]:
    """Check copies by an independent computation in float64; return their kinds.

    They may differ from it in numbers that lie halfway between two of FP8.
    """
    seen = set()
    for w in run.copies:
        assert isinstance(w, WeightByItself)
        dims = w.quantizer.dims if isinstance(w.quantizer, ops.Rowwise) else (0, 1)
        weight = torch.cat([p.detach() for p in w.parts])
        scale = scale_of(weight, recipe, dims)
        scaled = (weight.double() * scale).clamp(-448, 448)
        error = (scaled.float().to(torch.float8_e4m3fn).double() - scaled).abs()
        for name, x in zip(w.stored, w.tensors, strict=True):
            assert x.is_contiguous()
            assert (((x.t() if name == "x_t" else x).double() - scaled).abs() <= error + 1e-4).all()
            seen.add((name, dims))
        inverse = w.scales[w.quantizer.place_in_copy_scales].double()
        torch.testing.assert_close(inverse, scale.reciprocal().reshape(inverse.shape), rtol=1e-6, atol=0)
    return seen


def check_counted(run: Run, each: int, number: int) -> None:
    """Check that the copies are counted, and are not state. each: bytes per element; number: of weights."""
    elements = 32 * (32 + 16 + 32) + 32 * 32
    assert sum(w.nbytes for w in run.copies) == each * elements
    assert run.step.bytes_per_parameter().steady["FP8 copies"] == each * elements
    assert f"FP8 copies of {number} weights take" in str(run.step.report)
    assert not [key for key in fp8pass.state(run.model).state_dict() if "weight" in key]


LOWERINGS = ["eager", pytest.param("inductor", marks=VARIANT)]


@RECIPE
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(
    ("cache", "dtype", "merged"),
    [
        ("fp8+transpose", F32, True),
        *(pytest.param(*of, marks=VARIANT) for of in (("fp8", F32, False), ("fp8", BF16, True))),
    ],
)
def test_a_step_quantizes_each_weight_once(
    recipe: Recipe, lowering: str, cache: str, dtype: torch.dtype, merged: bool
) -> None:
    """The update does; numbers are the same to the bit. A forward takes the copy as it is, and quantizes nothing."""
    options: dict[str, Any] = {"lowering": lowering, "merge_siblings": merged, "dtype": dtype}
    wanted = trained("off", recipe, **options)
    assert wanted.copies == []
    got = trained(cache, recipe, **options)
    check_same(wanted, got)
    assert len(got.copies) == number_of_copies(cache, recipe, merged)
    turned = ("x_t", (0,) if isinstance(recipe, RowwiseScaling) else (0, 1))
    straight = ("x_q", (1,) if isinstance(recipe, RowwiseScaling) else (0, 1))
    assert check_copies(got, recipe) == ({straight, turned} if cache == "fp8+transpose" else {straight})
    check_counted(got, 1 + (cache == "fp8+transpose"), number_of_copies("fp8", recipe, merged))
    for w in got.copies:
        for x in w.tensors:
            x.view(torch.uint8).zero_()  # the weights do not change: whoever reads their copies sees zeros
    (x,) = batches(1, 16, 32, dtype=dtype)
    with torch.no_grad():
        of_zeros = loss_of(x + F.gelu(got.model.o.bias))
    torch.testing.assert_close(got.step([x]), of_zeros)
    assert all(w.is_fresh() and w.requantized == 1 for w in got.copies), "only before the first step"


def load(run: Run, forward: Any, i: int) -> None:
    """Load other weights, as from a checkpoint."""
    run.model.load_state_dict(make(Attention, run.model.o.weight.dtype, seed=i + 5).state_dict())


def edit(run: Run, forward: Any, i: int) -> None:
    with torch.no_grad():
        run.model.o.weight.mul_(1.5)
        run.model.k.weight[3] = 0


def replace_memory(run: Run, forward: Any, i: int) -> None:
    run.model.q.weight.data = run.model.q.weight.detach() * 2


def evaluate(run: Run, forward: Any, i: int) -> None:
    """Evaluate between steps, and run forwards with gradients that no update follows, within contexts."""
    (x,) = batches(1, 16, 32, dtype=run.model.o.weight.dtype)
    with torch.no_grad():
        run.others.append(forward(x))
    run.model.zero_grad()
    for context in (fp8pass.enabled(False), fp8pass.enabled(True), fp8pass.autocast(recipe="rowwise")):
        with context:
            run.others.append(forward(x).detach())


def not_finite(run: Run, forward: Any, i: int) -> None:
    """Make a weight infinite in the last step, whose copy then dequantizes to NaN."""
    if i == STEPS - 1:
        with torch.no_grad():
            run.model.k.weight[1, 2] = float("inf")
        x = batches(1, 16, 32, dtype=run.model.o.weight.dtype)[0]
        run.others.append(forward(x).detach().nan_to_num(-1.0))


def all_of_them(run: Run, forward: Any, i: int) -> None:
    """Do each of the above after one of the steps."""
    pokes = evaluate, load, edit, replace_memory, evaluate, not_finite
    for poke in (pokes[i], pokes[i + STEPS]):
        poke(run, forward, i)


@pytest.mark.parametrize("in_step", [True, pytest.param(False, marks=VARIANT)])
@pytest.mark.parametrize("recipe", [RECIPES["dynamic"], *(pytest.param(r, marks=VARIANT) for r in RECIPES.values())])
def test_never_stale(recipe: Recipe, in_step: bool) -> None:
    """Whatever happens between steps, numbers are those without copies, with a compiled update or another."""
    wanted, got = (
        trained(cache, recipe, all_of_them, in_step=in_step, merge_siblings=True) for cache in ("off", "fp8+transpose")
    )
    assert got.copies
    check_same(wanted, got)
    if in_step:
        assert "something other than an optimizer had changed them" in str(got.step.report)


@VARIANT
@RECIPE
def test_an_optimizer_that_is_not_compiled(recipe: Recipe) -> None:
    """Copies are made once a step, however many forwards read them."""
    wanted, got = (trained(cache, recipe, in_step=False) for cache in ("off", "fp8+transpose"))
    check_same(wanted, got)
    assert {w.requantized for w in got.copies} == {STEPS}


class Mixed(nn.Module):
    """A convolution that is a matmul, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.up = nn.Conv1d(1, 32, 4, stride=4), nn.Linear(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(self.patches(x.unsqueeze(1)))
        return y


def test_what_has_no_copy() -> None:
    """A convolution's weight is not a matrix: it is quantized in each forward, and the layer's is not."""
    got = trained("fp8+transpose", RECIPES["dynamic"], kind=Mixed)
    assert [[p is got.model.up.weight for p in w.parts] for w in got.copies] == [[True]]


def test_weights_that_nobody_trains_are_quantized_once() -> None:
    """As those below adapters: no update writes them, and the end of a step does not make their copies stale."""

    def kind() -> nn.Module:
        model = Attention()
        for layer in (model.q, model.k, model.v):
            layer.requires_grad_(False)
        return model

    got = trained("fp8+transpose", RECIPES["dynamic"], kind=kind)
    assert [w.requantized for w in got.copies] == [1] * 4


@VARIANT
def test_one_recipe_of_the_users() -> None:
    """A class that derives from dynamic scaling has no state either."""
    recipe = LessScaling()
    wanted, got = (trained(cache, recipe) for cache in ("off", "fp8+transpose"))
    check_same(wanted, got)
    assert {w.requantized for w in got.copies} == {1}


def test_two_instances_and_the_end_of_a_graph() -> None:
    """Instances that share compiled code have their own copies, which end with the code."""
    torch._dynamo.reset()
    models = [make(Attention, seed=i) for i in range(2)]
    options = {"recipe": "dynamic", "min_speedup": 0, "lowering": "eager", "weight_cache": "fp8"}
    (x,) = batches(1, 16, 32)
    for model in models:
        torch.compile(model, backend="fp8pass", options=options)(x)
    own = [weights_of(list(model.parameters())) for model in models]
    assert [len(of) for of in own] == [4, 4] and not set(own[0]) & set(own[1])
    del own
    torch._dynamo.reset()
    gc.collect()
    assert not any(weights_of(list(model.parameters())) for model in models)
