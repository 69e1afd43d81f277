"""Cases of `xla_rules.py` compile in Inductor and compute what eager computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8pass.hardware import why_emulated
from tests.helpers.harness import compiled, sqnr, verdicts
from tests.helpers.xla_rules import CASES, E4M3, Case
from tests.helpers.xla_rules_cases import results

ALIKE = {
    "M11": ("M1", "M3", "M4", "M6", "M7", "M9"),
    "S6": ("S2", "S5"),
    "L5": ("L2", "L3", "L4", "L11"),
    "L10": ("L9",),
    "E2": ("E1", "E3"),
    "E7": ("E8", "E10"),
    "E12": ("E13",),
    "E18": ("E15", "E16", "E17", "E19"),
    "E22": ("E21", "E23", "E24"),
}
"""Rules, each with others for whose first case Inductor generates no code that it does not generate for the rule's."""


def runnable(letters: str, every: bool) -> list[Case]:
    """Return cases of rules with these letters that a CPU can run: all, or the first of each rule not in `ALIKE`."""
    names = [name for name, c in CASES.items() if c.device == "cpu" and c.target is None and not c.dynamic]
    names = [name for name in names if name[0] in letters]
    first = {name.split()[0]: name for name in reversed(names) if CASES[name].calls}
    alike = {number for numbers in ALIKE.values() for number in numbers}
    assert not alike & set(ALIKE)
    return [CASES[name] for name in names if every or (name in first.values() and name.split()[0] not in alike)]


def tensors(values: Any) -> list[Tensor]:
    return [t for value in values for t in results(value)]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.variant)])
@pytest.mark.parametrize("letters", ["P", "M", *(pytest.param(n, marks=pytest.mark.variant) for n in "SL"), "T", "E"])
def test_compiled_by_inductor(letters: str, every: bool) -> None:
    """A matmul that is rewritten also compiles, and computes what eager computes."""
    chosen = runnable(letters, every)
    functions, inputs = [c.function for c in chosen], [c.inputs for c in chosen]
    emulated = why_emulated(torch.device("cpu"), E4M3, E4M3)

    def everything(inputs: list[tuple[Any, ...]]) -> list[Any]:
        return [f(*i) for f, i in zip(functions, inputs, strict=True)]

    matmuls = sum(c.calls > 0 for c in chosen) + sum(c is CASES["L8 square"] for c in chosen)  # it has two
    with verdicts() as report:
        actual = compiled(everything, recipe=None, lowering="inductor")(inputs)
    assert len(report.rewritten) == matmuls
    for wanted, got in zip(tensors(everything(inputs)), tensors(actual), strict=True):
        assert (wanted.dtype, wanted.shape) == (got.dtype, got.shape)
        dtype = wanted.dtype
        assert torch.equal(wanted.float().isfinite(), got.float().isfinite())
        wanted, got = wanted.float().nan_to_num(0, 0, 0), got.float().nan_to_num(0, 0, 0)
        if dtype.itemsize == 1:  # Inductor does not round to bfloat16 in between, so some FP8 values are neighbours
            assert (wanted != got).float().mean() < 0.1
            # where a CPU emulates matmuls, Inductor does not round their results either: an error of 2**-8 for
            # results of 1 to 2, which stays where an added term cancels the rest
            torch.testing.assert_close(got, wanted, rtol=1 / 7, atol=2**-7 if emulated else 2**-9)
        elif wanted.numel():
            assert sqnr(wanted, got) > (90 if dtype == torch.float32 and not emulated else 45)
