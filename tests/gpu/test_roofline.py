"""Test predicted times, whether FP8 pays, and the script that compares predictions with published measurements."""

from __future__ import annotations

import importlib.util
import itertools
import json
import operator
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sympy
import torch
from torch import nn

import fp8pass
from fp8pass.graph.prediction import in_words, needed
from fp8pass.hardware import TARGETS, Target, as_published, target_of
from fp8pass.recipes import BUILT_IN, KINDS, NAMED, DelayedScaling, Recipe, StaticScaling
from fp8pass.roofline import (
    ROWS,
    Intervals,
    call_seconds,
    gemm_seconds,
    load_machine,
    memory_seconds,
    overhead_seconds,
    pays_from,
    predicted_speedup,
    quantize_seconds,
    where,
)
from tests.helpers import ROOT
from tests.helpers.harness import expect_text
from tests.helpers.models import make

pytestmark = pytest.mark.tools

H100, H200, B200 = (TARGETS[name] for name in ("h100", "h200", "b200"))
PUBLISHED = as_published(H100)
BF16, E4M3, SIDE = torch.bfloat16, torch.float8_e4m3fn, 8192
GRADIENTS = ("grad_input", "grad_weight")


def test_a_matmul_is_as_long_as_its_arithmetic() -> None:
    """1.1e12 operations take a time at 64% of the peak."""
    flops = 2 * SIDE**3
    args = (PUBLISHED, SIDE, SIDE, SIDE)
    assert gemm_seconds(*args, BF16, 2) == pytest.approx(4e-6 + flops / (989e12 * 0.64))
    assert gemm_seconds(*args, torch.float32, 4) == pytest.approx(4e-6 + flops / (989e12 / 2 * 0.64))
    fp8 = flops / (1979e12 * 0.64)
    assert gemm_seconds(*args, E4M3, 2) == pytest.approx(4e-6 + fp8)
    assert gemm_seconds(*args, E4M3, 2, fast_accum=False) == pytest.approx(4e-6 + fp8 * 1.15)
    for scaling, share in (("rowwise", 0.9), ("blockwise", 0.875), ("mxfp8", 0.95)):
        assert gemm_seconds(*args, E4M3, 2, scaling) == pytest.approx(4e-6 + fp8 / share)


def test_a_measured_chip_has_shares_of_its_own() -> None:
    """FP8 matmuls of an H200 reach a smaller share of their peak than BF16 ones, and accumulate as fast in float32."""
    flops = 2 * SIDE**3
    for target in (H100, H200):
        args = (target, SIDE, SIDE, SIDE)
        assert gemm_seconds(*args, BF16, 2) == pytest.approx(4e-6 + flops / (989e12 * 0.81))
        for fast in (True, False):
            fp8 = gemm_seconds(*args, E4M3, 2, fast_accum=fast)
            assert fp8 == pytest.approx(4e-6 + flops / (1979e12 * 0.725))
    assert as_published(H200) != H200 and as_published(B200) == B200
    assert target_of(torch.device("cpu"), "h200") == H200


def test_blackwell_adds_up_in_float32_anyway() -> None:
    args = (B200, SIDE, SIDE, SIDE, E4M3, 2, "tensorwise")
    assert gemm_seconds(*args, fast_accum=False) == gemm_seconds(*args, fast_accum=True)


def test_a_matmul_is_as_long_as_its_bytes() -> None:
    bandwidth = 4.8e12 * 0.92
    moved = 16 * SIDE + SIDE * SIDE + 2 * 16 * SIDE
    assert gemm_seconds(H200, 16, SIDE, SIDE, E4M3, 2) == pytest.approx(4e-6 + moved / bandwidth)


def test_other_kernels() -> None:
    for target, transposed, rows in ((PUBLISHED, 0.75, 0.92), (H100, 0.56, 0.73)):
        assert memory_seconds(target, 3_350_000_000) == pytest.approx(1e-3 / 0.92)
        assert memory_seconds(target, 3_350_000_000, "transposed_share") == pytest.approx(1e-3 / transposed)
        assert memory_seconds(target, 3_350_000_000, "rows_share") == pytest.approx(1e-3 / rows)
        assert memory_seconds(target, 1000) == 2e-6


