"""Test the cut between forward and backward of compiled models: what is saved, and that nothing else changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from fp8pass.base._torch import CustomPartitionerFn, functorch_config, inductor_config, min_cut_partition
from fp8pass.base.node_meta import SAVED
from fp8pass.base.scaling import FP8_DTYPES
from fp8pass.compiler import partition
from fp8pass.compiler.partition import Partition
from fp8pass.passes.joint.save_transposes import SaveTransposes
from fp8pass.passes.kernels import emulate_matmuls
from tests.helpers.harness import BF16, E4M3, compiled, verdicts, without_caches
from tests.helpers.models import Block


@dataclass
class Cut:
    """One call of the partitioner. outputs: names of the forward's outputs; marked: shapes of nodes marked as SAVED."""

    outputs: list[str]
    marked: list[list[int]]
    forward: fx.GraphModule
    backward: fx.GraphModule

    @property
    def saved(self) -> list[fx.Node]:
        return list(self.forward.graph.output_node().args[0])[len(self.outputs) :]  # type: ignore[arg-type]


@contextlib.contextmanager
def noted_cuts() -> Iterator[list[Cut]]:
    """Yield a list to which each call of the partitioner inside is appended."""
    found: list[Cut] = []
    cut = Partition.__call__

    def noted(self: Partition, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        outputs: Any = gm.graph.output_node().args[0]
        names = [n.name for n in outputs[: kwargs["num_fwd_outputs"]]]
        marked = [list(n.meta["val"].shape) for n in gm.graph.nodes if SAVED in n.meta]
        found.append(Cut(names, marked, *cut(self, gm, joint_inputs, **kwargs)))
        return found[-1].forward, found[-1].backward

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Partition, "__call__", noted)
        patch.setattr(
            emulate_matmuls, "why_emulated", lambda *_: ""
        )  # as on most CPUs; emulated matmuls would have other names
        yield found


@pytest.fixture
def cuts() -> Iterator[list[Cut]]:
    """Yield a list to which each call of the partitioner in the test is appended."""
    with noted_cuts() as found:
        yield found


def step(model: nn.Module, x: Tensor, **options: Any) -> list[Tensor]:
    """Return the output and all gradients of the second of two training steps, whose scales have a history."""
    run = compiled(model, min_speedup=0, **options)
    for _ in range(2):
        model.zero_grad()
        x = x.detach().requires_grad_()
        y = run(x)
        y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


def layers() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)).bfloat16(), torch.randn(64, 32, dtype=BF16)


@pytest.fixture(scope="module")
def delayed() -> tuple[list[Tensor], Cut]:
    """Return the results of a step of `layers`, and the cut of its graph."""
    with without_caches(), noted_cuts() as found:
        return step(*layers()), found[-1]


def is_fp8(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor) and node.meta["val"].dtype in FP8_DTYPES


class Own(CustomPartitionerFn):  # type: ignore[misc]
    """A user's partitioner."""

    def __init__(self) -> None:
        self.outputs: list[int] = []

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        self.outputs.append(kwargs["num_fwd_outputs"])
        return min_cut_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return "own"


@pytest.mark.passes
def test_outputs_and_their_descriptions(delayed: tuple[list[Tensor], Cut]) -> None:
    """The caller's outputs come first, and there is one description for each."""
    _, cut = delayed
    output = cut.forward.graph.output_node()
    outputs: Any = output.args[0]
    assert [n.name for n in outputs[: len(cut.outputs)]] == cut.outputs
    assert len({n.name for n in outputs}) == len(outputs)
    for key in ("desc", "output_stack_traces"):
        assert len(output.meta.get(key, outputs)) == len(outputs)


@pytest.mark.passes
def test_the_cache_key() -> None:
    assert Partition().uuid() == Partition().uuid()
    assert Partition().uuid() != Partition(Own()).uuid()
    assert Partition(Own()).uuid()[1] == "own"


prims = torch.ops.prims


def matrices(nodes: list[fx.Node]) -> list[tuple[list[int], torch.dtype]]:
    """Return shape and dtype of the tensors that have two dimensions."""
    tensors = [n.meta["val"] for n in nodes if isinstance(n.meta.get("val"), Tensor)]
    return sorted(((list(x.shape), x.dtype) for x in tensors if x.dim() == 2), key=str)


