"""Where elements of a matrix lie, and which comparisons of an index have one outcome in a range of columns."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch

from fp8pass.base._torch import FloorDiv, GraphLowering, ModularIndexing
from fp8pass.passes.kernels.element_addresses import (
    COLUMN,
    PAIR,
    ROW,
    WITHIN,
    Address,
    AddressStep,
    AtPlaces,
    CannotFuse,
    Columns,
    address,
    cut,
    simplified,
)

pytestmark = pytest.mark.passes

ROWS = 24


def lies(at: Address, row: int, column: int) -> int:
    """Return the element that an address is, for a row and a column of the kernel."""
    of = {"row": row, "column": column}
    steps = sum(of[step.dim] // step.every * step.step for step in at.steps)
    return row * at.row + column * at.column + at.offset + steps


@pytest.mark.parametrize("half", [0, 4])
@pytest.mark.parametrize("start", [0, 32])
def test_an_address_is_the_index_at_each_place(start: int, half: int) -> None:
    """A part of a cat, [2, H, 12, 8] in memory, whose heads of each position stand side by side from `start` on."""
    columns = Columns(start, 16, half)
    sizes = columns.sizes(ROWS)
    simplify = GraphLowering(torch.fx.symbolic_trace(torch.nn.Identity())).sizevars.simplify_with_ranges

    def index(row: Any, column: Any) -> Any:
        head, within = FloorDiv(column, 8), ModularIndexing(column, 1, 8)
        return FloorDiv(row, 12) * 576 + ModularIndexing(row, 1, 12) * 8 + head * 96 + within

    for part in range(columns.parts):
        row, column = columns.place(part)
        at = address(simplified(index(row, column - start), sizes, simplify), columns)
        for r in range(ROWS):
            for c in range(columns.size // columns.parts):
                there = c // half * 2 * half + half * part + c % half if half else c
                wanted = r // 12 * 576 + r % 12 * 8 + there // 8 * 96 + there % 8
                assert lies(at, r, columns.first + c) == wanted


def test_neighbours_are_told_from_further_steps() -> None:
    index = ROW * 128 + FloorDiv(ROW, 16) * 64 + COLUMN + 3
    assert address(index) == Address(128, 1, 3, (AddressStep("row", 16, 64),))


@pytest.mark.parametrize(
    "index", [ROW * COLUMN, FloorDiv(ROW + 1, 4), FloorDiv(WITHIN, 2), sympy.Symbol("other"), ROW / 2]
)
def test_what_is_no_sum_of_quotients_is_refused(index: Any) -> None:
    with pytest.raises(CannotFuse):
        address(index, Columns(0, 64, 8))


def test_a_range_starts_where_quotients_do() -> None:
    with pytest.raises(CannotFuse, match="whole multiples of 16"):
        address(FloorDiv(COLUMN, 16), Columns(24, 16))


def test_a_matrix_is_cut_where_parts_start() -> None:
    assert cut([96, 0, 32], 128, 0) == [Columns(0, 32), Columns(32, 64), Columns(96, 32)]
    assert cut([], 128, 8) == [Columns(0, 128, 8)]


class Written:
    """Returns what it is asked to write."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: (name, *args)


def at(columns: Columns) -> AtPlaces:
    return AtPlaces(Written(), sympy.expand, columns.sizes(ROWS))


def test_a_comparison_with_one_outcome_chooses() -> None:
    ops, (_, column) = at(Columns(64, 64)), Columns(64, 64).place(0)
    here = ops.index_expr(column, torch.int64)
    is_second = ops.ge(here, ops.constant(64, torch.int64))
    assert is_second is True
    assert ops.lt(here, ops.constant(64, torch.int64)) is False
    assert ops.where(is_second, "a", "b") == "a"
    assert ops.masked(is_second, lambda: "read", 0.0) == "read"
    assert ops.masked(False, lambda: pytest.fail("read"), 0.0) == ("constant", 0.0, torch.float32)
    assert ops.and_(is_second, False) is False


def test_the_halves_of_heads_have_one_outcome_each() -> None:
    columns = Columns(0, 64, 8)
    ops = at(columns)
    within = [ops.index_expr(columns.place(part)[1] - 16 * PAIR, torch.int64) for part in range(2)]
    assert [ops.lt(w, ops.constant(8, torch.int64)) for w in within] == [True, False]


@pytest.mark.parametrize("name", ["lt", "ge", "eq", "ne"])
def test_a_comparison_with_two_outcomes_is_refused(name: str) -> None:
    ops = at(Columns(0, 64))
    with pytest.raises(CannotFuse, match="at some columns"):
        getattr(ops, name)(ops.index_expr(COLUMN, torch.int64), ops.constant(32, torch.int64))


def test_what_computes_with_an_index_is_refused() -> None:
    ops = at(Columns(0, 64))
    with pytest.raises(CannotFuse, match="computes with the index"):
        ops.add(ops.index_expr(COLUMN, torch.int64), ops.constant(1, torch.int64))
    assert ops.add("x", ops.constant(1, torch.int64)) == ("add", "x", ("constant", 1, torch.int64))
