"""Test what is known of GPUs: figures, what is measured of the one that is there, trials of its kernels, its file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import fp8pass
from fp8pass.base.errors import Fp8Error
from fp8pass.gpu import here, kept, kernel_kinds, speeds, trial, tried
from fp8pass.gpu.machine_file import load_machine, to_json
from fp8pass.gpu.speeds import STEP, Speeds, expected, with_speeds
from fp8pass.gpu.target import TARGETS, Target, nearest, published, sizes
from fp8pass.gpu.tried import Tried
from fp8pass.inspect.cli import main
from fp8pass.options import machine
from fp8pass.options.config import Config, make_config
from fp8pass.options.machine import gpu_of, on_machine
from fp8pass.recipes import DelayedScaling, MXFP8Scaling, Schedule
from fp8pass.roofline import predicted_speedup
from tests.helpers.gpus import CUDA, LABELS, properties_of, there
from tests.helpers.harness import compiled, verdicts

pytestmark = pytest.mark.tools

CAPABILITIES = [(8, 9), (9, 0), (10, 0), (10, 1), (10, 3), (11, 0), (12, 0), (12, 1), (13, 0)]

# ---------------------------------------------------------------------------------------------------------------------
# Figures


@pytest.mark.parametrize("name", LABELS)
def test_a_gpu_is_known_by_its_name(name: str) -> None:
    target = TARGETS[name]
    assert published(properties_of(LABELS[name], target)) is target
    eighth = {"multi_processor_count": sizes(target).multiprocessors // 8, "total_memory": sizes(target).memory // 8}
    part = published(properties_of(f"{LABELS[name]} MIG 1g.10gb", target, **eighth))
    assert part.bf16_peak == pytest.approx(target.bf16_peak / 8, rel=0.15)
    assert (part.name, part.bandwidth) == (name, target.bandwidth / 8)


@pytest.mark.parametrize(
    ("label", "like", "changed", "bf16", "fp8"),
    [
        ("NVIDIA GeForce RTX 5080", "rtx5090", {"multi_processor_count": 84, "clock_rate": 2.617e6}, 112.6, 225.1),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", "rtx5090", {"multi_processor_count": 82, "clock_rate": 1.5e6}, 63, 126),
        ("NVIDIA GeForce RTX 4080", "rtx4090", {"multi_processor_count": 76, "clock_rate": 2.505e6}, 97.5, 195),
        ("NVIDIA RTX 6000 Ada Generation", "l40s", {"multi_processor_count": 142, "clock_rate": 2.505e6}, 360, 728),
        ("NVIDIA RTX PRO 5000 Blackwell", "rtx_pro_6000", {"multi_processor_count": 110}, 295, 590),
    ],
)
def test_others_are_like_their_kind(label: str, like: str, changed: dict[str, Any], bf16: float, fp8: float) -> None:
    memory = {"memory_clock_rate": 14e6, "memory_bus_width": 256}
    found = published(properties_of(label, TARGETS[like], **changed, **memory))
    assert found.name == label and found.capability == TARGETS[like].capability
    assert found.bf16_peak / 1e12 == pytest.approx(bf16, rel=0.01)
    assert found.fp8_peak / 1e12 == pytest.approx(fp8, rel=0.01)
    assert found.bandwidth == pytest.approx(896e9)
    assert found.mxfp8_rate / found.fp8_rate == pytest.approx(TARGETS[like].mxfp8_rate / TARGETS[like].fp8_rate)
    without = published(properties_of(label, TARGETS[like], **changed))  # as torch says it with some versions of CUDA
    assert without.bandwidth == nearest(found.capability, "GeForce" in label).bandwidth


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_capability_has_sizes(capability: tuple[int, int], tmp_path: Path) -> None:
    target = Target("mine", capability, 1e14, 2e14, 1e12)
    assert sizes(target).multiprocessors == nearest(capability).multiprocessors
    given = replace(target, multiprocessors=7, shared_memory=100 << 10, cache=3 << 20)
    assert (sizes(given).multiprocessors, sizes(given).shared, sizes(given).cache) == (7, 100 << 10, 3 << 20)
    (tmp_path / "mine.json").write_text(to_json(given))
    assert load_machine(tmp_path / "mine.json") == given
    for recipe in ("delayed", "rowwise", "mxfp8"):
        gain = predicted_speedup(target, 4096, 4096, 4096, make_config({"recipe": recipe}).recipe)
        assert gain is None or gain > 0.5


@pytest.mark.parametrize(("name", "least"), [("rtx4090", 1.1), ("rtx5090", 1.25), ("h20", 1.4)])
def test_what_many_people_own_gains(name: str, least: float) -> None:
    assert predicted_speedup(TARGETS[name], 2048, 1024, 1024, DelayedScaling()) > least


def test_mxfp8_is_twice_as_fast_as_fp8_on_geforce() -> None:
    of = [predicted_speedup(TARGETS["rtx5090"], 8192, 4096, 4096, r) for r in (MXFP8Scaling(), DelayedScaling())]
    assert of[0] > 1.4 * of[1]


GPT2_SMALL = {"q, k, v": (768, 2304), "attention's output": (768, 768), "up": (768, 3072), "down": (3072, 768)}


@pytest.mark.parametrize(
    ("name", "gains"),
    [
        ("h100", {"q, k, v", "up", "down"}),
        ("h200", {"q, k, v", "attention's output", "up", "down"}),
        ("rtx4090", {"q, k, v", "attention's output", "up", "down"}),
        ("rtx5090", {"q, k, v", "attention's output", "up", "down"}),
        ("h20", {"q, k, v", "attention's output", "up", "down"}),
        ("l40s", {"q, k, v", "up", "down"}),
    ],
)
def test_a_gpt2_small_is_judged_by_each_gpu(name: str, gains: set[str]) -> None:
    found = {
        layer for layer, (k, n) in GPT2_SMALL.items()
        if predicted_speedup(TARGETS[name], 8192, k, n, DelayedScaling()) >= 1
    }  # fmt: skip
    assert found == gains


# ---------------------------------------------------------------------------------------------------------------------
# Speeds


@pytest.mark.parametrize("name", ["h200", "rtx5090", "gb10"])
def test_a_gpu_as_published_keeps_its_figures(name: str) -> None:
    target, usual = TARGETS[name], expected(TARGETS[name])
    for noise in (0.96, 1.0, 1.04):
        found = Speeds(usual.bf16 * noise, usual.fp8 / noise, usual.copy * noise)
        assert with_speeds(target, found) == target
    slow = with_speeds(target, Speeds(usual.bf16 / 2, usual.fp8 / 2, usual.copy))
    assert slow.bf16_peak == pytest.approx(target.bf16_peak / 2, rel=0.06)
    assert slow.bf16_peak / target.bf16_peak == pytest.approx(STEP**-7)
    assert (slow.bandwidth, slow.name) == (target.bandwidth, name)
    exact = with_speeds(target, Speeds(usual.bf16 * 0.77, usual.fp8, usual.copy), rounded=False)
    assert expected(exact).bf16 == pytest.approx(usual.bf16 * 0.77, rel=0.02)


def test_rates_are_operations_and_bytes_by_the_time_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    times = iter((2e-4, 1e-4, 1.3e-4))
    state = torch.get_rng_state()
    found = speeds.measure(torch.device("cpu"), 0.3, lambda call, seconds: next(times))
    assert found == Speeds(2 * 4096**3 / 2e-4, 2 * 4096**3 / 1e-4, 2 * 2**28 / 1.3e-4)
    assert torch.equal(state, torch.get_rng_state())


def test_it_measures_once_for_all_processes(tmp_path: Path) -> None:
    with there(tmp_path, "rtx5090") as gpu:
        gpu.faster(fp8=1.3, copy=0.8)
        first = here.target_here(CUDA, "measured", (), ())
        assert here.target_here(CUDA, "measured", (), ()) is first and gpu.measured == 1
        assert first.fp8_peak == pytest.approx(TARGETS["rtx5090"].fp8_peak * STEP**3)
        assert first.mxfp8_peak == pytest.approx(838e12 * STEP**3)
        assert first.bandwidth == pytest.approx(TARGETS["rtx5090"].bandwidth * STEP**-2)
    with there(tmp_path, "rtx5090") as gpu:  # another process
        assert here.target_here(CUDA, "measured", (), ()) == first and gpu.measured == 0
        next(tmp_path.glob("*.json")).write_text("{")  # a broken file
    with there(tmp_path, "rtx5090") as gpu:
        here.target_here(CUDA, "measured", (), ())
        assert gpu.measured == 1
    with there(tmp_path, "rtx5090", multi_processor_count=85) as gpu:  # another GPU: a part of one
        here.target_here(CUDA, "measured", (), ())
        assert gpu.measured == 1 and len(list(tmp_path.glob("*.json"))) == 2


def test_other_processes_wait_and_read(tmp_path: Path) -> None:
    with there(tmp_path, "h200") as gpu:
        file, started = kept.file_of(torch.cuda.get_device_properties(0)), threading.Event()

        def other() -> None:
            with kept.alone(file, 1.0) as mine:
                assert mine
                started.set()
                time.sleep(0.3)
                kept.write(file, {"speeds": asdict(Speeds(1e14, 2e14, 1e12))})

        thread = threading.Thread(target=other)
        thread.start()
        started.wait()
        found = here.target_here(CUDA, "measured", (), ())
        thread.join()
        assert gpu.measured == 0 and found.bf16_peak < TARGETS["h200"].bf16_peak / 4


def test_a_process_that_never_ends_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "_WAITS", 0.1)
    said = pytest.warns(UserWarning, match="speeds: another process did not end in .* published figures are used")
    with there(tmp_path, "h200") as gpu, kept.alone(kept.file_of(torch.cuda.get_device_properties(0)), 1.0), said:
        assert here.target_here(CUDA, "measured", (), ()) is TARGETS["h200"] and gpu.measured == 0


def test_a_gpu_without_room_keeps_published_figures(tmp_path: Path) -> None:
    with there(tmp_path, "rtx4090") as gpu:
        gpu.speeds = torch.OutOfMemoryError("CUDA out of memory: made up for the test")
        with pytest.warns(UserWarning, match="speeds: CUDA out of memory.* published figures are used.* FP8PASS_MACH"):
            assert here.target_here(CUDA, "measured", (), ()) is TARGETS["rtx4090"]
        assert not list(tmp_path.glob("*.json"))


def test_nothing_is_measured_where_it_would_be_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with there(tmp_path, "rtx4090") as gpu:
        gpu.faster(bf16=2)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert here.target_here(CUDA, "measured", (), ()) is TARGETS["rtx4090"]
        assert on_machine(Config(target="h100"), CUDA).target == "h100"  # a target that is named
        assert on_machine(Config(), None).target is None  # a CPU, or a pretended GPU
        with FakeTensorMode():
            fake = torch.empty(2, device="cpu")
        monkeypatch.setattr(type(fake), "device", CUDA, raising=False)
        assert gpu_of([fake]) is None
        monkeypatch.setattr(machine, "first_call_is_fake", lambda: True)  # DDPOptimizer's, of real tensors
        assert gpu_of([fake]) == CUDA
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        assert here.target_here(CUDA, "published", (), ()) is TARGETS["rtx4090"] and gpu.measured == 0
        assert here.target_here(CUDA, "measured", (), ()) != TARGETS["rtx4090"]  # now, once


def test_a_machine_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = replace(TARGETS["rtx4090"], name="mine", bf16_peak=1e14)
    file = tmp_path / "mine.json"
    file.write_text(to_json(mine))
    monkeypatch.setenv("FP8PASS_MACHINE", str(file))
    with there(tmp_path, "rtx4090") as gpu:
        assert on_machine(make_config(), CUDA).target == mine and gpu.measured == 0
    with (
        there(tmp_path, "h200"),
        pytest.raises(ValueError, match="describes mine, sm_89, and this GPU is h200, sm_90: wr"),
    ):
        on_machine(make_config(), CUDA)
    for wrong, why in {
        str(tmp_path / "gone.json"): r"machine='.*gone.json': 'measured' or 'published', or the path of a file that",
        3: "machine=3: 'measured' or",
    }.items():
        with pytest.raises(ValueError, match=why):
            make_config({"machine": wrong})
    file.write_text("{}")
    with pytest.raises(ValueError, match="the field 'name' is missing"):
        make_config({"machine": file})


# ---------------------------------------------------------------------------------------------------------------------
# Trials


def test_cases_are_right_where_a_kernel_is() -> None:
    found = tried.try_kinds(["tensor", "mxfp8"], "cpu", 60)
    of_tensor = [t for t in found if t.kind == "tensor"]
    assert len(of_tensor) == 11 and tried.works("tensor", found)
    assert tried.works("mxfp8", found) is False and "refused: " in found[-1].result


def test_a_wrong_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch._scaled_mm

    def off(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = multiply(*args, **kwargs)
        result[3, 5] *= 1.02
        return result

    case = next(trial.cases("tensor"))
    assert trial.run(case, torch.device("cpu")) == ""
    monkeypatch.setattr(torch, "_scaled_mm", off)
    assert re.match(r"wrong in 0% of the elements: -?[\d.]+, not -?[\d.]+", trial.run(case, torch.device("cpu")))
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, **k: multiply(*a, **k) * float("nan"))
    assert trial.run(case, torch.device("cpu")).startswith("wrong in 100% of the elements: nan")


@pytest.mark.parametrize("kind", ["tensor", *kernel_kinds.KINDS])
def test_cases_are_such_as_cuda_takes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call each case that fp8pass emits on fake CUDA tensors, which applies CUDA's rules without a GPU."""
    multiply, mode = torch._scaled_mm, FakeTensorMode()

    def on_cuda(*args: Any, **kwargs: Any) -> torch.Tensor:
        with mode:
            moved = tree_map_only(
                torch.Tensor,
                lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda"),
                (args, kwargs),
            )
            result = multiply(*moved[0], **moved[1])
        return torch.zeros(result.shape)

    monkeypatch.setattr(torch, "_scaled_mm", on_cuda)
    monkeypatch.setattr(trial, "_compared", lambda got, exact, _: "" if got.shape == exact.shape else "shape")
    assert [trial.run(case, torch.device("cpu")) for case in trial.cases(kind) if case.needed].count("") >= 2