def quantized(module: fx.GraphModule) -> list[list[int]]:
    """Return the shapes of the tensors that a graph casts to e4m3; gradients are in e5m2."""
    casts = [n.meta["val"] for n in module.graph.nodes if n.target is prims.convert_element_type.default]
    return sorted(list(x.shape) for x in casts if x.dtype == E4M3)


@pytest.mark.compiled
@pytest.mark.parametrize("recipe", ["delayed", "dynamic"])
def test_weights_are_saved_transposed_in_fp8(recipe: str, cuts: list[Cut], delayed: tuple[list[Tensor], Cut]) -> None:
    """The input is, too; the output of the activation is not: its backward needs the activation's own input."""
    if recipe == "dynamic":
        step(*layers(), recipe=recipe)
    cut = delayed[1] if recipe == "delayed" else cuts[-1]
    fp8 = [x for x in cut.saved if is_fp8(x)]
    assert matrices(fp8) == [([32, 48], E4M3), ([48, 32], E4M3), ([64, 32], E4M3)]
    assert all(x.meta["val"].t().is_contiguous() for x in fp8)
    assert matrices([x for x in cut.saved if not is_fp8(x)]) == [([64, 48], BF16)]  # neither a weight nor an input
    read = [n for n in cut.backward.graph.nodes if n.op == "placeholder" and not n.name.startswith("tangents")]
    assert matrices(read) == matrices(cut.saved)
    assert quantized(cut.backward) == [[64, 48]]


@pytest.mark.compiled
def test_the_cut_is_torchs_own_found_faster(cuts: list[Cut], monkeypatch: pytest.MonkeyPatch) -> None:
    def a_cut() -> list[str]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        step(Block(), torch.randn(8, 32), lowering="eager")
        return [module.graph.python_code("self").src for module in (cuts[-1].forward, cuts[-1].backward)]

    ours = a_cut()
    monkeypatch.setattr(partition, "cuts_fast", contextlib.nullcontext)
    assert a_cut() == ours


