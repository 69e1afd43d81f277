"""Rows and blocks that the quantize_collectives pass sends in FP8, each with its amax: numbers and reasons to decline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8pass.base import scaling
from fp8pass.base.scaling import E4M3, E5M2
from fp8pass.graph.pass_base import JointContext
from fp8pass.options.config import Config
from fp8pass.passes.joint.quantize_collectives import QuantizeCollectives
from fp8pass.quant import ops
from fp8pass.recipes import BlockwiseScaling, MXFP8Scaling, RowwiseScaling
from tests.helpers.fake_collectives import (
    MOVERS,
    Function,
    c10d,
    data,
    exchange,
    gather,
    on_ranks,
    rewritten,
    same_bits,
    sent,
)
from tests.helpers.fake_ranks import GROUPS, RANKS, WORLD
from tests.helpers.fake_ranks import groups as groups
from tests.helpers.harness import BF16, F16, F32, capture, run, text

pytestmark = pytest.mark.passes

WIDTH = 256
QUANTIZERS: dict[str, Callable[[int], ops.Quantizer]] = {
    "rowwise": lambda dim: ops.Rowwise(RowwiseScaling(), E4M3, (dim,)),
    "rowwise, any scale": lambda dim: ops.Rowwise(RowwiseScaling(power_of_2=False), E5M2, (dim,)),
    "blockwise": lambda dim: ops.Blockwise(BlockwiseScaling(), E4M3, 128, dims=(dim,)),
    "mxfp8": lambda dim: ops.Blockwise(MXFP8Scaling(), E4M3, 32, dims=(dim,)),
}
BLOCKS = {"rowwise": WIDTH, "rowwise, any scale": WIDTH, "blockwise": 128, "mxfp8": 32}


def of_ranks(*shape: int, dtype: torch.dtype = BF16) -> list[Tensor]:
    """Return a tensor for each rank whose rows have unlike sizes, with rows of zeros, NaN and infinity."""
    found = [x.view(-1, shape[-1]) for x in data(*shape, dtype=dtype)]
    for rank, x in enumerate(found):
        x *= torch.exp2(torch.arange(len(x)) - rank).unsqueeze(1).to(dtype)
        x[0] = 0
        x[1, 5], x[2, 7] = float("nan"), -float("inf")
    return [x.view(shape) for x in found]


@pytest.mark.parametrize("move", MOVERS)
@pytest.mark.parametrize("recipe", QUANTIZERS)
def test_no_bit_changes(recipe: str, move: str) -> None:
    quantizer = QUANTIZERS[recipe](1)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        whole = MOVERS[move](x)
        return quantizer(whole), quantizer.parts(whole)[0].float()  # type: ignore[union-attr,call-arg]

    parts = of_ranks(8, WIDTH)
    before, after, context = rewritten(function, parts[0])
    assert len(sent(before)) == 1 and sorted(x.split()[1] for x in sent(after)) == ["bfloat16", "uint8"]
    numel = before.graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)[0].meta["val"].numel()
    mb = (numel + 2 * numel // BLOCKS[recipe]) / 1e6
    assert context.notes == [f"1 collectives send FP8, {mb:.3g} MB instead of {2 * numel / 1e6:.3g} MB"]
    results = [on_ranks(module, [(x,) for x in parts]) for module in (before, after)]
    for a, b in zip(*results, strict=True):
        same_bits(a, b)
    assert any(a[0].isnan().any() for a in results[0])


@pytest.mark.parametrize("dtype", [F32, F16])
def test_other_types_too(dtype: torch.dtype) -> None:
    parts = of_ranks(8, WIDTH, dtype=dtype)
    before, after, _ = rewritten(lambda x: (QUANTIZERS["rowwise"](1)(gather(x)),), parts[0])  # type: ignore[call-arg]
    for a, b in zip(*(on_ranks(g, [(x,) for x in parts]) for g in (before, after)), strict=True):
        same_bits(a, b)


@pytest.mark.parametrize("recipe", QUANTIZERS)
def test_rows_of_a_sequence_may_be_joined(recipe: str) -> None:
    """DTensor gathers along dimension 0, and joins what it splits along the dimension of the sequence."""
    quantizer = QUANTIZERS[recipe](2)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        whole = torch.cat(gather(x).split(2), 1)
        return (quantizer(whole),)  # type: ignore[call-arg]

    parts = of_ranks(2, 4, WIDTH)
    before, after, _ = rewritten(function, parts[0])
    for a, b in zip(*(on_ranks(g, [(x,) for x in parts]) for g in (before, after)), strict=True):
        same_bits(a, b)


@pytest.mark.parametrize("recipe", QUANTIZERS)
def test_tokens_may_be_sorted_for_experts(recipe: str) -> None:
    quantizer = QUANTIZERS[recipe](1)

    def function(x: Tensor, order: Tensor) -> tuple[Tensor, ...]:
        return (quantizer(exchange(x)[order].view(4, 2, WIDTH).transpose(0, 1).reshape(8, WIDTH)),)  # type: ignore[call-arg]

    parts, order = of_ranks(8, WIDTH), torch.tensor([3, 1, 0, 2, 7, 6, 5, 5])
    before, after, _ = rewritten(function, parts[0], order)
    assert sorted(sent(after)) == ["all_to_all_single bfloat16", "all_to_all_single uint8"]
    for a, b in zip(*(on_ranks(g, [(x, order) for x in parts]) for g in (before, after)), strict=True):
        same_bits(a, b)


def test_a_rank_may_send_or_get_no_tokens() -> None:
    """Rank 0 has all tokens, and rank 1 gets none."""
    quantizer = QUANTIZERS["rowwise"](1)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        brought = c10d.all_to_all_single(x, [4, 0, 0, 0], [4, 0, 2, 2], GROUPS[WORLD])
        return (quantizer(c10d.wait_tensor(brought)),)  # type: ignore[call-arg]

    before, after, _ = rewritten(function, of_ranks(8, WIDTH)[0])
    for module, rank in ((before, 0), (after, 0)):
        (node, *_) = [n for n in module.graph.nodes if n.target is c10d.all_to_all_single.default]
        assert node.args[1:3] == ([4, 0, 0, 0], [4, 0, 2, 2]), rank

    def nothing(x: Tensor) -> tuple[Tensor, ...]:
        brought = c10d.all_to_all_single(x, [2, 0, 0, 0], [0, 0, 0, 0], GROUPS[WORLD])
        return (quantizer(c10d.wait_tensor(brought)),)  # type: ignore[call-arg]

    rewritten(nothing, torch.zeros(0, WIDTH, dtype=BF16))


def columns(x: Tensor) -> Tensor:
    return QUANTIZERS["rowwise"](0)(x)  # type: ignore[no-any-return,call-arg]


def for_both(x: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x)
    return QUANTIZERS["rowwise"](1)(whole), columns(whole)  # type: ignore[call-arg]


def of_two_sizes(x: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x)
    return QUANTIZERS["blockwise"](1)(whole), QUANTIZERS["mxfp8"](1)(whole)  # type: ignore[call-arg]


def read_too(x: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x)
    return QUANTIZERS["rowwise"](1)(whole), whole.cos()  # type: ignore[call-arg]


def across_ranks(x: Tensor) -> tuple[Tensor, ...]:
    """Quantize rows that hold elements of two ranks."""
    whole = gather(x).view(RANKS, -1, WIDTH).permute(1, 0, 2).reshape(-1, 2 * WIDTH)
    return (QUANTIZERS["rowwise"](1)(whole),)  # type: ignore[call-arg]


def by_another_row(x: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x)
    scale = 448 / whole.abs().amax(1, keepdim=True).float()
    return (scaling.quantize(whole, scale.flip(0), E4M3),)


def by_the_amax_of_other_rows(x: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x)
    halves = torch.cat([whole[16:], whole[:16]])
    return (scaling.quantize(whole, 448 / halves.abs().amax(1, keepdim=True).float(), E4M3),)


def by_a_ranks_number(x: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x)
    return (scaling.quantize(whole, factor / whole.abs().amax(1, keepdim=True).float(), E4M3),)


SEVERAL = (
    "the result of all_gather_into_tensor is quantized in 2 ways, along different dimensions: sent once for each it takes "
    "more than 2 bytes per element, and 2 in bfloat16"
)
REFUSED: dict[str, tuple[Function, str]] = {
    "rows and columns": (for_both, SEVERAL),
    "blocks of two sizes": (of_two_sizes, SEVERAL),
    "columns": (
        lambda x: (columns(gather(x)),),
        "the result of all_gather_into_tensor has scales of which each needs elements of all ranks",
    ),
    "read in high precision, too": (read_too, "cos reads the result of all_gather_into_tensor in bfloat16"),
    "rows of several ranks": (
        across_ranks,
        "the result of all_gather_into_tensor has scales of which each needs elements of all ranks",
    ),
    "the scale of another row": (by_another_row, "rev moves scales of the result of all_gather_into_tensor"),
    "the amaxes of other rows": (
        by_the_amax_of_other_rows,
        "the result of all_gather_into_tensor has scales of which each needs elements of all ranks",
    ),
    "a scale of this rank": (by_a_ranks_number, "the scale div after all_gather_into_tensor may differ between ranks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    function, reason = REFUSED[case]
    inputs: list[Any] = [data(8, WIDTH)[0], *([torch.tensor(3.0)] if function is by_a_ranks_number else [])]
    module = capture(function, *inputs)
    reference, context = text(module), JointContext(Config(recipe=None))
    assert QuantizeCollectives().run(module.graph, context) == 0
    run(module)
    assert text(module) == reference
    assert context.notes == [f"all_gather_into_tensor sends bfloat16: {reason}"]
