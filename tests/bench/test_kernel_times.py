"""Test predicted times of compiled kernels: against those that an H200 measured, and what they respond to."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from types import ModuleType

import pytest

from fp8pass.hardware import TARGETS
from fp8pass.inspect.kernel_time import FITTED, Code, Work, fastest, kernel_seconds, parts, resident
from fp8pass.inspect.machine_code import unrolled, work
from fp8pass.inspect.sectors import in_vain
from tests.helpers import ROOT

pytestmark = pytest.mark.tools

H100, H200 = TARGETS["h100"], TARGETS["h200"]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """Return bench/kernel_times.py, which is no part of a package."""
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        spec = importlib.util.spec_from_file_location("bench_kernel_times", ROOT / "bench" / "kernel_times.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "bench"))
    return module


# ---------------------------------------------------------------------------------------------------------------------
# Against measurements


@pytest.mark.parametrize("kept_out", [False, True])
def test_most_kernels_are_predicted_within_a_quarter(bench: ModuleType, kept_out: bool) -> None:
    chosen = [k for k in bench.long_ones(bench.load()) if k.kept_out == kept_out]
    assert len(chosen) >= 40
    assert bench.within(chosen) >= 0.8
    assert {k.model for k in chosen} == ({"llama_block", "relu2_mlp"} if kept_out else set(bench.FIT))


@pytest.mark.parametrize(
    "change", [{"issue": 0.4}, {"issue": 1.0, "dependent": 1.0}, {"latency": 1.5e-6}, {"norm": 1.0}, {"barrier": 4e3}]
)
def test_other_constants_predict_worse(bench: ModuleType, change: dict[str, float]) -> None:
    chosen = [k for k in bench.long_ones(bench.load()) if k.kept_out]
    assert bench.within(chosen, constants=replace(FITTED, **change)) < 0.8


def test_the_constants_are_the_best_around(bench: ModuleType) -> None:
    chosen = [k for k in bench.long_ones(bench.load()) if not k.kept_out]
    best = bench.error(chosen, FITTED)
    for name in bench.FITTED_TO:
        for factor in (0.9, 1.1):
            other = replace(FITTED, **{name: factor * getattr(FITTED, name)})
            assert bench.error(chosen, other) >= best - 5e-4, name


def test_sums_of_runs_are_within_a_tenth(bench: ModuleType) -> None:
    """The model predicts the sums of kernels of BF16, of fp8pass with delayed scaling, and of torchao within 10%."""
    found = bench.totals()
    compared = [t for t in found if t.run in ("bf16", "fp8pass delayed", "torchao tensorwise")]
    assert len(compared) == 11
    for t in compared:
        assert t.predicted == pytest.approx(t.all, rel=0.1), (t.model, t.run)
        assert t.predicted_matmuls == pytest.approx(t.matmuls, rel=0.1), (t.model, t.run)


def test_the_documented_tables_are_those_that_the_script_prints(bench: ModuleType) -> None:
    page = (ROOT / "docs" / "roofline.md").read_text()
    for table in bench.TABLES.values():
        assert table() in page


# ---------------------------------------------------------------------------------------------------------------------
# What a prediction responds to

LOOP = Work(instructions=400, cycles=600, waits=1.0, barriers=2)
CODE = Code("", 8, 64, 8192, 512, 32, Work(instructions=100, cycles=100), LOOP)
MOVED = 200_000_000


def seconds(**changes: object) -> float:
    return kernel_seconds(H200, MOVED, replace(CODE, **changes))


def test_by_hand() -> None:
    """512 programs of 8 warps run four to a multiprocessor: all in one round, four on the busiest one."""
    assert resident(H200, CODE) == 4
    memory, issue, chain = parts(H200, MOVED, CODE)
    assert memory == pytest.approx(2e8 / 4.8e12)
    assert issue == pytest.approx(4 * 8 * (100 + 32 * 600) / (4 * 1.98e9 * FITTED.issue))
    cycles = 32 * 2 * FITTED.barrier + (100 + 32 * 400) * FITTED.dependent
    assert chain == pytest.approx(32 * 250e-9 + cycles / 1.98e9)
    p = FITTED.norm
    assert seconds() == pytest.approx(2e-6 + (memory**p + issue**p + chain**p) ** (1 / p))


@pytest.mark.parametrize(
    ("limit", "wanted"),
    [
        ({"registers": 65}, 3),
        ({"registers": 129}, 1),
        ({"registers": 16}, 8),
        ({"registers": 16, "warps": 1, "shared": 0}, 32),
        ({"shared": 100_000}, 2),
    ],
)
def test_programs_at_once(limit: dict[str, int], wanted: int) -> None:
    assert resident(H200, replace(CODE, **limit)) == wanted


def test_what_makes_a_kernel_slower() -> None:
    base = seconds()
    slower = [
        {"registers": 200}, {"programs": 600}, {"iterations": 40}, {"in_vain": 2 * MOVED},
        {"loop": replace(LOOP, barriers=6)}, {"loop": replace(LOOP, waits=3.0)}, {"loop": replace(LOOP, cycles=900)},
    ]  # fmt: skip
    assert all(seconds(**change) > base for change in slower)
    assert seconds(loop=replace(LOOP, waits=1 / 3)) < base
    assert kernel_seconds(H100, MOVED, CODE) > base


def test_the_autotuner_picks_the_fastest() -> None:
    slow = replace(CODE, registers=200)
    assert fastest(H200, MOVED, [slow, CODE, slow]) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Reading machine code

LISTING = """
.text.k:
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/                   IMAD.MOV.U32 R14, RZ, RZ, -0x40 ;
.L_x_0:
        /*0020*/              @!P0 LDG.E.EF.64 R2, desc[UR4][R4.64] ;
        /*0030*/                   LDG.E.128 R8, desc[UR4][R6.64] ;
        /*0040*/                   IADD3 R14, P2, R14, 0x80, RZ ;
        /*0050*/                   FSETP.GT.AND P1, PT, R2, R3, PT ;
        /*0060*/                   FFMA R16, R8, R9, R16 ;
        /*0070*/                   MUFU.RCP R17, R16 ;
        /*0080*/                   STS.128 [R20], R8 ;
        /*0090*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00a0*/                   STG.E.U8 desc[UR4][R6.64], R17 ;
        /*00b0*/                   ISETP.GE.U32.AND P1, PT, R14, 0xfc0, PT ;
        /*00c0*/              @!P1 BRA `(.L_x_0) ;
        /*00d0*/                   EXIT ;
.L_x_1:
        /*00e0*/                   BRA `(.L_x_1);
        /*00f0*/                   NOP;
