"""Four ranks of a process group that sends nothing: for graphs with collectives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS = 4
WORLD, HALF = "world", "half"
"""Keys of `GROUPS`: torch's names of groups are known only after the groups are made."""
GROUPS: dict[str, str] = {}


@pytest.fixture(autouse=True, scope="module")
def groups() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())  # type: ignore[no-untyped-call]
    world, half = dist.group.WORLD, dist.new_group([0, 1])
    assert world is not None
    GROUPS.update({WORLD: world.group_name, HALF: half.group_name})
    yield
    dist.destroy_process_group()
