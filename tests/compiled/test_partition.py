"""Test the cut between forward and backward of compiled models: what is saved, and that nothing else changes."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from fp8pass.compiler import partition
from fp8pass.passes.joint.save_transposes import SaveTransposes
from tests.helpers.harness import BF16, E4M3, compiled, without_caches
from tests.helpers.models import Block
from tests.helpers.partition import Cut, is_fp8, layers, step
from tests.helpers.partition import cuts as cuts
from tests.helpers.partition import delayed as delayed

prims = torch.ops.prims


def matrices(nodes: list[fx.Node]) -> list[tuple[list[int], torch.dtype]]:
    """Return shape and dtype of the tensors that have two dimensions."""
    tensors = [n.meta["val"] for n in nodes if isinstance(n.meta.get("val"), Tensor)]
    return sorted(((list(x.shape), x.dtype) for x in tensors if x.dim() == 2), key=str)


def quantized(module: fx.GraphModule) -> list[list[int]]:
    """Return the shapes of the tensors that a graph casts to e4m3; gradients are in e5m2."""
    casts = [n.meta["val"] for n in module.graph.nodes if n.target is prims.convert_element_type.default]
    return sorted(list(x.shape) for x in casts if x.dtype == E4M3)


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


def test_the_cut_is_torchs_own_found_faster(cuts: list[Cut], monkeypatch: pytest.MonkeyPatch) -> None:
    def a_cut() -> list[str]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        step(Block(), torch.randn(8, 32), lowering="eager")
        return [module.graph.python_code("self").src for module in (cuts[-1].forward, cuts[-1].backward)]

    ours = a_cut()
    monkeypatch.setattr(partition, "cuts_fast", contextlib.nullcontext)
    assert a_cut() == ours


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


def test_a_recipe_that_quantizes_anew_for_the_backward(cuts: list[Cut]) -> None:
    step(*layers(), recipe="rowwise")
    assert all(cut.marked == [] for cut in cuts)


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
