"""Test bench/h200.py without a GPU: all of it except for CUDA's events, on tiny sizes."""

from __future__ import annotations

import importlib.util
import json
import math
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import h200
import h200_run
import measured
import pytest
import torch
from torch import Tensor, nn
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties, HeuristicType

from fp8pass.hardware import scales_rows

pytestmark = [pytest.mark.tools, pytest.mark.xdist_group("h200")]

CPU = torch.device("cpu")
Rows = list[dict[str, Any]]


def dry_run(path: Path, *runs: str) -> Rows:
    """Dry-run the runs, in processes; return what was written."""
    command = [
        sys.executable,
        h200.__file__,
        "--device",
        "cpu",
        "--quick",
        "--minutes",
        "30",
        "--out",
        str(path),
        *runs,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *rows = [json.loads(text) for text in path.read_text().splitlines()]
    assert first["environment"]["torch"] == str(torch.__version__) and first["environment"]["gpu"] is None
    assert first["environment"]["dry_run"]
    printed = done.stdout.splitlines()
    assert all(h200.line(row) in printed for row in rows)
    return rows


def hold(row: dict[str, Any]) -> None:
    """Check a result that is right: fp8pass ran, and all was measured."""
    assert row["status"] == "ok", row
    assert row["kernels"][0][1] > 0
    if row["who"] in h200.OURS and "dB" in row:
        assert row["matmuls"].split(" (")[0].endswith("100% of matmul FLOPs") and row["declined"] == []
        assert row["p20_80"][0] <= row["speedup"] <= row["p20_80"][1] and min(row["ms"]) > 0
        assert row.get("table") == (None if row["who"] == "graphs" else [])
        assert (row["who"] == "delayed") == ("kernels_bf16" in row)


@pytest.mark.gate
def test_dry_run(tmp_path: Path) -> None:
    rows = dry_run(tmp_path / "out.jsonl", "linear--delayed", "gemm--tensorwise", "hf_8b_4l--bf16")
    one, two, *gemms, step = rows
    hold(one)
    hold(two)
    assert tuple((row["m"], row["k"], row["n"]) for row in (one, two)) == h200.QUICK_SHAPES
    assert [g["fast_accum"] for g in gemms] == [True, False] * 2
    assert all(g["dB"][0] > 50 and len(g["ms"]) == 2 and g["status"] == "ok" for g in gemms)
    hold(step)
    assert step["loss"][1] < step["loss"][0] and step["tokens_s"] == pytest.approx(32e3 / step["ms"], rel=1e-3)


def test_what_cannot_run_is_skipped() -> None:
    def results(work: str, who: str) -> Rows:
        return list(h200_run.results(h200_run.Job(work, who, CPU, True), lambda: None))

    (blocks,) = results("linear", "blockwise")
    assert blocks["status"].startswith("skipped: blockwise kernels exist on sm_")
    if not scales_rows(CPU, None):
        no_rows = "skipped: torch._scaled_mm takes no scales for rows on this device"
        assert results("gemm", "rowwise") == results("linear", "ao_rowwise") == [{"status": no_rows}]
    if importlib.util.find_spec("jax") is None:
        assert results("xla", "jax") == [{"status": "skipped: No module named 'jax'"}]


@pytest.mark.variant
def test_every_kind_of_contender(tmp_path: Path) -> None:
    layers = [f"llama_block--{who}" for who in ("bf16", "rowwise", "fusedsave", "graphs")]
    runs = [*layers, "relu2_mlp--delayed", "hf_1b_8l--t_delayed", "llama_mlp--ao_tensorwise"]
    rows = dry_run(tmp_path / "out.jsonl", *runs)
    assert [f"{row['work']}--{row['who']}" for row in rows] == runs
    for row in rows:
        if row["status"] != "skipped: No module named 'torchao'":
            hold(row)


@pytest.mark.gpu
def test_a_short_run_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert h200.main(["--quick", "--out", str(out), "llama_mlp--delayed", "llama_mlp--graphs", "gemm"]) == 0
    first, *rows = [json.loads(text) for text in out.read_text().splitlines()]
    assert first["environment"]["copy_bytes_per_second"] > 1e11 and rows[0]["peak"] > 0
    assert all(c["us"] > 0 and kernel["bytes"] for kernel in rows[0]["table"] for c in kernel["configurations"])


def fake(name: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> h200.Run:
    """Return a run of another program than h200_run.py."""
    program = tmp_path / "h200_run.py"
    program.write_text(
        f"import sys, pathlib\nname, folder = sys.argv[1:3]\nfile = pathlib.Path(folder) / name\n{source}"
    )
    monkeypatch.setattr(h200, "__file__", str(tmp_path / "h200.py"))
    return h200.Run(name, tmp_path, [])


READY = (
    "file.with_suffix('.ready').touch()\nassert sys.stdin.readline()\nfile.with_suffix('.jsonl').write_text('{}\\n')\n"
)


@pytest.mark.gate
@pytest.mark.parametrize(
    ("source", "results"),
    [
        (READY + "print('hello')", [{}]),
        (READY + "raise SystemExit('no  kernel')", [{}, {"status": "failed: no kernel"}]),
        (READY + "import time\ntime.sleep(60)", [{}, {"status": "out of time: not measured to the end"}]),
        ("import time\ntime.sleep(60)", [{"status": "out of time: not compiled after 3 s"}]),
    ],
    ids=("right", "fails", "measures for too long", "compiles for too long"),
)
def test_what_is_measured_is_kept(source: str, results: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fake("gemm--rowwise", source, tmp_path, monkeypatch)
    monkeypatch.setattr(h200, "Run", lambda *_: run)
    monkeypatch.setattr(h200, "TURN", 2)
    found: Rows = []
    h200.measure(["gemm--rowwise"], [], 5, found.append)
    assert found == [{"work": "gemm", "who": "rowwise", **row} for row in results]
    assert run.process.returncode in (0, 1, -signal.SIGKILL)


def test_a_run_whose_parent_has_ended_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fake("gemm--rowwise", READY, tmp_path, monkeypatch)
    assert run.process.stdin is not None
    run.process.stdin.close()
    assert run.process.wait(60) == 1


def test_the_exit_status() -> None:
    rows = [{"status": status, "who": "delayed"} for status in ("ok", "skipped: no", "out of time: no", "failed: no")]
    assert [h200.exit_status(rows[:n]) for n in (1, 2, 3, 4)] == [0, 0, 3, 1]
    assert h200.exit_status([{"status": "failed: no", "who": "ao_rowwise"}]) == 0
    assert h200.exit_status([{"status": "wrong: no", "who": "ao_rowwise"}]) == 1


def test_names_and_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert h200.chosen(["gemm", "llama_*--save"]) == [
        *("gemm--tensorwise", "gemm--rowwise", "llama_block--save", "llama_mlp--save")
    ]
    assert h200.chosen(h200.USUAL) == h200.USUAL
    assert {name.partition("--")[0] for name in h200.chosen(["*"])} == h200.RUNS.keys() == h200_run.WORKS.keys()
    with pytest.raises(ValueError, match="no run is named 'gem'"):
        h200.chosen(["gem"])
    with pytest.raises(SystemExit):
        h200.main(["--device", "cpu"])
    assert "on a CPU there is nothing to measure: add --quick for a dry run" in capsys.readouterr().err


def test_wrong_results_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepared(run: Any, who: str) -> dict[str, Any]:
        job = h200_run.Job("linear", who, CPU, True)
        monkeypatch.setattr(h200_run, "compiled", lambda _, model, **__: (model, partial(run, model)))
        made, x = h200.linear(64, 32, 48)
        measure: Any = h200_run.prepare_layer(job, made, x, h200_run.LINEAR, {})
        return dict(measure.args[1])

    wrong = prepared(lambda model, x: model(x) * 1.1, "ao_rowwise")
    assert wrong["status"] == "wrong: dB 0 is 20.0, not 26.0, dB 1 is 20.0, not 22.0, dB 2 is 20.0, not 22.0"
    idle = prepared(nn.Module.__call__, "delayed")
    assert idle["status"] == "wrong: nothing runs in FP8; 0 of 0 matmuls in FP8 (0 graphs)"


def test_signal_to_noise() -> None:
    x = torch.tensor([3.0, 4.0])
    assert h200_run.sqnr(x, x) == 300
    assert h200_run.sqnr(x, x * 1.1) == pytest.approx(20)
    assert h200_run.sqnr(x * 0, x) == -300
    assert math.isnan(nan := h200_run.sqnr(x, x * math.nan))
    assert h200_run.why_wrong([nan], (20, 0)) == "wrong: dB 0 is nan, not 20"
    assert h200_run.why_wrong([20.0, 9.0, 10.0], (20, 10)) == "wrong: dB 1 is 9.0, not 10"


def test_percentiles() -> None:
    assert [h200_run.percentile([5.0, 1.0, 3.0, 2.0, 4.0, 0.0], share) for share in (0.2, 0.5, 0.8)] == [1, 2, 4]


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_qqtst_128x256_128x4_2x1_v_bz_coopA_NNT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute", "matmul"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<...>>", "matmul"),
        ("triton_tem_fused__scaled_mm_0", "matmul"),
        ("scaled_mm_fused", "matmul"),
        ("aten::_scaled_mm", "matmul"),
        ("triton_red_fused_abs_amax_mm_3", "other"),
        ("triton_poi_fused__scaled_mm_clamp_1", "other"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_backward_2", "other"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<..., cutlass::bfloat16_t>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", "other"),
        ("Memset (Device)", "other"),
    ],
)
def test_kinds_of_kernels(kernel: str, kind: str) -> None:
    assert measured.kind(kernel) == kind


