"""Count the updates of each optimizer, and number its tensors: stochastic rounding makes its random bits of these.

The count is a tensor, which the compiled update increments. It is saved with the optimizer, as an integer in the first
parameter group of its state dict, so that a run that resumes goes on with the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

KEY = "fp8pass_updates"
"""The key of the count in the first parameter group of a state dict."""
_OTHERS = 1 << 30
"""The first number of tensors that belong to no optimizer."""
_counts: weakref.WeakKeyDictionary[Optimizer, Tensor] = weakref.WeakKeyDictionary()
"""The number of updates of each optimizer, i32[1], on the device of its parameters."""


@torch.no_grad()
def count_updates(optimizers: Iterable[Optimizer]) -> None:
    """Begin to count the updates of optimizers that are not counted yet; take over the counts that they have loaded."""
    for optimizer in optimizers:
        loaded = optimizer.param_groups[0].pop(KEY, None)  # the step that is compiled must not see it
        if optimizer not in _counts:
            device = optimizer.param_groups[0]["params"][0].device
            with torch.inference_mode(False):
                _counts[optimizer] = torch.zeros(1, dtype=torch.int32, device=device)
            optimizer.register_state_dict_post_hook(_save)
        if loaded is not None:
            _counts[optimizer].fill_(int(loaded))


@torch.no_grad()
def repeat_count(optimizer: Optimizer) -> None:
    """Give the next update of an optimizer the number of the last one, of which it is another part."""
    if optimizer in _counts:
        _counts[optimizer].sub_(1)


def _save(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    if int(_counts[optimizer]):
        state_dict["param_groups"][0][KEY] = int(_counts[optimizer])


class Numbers:
    """The count and the numbers of the tensors that one update writes.

    updates: i32[1], the number of updates of the optimizer whose parameters these are; 0 if there is none.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._seeds = {id(x): _OTHERS + i for i, x in enumerate(tensors)}
        device = tensors[0].device if tensors else torch.device("cpu")
        with torch.inference_mode(False):
            self.updates = torch.zeros(1, dtype=torch.int32, device=device)
        for optimizer, count in list(_counts.items()):
            seeds = _seeds_of(optimizer)
            if _has_any(optimizer, self._seeds.keys()):
                self.updates = count
                self._seeds |= seeds

    def seed(self, x: Tensor) -> int:
        """Return the number of a tensor: the same in each run of the same code."""
        return self._seeds.get(id(x), _OTHERS)


def _has_any(optimizer: Optimizer, ids: Set[int]) -> bool:
    return any(id(p) in ids for group in optimizer.param_groups for p in group["params"])


def _seeds_of(optimizer: Optimizer) -> dict[int, int]:
    """Return the numbers of parameters, in the order of the optimizer's groups, and of the tensors of their states."""
    seeds: dict[int, int] = {}
    for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        seeds[id(p)] = 16 * i  # leaves 15 numbers for the tensors of its state
        state = optimizer.state.get(p, {})
        tensors = [x for _, x in sorted(state.items()) if isinstance(x, Tensor)]
        seeds |= {id(x): 16 * i + 1 + k for k, x in enumerate(tensors)}
    return seeds