DIES = """
import os, sys
sys.path.insert(0, {folder!r})
import trial
def tries(case, device):
    if case.kind == {at!r} and case.bias:
        {how}
    return ""
trial.main(sys.argv[1], sys.argv[2], sys.argv[3:], tries)
"""


def script(tmp_path: Path, how: str, at: str = "rowwise") -> str:
    file = tmp_path / "dies.py"
    file.write_text(DIES.format(folder=str(Path(trial.__file__).parent), how=how, at=at))
    return str(file)


def test_a_child_that_dies_says_at_what(tmp_path: Path) -> None:
    found = tried.try_kinds(["rowwise", "mxfp8"], "cpu", 60, script(tmp_path, "os.abort()"))
    assert tried.works("rowwise", found) is False and tried.works("mxfp8", found)
    (died,) = [t for t in found if t.result]
    assert died.case.endswith("bias") and "died with status -6" in died.result


def test_a_child_that_hangs_is_stopped(tmp_path: Path) -> None:
    begun = time.monotonic()
    found = tried.try_kinds(["rowwise", "mxfp8"], "cpu", 2, script(tmp_path, "import time; time.sleep(100)"))
    assert time.monotonic() - begun < 20
    assert tried.works("rowwise", found) is False and tried.works("mxfp8", found) is None
    assert "took more than" in next(t.result for t in found if t.result)


