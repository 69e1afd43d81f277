"""fp8pass finds what XLA finds: every case of `xla_rules.py`, rewritten or declined, and the page of the rules."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fp8pass.hardware import output_saturates, why_emulated
from fp8pass.passes.common.patterns import is_wide_cast
from fp8pass.passes.joint.list_matmuls import ListMatmuls
from fp8pass.passes.joint.scaled_mm import ScaledMM
from tests.helpers import ROOT, xla_rules
from tests.helpers.harness import aten, capture, check_legal_on_cuda, compiled, count, run, sqnr, text, verdicts
from tests.helpers.xla_rules import CASES, E4M3, RULES, Case
from tests.helpers.xla_rules_cases import results, rewritten


@pytest.mark.passes
@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    case = CASES[name]
    if name == "E5 on CPU" and not output_saturates(torch.device("cpu"), E4M3):
        case = replace(case, note="the cpu kernel of torch .* does not saturate float8_e4m3fn")
    module, gemms, notes = rewritten(case)
    assert count(module, aten._scaled_mm.default) == case.calls, [g.reason for g in gemms]
    if not case.calls:
        assert text(module) == text(capture(case.function, *case.inputs))
        assert gemms or notes, "declined without a reason"
        assert all(g.status == "declined" and re.search(case.why, g.reason) for g in gemms), gemms
        assert_notes(case, notes)
        return
    assert all((g.status, g.reason) == ("rewritten", "") for g in gemms), gemms
    assert_notes(case, notes)
    if case.copies is not None:
        assert _copies(module) == case.copies
    if case.after is not None:
        assert _after(module) == case.after
    assert check_legal_on_cuda(module.graph) == case.calls
    if case.device == "cpu":
        _compare(case, module)
    once = text(module)
    assert run(module, ListMatmuls(), ScaledMM()).gemms == {}
    assert text(module) == once


def tensors(values: Any) -> list[Tensor]:
    return [t for value in values for t in results(value)]


NOT_IN_TRITON = {"T4 e4m3fnuz", "T4 e5m2fnuz", "P5 float64 matmul"}
"""Cases that Triton can't compile for NVIDIA GPUs: formats of AMD's, and a conversion from FP8 to float64."""


@pytest.mark.passes
@pytest.mark.gpu
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_on_a_gpu(lowering: str) -> None:
    """Compare every case with the CPU's eager result, because GPUs have no eager float8 matmul for P1."""
    wrong = []
    for name, case in CASES.items():
        if lowering == "inductor" and name in NOT_IN_TRITON:
            continue
        torch._dynamo.reset()
        on_gpu = [x.cuda() if isinstance(x, Tensor) else x for x in case.inputs]
        actual = compiled(case.function, recipe=None, lowering=lowering)(*on_gpu)
        for wanted, got in zip(results(case.function(*case.inputs)), results(actual), strict=True):
            finite = wanted.numel() and wanted.float().isfinite().all()
            db = sqnr(wanted.float(), got.float().cpu()) if finite else 300.0
            if wanted.shape != got.shape or db < (20 if wanted.dtype.itemsize == 1 else 45):
                wrong.append((name, db))
    assert wrong == []


def assert_notes(case: Case, notes: list[str]) -> None:
    assert any(re.search(case.note, n) for n in notes) if case.note else not notes, notes


def _compare(case: Case, module: fx.GraphModule) -> None:
    exact = not any(
        n.meta["val"].dtype in (torch.bfloat16, torch.float16)
        for n in module.graph.nodes
        if n.op == "call_function" and isinstance(n.meta["val"], Tensor)
    )
    for wanted, got in zip(results(case.function(*case.inputs)), results(module(*case.inputs)), strict=True):
        assert (wanted.dtype, wanted.shape, wanted.stride()) == (got.dtype, got.shape, got.stride())
        if wanted.dtype.itemsize == 1:
            assert (wanted.float() != got.float()).float().mean() < 0.01  # the order of the sum decides ties
        elif exact:
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-4)
        else:
            assert sqnr(wanted, got) > 45


def _copies(module: fx.GraphModule) -> int:
    """Return how many FP8 tensors are written other than by quantizing."""
    return sum(n.target is aten.clone.default and n.meta["val"].dtype.itemsize == 1 for n in module.graph.nodes)


def _after(module: fx.GraphModule) -> tuple[str, ...]:
    """Return the ops after the kernels, without casts between high-precision types."""
    after: list[fx.Node] = []
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is aten._scaled_mm.default:
            continue
        if any(n in after or n.target is aten._scaled_mm.default for n in node.all_input_nodes):
            after.append(node)
    return tuple(n.target.__name__.split(".")[0] for n in after if not is_wide_cast(n))


@pytest.mark.passes
def test_every_rule_is_there() -> None:
    """The page has XLA's 71 rules and the table of types; a rule without a case says why, or names a file with one."""
    numbers = [rule.number for rule in RULES]
    counts = {"P": 15, "M": 13, "S": 7, "L": 11, "T": 4, "E": 25}
    assert numbers == [f"{letter}{i}" for letter, n in counts.items() for i in range(1, n + 1)]
    for rule in RULES:
        elsewhere = re.findall(r"`(tests/[\w/]+\.py)`", rule.ours)
        assert all((ROOT / name).is_file() for name in elsewhere), rule.number
        assert rule.cases or elsewhere or rule.ours.startswith("not "), rule.number
    assert len(CASES) == sum(len(rule.cases) for rule in RULES)


@pytest.mark.passes
def test_the_page_is_up_to_date() -> None:
    assert xla_rules.PAGE.read_text() == xla_rules.page(), "run python -m tests.helpers.xla_rules"


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


@pytest.mark.inductor
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