# Bytes per element that each kernel moves for input, weight, grad_output; and kernels that write a transposed copy.
MX, ROW, COLUMN = 3 + 1 / 32, [3, 2], [3]


@pytest.mark.parametrize(
    ("recipe", "options", "straight", "transposed"),
    [
        ("delayed", {}, [], [4, 4, 4]),
        ("delayed", {"kinds": KINDS[:1]}, [3, 3], []),
        ("delayed", {"fused": True}, [], [2, 4, 2]),
        ("delayed", {"target": B200}, [], [4, 4, 4]),
        ("dynamic", {}, [2, 2, 2], [4, 4, 4]),
        ("dynamic", {"fused": True}, [2], [4, 4, 4]),
        ("dynamic", {"element_size": 4}, [4, 4, 4], [6, 6, 6]),
        ("rowwise", {}, [*ROW, *ROW, *ROW], [*COLUMN, *COLUMN, *COLUMN]),
        ("rowwise_gw_hp", {}, [3, *ROW, 3], COLUMN),
        ("blockwise", {}, [MX], [MX, 4, 2 + 2 * (MX - 2)]),
        ("mxfp8", {"target": B200}, [MX, MX, MX], [MX, MX, MX]),
        (StaticScaling({}), {"kinds": KINDS[:1]}, [3], []),
        (DelayedScaling(high_precision="grad_weight"), {}, [3, 3], [4]),
        (DelayedScaling(high_precision=GRADIENTS), {}, [3, 3], []),
        (DelayedScaling(high_precision=("output", *GRADIENTS)), {}, [], []),
    ],
)
def test_bytes_that_quantizing_moves(
    recipe: str | Recipe, options: dict[str, Any], straight: list[float], transposed: list[float]
) -> None:
    recipe = NAMED[recipe]() if isinstance(recipe, str) else recipe
    target = options.get("target", PUBLISHED)
    found = overhead_seconds(
        target,
        SIDE,
        SIDE,
        SIDE,
        recipe,
        options.get("element_size", 2),
        options.get("kinds", KINDS),
        options.get("fused", False),
    )
    bandwidth = target.bandwidth / SIDE**2
    assert found == pytest.approx(sum(straight) / (bandwidth * 0.92) + sum(transposed) / (bandwidth * 0.75))


def test_the_prediction_by_hand() -> None:
    """Under delayed scaling on an H100, one of three matmuls accumulates fast, and three tensors move 2 + 2 bytes."""
    flops, elements = 2 * SIDE**3, SIDE**2
    high = 3 * (4e-6 + flops / (989e12 * 0.64))
    fp8 = 3 * 4e-6 + (1 + 2 * 1.15) * flops / (1979e12 * 0.64)
    quantize = 3 * elements * 4 / (3.35e12 * 0.75)
    gain = predicted_speedup(PUBLISHED, SIDE, SIDE, SIDE, NAMED["delayed"](), 2, KINDS)
    assert gain == pytest.approx(high / (fp8 + quantize))


def test_each_matmul_of_a_call_moves_the_bytes_of_its_own_shape() -> None:
    """Operands have one byte, outputs two: with few rows it matters which is which."""
    m, k, n = 16, 8192, 1024
    fast = gemm_seconds(H100, m, k, n, E4M3, 2)
    exact = [gemm_seconds(H100, *shape, E4M3, 2, fast_accum=False) for shape in ((m, n, k), (k, m, n))]
    assert call_seconds(H100, m, k, n, NAMED["delayed"](), 2, KINDS) == pytest.approx(fast + sum(exact), rel=1e-12)
    assert gemm_seconds(H100, m, k, n, E4M3, 2, fast_accum=False) != pytest.approx(exact[0], rel=1e-3)


def test_what_stays_in_high_precision_gains_nothing() -> None:
    all_of_it = DelayedScaling(high_precision=("output", *GRADIENTS))
    assert predicted_speedup(H100, SIDE, SIDE, SIDE, all_of_it) == 1
    some = DelayedScaling(high_precision=GRADIENTS)
    forward = gemm_seconds(H100, SIDE, SIDE, SIDE, BF16, 2) - gemm_seconds(H100, SIDE, SIDE, SIDE, E4M3, 2)
    saved = call_seconds(H100, SIDE, SIDE, SIDE, None, 2, KINDS) - call_seconds(H100, SIDE, SIDE, SIDE, some, 2, KINDS)
    assert saved == pytest.approx(forward)