"""


def test_the_work_of_a_loop() -> None:
    """Both loads are under way together; a reciprocal takes 8 cycles, and 16 bytes of shared memory take 16."""
    once, loop = work(LISTING)
    assert once == Work(3, 3)
    assert loop == Work(
        instructions=11, cycles=16, waits=pytest.approx(82 / 85, abs=0.01), barriers=1, loaded=24, stored=1, shared=16
    )


SIDES = """
        /*0000*/                   S2R R0, {of} ;
        /*0008*/                   STG.E desc[UR4][R0.64], RZ ;
        /*000c*/               @P1 MOV R0, RZ ;
        /*0010*/                   ISETP.GT.AND P0, PT, R0, 0x7f, PT ;
        /*0020*/               @P0 BRA `(.L_x_0) ;
        /*0030*/                   LDG.E.128 R8, desc[UR4][R6.64] ;
        /*0040*/                   LDG.E.128 R12, desc[UR4][R6.64] ;
        /*0050*/                   BRA `(.L_x_1) ;
.L_x_0:
        /*0060*/                   LDG.E.64 R8, desc[UR4][R6.64] ;
.L_x_1:
        /*0070*/                   EXIT ;
"""


@pytest.mark.parametrize(("of", "wanted"), [("SR_CTAID.X", (9, 32)), ("SR_TID.X", (10, 40))])
def test_a_program_takes_one_side_of_a_branch_that_its_threads_agree_on(of: str, wanted: tuple[int, int]) -> None:
    once, _ = work(SIDES.format(of=of))
    assert (once.instructions, once.loaded) == wanted


def test_an_unrolled_loop_counts_as_several() -> None:
    """The counter goes up by 128: two tiles of 64."""
    _, loop = work(LISTING, step=64)
    assert (loop.instructions, loop.barriers, loop.loaded) == (5.5, 0.5, 12)
    assert unrolled(["IADD3 R1, R1, 0x40, RZ", "ISETP.GE.AND P0, PT, R2, 0x40, PT"], 64) == 1


def test_loads_that_run_ahead_are_waited_for_less() -> None:
    body = [
        "LDGSTS.E.BYPASS.128 [R3], desc[UR4][R4.64]", "LDGDEPBAR", "DEPBAR.LE SB0, 0x2", "BAR.SYNC 0x0", "LDS R2, [R3]",
    ]  # fmt: skip
    lines = ["L:", *body]
    listing = ".L_x_0:\n" + "".join(
        f"        /*00{i}0*/                   {line} ;\n" for i, line in enumerate(lines[1:])
    )
    listing += "        /*0090*/              @!P1 BRA `(.L_x_0) ;\n        /*00a0*/                   EXIT ;\n"
    _, loop = work(listing)
    assert loop.waits == pytest.approx(1 / 3, abs=0.01) and loop.ahead == 16 and loop.loaded == 0


SOURCE = """
    x0 = (xindex % 4096)
    x1 = xindex // 4096
    tmp0 = tl.load(in_ptr0 + (x0 + 4096*r0_2 + 8388608*x1), None)
    tmp1 = tl.load(in_ptr1 + (x1), None)
    tl.store(out_ptr0 + (r0_2 + 2048*x1 + 16384*x0), tmp0, None)
"""
SIGNATURE = {"in_ptr0": "*bf16", "in_ptr1": "*fp32", "out_ptr0": "*fp8e4nv"}


@pytest.mark.parametrize(
    ("x", "r", "wanted"), [(64, 64, 0), (64, 32, 0), (64, 16, 64 // 16 - 1), (8, 64, 32 // 8 - 2), (1, 1, 30 + 63)]
)
def test_bytes_moved_in_vain(x: int, r: int, wanted: int) -> None:
    """Memory reads and writes a sector whole, of which a tile writes a part; here for 2**26 elements."""
    numels = {"xnumel": 32768, "r0_numel": 2048}
    assert in_vain(SOURCE, SIGNATURE, {"XBLOCK": x, "R0_BLOCK": r}, numels) == wanted << 26
