"""The inputs that passes add to a graph of Dynamo's, after its own: each knows its example and its value in a call.

A pass that adds a placeholder appends its `Input` to the graph's list. Lowering traces with the examples, in the order
of the list, and each call passes the values, in the same order: so no other file knows the order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fp8pass.base._torch import detect_fake_mode
from fp8pass.quant.ops import SlotTensors
from fp8pass.states.slots import InstanceState, SlotTable

T = TypeVar("T")


@dataclass
class Call:
    """One call of a graph. args: Dynamo's inputs. owned: the instance's tensors among them.

    states: the instance's state for each slot table. slots: the tensors that the graph reads and writes in this call,
    for each state. repeats: True if a backward runs the forward again, or if the call belongs to no step.
    is_counted: True if the forward that the call repeats has been counted, by inputs that count.
    """

    args: Sequence[Any]
    owned: Sequence[Tensor] = ()
    states: Sequence[InstanceState] = ()
    slots: list[SlotTensors] = field(default_factory=list)
    repeats: bool = False
    is_counted: bool = False
    _made: dict[int, Any] = field(default_factory=dict)

    def once(self, owner: object, make: Callable[[Call], T]) -> T:
        """Return what `make` returned for this call at the first request for `owner`, which inputs may share."""
        key = id(owner)  # of an object that inputs hold; to hash a table or a weight takes longer
        if key not in self._made:
            self._made[key] = make(self)
        made: T = self._made[key]
        return made


C = TypeVar("C", contravariant=True)


class Together(Protocol):
    """Inputs whose values take less time together."""

    def values(self, inputs: Sequence[Any], call: Any) -> list[Tensor]:
        """Return the `value` of each of these inputs, which have this object as `together`."""
        ...


class Input(Protocol[C]):
    """An input that a pass has added."""

    @property
    def name(self) -> str:
        """The name of its placeholder, without the prefix `fp8pass_`."""
        ...

    def example(self, call: C) -> Tensor:
        """Return the tensor that lowering traces with. The arguments of `call` are examples, and it has no states."""
        ...

    def value(self, call: C) -> Tensor:
        """Return the tensor that a call passes. CUDA graphs need the same address in each call of one instance."""
        ...


def examples_of(inputs: Sequence[Input[C]], call: C, args: Sequence[Any]) -> list[Tensor]:
    """Return the examples of `inputs`, fake tensors if any of `args`, the examples of Dynamo's inputs, is fake."""
    with detect_fake_mode(args) or nullcontext(), torch.no_grad():
        return [x.example(call) for x in inputs]


@dataclass(frozen=True)
class SlotInput:
    """A state tensor of one slot table. table, index: the table, and its position in `Call.states`.

    field: of `SlotTensors`. The backward merges its amaxes into the values that `amax_backward` holds when it runs, not
    into those that its forward saw: so that buffer is an input once more, which the forward does not touch.
    """

    name: str
    table: SlotTable
    index: int
    field: str

    def example(self, call: Call) -> Tensor:
        """Return a tensor of a state without history."""
        return self.table.new_tensor(self.field)

    def value(self, call: Call) -> Tensor:
        """Return the instance's tensor, with a version counter for this call alone.

        With one for all calls, autograd would raise if a second forward wrote into it before the first backward.
        """
        tensor: Tensor = getattr(call.slots[self.index], self.field)
        return tensor.data


@dataclass(frozen=True)
class FixedScales:
    """The scales of a table of static scaling and their reciprocals, f32[2, T]. index: as in `SlotInput`."""

    name: str
    table: SlotTable
    index: int

    def example(self, call: Call) -> Tensor:
        """Return a tensor of this shape."""
        scale = self.table.new_tensor("scale")
        return torch.stack([scale, scale])

    def value(self, call: Call) -> Tensor:
        """Return the scales of the instance."""
        return call.states[self.index].fixed_scales()


@dataclass(frozen=True)
class LateAmax:
    """The running amax f32[] of a user's `ScaleState`, once more, for the backward to write: see `SlotInput`.

    position: of the amax among Dynamo's inputs.
    """

    name: str
    position: int

    def example(self, call: Call) -> Tensor:
        """Return a tensor of this shape."""
        return torch.empty((), device=call.args[self.position].device)

    def value(self, call: Call) -> Tensor:
        """Return the buffer, with a version counter for this call alone: see `SlotInput.value`."""
        amax: Tensor = call.args[self.position]
        return amax.data