def test_no_prediction_without_a_kernel() -> None:
    found = {
        (name, target.name)
        for name in BUILT_IN
        for target in (TARGETS["sm_89"], H100, B200)
        if predicted_speedup(target, SIDE, SIDE, SIDE, NAMED[name]()) is None
    }
    assert found == {
        ("rowwise", "l40s"),
        ("rowwise_gw_hp", "l40s"),
        ("blockwise", "l40s"),
        ("mxfp8", "l40s"),
        ("mxfp8", "h100"),
        ("blockwise", "b200"),
    }


@pytest.mark.parametrize(
    ("m", "k", "n", "pays"),
    [(16384, 8192, 8192, True), (8192, 4096, 14336, True), (2048, 256, 1024, False), (8192, 64, 64, False)],
)
def test_large_matmuls_pay_and_small_ones_do_not(m: int, k: int, n: int, pays: bool) -> None:
    for target in (H100, H200, B200):
        gain = predicted_speedup(target, m, k, n, NAMED["delayed"]())
        assert gain is not None
        assert (gain > 1) == pays
        assert gain < 2


def _gains(target: Target, k: int, n: int, recipe: Recipe, first: int, **options: Any) -> list[float]:
    gains = (predicted_speedup(target, 2**i, k, n, recipe, **options) for i in range(first, 20))
    return [gain for gain in gains if gain is not None]


@pytest.mark.parametrize("recipe", BUILT_IN)
def test_more_rows_never_make_it_stop_paying(recipe: str) -> None:
    sizes = (256, 512, 1024, 2048, 4096, 8192, 16384)
    for target, k, n, kinds, fused in itertools.product(
        (H100, H200, B200), sizes, sizes, (KINDS, KINDS[:1]), (True, False)
    ):
        gains = _gains(target, k, n, NAMED[recipe](), 4, kinds=kinds, fused=fused)
        assert all(after >= 1 for before, after in itertools.pairwise(gains) if before >= 1)


@pytest.mark.parametrize("recipe", BUILT_IN)
def test_large_weights_gain_more_with_more_rows(recipe: str) -> None:
    sizes = (2048, 4096, 8192, 16384)
    for target, k, n, kinds in itertools.product((H100, H200, B200), sizes, sizes, (KINDS, KINDS[:1])):
        gains = _gains(target, k, n, NAMED[recipe](), 8, kinds=kinds)
        assert gains == sorted(gains)