@pytest.mark.compiled
def test_nothing_else_changes(
    cuts: list[Cut], delayed: tuple[list[Tensor], Cut], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_copies, ours = delayed
    monkeypatch.setattr(SaveTransposes, "run", lambda *_: 0)
    without, plain = step(*layers()), cuts[-1]
    assert all(torch.equal(a, b) for a, b in zip(with_copies, without, strict=True))
    assert bool(ours.marked) and not plain.marked
    assert ours.outputs == plain.outputs
    assert quantized(ours.backward) == [[64, 48]]
    assert quantized(plain.backward) == [[32, 48], [48, 32], [64, 48]]


@pytest.mark.compiled
def test_a_recipe_that_quantizes_anew_for_the_backward(cuts: list[Cut]) -> None:
    step(*layers(), recipe="rowwise")
    assert all(cut.marked == [] for cut in cuts)


@pytest.mark.compiled
def test_regions_of_activation_checkpointing(cuts: list[Cut]) -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(32, 48), nn.Linear(48, 64)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(lambda x: self.inner(x).sin(), x, use_reentrant=False)
            return self.outer(y)

    torch.manual_seed(0)
    step(Region().bfloat16(), torch.randn(64, 32, dtype=BF16))
    assert cuts[-1].marked == [[48, 64]]  # the weight outside
    assert matrices([n for n in cuts[-1].saved if is_fp8(n)]) == [([64, 48], E4M3)]


class Attention(nn.Module):
    """Attention of 2 heads with its projections, [16, 32] to [16, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.projection = nn.Linear(32, 96, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(1, 16, 3, 2, 16).permute(2, 0, 3, 1, 4)
        o = nn.functional.scaled_dot_product_attention(q, k, v)
        y: Tensor = self.projection(o.transpose(1, 2).reshape(1, 16, 32))
        return y


@pytest.mark.compiled
@pytest.mark.parametrize("save_fp8", [False, True])
def test_attention_saves_q_k_v_and_its_output_once(save_fp8: bool, cuts: list[Cut]) -> None:
    """For its backward, in high precision; with `save_fp8` that reads the projection's operand instead of the output."""
    model, x = Attention().to(BF16), torch.randn(1, 16, 32, dtype=BF16, requires_grad=True)
    with without_caches():
        compiled(model, save_fp8=save_fp8)(x).sum().backward()
    saved = [n.meta["val"] for n in cuts[-1].saved if isinstance(n.meta["val"], Tensor)]
    size = 16 * 32
    assert sum(t.numel() for t in saved if t.dtype is BF16) == (3 if save_fp8 else 4) * size
    # operands of grad_weight, of both projections, and the transposed weights for grad_input
    assert sum(t.numel() for t in saved if t.dtype is E4M3) == 2 * size + 32 * 96 + 32 * 32


@pytest.mark.inductor
def test_a_partitioner_of_the_users_own(cuts: list[Cut]) -> None:
    own, x = Own(), torch.randn(64, 32, dtype=BF16)
    with inductor_config.patch(custom_partitioner_fn=own):
        run = compiled(nn.Linear(32, 48, bias=False).bfloat16(), recipe="dynamic", lowering="inductor", min_speedup=0)
        run(x.requires_grad_())
    (cut,) = cuts
    assert own.outputs == [1 + 2]  # fp8pass adds the two copies to the outputs that the partitioner sees
    assert (len(cut.outputs), cut.marked) == (1, [[32, 64], [32, 48]])
    assert len([n for n in cut.saved if is_fp8(n)]) == 2


class Dropout(nn.Module):
    """Returns what a dropout left, whose gradient says which mask the backward has, and what a layer makes of it."""

    def __init__(self, budget: float | None = None) -> None:
        super().__init__()
        self.a, self.b, self.budget = nn.Linear(64, 96), nn.Linear(96, 64), budget

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.budget is None:
            return self.layers(x)
        with torch.autograd.graph.region_activation_memory_budget(self.budget):
            return self.layers(x)

    def layers(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left = F.dropout(self.a(x), 0.5)
        return left, self.b(left)


def trains_what_it_left(model: Dropout, **options: Any) -> None:
    """Train a step, and check that the backward has the mask of the forward."""
    left, y = compiled(model, min_speedup=0, **options)(torch.randn(48, 64))
    (left.sum() + 0 * y.sum()).backward()
    assert torch.equal(model.a.bias.grad, 2.0 * (left != 0).sum(0))


@pytest.mark.inductor
@pytest.mark.parametrize(("budget", "lowering"), [(0.0, "eager"), (0.1, "eager"), (0.0, "inductor")])
def test_a_memory_budget_draws_no_other_random_numbers(budget: float, lowering: str) -> None:
    """Torch's own partitioner drops other elements in the backward: pytorch#190758."""
    with verdicts() as report, functorch_config.patch(activation_memory_budget=budget):
        trains_what_it_left(Dropout(), lowering=lowering)
    assert len(report.rewritten) == 5


@pytest.mark.compiled
@pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "region_activation_memory_budget"), reason="torch 2.11 has no budget for a region"
)
@pytest.mark.parametrize("budget", [0.0, 0.3])
def test_a_memory_budget_of_a_region(budget: float) -> None:
    """Every node of a graph must have the budget, those of passes and the writes of the state too."""
    with verdicts() as report:
        trains_what_it_left(Dropout(budget))
    assert len(report.rewritten) == 5 and not report.faults


@torch.library.custom_op("tests::drop", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _drop(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return half of the elements, and a mask of them."""
    mask = torch.rand_like(x) > 0.5
    return x * mask, mask


_drop.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)))
_drop.register_autograd(
    lambda ctx, gradient, _: gradient * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


@pytest.mark.compiled
@pytest.mark.parametrize("budget", [0.0, 0.5, 1.0])
def test_a_random_op_that_returns_a_tuple(budget: float) -> None:
    """Autograd takes no tuple; a graph with little to recompute would save it."""
    w = nn.Parameter(torch.randn(64))
    with functorch_config.patch(activation_memory_budget=budget):
        left = compiled(lambda x: _drop(x * w)[0])(x := torch.randn(32, 64))
        left.sum().backward()
    torch.testing.assert_close(w.grad, (x * (left != 0)).sum(0))


@pytest.mark.passes
@pytest.mark.parametrize(("dropout", "is_marked"), [((), False), ((0.0,), False), ((0.1,), True)])
def test_attention_without_dropout_is_computed_again(dropout: tuple[float, ...], is_marked: bool) -> None:
    graph = fx.Graph()
    q = graph.placeholder("q")
    node = graph.call_function(torch.ops.aten._scaled_dot_product_flash_attention.default, (q, q, q, *dropout))
    partition._mark_random(graph)
    assert ("recompute" in node.meta) is is_marked
