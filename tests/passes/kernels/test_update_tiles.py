"""The update_tiles pass: graphs of updates write the same bits into the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8pass.base import scaling
from fp8pass.passes.kernels.fold_quantizes import FoldQuantizes
from fp8pass.passes.kernels.update_tiles import UpdateTiles
from fp8pass.quant.kernel_ops import ROUNDED, WRITE
from tests.helpers.harness import BF16, E4M3, F32, capture, count, on_kernels, scale, text

pytestmark = pytest.mark.passes


def both(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a matrix, and return both orientations."""
    x_q = scaling.quantize(x, s, E4M3)
    return x_q, x_q.t().contiguous()


def momentum(p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """Return the new parameter and state."""
    new = m * 0.9 + g
    return p - 0.1 * new, new


def of_the_old(p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the state from the old parameter; it is written after the parameter."""
    new = p - 0.1 * g
    return new, new - p


def average_of_the_old(p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    return p - 0.1 * g, m.lerp(p, 0.5)


def transposed(p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """Read a view with the parameter's shape, which can't be viewed as tiles."""
    return p - 0.1 * g.t(), m + g


def by_columns(p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    return p - 0.1 * g * g.square().mean(0), m + g * g.mean(0, keepdim=True)


def by_rows(p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """Read a number for each row, which tiles read in parts."""
    return p - 0.1 * g, g / g.square().mean(1, keepdim=True)


def expanded(p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    return p - 0.1 * g * g.mean(0).expand(p.shape), m + p


def flat(p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    return p - 0.1 * (g.view(-1) * 2).view(p.shape), (m.view(-1) + g.view(-1)).view(m.shape)


UPDATES = momentum, of_the_old, average_of_the_old, transposed, by_columns, by_rows, expanded, flat


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("rule", UPDATES, ids=lambda f: f.__name__)
def test_updates_write_tiles(rule: Callable[..., Any], dtype: torch.dtype) -> None:
    """The parameter, its state, and both of its FP8 copies are written by tiles, with the same bits."""

    def update(p: Tensor, g: Tensor, m: Tensor, x_q: Tensor, x_t: Tensor, made: Tensor, s: Tensor) -> None:
        new, state = rule(p, g, m)
        stored = new if dtype == F32 else ROUNDED(new)
        both_ = both(stored, s)
        amax = scaling.amax(stored)
        for into, value in zip((p, m, x_q, x_t, made), (new, state, *both_, amax), strict=True):
            into.copy_(value)

    p, g, m = (torch.randn(128, 128).to(dtype) for _ in range(3))
    inputs = p, g, m, torch.zeros(128, 128).to(E4M3), torch.zeros(128, 128).to(E4M3), torch.zeros(()), scale(8.0)
    module = capture(update, *inputs)
    on_kernels(module, FoldQuantizes())
    wanted, got = ([x.clone() for x in inputs] for _ in range(2))
    module(*wanted)
    on_kernels(module, UpdateTiles())
    assert count(module, WRITE) == 4
    module(*got)
    for a, b, before in zip(wanted, got, inputs, strict=True):
        assert torch.equal(a.float(), b.float())
        assert torch.equal(a.float(), before.float()) == (before is g or before is inputs[-1])
    before_ = text(module)
    on_kernels(module, UpdateTiles())
    assert text(module) == before_, "a second run finds something"


@pytest.mark.parametrize("foreach", [False, True], ids=["each", "foreach"])
def test_an_amax_of_the_state_that_is_taken_before_the_parameter_is_known(foreach: bool) -> None:
    """A moment in FP8 has such an amax; the rate is computed after it. Ops on lists of small tensors stay."""

    def update(p: Tensor, g: Tensor, m: Tensor, t: Tensor, x_q: Tensor, x_t: Tensor, made: Tensor, s: Tensor) -> None:
        new = m * 0.9 + g
        amax = scaling.amax(new)
        rate = 1 - 0.9**t
        updated = torch._foreach_div([p - new], rate)[0] if foreach else p - new / rate
        for into, value in zip((p, m, x_q, x_t, made), (updated, new, *both(updated, s), amax), strict=True):
            into.copy_(value)

    p, g, m = (torch.randn(128, 128) for _ in range(3))
    copies = torch.zeros(128, 128).to(E4M3), torch.zeros(128, 128).to(E4M3)
    inputs = p, g, m, torch.tensor(3.0), *copies, torch.zeros(()), scale(8.0)
    module = capture(update, *inputs)
    on_kernels(module, FoldQuantizes())
    wanted, got = ([x.clone() for x in inputs] for _ in range(2))
    module(*wanted)
    on_kernels(module, UpdateTiles())
    assert count(module, WRITE) == 4 - 2 * foreach, "writes other than of x_q, x_t, and elementwise results"
    module(*got)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(wanted, got, strict=True))