@pytest.mark.parametrize(("ours", "theirs"), [("dynamic", "tensorwise"), ("rowwise", "rowwise")])
def test_few_rows_do_not_pay_though_torchaos_filter_takes_them(ours: str, theirs: str) -> None:
    """torchao's filter looks at K and N only."""
    utils = pytest.importorskip("torchao.float8.float8_linear_utils")
    wants = utils._auto_filter_for_recipe(theirs, [])
    assert wants(nn.Linear(8192, 8192, device="meta"), "up")
    gains = {m: predicted_speedup(H100, m, 8192, 8192, NAMED[ours]()) for m in (16, 64, 256, 4096)}
    assert {m: gain is not None and gain >= 1 for m, gain in gains.items()} == {
        16: False,
        64: False,
        256: False,
        4096: True,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Sizes from which FP8 pays


def scanned(holds: Callable[[int], bool], end: int) -> Intervals:
    """Return the intervals of 1 to `end`, by trying every number; the last one that holds has no end."""
    known = [m for m in range(1, end + 1) if holds(m)]
    firsts = [m for m in known if m == 1 or not holds(m - 1)]
    lasts = [m for m in known if m == end or not holds(m + 1)]
    return tuple((first, None if last == end else last) for first, last in zip(firsts, lasts, strict=True))


@pytest.mark.parametrize("recipe", BUILT_IN)
def test_where_it_pays_is_where_a_scan_says_so(recipe: str) -> None:
    numbers = random.Random(recipe)
    for _ in range(12):
        target = TARGETS[numbers.choice(("sm_89", "h100", "h200", "b200"))]
        k, n = 16 * numbers.randint(1, 600), 16 * numbers.randint(1, 600)
        kinds = KINDS if numbers.random() < 0.7 else KINDS[:1]
        size, least = numbers.choice((2, 4)), numbers.choice((0.7, 1.0, 1.0, 1.2, 1.5))
        args = (NAMED[recipe](), size, kinds)
        found = pays_from(target, ROWS, k, n, *args, least)
        if predicted_speedup(target, 16, k, n, *args) is None:
            assert found is None
            continue
        end = 3000
        wanted = scanned(lambda m: predicted_speedup(target, m, k, n, *args) >= least, end)  # noqa: B023
        assert found is not None
        near = tuple((first, None if last is None or last >= end else last) for first, last in found if first <= end)
        assert near == wanted, (target.name, k, n, args, least)


MACHINES = {
    "hopper": Target("hopper", (9, 0), 8e14, 1.6e15, 4e12),
    "blackwell": Target("blackwell", (10, 0), 2e15, 4e15, 7e12, 4e15),
    "late start": Target("late start", (9, 0), 8e14, 1.6e15, 1e12, gemm_start=1e-5, launch=1e-6),
    "hardly faster": Target("hardly", (12, 0), 2.1e14, 2.12e14, 1.1e13, 8.4e14, gemm_start=7e-7, launch=1e-8),
    "wide memory": Target("wide", (12, 0), 2.1e14, 2.73e14, 1.14e13, 8.4e14, gemm_start=8.6e-8, launch=1.07e-8),
}
LAYERS = (
    (1024, 4096, 2, KINDS, 1.0),
    (4096, 1024, 4, KINDS[:1], 1.2),
    (11536, 3856, 4, KINDS, 0.9),
    (1440, 3056, 4, KINDS, 0.9),
)
"""K, N, the size of an element, the matmuls, and the speed-up that it must reach."""
PAYS: dict[tuple[str, str], tuple[tuple[tuple[int, ...], ...], ...]] = {
    ("hopper", "delayed"): (((456,),), ((470,),), ((131, 140), (147,)), ((175,),)),
    ("hopper", "dynamic"): (((833,),), ((1201,),), ((203,),), ((264,),)),
    ("hopper", "rowwise"): (((1682,),), ((504,),), ((263,),), ((362,),)),
    ("hopper", "blockwise"): (((755,),), ((516,),), ((153,),), ((198,),)),
    ("blackwell", "delayed"): (((775,),), ((879,),), ((196,),), ((284,),)),
    ("blackwell", "dynamic"): (((1692,),), ((3398,),), ((294,),), ((451,),)),
    ("blackwell", "rowwise"): (((3950,),), ((957,),), ((384,),), ((634,),)),
    ("blackwell", "mxfp8"): (((1678,),), ((923,),), ((293,),), ((451,),)),
    ("late start", "delayed"): ((), (), ((1,),), ((1,),)),
    ("late start", "dynamic"): ((), (), ((972,),), ((2679,),)),
    ("late start", "rowwise"): ((), (), ((1354,),), ((19295,),)),
    ("late start", "blockwise"): ((), (), ((8, 41), (728,)), ((1, 500), (1408,))),
    ("hardly faster", "delayed"): ((), ((55,),), ((1, 6), (17,)), ((1, 8), (16,))),
    ("hardly faster", "dynamic"): ((), ((100,),), ((22,),), ((22,),)),
    ("hardly faster", "rowwise"): ((), ((66,),), ((31,),), ((30,),)),
    ("hardly faster", "mxfp8"): (((25,),), ((26,),), ((18,),), ((17,),)),
    ("wide memory", "delayed"): (((49,),), ((38,),), ((15,),), ((2, 8), (15,))),
    ("wide memory", "dynamic"): (((70,),), ((69,),), ((20,),), ((20,),)),
    ("wide memory", "rowwise"): (((152,),), ((42,),), ((25,),), ((26,),)),
    ("wide memory", "mxfp8"): (((24,),), ((24,),), ((17,),), ((17,),)),
}
"""The intervals of M for each of the layers, without an end that there is not. They were solved as polynomials."""


@pytest.mark.parametrize(("machine", "recipe"), PAYS, ids=str)
def test_where_it_pays_is_what_polynomials_gave(machine: str, recipe: str) -> None:
    found = (
        pays_from(MACHINES[machine], ROWS, k, n, NAMED[recipe](), size, kinds, least)
        for k, n, size, kinds, least in LAYERS
    )
    known = (tuple((first, *end, None)[:2] for first, *end in intervals) for intervals in PAYS[machine, recipe])
    assert list(found) == list(known)


def test_it_need_not_pay_for_all_larger_sizes() -> None:
    """Where a matmul is as slow in FP8 as its bytes, and quantizing is slow, few rows pay and many do not."""
    odd = replace(H100, fp8_peak=H100.bf16_peak * 1.01, gemm_start=1e-9, launch=1e-9)
    recipe = DelayedScaling(high_precision=GRADIENTS)
    found = pays_from(odd, ROWS, 4096, 4096, recipe, 2, KINDS[:1], 0.8)
    assert found is not None and found == scanned(
        lambda m: predicted_speedup(odd, m, 4096, 4096, recipe, 2, KINDS[:1]) >= 0.8, 60_000
    )
    assert in_words(((96, 200), (1184, None))) == "96 to 200, 1,184"
    assert (in_words(()), in_words(None), in_words(((3, None),), "s27")) == ("never", "", "s27 = 3")


def test_any_formula_of_longer_times_is_solved() -> None:
    """Sums of maxima of lines, and of products, change their sign several times."""
    numbers, several = random.Random(0), 0
    for _ in range(150):
        lines = [(numbers.randint(-400, 400), numbers.randint(-9, 9)) for _ in range(6)]

        def times(x: int) -> tuple[float, float]:
            a, b, c, d, e, f = ((x * slope + start) for start, slope in lines)  # noqa: B023
            return max(a, b) + max(c, d, x * x * 0.5 - 300), max(e, f) * 2

        solved = where(times)
        wanted = scanned(lambda m: operator.ge(*times(m)), 1000)
        assert solved == wanted
        several += len(wanted) > 1
    assert several > 8


def test_the_size_that_varies_may_be_in_several_places() -> None:
    """M and N are 8 times one size: the intervals are of that size."""
    x, recipe = sympy.Symbol("x", positive=True, integer=True), DelayedScaling()
    found = pays_from(H100, 8 * x, 1024, 8 * x, recipe, 2, KINDS)
    assert found == scanned(lambda s: predicted_speedup(H100, 8 * s, 1024, 8 * s, recipe) >= 1, 1500)
    assert pays_from(H100, 8 * x, 1024, 800 - x, recipe) is None  # a product that rises and then falls


def test_a_call_without_fp8_pays_nowhere_or_everywhere() -> None:
    """Its two times are one: that is known without a search."""
    recipe = DelayedScaling(high_precision=("output", *GRADIENTS))
    pays = [pays_from(H100, ROWS, 1024, 1024, recipe, 2, KINDS, least) for least in (0.9, 1.0, 1.1)]
    assert pays == [((1, None),), ((1, None),), ()]


# ---------------------------------------------------------------------------------------------------------------------
# Machine files


def machine(path: Path, **changed: Any) -> Path:
    values = {"name": "mine", "capability": [9, 0], "bf16_peak": 7e14, "fp8_peak": 1.3e15, "bandwidth": 4.3e12}
    path.write_text(json.dumps({k: v for k, v in {**values, **changed}.items() if v is not None}))
    return path


def test_a_measured_machine(tmp_path: Path) -> None:
    path = machine(tmp_path / "mine.json", gemm_share=1, memory_share=1, gemm_start=3e-6)
    target = load_machine(path)
    assert target == Target("mine", (9, 0), 7e14, 1.3e15, 4.3e12, gemm_share=1, memory_share=1, gemm_start=3e-6)
    assert gemm_seconds(target, SIDE, SIDE, SIDE, BF16, 2) == pytest.approx(3e-6 + 2 * SIDE**3 / 7e14)


def test_every_target_is_a_machine_file(tmp_path: Path) -> None:
    for target in TARGETS.values():
        (tmp_path / "target.json").write_text(json.dumps(asdict(target)))
        assert load_machine(tmp_path / "target.json") == target


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"bandwith": 4e12},
            "unknown field 'bandwith'; valid ones are name, capability, bf16_peak, fp8_peak, bandwidth, ",
        ),
        ({"fp8_peak": None}, "the field 'fp8_peak' is missing"),
        ({"bandwidth": "4.8 TB/s"}, 'bandwidth must be a finite number above 0, not "4.8 TB/s"'),
        ({"bf16_peak": 0}, "bf16_peak must be a finite number above 0, not 0"),
        ({"gemm_share": 64}, "gemm_share must be a number above 0, and at most 1, not 64"),
        ({"fp8_share": "fast"}, 'fp8_share must be null, or a number above 0, and at most 1, not "fast"'),
        ({"capability": "sm_90"}, r'capability must be \[major, minor\], not "sm_90"'),
    ],
)
def test_what_is_wrong_with_a_machine_file(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"mine.json: {message}"):
        load_machine(machine(tmp_path / "mine.json", **changed))


