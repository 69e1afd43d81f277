"""Test bench/h200.py without a GPU: all of it except for CUDA's timer, on tiny sizes."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import h200
import pytest
import torch
from torch import Tensor, nn

from fp8pass.hardware import scales_rows

CPU = torch.device("cpu")
NAMES = [s.name for s in h200.SECTIONS]
OURS, BLOCKS = ["delayed", "dynamic", "rowwise"], ["blockwise", "mxfp8"]
NO_ROWS = "skipped: torch._scaled_mm takes no scales for rows on this device"
NO_JAX = None if importlib.util.find_spec("jax") else "skipped: No module named 'jax'"
PEERS = ["torchao tensorwise", "torchao rowwise"]


def bench(tmp_path: Path, budget: float = 1000) -> h200.Bench:
    made = h200.Bench(CPU, True, False, budget, tmp_path / "out.json", h200.WallClock())
    made.plan(NAMES)
    return made


def dry_run(path: Path, sections: list[str], *options: str) -> dict[str, Any]:
    """Dry-run some sections; return what was written. These are done, and the others say that they were left out."""
    command = [sys.executable, h200.__file__, "--device", "cpu", "--quick", "--json", str(path), *options]
    done = subprocess.run([*command, "--sections", *sections], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(path.read_text())
    assert found["dry_run"] == h200.DRY_RUN and h200.DRY_RUN in done.stdout
    assert {name: s["status"] for name, s in found["sections"].items()} == {
        name: (
            "skipped: not among --sections" if name not in sections else (NO_JAX or "done") if name == "xla" else "done"
        )
        for name in NAMES
    }
    assert found["environment"]["torch"] == str(torch.__version__) and found["environment"]["gpu"] is None
    assert not found["bad"]
    return found["sections"]


Points = list[dict[str, Any]]


def hold(points: Points, recipes: list[str], bounds: dict[str, h200.Bounds]) -> None:
    """Check that every contender has a point, and is right or says why it is missing; fp8pass runs."""
    assert [p["recipe"] for p in points] == ["bf16", *recipes]
    for point in points:
        recipe, status = point["recipe"], point["status"]
        if recipe in BLOCKS:
            assert status.startswith(f"skipped: {recipe} kernels exist on sm_")
        elif status != "ok":
            assert recipe in PEERS and status.startswith("skipped: "), point
        else:
            assert not h200.why_wrong(point["sqnr_db"], bounds["bf16" if recipe == "bf16" else "fp8"])
            assert 0 < point["seconds_fp8_p20"] <= point["seconds_fp8"] <= point["seconds_fp8_p80"]
        if recipe in (*OURS, *h200.VARIANTS):
            assert point["matmuls"].endswith("100% of matmul FLOPs (1 graph)") and point["declined"] == []


@pytest.mark.parametrize(
    "recipes", [OURS[:1], pytest.param([*OURS, *BLOCKS, *h200.VARIANTS, *PEERS], marks=pytest.mark.variant)], ids=len
)
def test_dry_run(recipes: list[str], tmp_path: Path) -> None:
    matmuls, models = ["gemm", "linear_fwd_bwd", "xla"], ["llama_mlp", "llama_block", "llama_step", "cudagraphs"]
    more = ["gpt2_mlp", "relu2_mlp"] if len(recipes) > 1 else []
    found = dry_run(tmp_path / "out.json", [*matmuls, *models, *more], "--kernels", "--recipes", *recipes)
    hold_matmuls(recipes, *(found[name]["points"] for name in matmuls))
    hold_models(recipes, *(found[name]["points"] for name in models))
    for name in more:
        hold(found[name]["points"], recipes, h200.LAYER)


def hold_matmuls(recipes: list[str], gemms: Points, layers: Points, xla: Points) -> None:
    assert [(p["recipe"], p["fast_accum"]) for p in gemms] == [
        (recipe, fast) for recipe in ("tensorwise", "rowwise") for fast in (True, False)
    ]
    of_rows = "ok" if scales_rows(CPU, None) else NO_ROWS
    assert [p["status"] for p in gemms] == ["ok", "ok", of_rows, of_rows]
    assert all(p["op"] == "gemm" and p["sqnr_db"]["output"] > 50 for p in gemms if p["status"] == "ok")
    hold(layers, recipes, h200.LINEAR)
    assert all(p["status"] == "ok" or p["status"].startswith("skipped: ") for p in xla)
    for point in (*gemms, *layers, *xla):
        assert (point["m"], point["k"], point["n"]) == h200.QUICK_SHAPES[0]
        assert {"op", "recipe", "gpu", "status"} <= point.keys()
        assert ("seconds_bf16" in point) == ("seconds_fp8" in point) == (point["status"] == "ok")


def hold_models(recipes: list[str], mlp: Points, block: Points, steps: Points, graphs: Points) -> None:
    hold(mlp, recipes, h200.LAYER)
    hold(block, recipes, h200.LAYER)
    hold(steps, recipes, h200.LLAMA)
    hold(graphs, [r for r in recipes if r not in PEERS], h200.LAYER)
    for point in mlp:
        assert ("kernels" in point) == (point["status"] == "ok")
        if "kernels" in point:
            assert 0 < point["kernels"]["gemm_share"] < 1 and point["kernels"]["top"][0]["seconds"] > 0
    for point in steps[1:]:
        if point["status"] == "ok":
            assert point["loss_fp8"] == pytest.approx(point["loss_bf16"], rel=0.05)
    assert all(p["cudagraphs_skipped"] == 0 for p in graphs if p["status"] == "ok")


@pytest.mark.gpu
def test_a_short_run_on_a_gpu(tmp_path: Path) -> None:
    assert h200.main(["--quick", "--kernels", "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["timer"] == "CUDA events"


def test_out_of_time(tmp_path: Path) -> None:
    made = bench(tmp_path, budget=1e-3)
    made.run(NAMES)
    found = json.loads(made.path.read_text())["sections"]
    for name, section in found.items():
        assert section["status"] == ((NO_JAX or h200.OUT_OF_TIME) if name == "xla" else h200.OUT_OF_TIME), name
        why = {p["status"] for p in section["points"] if p["recipe"] not in BLOCKS and p["status"] != NO_ROWS}
        rest = {f"skipped: no BF16 to compare with, which was {h200.OUT_OF_TIME}"}
        assert why - rest == {section["status"]}, name


def test_the_time_is_up_in_the_middle_of_something(tmp_path: Path) -> None:
    source = f"""