def test_all_kinds_share_the_time(tmp_path: Path) -> None:
    """A second kind is tried in what the first one has left of the time, or in a second."""
    given: list[float] = []

    def slow(kinds: Any, device: str, seconds: float) -> list[Tried]:
        given.append(seconds)
        time.sleep(0.2)
        return [Tried(kind, "a case", True, "") for kind in kinds]

    with there(tmp_path, "rtx5090"), mock.patch.object(tried, "try_kinds", slow):
        here.target_here(CUDA, "measured", (), ("mxfp8", "rowwise"))
    assert len(given) == 2 and given[0] <= tried.SECONDS and given[1] <= given[0] - 0.2


def test_a_child_that_can_not_start_leaves_it_to_the_tables(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit('no context: the GPU is exclusive')")
    with pytest.raises(RuntimeError, match="died with status 1: no context: the GPU is exclusive"):
        tried.try_kinds(["mxfp8"], "cpu", 60, str(tmp_path / "fails.py"))
    with there(tmp_path, "rtx5090") as gpu:
        gpu.error = RuntimeError("no context: made up for the test")
        with pytest.warns(UserWarning, match="mxfp8: no context: made up for the test"):
            target = here.target_here(CUDA, "measured", (), ("mxfp8",))
        assert target.mxfp8 is None and not kernel_kinds.why_not("mxfp8", target)


def test_what_says_nothing_of_a_kernel_is_not_kept(tmp_path: Path) -> None:
    found = [Tried("mxfp8", "a case", True, f"{trial.NOT_TRIED}: out of memory")]
    assert tried.works("mxfp8", found) is None
    with there(tmp_path, "rtx5090") as gpu:
        gpu.result = found[0].result
        with pytest.warns(UserWarning, match="mxfp8: not tried: out of memory; published figures are used"):
            assert here.target_here(CUDA, "measured", (), ("mxfp8",)).mxfp8 is None
        assert "mxfp8" not in kept.read(next(tmp_path.glob("*.json")))

    def fails(*_: Any) -> str:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert trial._tried(next(trial.cases("mxfp8")), torch.device("cpu"), fails) == found[0].result


def test_a_trial_is_made_where_the_table_is_not_sure_and_the_recipe_asks(tmp_path: Path) -> None:
    for name, asks in {
        "h100": [],
        "b200": [],
        "l40s": [],
        "rtx5090": ["mxfp8", "rowwise"],
        "gb10": ["mxfp8", "rowwise"],
    }.items():
        with there(tmp_path / name, name) as gpu:
            for recipe in (
                "delayed",
                {"head": "mxfp8", "*": "rowwise"},
                Schedule({0: None, 9: "rowwise"}),
                "blockwise",
            ):
                on_machine(Config(recipe=recipe), CUDA)
            assert sorted(gpu.tried) == asks


def test_a_gpu_without_fp8_is_not_measured(tmp_path: Path) -> None:
    with there(tmp_path, "a100") as gpu:
        assert here.target_here(CUDA, "measured", (), ("mxfp8",)) is TARGETS["a100"] and not gpu.measured


@pytest.mark.parametrize(("result", "native"), [("", True), ("refused: CUBLAS_STATUS_NOT_SUPPORTED", False)])
def test_a_trial_decides(result: str, native: bool, tmp_path: Path) -> None:
    with there(tmp_path, "rtx5090") as gpu:
        gpu.result = result
        target = here.target_here(CUDA, "measured", (), ("mxfp8", "rowwise"))
        assert (target.mxfp8, target.rowwise, target.blockwise) == (native, native, None)
        assert (kernel_kinds.why_not("mxfp8", target) == "") == native
        assert (predicted_speedup(target, 4096, 4096, 4096, MXFP8Scaling()) is not None) == native
    with there(tmp_path, "rtx5090") as gpu:  # another process reads the answers
        assert here.target_here(CUDA, "measured", (), ("mxfp8", "rowwise")) == target and not gpu.tried
    if not native:
        assert kernel_kinds.why_not("mxfp8", target) == (
            "mxfp8 kernels do not work on this rtx5090, as tried: see `fp8pass env`"
        )


@pytest.mark.gpu
def test_tables_and_trials_agree() -> None:
    base = here.published_here(CUDA)
    found = tried.try_kinds(["tensor", *kernel_kinds.KINDS], "cuda", 60)
    assert tried.works("tensor", found), found
    for kind in kernel_kinds.KINDS:
        if kind not in kernel_kinds.unsure(base):
            assert tried.works(kind, found) == (not kernel_kinds.why_not(kind, base)), [
                t for t in found if t.kind == kind
            ]


@pytest.mark.gpu
def test_the_measurement_is_short_and_near_a_long_one() -> None:
    begun = time.monotonic()
    short = speeds.measure(CUDA, here.SECONDS)
    assert time.monotonic() - begun < 1.0
    long = speeds.measure(CUDA, 6.0)
    for name, rate in asdict(long).items():
        assert getattr(short, name) == pytest.approx(rate, rel=0.1), name


# ---------------------------------------------------------------------------------------------------------------------
# What follows


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.device | None], None]:
    """Let graphs on the CPU be compiled as if their tensors were on the GPU that is there."""

    def pretend(device: torch.device | None) -> None:
        monkeypatch.setattr("fp8pass.backend.gpu_of", lambda _: device)

    return pretend


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(1024, 1024, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


@pytest.mark.filterwarnings("ignore:fp8pass. a graph has no matmul in FP8")
@pytest.mark.parametrize(("name", "in_fp8"), [("h100", 0), ("rtx4090", 2), ("rtx5090", 2), ("h20", 2), ("l40s", 0)])
def test_it_is_decided_by_the_gpu_that_is_there(name: str, in_fp8: int, tmp_path: Path, on_gpu: Any) -> None:
    on_gpu(CUDA)
    with there(tmp_path, name) as gpu:
        with verdicts() as report:
            compiled(Small(), lowering="eager")(torch.randn(512, 1024)).sum().backward()
        assert len(report.rewritten) == in_fp8 and gpu.measured == 1
        assert all(f"predicted speed-up on {name} is 0." in g.reason for g in report.declined)


def test_the_target_is_part_of_cache_keys(tmp_path: Path) -> None:
    with there(tmp_path, "rtx5090") as gpu:
        plain = on_machine(Config(), CUDA)
        here._targets.clear()
        here.known(CUDA).speeds = None
        next(tmp_path.glob("*.json")).unlink()
        gpu.faster(fp8=0.5)
        slow = on_machine(Config(), CUDA)
    assert plain.cache_key() != slow.cache_key() and plain == on_machine(plain, None)


def test_a_state_names_its_target_and_a_resumed_run_uses_it(
    tmp_path: Path, on_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu(CUDA)
    monkeypatch.setattr("fp8pass.states.checkpoint.in_use", lambda _: here.in_use(CUDA))

    def trained(state: dict[str, Any] | None = None) -> nn.Module:
        torch.compiler.reset()
        model = Small()
        if state is not None:
            fp8pass.state(model).load_state_dict(state)
        compiled(model, lowering="eager")(torch.randn(512, 1024)).sum().backward()
        return model

    with there(tmp_path / "one", "h100") as gpu:
        gpu.faster(bf16=0.5)
        model = trained()
        saved = fp8pass.state(model).state_dict()
        used = here.in_use(CUDA)
        assert used is not None and json.loads(bytes(saved["target"].tolist()).rstrip(b"\0")) == json.loads(
            to_json(used)
        )
    with there(tmp_path / "two", "h100") as gpu:  # a machine that measures something else
        model = trained(saved)
        assert here.in_use(CUDA) == used and gpu.measured == 0
        assert torch.equal(fp8pass.state(model).state_dict()["target"], saved["target"])
    with there(tmp_path / "three", "rtx5090") as gpu:  # another kind of GPU
        trained({name: x for name, x in saved.items() if name in ("recipe", "steps", "target")})
        assert here.in_use(CUDA) == TARGETS["rtx5090"] and gpu.measured == 1
    with pytest.raises(
        Fp8Error, match=r"'target' in the saved FP8 state is not JSON: .*; leave 'target' out of the sta"
    ):
        fp8pass.state(Small()).load_state_dict({**saved, "target": saved["target"][1:]})


def test_a_state_brings_speeds_and_no_kernels(tmp_path: Path) -> None:
    with there(tmp_path, "rtx5090") as gpu:
        here.load(replace(TARGETS["rtx5090"], bf16_peak=1e14, rowwise=False))
        target = here.target_here(CUDA, "measured", (), ("rowwise",))
        assert (target.bf16_peak, target.rowwise, gpu.tried) == (1e14, True, ["rowwise"])


def test_a_state_that_comes_too_late(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with there(tmp_path, "h100"):
        here.target_here(CUDA, "measured", (), ())
        here.load(TARGETS["h100"])
        assert not caplog.records
        here.load(replace(TARGETS["h100"], bf16_peak=1e14))
        assert "load the state before the first call" in caplog.text


# ---------------------------------------------------------------------------------------------------------------------
# Commands


def test_the_environment_tells_what_was_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with there(tmp_path, "rtx5090", available=True) as gpu:
        gpu.faster(fp8=0.7)
        gpu.result = "refused: CUBLAS_STATUS_NOT_SUPPORTED"
        assert main(["env"]) == 0
        lines = [re.sub(" +", " ", line) for line in capsys.readouterr().out.splitlines()]
    for wanted in (
        "figures measured: rtx5090, sm_120, BF16 194 and FP8 264 TFLOPS, copies 1.65 TB/s",
        " published rtx5090, sm_120, BF16 194 and FP8 385 TFLOPS, copies 1.65 TB/s",
        " measured BF16 194 and FP8 270 TFLOPS, copies 1.65 TB/s",
        " mxfp8 kernels tried: do not work, 0 of 1 cases are right",
        " mxfp8 a case: refused: CUBLAS_STATUS_NOT_SUPPORTED",
        " rowwise native, scales of rows applied after the matmul",
    ):
        assert wanted in lines, (wanted, lines)
    assert any(line.startswith(" blockwise kernels by the tables: blockwise kernels exist on sm_90") for line in lines)


def test_the_environment_says_what_could_not_be_found_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with there(tmp_path, "gb10", available=True) as gpu:
        gpu.error = RuntimeError("the GPU is exclusive")
        with pytest.warns(UserWarning, match="the GPU is exclusive"):
            assert main(["env"]) == 0
        found = capsys.readouterr().out
        assert "mxfp8: the GPU is exclusive; published figures are used" in found
    monkeypatch.setenv("FP8PASS_MACHINE", "published")
    with there(tmp_path, "gb10", available=True) as gpu:
        assert main(["env"]) == 0
        assert "published: gb10, sm_121" in capsys.readouterr().out and not gpu.tried and not gpu.measured


def test_the_environment_is_told_with_a_wrong_machine_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.json").write_text(to_json(TARGETS["h200"]))
    monkeypatch.setenv("FP8PASS_MACHINE", str(tmp_path / "mine.json"))
    with there(tmp_path, "gb10", available=True):
        assert main(["env"]) == 0
    assert re.search("figures +published, for machine='a path' describes h200, sm_90", capsys.readouterr().out)


def test_a_command_writes_the_file_of_a_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.json"
    with there(tmp_path, "rtx5090", multi_processor_count=160) as gpu:
        gpu.faster(bf16=1.03)
        assert main(["machine", "--out", str(file)]) == 0
        assert "mine.json: rtx5090, sm_120, BF16 200" in capsys.readouterr().out
        gpu.speeds = RuntimeError("out of memory")
        assert main(["machine", "--out", str(file)]) == 2
        assert capsys.readouterr().err == "fp8pass machine: out of memory\n"
    found = load_machine(file)
    assert (found.multiprocessors, found.shared_memory, found.rowwise, found.mxfp8) == (160, 100 << 10, True, True)
    assert found.bf16_peak == pytest.approx(1.03 * 209.5e12, rel=0.01)


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["machine"]) == 2
    assert "torch finds 0 GPUs here" in capsys.readouterr().err


def test_the_trial_needs_torch_alone() -> None:
    code = f"import runpy, sys; runpy.run_path({trial.__file__!r}); print([m for m in sys.modules if m.startswith('fp8pass')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_answers_are_kept_as_they_are() -> None:
    of = Tried("mxfp8", "a case", False, "wrong")
    assert Tried(*asdict(of).values()) == of