def test_tables_of_a_run_of_the_bench(tmp_path: Path) -> None:
    """They also have single linear layers, and the configurations of kernels."""
    tile = {"XBLOCK": 64, "R0_BLOCK": 32, "num_warps": 8, "num_stages": 1, "GB_s": 2000.0, "share_of_copy": 0.5}
    configurations = [tile | {"us": 300.2, "chosen": True}, tile | {"XBLOCK": 16, "us": 400.0, "chosen": False}]
    kernel = {"kernel": "triton_unk_fused_1", "bytes": 600 << 20, "configurations": configurations}
    same = {"who": "delayed", "ms": [3.0, 2.0], "speedup": 1.5, "p20_80": [1.4, 1.6], "dB": [30.0, 20.5, 21.0]}
    rows = [
        {"environment": {"gpu": "NVIDIA H200", "date": "2026-11-28T01:02:03", "torch": "2.13"}},
        {"work": "linear", "m": 1, "k": 2, "n": 3, **same},
        {"work": "linear", "who": "rowwise", "status": "out of time: not compiled after 3 s"},
        {"work": "llama_mlp", "table": [kernel], "kernels": [], "peak": 10**9, "peak_bf16": None, **same},
    ]
    (tmp_path / "out.jsonl").write_text("\n".join(map(json.dumps, rows)))
    layers = measured.printed("layers", tmp_path / "out.jsonl").splitlines()
    assert layers[0] == "NVIDIA H200, 2026-11-28, torch 2.13."
    assert layers[4:] == [
        "| MLP of Llama-3-8B | delayed | 3.00 | 2.00 | **1.50** (1.40 to 1.60) | 30.0, 20.5 | 1.00 |  |  |  |",
        "| linear 1 x 2 x 3 | delayed | 3.00 | 2.00 | **1.50** (1.40 to 1.60) | 30.0, 20.5 |  |  |  |  |",
    ]
    assert measured.printed("kernels", tmp_path / "out.jsonl").splitlines()[2] == (
        "| MLP of Llama-3-8B | `triton_unk_fused_1` | 300 | 629 | 2000 | 50% | 64 x 32, 8 warps, 1 stages "
        "| 16 x 32, 8 warps, 1 stages 400 |"
    )