import h200, sys, threading, time, torch
from pathlib import Path
made = h200.Bench(torch.device("cpu"), True, False, 1.0, Path({str(tmp_path / "out.json")!r}), h200.WallClock())
made.plan(["gemm"])
made.record(h200.SECTIONS[0], {{"recipe": "tensorwise", "status": "ok"}})
threading.Timer(0.1, made.stop).start()
time.sleep(60)
"""
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=Path(h200.__file__).parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())["sections"]
    assert found["gemm"]["status"] == h200.OUT_OF_TIME and len(found["gemm"]["points"]) == 1
    assert found["xla"]["status"] == "skipped: not among --sections"


@pytest.mark.parametrize(
    ("error", "ours", "status", "bad"),
    [
        (RuntimeError("no\n  kernel"), True, "failed: RuntimeError: no kernel", True),
        (RuntimeError("no kernel"), False, "failed: RuntimeError: no kernel", False),
        (ModuleNotFoundError("No module named 'torchao'"), True, "skipped: No module named 'torchao'", False),
    ],
)
def test_an_exception_of_a_point_is_recorded(
    error: Exception, ours: bool, status: str, bad: bool, tmp_path: Path
) -> None:
    def measure() -> dict[str, Any]:
        raise error

    made = bench(tmp_path)
    made.point(h200.SECTIONS[0], {"recipe": "delayed"}, measure, ours=ours)
    written = json.loads(made.path.read_text())
    assert written["sections"]["gemm"]["points"][0]["status"] == status
    assert written["bad"] == made.bad == bad


def test_wrong_results_are_found(tmp_path: Path) -> None:
    made = bench(tmp_path)
    workload = h200.Workload(partial(h200.linear, 64, 32, 48), {}, h200.LINEAR)
    base, fields = h200.start(made, workload)
    assert fields["status"] == "ok"

    def compiled_wrong(model: nn.Module) -> tuple[nn.Module, Any]:
        def run(x: Tensor) -> Tensor:
            return model(x) * 1.1

        return model, run

    wrong = h200.against(made, base, h200.Contender("wrong", compiled_wrong))
    assert wrong["status"].startswith("wrong: output has 20.0 dB, not 26, grad_input has 20.0 dB, not 22, grad_weight")
    idle = h200.against(made, base, h200.Contender("idle", lambda model: (model, model), ours=True))
    assert idle["status"] == "wrong: nothing runs in FP8; 0 of 0 matmuls in FP8 (0 graphs)"


def test_signal_to_noise() -> None:
    x = torch.tensor([3.0, 4.0])
    assert h200.sqnr([x], [x]) == 300
    assert h200.sqnr([x, x], [x, x * 1.1]) == pytest.approx(10 * math.log10(200))
    assert h200.sqnr([x * 0], [x]) == -300
    nan = h200.sqnr([x], [x * math.nan])
    assert math.isnan(nan)
    assert h200.why_wrong({"output": nan}, h200.Bounds(20, 0, 0)) == "output has nan dB, not 20"
    assert h200.why_wrong({"output": 20, "grad_weight": 9, "worst": 8}, h200.Bounds(20, 10, 8)) == (
        "grad_weight has 9.0 dB, not 10"
    )


def test_percentiles() -> None:
    assert h200.spread("seconds", [5.0, 1.0, 3.0, 2.0, 4.0, 0.0]) == {"seconds": 2, "seconds_p20": 1, "seconds_p80": 4}


@pytest.mark.parametrize(
    ("kernel", "gemm"),
    [
        ("nvjet_qqtst_128x256_128x4_2x1_v_bz_coopA_NNT", True),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute", True),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<...>>", True),
        ("triton_tem_fused__scaled_mm_0", True),
        ("aten::_scaled_mm", True),
        ("triton_red_fused_abs_amax_mm_3", False),
        ("triton_poi_fused__scaled_mm_clamp_1", False),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<..., cutlass::bfloat16_t>>", False),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", False),
        ("Memset (Device)", False),
    ],
)
def test_which_kernels_are_gemms(kernel: str, gemm: bool) -> None:
    assert h200.is_gemm(kernel) == gemm


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    with pytest.raises(SystemExit):
        h200.main(["--device", "cpu"])
    assert "on a CPU there is nothing to measure: add --quick for a dry run" in capsys.readouterr().err
    assert threading.active_count() == before
