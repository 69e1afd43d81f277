"""Test what the passes over an update make of tensors that are divided among ranks, here those of `fake_ranks`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fp8pass.base.errors import Fp8Error
from fp8pass.compiler.update_passes import annotated_update
from fp8pass.options.config import Config
from fp8pass.quant.moments import Moments
from fp8pass.quant.random_bits import bits_like, key_at, keys_of
from fp8pass.quant.sharded import Division, division_of, first_index, part_of, sizes_of_parts
from fp8pass.train.training_step import _check_division
from fp8pass.weights.update_key import Moment, UpdateKey
from tests.helpers.fake_ranks import RANKS, groups
from tests.helpers.harness import capture

pytestmark = pytest.mark.passes

__all__ = ["groups"]


def divided(
    shape: tuple[int, int], placements: tuple[Placement, ...] = (Shard(0),), position: int = 0, **mesh_of: Any
) -> Any:
    """Return a DTensor of which this process has the part at a position among the ranks."""
    ranks = list(range(RANKS))
    ranks[0], ranks[position] = ranks[position], 0
    mesh = DeviceMesh("cpu", mesh_of.get("mesh", ranks))
    whole = torch.arange(1.0, shape[0] * shape[1] + 1).view(shape)
    part: Tensor = whole
    for i, p in enumerate(placements):
        if isinstance(p, Shard):
            parts = part.chunk(mesh.size(i), p.dim)
            coordinate = mesh.get_coordinate()
            assert coordinate is not None
            at = coordinate[i]
            part = parts[at] if at < len(parts) else part.narrow(p.dim, 0, 0)
    return DTensor.from_local(
        part.contiguous(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


@pytest.mark.parametrize("rows", [8, 130, 3], ids=["even", "uneven", "fewer than ranks"])
def test_the_first_index_is_that_in_the_whole_tensor(rows: int) -> None:
    parts = [divided((rows, 16), position=position) for position in range(RANKS)]
    sizes = [part_of(x).numel() for x in parts]
    assert [first_index(x) for x in parts] == [sum(sizes[:position]) for position in range(RANKS)]
    for x in parts:
        assert sizes_of_parts(x) == set(sizes) - {0}
        assert part_of(x).numel() == 0 or part_of(x)[0, 0] == 1 + first_index(x)


def test_of_columns_it_counts_the_elements_of_earlier_parts() -> None:
    found = [first_index(divided((4, 6), (Shard(1),), position)) for position in range(RANKS)]
    assert found == [0, 8, 16, 24] and sizes_of_parts(divided((4, 6), (Shard(1),))) == {8}


def test_plain_and_replicated_tensors_are_whole() -> None:
    for x in (torch.ones(4, 6), divided((4, 6), (Replicate(),))):
        assert sizes_of_parts(x) == {24} and first_index(x) == 0
    assert division_of(torch.ones(4, 6)) is None
    both = divided((8, 16), (Replicate(), Shard(0)), mesh=[[3, 1], [2, 0]])
    assert sizes_of_parts(both) == {64} and first_index(both) == 64


def test_bits_of_parts_are_those_of_the_whole() -> None:
    whole = torch.empty(130, 16)
    updates, seed = torch.tensor([7], dtype=torch.int32), 48
    alone = keys_of(updates, torch.tensor([seed], dtype=torch.int32))
    expected = bits_like(whole, key_at(alone, 0)).chunk(RANKS)
    for position in range(RANKS):
        x = divided((130, 16), position=position)
        keys = keys_of(updates, torch.tensor([[3, 5], [seed, first_index(x)]], dtype=torch.int32))
        assert torch.equal(bits_like(part_of(x), key_at(keys, 1)), expected[position])


def test_blocks_must_divide_each_part() -> None:
    """All ranks choose the same, whatever their own part is."""
    for position in range(RANKS):
        assert Moments(block=64).format("first", divided((130, 64), position=position)).block == 64
        # parts of 33 and 31 rows: 128 divides neither, though it divides the whole
        assert Moments(block=128).format("first", divided((130, 64), position=position)).block is None
    assert Moments(block=128).format("first", torch.empty(130, 64)).block == 128


def test_a_division_is_that_of_the_tensor() -> None:
    x = divided((130, 16), position=3)
    division = division_of(x)
    assert division is not None and division == division_of(divided((130, 16), position=3))
    again: Any = division.whole(part_of(x))
    assert (again.shape, again.stride(), again.placements) == (x.shape, x.stride(), x.placements)
    assert repr(division) == "Division([130, 16], '(Shard(dim=0),)')"


def test_a_decoded_moment_is_divided_as_it_was() -> None:
    """The graph computes with a DTensor, and writes this rank's part."""
    p, m = (divided((130, 16), position=3) for _ in range(2))
    p.grad = torch.ones_like(p)

    @torch.no_grad()
    def update(p: Tensor, grad: Tensor, m: Tensor) -> None:
        m.lerp_(grad, 0.5)
        p.sub_(m)

    module = capture(update, p, p.grad, m)
    stored = Moments(second="float16").format("first", m)
    key = UpdateKey((), (), (), (Moment(2, stored, m.dtype, division_of(m)),))
    annotation = annotated_update(module, key, Config())
    x_q = torch.linspace(0.0, 448.0, part_of(m).numel()).view_as(part_of(m)).to(stored.dtype)
    scales = torch.tensor([[1.0], [448.0]])
    values = x_q.float().lerp(torch.ones(()), 0.5)
    before = part_of(p).clone()
    annotation.run(p, p.grad, m, scales, x_q)
    assert torch.equal(part_of(p), before - values)
    assert scales[0, 0] > 1 and torch.equal(
        x_q.float() * scales[0, 0], (values / scales[0, 0]).to(stored.dtype).float() * scales[0, 0]
    )
    assert any(isinstance(n.kwargs.get("division"), Division) for n in annotation.module.graph.nodes)


def test_several_divisions_are_refused() -> None:
    p = divided((8, 16), (Shard(0), Shard(1)), mesh=[[0, 1], [2, 3]])
    with pytest.raises(
        Fp8Error,
        match=r"optimizer_state='fp8' supports parameters sharded over one dimension .* w is sharded over several",
    ):
        _check_division("w", p, Config(optimizer_state="fp8"))
    with pytest.raises(ValueError, match="more than one dimension of the mesh"):
        sizes_of_parts(p)
    _check_division("w", p, Config())
    _check_division("w", divided((8, 16)), Config(optimizer_state="fp8", update_rounding="stochastic"))