def test_no_machine_file(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("fast")
    with pytest.raises(ValueError, match=r"text\.json is not JSON"):
        load_machine(tmp_path / "text.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match=r"list\.json must hold one object, with the fields name, "):
        load_machine(tmp_path / "list.json")


# ---------------------------------------------------------------------------------------------------------------------
# The report


def test_the_report_has_the_prediction() -> None:
    model, x = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)), torch.randn(16, 32)
    config = fp8pass.Config(recipe={"0": "delayed", "2": None}, target="h100", min_speedup=0)
    report = fp8pass.explain(model, x, config=config)
    expected = predicted_speedup(H100, 16, 32, 64, DelayedScaling(), 4, needed(of_input=False, of_weight=True))
    assert {(g.name, g.predicted_speedup) for g in report.gemms} == {("0", expected), ("2", None)}
    assert report.to_dict()["gemms"][0]["predicted_speedup"] == expected
    expect_text(
        str(report),
        """\
matmul  gemm         M x K x N     dtypes              scaling  predicted  pays from M  status        source
------------------------------------------------------------------------------------------------------------
0       output       16 x 32 x 64  e4m3 @ e4m3 -> f32  delayed  0.57x      never        rewritten
2       output       16 x 64 x 16  f32 @ f32 -> f32                                     declined [1]
2       grad_input   16 x 16 x 64  f32 @ f32 -> f32                                     declined [1]
2       grad_weight  16 x 16 x 64  f32 @ f32 -> f32                                     declined [1]
0       grad_weight  64 x 16 x 32  e5m2 @ e4m3 -> f32  delayed  0.57x      never        rewritten

[1] '2' matches the pattern '2', whose recipe is None

2 of 5 matmuls in FP8, 57% of matmul FLOPs (1 graph); declined: 3 recipe
""",
    )