def kernel(*launchers: Any, stores: str = "*fp8e4nv", **meta: Any) -> Any:
    """Return one of Inductor's kernels, which has compiled the configurations of these launchers.

    It has an input and an output, and adds to its third argument, in place.
    """
    import triton

    def triton_red_fused_1(in_ptr0, out_ptr0, in_out_ptr0):  # type: ignore[no-untyped-def]
        pass

    device = DeviceProperties(type="cpu", index=0, multi_processor_count=1, cc=0, warp_size=32)
    signature = {"in_ptr0": "*bf16", "out_ptr0": stores, "in_out_ptr0": "*fp32"}
    tuner = triton_heuristics.CachingAutotuner(
        SimpleNamespace(__name__="triton_red_fused_1", arg_names=list(signature), fn=triton_red_fused_1),
        triton_meta={"device": device, "signature": signature},
        configs=[triton.Config({"XBLOCK": 64})],
        save_cache_hook=None,
        mutated_arg_names=["in_out_ptr0"],
        optimize_mem=True,
        heuristic_type=HeuristicType.REDUCTION,
        inductor_meta=meta,
    )
    tuner.launchers = list(launchers)
    return tuner


def launcher(milliseconds: float, block: int, spills: int = 0) -> Any:
    """Return a launcher that sleeps, and copies its input; it adds 1 to its third argument."""
    import triton

    def launch(x: Tensor, out: Tensor, count: Tensor, stream: int) -> None:
        time.sleep(milliseconds / 1e3)
        out.copy_(x)
        count.add_(1)

    launch.config = triton.Config({"XBLOCK": block}, num_warps=8, num_stages=1)  # type: ignore[attr-defined]
    for name, value in (("n_regs", 64), ("n_spills", spills), ("store_cubin", False), ("cache_hash", "")):
        setattr(launch, name, value)
    return launch


