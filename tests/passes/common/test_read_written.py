"""A weight that an update has written is read from memory to be quantized, where that must wait for its amax."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from fp8pass.base import scaling
from fp8pass.passes.common.patterns import aten, first
from fp8pass.passes.common.read_written import read_written
from fp8pass.passes.kernels.fold_quantizes import FoldQuantizes
from fp8pass.passes.kernels.update_tiles import UpdateTiles
from fp8pass.quant.kernel_ops import QUANTIZE, ROUNDED
from tests.helpers.harness import BF16, E4M3, F32, capture, on_kernels, text

pytestmark = pytest.mark.passes


def of_tensor(new: Tensor, s: Tensor) -> Tensor:
    return 448 / scaling.amax(new)


def of_rows(new: Tensor, s: Tensor) -> Tensor:
    return 448 / scaling.amax_along(new, (1,))


def of_columns(new: Tensor, s: Tensor) -> Tensor:
    return 448 / scaling.amax_along(new, (0,))


def given(new: Tensor, s: Tensor) -> Tensor:
    return s


def updated(
    scale: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, copy_first: bool = False
) -> tuple[fx.GraphModule, list[Tensor]]:
    """Return the graph of an update that writes both copies, and its inputs. copy_first: in which order it writes."""

    def update(p: Tensor, x_q: Tensor, g: Tensor, x_t: Tensor, made: Tensor, s: Tensor) -> None:
        new = p - 0.1 * g
        stored = new if dtype == F32 else ROUNDED(new)
        of = scale(stored, s)
        q = scaling.quantize(stored, of, E4M3)
        writes = [(p, new), (x_q, q), (x_t, q.t().contiguous()), (made, of.reciprocal())]
        for into, value in reversed(writes) if copy_first else writes:
            into.copy_(value)

    p, g = (torch.randn(128, 64).to(dtype) for _ in range(2))
    copies = torch.zeros(128, 64).to(E4M3), torch.zeros(64, 128).to(E4M3)
    s = torch.tensor(8.0)
    inputs = [p, copies[0], g, copies[1], torch.zeros_like(scale(p, s), dtype=F32), s]
    module = capture(update, *inputs)
    on_kernels(module, FoldQuantizes())
    return module, inputs


def read_by_quantizes(module: fx.GraphModule) -> set[bool]:
    """Return whether each quantize reads what a `copy_` has written."""
    return {first(n).target is aten.copy_.default for n in module.graph.nodes if n.target is QUANTIZE}


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(("scale", "readers"), [(of_tensor, 1), (of_rows, 2), (of_columns, 2)])
def test_a_scale_of_the_new_weight(scale: Callable[[Tensor, Tensor], Tensor], readers: int, dtype: torch.dtype) -> None:
    """The quantize reads the weight, and so does the amax of rows or columns; numbers are the same to the bit."""
    module, inputs = updated(scale, dtype)
    wanted, got, tiled = ([x.clone() for x in inputs] for _ in range(3))
    module(*wanted)
    assert read_written(module.graph) == readers
    module.graph.lint()
    module.recompile()
    assert read_by_quantizes(module) == {True}
    module(*got)
    before = text(module)
    assert read_written(module.graph) == 0 and text(module) == before, "a second run finds something"
    on_kernels(module, UpdateTiles())
    module(*tiled)
    for a, b, c in zip(wanted, got, tiled, strict=True):
        assert torch.equal(a.float(), b.float()) and torch.equal(a.float(), c.float())
    assert not torch.equal(wanted[0], inputs[0])


def test_what_reads_the_new_weight_as_it_is_computed() -> None:
    """A scale that is known earlier, whose kernel updates the weight too; a copy that is written before the weight."""
    for module, _ in (updated(given, F32), updated(of_tensor, F32, copy_first=True)):
        before = text(module)
        assert read_written(module.graph) == 0
        assert text(module) == before and read_by_quantizes(module) == {False}