def test_the_report_of_a_declined_matmul_has_it_too() -> None:
    with pytest.warns(UserWarning, match="no matmul in FP8: predicted speed-up on h100 is 0"):
        report = fp8pass.explain(make(), torch.randn(24, 32), config=fp8pass.Config(target="h100"))
    assert {g.rule for g in report.gemms} == {"min_speedup"}
    assert all(g.predicted_speedup is not None and g.predicted_speedup < 1 for g in report.gemms)


def test_on_a_cpu_nothing_is_predicted() -> None:
    report = fp8pass.explain(make(), torch.randn(16, 32))
    assert {g.predicted_speedup for g in report.gemms} == {None}
    assert "predicted" not in str(report)


# ---------------------------------------------------------------------------------------------------------------------
# bench/roofline.py


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_roofline", ROOT / "bench" / "roofline.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_published_points_have_sources(bench: ModuleType) -> None:
    data = json.loads((ROOT / "bench" / "measured_points.json").read_text())
    for source in data["sources"]:
        assert source["url"].startswith("https://")
        assert source["title"]
        assert source["versions"]
        assert source["date"][:2] == "20"
        assert source["gpu"] in data["gpus"]
        assert isinstance(source["gpu_stated"], bool)
        assert source["points"]
    points = bench.load(ROOT / "bench" / "measured_points.json", None)
    assert len(points) == sum(len(source["points"]) for source in data["sources"])
    assert all(p.speedup is not None or p.seconds_bf16 is not None or p.seconds_fp8 is not None for p in points)


