"""The cut between forward and backward: the order of the forward's outputs, and the cache key."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fp8pass.compiler.partition import Partition
from tests.helpers.partition import Cut, Own
from tests.helpers.partition import delayed as delayed


def test_outputs_and_their_descriptions(delayed: tuple[list[Tensor], Cut]) -> None:
    """The caller's outputs come first, and there is one description for each."""
    _, cut = delayed
    output = cut.forward.graph.output_node()
    outputs: Any = output.args[0]
    assert [n.name for n in outputs[: len(cut.outputs)]] == cut.outputs
    assert len({n.name for n in outputs}) == len(outputs)
    for key in ("desc", "output_stack_traces"):
        assert len(output.meta.get(key, outputs)) == len(outputs)


def test_the_cache_key() -> None:
    assert Partition().uuid() == Partition().uuid()
    assert Partition().uuid() != Partition(Own()).uuid()
    assert Partition(Own()).uuid()[1] == "own"