def test_the_fastest_configuration_is_chosen_in_the_runs_turn() -> None:
    pytest.importorskip("triton")
    slow, fast, spilled = launcher(3, 64), launcher(1, 128), launcher(0, 256, spills=17)
    tuned, other = kernel(slow, fast, spilled, kernel_num_gb=2e-6), kernel(slow, fast, stores="*bf16")
    x, out, count = torch.randn(8), torch.zeros(8), torch.zeros(8)

    def step() -> None:
        for one in (tuned, other, tuned):
            one.run(x, out, count, stream=0)

    with h200_run.tuning_later():
        step()
    assert tuned.launchers == other.launchers == [slow] and count[0] == 3
    (row,) = h200_run.tuned(CPU, step)
    assert tuned.launchers == other.launchers == [fast]
    assert count[0] == 6, "the trials add to copies"
    assert (row["kernel"], row["bytes"]) == ("triton_red_fused_1", 2000)
    found = {c["XBLOCK"]: c for c in row["configurations"]}
    assert [found[block]["chosen"] for block in (64, 128, 256)] == [False, True, False]
    assert found[64]["us"] > 3000 and found[128]["us"] < found[64]["us"] and found[256]["spills"] == 17
    assert found[64]["GB_s"] == pytest.approx(2000 / found[64]["us"] / 1e3, abs=0.06)
    assert found[64]["num_warps"] == 8 and found[64]["registers"] == 64 and found[64]["share_of_copy"] < 1
    step()
    assert count[0] == 9


def test_bytes_that_inductor_does_not_count_are_those_of_the_tensors() -> None:
    x, y = torch.zeros(4), torch.zeros(8, dtype=torch.int8)
    assert h200_run.moved_bytes(SimpleNamespace(inductor_meta={}), [x, y, 3, x]) == 24
    assert h200_run.moved_bytes(SimpleNamespace(inductor_meta={"kernel_num_gb": 1e-6}), [x]) == 1000


def test_a_run_waits_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    call = mock.Mock(side_effect=[torch.OutOfMemoryError(), torch.OutOfMemoryError(), 5])
    assert h200_run.patiently(call) == 5