def test_the_documented_tables_are_those_that_the_script_prints(bench: ModuleType) -> None:
    page = (ROOT / "docs" / "roofline.md").read_text()
    points = bench.load(ROOT / "bench" / "measured_points.json", None)
    for table in (bench.errors(points), bench.decisions(points), bench.predictions()):
        assert table in page


def test_the_fitted_constants_are_the_best_around(bench: ModuleType) -> None:
    times = bench.times_alone(bench.load(ROOT / "bench" / "measured_points.json", None))
    best = bench.error(times, H100.gemm_share, H100.gemm_start, False)
    for share, start in itertools.product((-0.01, 0, 0.01), (-1e-6, 0, 1e-6)):
        assert bench.error(times, H100.gemm_share + share, H100.gemm_start + start, False) >= best


def test_measurements_of_the_user(bench: ModuleType, tmp_path: Path) -> None:
    row = {"m": SIDE, "k": SIDE, "n": SIDE, "gpu": "NVIDIA H200", "seconds_bf16": 3e-3, "seconds_fp8": 2e-3}
    rows = [{**row, "op": "gemm", "recipe": "rowwise"}, {**row, "op": "linear_fwd_bwd", "recipe": "delayed"}]
    (tmp_path / "h200.json").write_text(json.dumps(rows))
    alone, layer = bench.load(tmp_path / "h200.json", None)
    assert alone.speedup == layer.speedup == 1.5
    args = (H200, SIDE, SIDE, SIDE)
    assert alone.predicted() == (gemm_seconds(*args, BF16, 2), gemm_seconds(*args, E4M3, 2, "rowwise"))
    wide, narrow = layer.predicted()
    assert wide / narrow == pytest.approx(predicted_speedup(*args, DelayedScaling()))
    written = [{"environment": {"gpu": "NVIDIA H200"}}, {"work": "gemm", "who": "rowwise", "status": "ok"}]
    linear = {"work": "linear", "who": "delayed", "status": "ok", "m": SIDE, "k": SIDE, "n": SIDE, "ms": [3, 2]}
    written += [linear, linear | {"who": "ao_rowwise"}, linear | {"status": "out of time"}]
    (tmp_path / "h200.jsonl").write_text("\n".join(map(json.dumps, written)))
    assert bench.load(tmp_path / "h200.jsonl", None) == [layer]
    (mine, _) = bench.load(tmp_path / "h200.json", replace(H200, gemm_start=1e-6))
    assert mine.predicted()[0] == pytest.approx(alone.predicted()[0] - 3e-6)


@pytest.mark.parametrize("name", ["h100", "b200", "rtx4090"])
def test_a_frozen_weight_saves_less_than_a_trained_one(name: str) -> None:
    """One of three matmuls is not there, and quantizing the weight costs as much: LoRA at small batches does not pay."""
    target, recipe = TARGETS[name], NAMED["delayed"]()
    of_frozen, of_input = needed(of_input=True, of_weight=False), needed(of_input=False, of_weight=True)
    assert of_frozen == ("output", "grad_input") and of_input == ("output", "grad_weight")
    for m in (256, 1024, 4096):
        shape = (m, 3072, 3072, recipe, 2)
        trained, frozen = (predicted_speedup(target, *shape, kinds) for kinds in (KINDS, of_frozen))
        in_fp8 = predicted_speedup(target, *shape, of_frozen, ready=True)
        assert frozen < trained and frozen < in_fp8
        # what is left out is what the weight's kernels take
        seconds = [overhead_seconds(target, *shape, of_frozen, ready=ready) for ready in (False, True)]
        both = quantize_seconds(target, 3072 * 3072, recipe, "weight", 2, both=True)
        assert seconds[0] - seconds[1] == pytest.approx(both)
