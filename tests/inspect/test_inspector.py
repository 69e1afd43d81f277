"""`fp8pass inspect`: its numbers for small models, where every byte can be counted by hand."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch

from fp8pass import hardware
from fp8pass.base.errors import Fp8Error
from fp8pass.gpu.machine_file import to_json
from fp8pass.hardware import TARGETS, Target
from fp8pass.inspect import cli
from fp8pass.inspect.cli import main
from fp8pass.inspect.fake_cuda import FakeCuda, _choices, properties, resources, widths
from fp8pass.inspect.inspector import Compiled, InspectedRun, Inspection, Kernel, inspect
from fp8pass.inspect.kernel_time import kernel_seconds
from fp8pass.inspect.process import _built, _factory, _Work
from fp8pass.passes.kernels.combo_kernels import SMALL_KERNEL_BYTES
from fp8pass.roofline import gemm_seconds, memory_seconds
from tests.helpers import inspected
from tests.helpers.pretend_gpu import inspect_there, inspects_there, pretend

pytestmark = [pytest.mark.gpu_code, pytest.mark.xdist_group("pretended_gpu")]

H100 = TARGETS["h100"]
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
ANY_SIZE: dict[str, Any] = {"min_speedup": 0}  # models this small are not faster in FP8


@pytest.fixture(scope="module")
def linear() -> Inspection:
    """Return the inspection of a layer with x: bf16[512, 256] and weight: bf16[1024, 256]."""
    return inspect_there(
        "tests.helpers.inspected:linear", recipe="dynamic", peer="torchao:tensorwise", ptx=True, options=ANY_SIZE
    )


def test_explain_prints_the_memory_of_a_step(
    linear: Inspection, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def known(*args: Any, **kwargs: Any) -> Inspection:
        asked.append((*args, kwargs))
        return linear

    monkeypatch.setattr(cli, "inspect", known)
    spec = "tests.helpers.inspected:linear"
    assert main(["explain", spec, "--recipe", "dynamic", "--memory"]) == 0
    assert asked == [(spec, "h100", "dynamic", {"peer": "torchao:tensorwise"})]
    lines = capsys.readouterr().out.splitlines()
    rows = lines[lines.index(next(line for line in lines if line.startswith("memory of a training step on h100"))) :]
    for run in linear.runs:
        (row,) = (line for line in rows if line.startswith(run.name))
        assert row.split()[-2:] == [f"{run.bytes_saved / 1e6:.2f}", f"{run.peak_bytes / 1e6:.2f}"]
    monkeypatch.setenv("FP8PASS_RECIPE", "none")
    assert main(["explain", spec, "--memory"]) == 2
    assert "the memory is not known: there is no recipe" in capsys.readouterr().err


def matmuls(run: InspectedRun) -> list[tuple[str, str, int, int]]:
    return [(k.graph, k.what, k.bytes_read, k.bytes_written) for k in run.of("gemm")]


M, K, N = 512, 256, 1024


def test_the_matmuls_of_bf16(linear: Inspection) -> None:
    assert matmuls(linear.run("bf16")) == [
        ("forward", "[512, 256] x [256, 1024] bf16", 2 * (M * K + K * N), 2 * M * N),
        ("backward", "[1024, 512] x [512, 256] bf16", 2 * (M * N + M * K), 2 * N * K),
        ("backward", "[512, 1024] x [1024, 256] bf16", 2 * (M * N + N * K), 2 * M * K),
    ]
    assert linear.run("bf16").rest_bytes == linear.run("bf16").launches == 0
    assert linear.run("bf16").bytes_saved == 0  # it saves its input and its parameter


def test_the_matmuls_of_fp8(linear: Inspection) -> None:
    scales = 2 * 4  # one f32[] for each operand
    assert sorted(matmuls(linear.run("fp8pass dynamic")), reverse=True) == [
        ("forward", "[512, 256] x [256, 1024] e4m3 x e4m3 tensorwise", M * K + K * N + scales, 2 * M * N),
        ("backward", "[512, 1024] x [1024, 256] e5m2 x e4m3 tensorwise", M * N + N * K + scales, 2 * M * K),
        ("backward", "[1024, 512] x [512, 256] e5m2 x e4m3 tensorwise", M * N + M * K + scales, 2 * N * K),
    ]


def quantizing(run: InspectedRun) -> list[Kernel]:
    return [k for k in run.kernels if k.what.startswith("quantize e4m3") and k.graph == "forward"]


def test_a_quantizing_kernel_reads_once_and_writes_each_copy(linear: Inspection) -> None:
    of_input, of_weight = quantizing(linear.run("fp8pass dynamic"))
    assert (
        of_input.what == of_weight.what == "quantize e4m3 x 2"
    )  # one copy as the forward multiplies it, one transposed
    assert (of_input.bytes_written, of_weight.bytes_written) == (2 * M * K, 2 * N * K)
    assert 0 < of_input.bytes_read - 2 * M * K <= 8  # its amax and scale
    assert 0 < of_weight.bytes_read - 2 * N * K <= 8


def test_a_gradient_is_quantized_in_both_orientations_at_once(linear: Inspection) -> None:
    """The amax, which dynamic scaling needs first, is in another kernel."""
    kernels = [k for k in linear.run("fp8pass dynamic").kernels if "quantize e5m2" in k.what]
    assert [(k.what, k.bytes_written) for k in kernels] == [("quantize e5m2 x 2", 2 * M * N)]


def test_totals(linear: Inspection) -> None:
    assert [run.name for run in linear.runs] == ["fp8pass dynamic", "bf16", "torchao tensorwise"]
    for run in linear.runs:
        assert run.gemm_bytes + run.rest_bytes == sum(k.bytes_read + k.bytes_written for k in run.kernels)
        assert run.launches + run.extern_launches + 3 == len(run.kernels)
        assert run.seconds == pytest.approx(sum(k.seconds for k in run.kernels))


def test_times_are_those_of_the_compiled_kernels_and_of_the_roofline(linear: Inspection) -> None:
    for run in linear.runs:
        for k in run.of("triton"):
            assert k.compiled is not None
            assert (k.compiled.code is not None) == (k.bytes_moved > SMALL_KERNEL_BYTES)  # others take a launch
            if k.compiled.code is not None:
                assert k.seconds == kernel_seconds(H100, k.bytes_moved + k.scratch, k.compiled.code)
    first = linear.run("bf16").of("gemm")[0]
    assert first.seconds == gemm_seconds(H100, M, K, N, BF16, 2)
    first = linear.run("fp8pass dynamic").of("gemm")[0]
    assert first.seconds == gemm_seconds(H100, M, K, N, E4M3, 2, "tensorwise")


def test_every_triton_kernel_has_machine_code(linear: Inspection) -> None:
    for k in (k for run in linear.runs for k in run.kernels):
        assert (k.compiled is not None) == (k.kind == "triton")
        if k.compiled is not None:
            assert k.compiled.registers > 0
            assert k.compiled.spilled == 0
            assert k.compiled.loads and set(k.compiled.loads) <= {8, 16, 32, 64, 128}
            assert k.compiled.stores and set(k.compiled.stores) <= {8, 16, 32, 64, 128}
            if (code := k.compiled.code) is not None:
                assert code.programs > 0 and code.once.instructions > 0
                assert code.registers == k.compiled.registers and code.config
    for k in quantizing(linear.run("fp8pass dynamic")):
        assert k.compiled is not None
        assert k.compiled.loads[0] == 128
        # at least 4 numbers in FP8 at a time, in the configuration that is predicted to be the fastest
        assert min(k.compiled.stores) >= 32


def test_facts_of_machine_code() -> None:
    ptx = """
        ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
        @%p1 ld.global.L1::evict_last.L2::cache_hint.b16 { %rs1 }, [ %rd2 + 0 ], %rd9;
        cp.async.ca.shared.global [ %r7 + 0 ], [ %rd3 + 0 ], 0x8, %r9;
        ld.shared.v4.b64 { %r5 }, [ %r6 ];
        st.global.v2.b64 [ %rd4 + 0 ], { %rd5, %rd6 };
        st.global.b8 [ %rd4 + 0 ], { %rs7 };"""
    assert widths(ptx) == ((128, 64, 16), (128, 8))
    report = (
        "Function k:\n  REG:24 STACK:56 SHARED:1024 LOCAL:0 CONSTANT[0]:592 TEXTURE:0"  # ptxas reports 60 spilled bytes
    )
    assert resources(report) == (24, 56)


def test_attention_is_the_gpus_kernel() -> None:
    found = inspect_there("tests.helpers.inspected:attention", run="bf16", options=ANY_SIZE).run("bf16").of("extern")
    q, k, log_sums = 2 * 8 * 128 * 32, 2 * 2 * 128 * 32, 2 * 8 * 128
    named = {k.name.removeprefix("aten."): k for k in found}
    forward = named["_scaled_dot_product_flash_attention"]
    assert forward.what == "scaled_dot_product_attention"
    # the operands are views of one product, each of which counts as the whole product
    assert forward.bytes_written - 2 * q - 4 * log_sums <= 32
    backward = named["_scaled_dot_product_flash_attention_backward"]
    assert backward.bytes_written == 2 * (q + 2 * k)
    assert backward.graph == "backward" and backward.seconds >= forward.seconds


@pytest.mark.parametrize(
    ("spec", "arguments", "message"),
    [
        (
            "tests.helpers.inspected:linear",
            {"target": "h10"},
            "unknown target 'h10': choose one of .* did you mean 'h100'?",
        ),
        ("tests.helpers.inspected:linear", {"peer": "torchao"}, "unknown peer 'torchao': choose one of"),
        ("tests.helpers.inspected:linear", {"recipe": "delaied"}, "did you mean 'delayed'"),
        ("tests.helpers.inspected", {}, "does not name a model: write module:factory"),
        ("tests.nothing:linear", {}, "can't be imported: ModuleNotFoundError: No module named 'tests.nothing'"),
        ("tests.helpers.inspected:looks_at_a_value", {}, "can't be built: .*has sizes but no values|fake tensors"),
        ("tests.helpers.inspected:wrong_shape", {}, "can't be compiled with fp8pass delayed for h100: .*shows where"),
    ],
)
def test_errors_are_one_line(spec: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((Fp8Error, ValueError), match=message) as caught:
        inspect_there(spec, **arguments)
    assert "\n" not in str(caught.value)


def test_errors_about_factories() -> None:
    with pytest.raises(Fp8Error, match="not_a_factory is not callable: write module:factory"):
        _factory("tests.helpers.inspected:not_a_factory")
    with pytest.raises(Fp8Error, match=r"returned Linear: let it return a tuple \(model, \*inputs\)"):
        _built(inspected.no_tuple)
    with pytest.raises(Fp8Error, match="tensor on meta: leave the model and its inputs on the CPU"):
        _built(lambda: (torch.nn.Linear(16, 16, device="meta"), torch.ones(16)))


WITHOUT_TRITON = "inspecting needs Triton, which generates the kernels: pip install triton"


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.backends.compiler", None)
    with pytest.raises(Fp8Error, match=WITHOUT_TRITON):
        FakeCuda(H100)


@pytest.mark.variant
def test_inspect_without_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('no triton here')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Fp8Error, match=WITHOUT_TRITON):
        inspect("tests.helpers.inspected:linear")


def test_passes_after_the_partitioner_run_too() -> None:
    """Inductor's configured pass runs on each graph before code is generated; fp8pass may have such passes."""
    assert pretend("passes") == [2, 2, [1, 1]]


def test_errors_of_torch_are_one_line() -> None:
    work = _Work(Path("answer"), "the model can't be compiled", "Do this.")
    assert work.line(RuntimeError("\nbackend='x' raised:\nValueError: no")) == (
        "the model can't be compiled: ValueError: no. Do this"
    )
    assert work.line(KeyError("k")) == "the model can't be compiled: KeyError: 'k'. Do this"
    assert work.line(Fp8Error("said already\nmore")) == "said already"


@pytest.mark.gate
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the command as users do, in a new process.

    Operands have the same layout on every GPU: cuBLASLt would take other layouts on sm_100, but torch refuses them, and
    then nothing here would compile.
    """
    file = tmp_path / "found.json"
    command = [
        "inspect",
        "tests.helpers.inspected:worthwhile",
        "--target",
        "b200",
        "--recipe",
        "dynamic",
        "--json",
        str(file),
    ]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "one training step for b200" in printed
    assert "All times are predictions, not measurements." in printed
    runs = json.loads(file.read_text())["runs"]
    assert [run["name"] for run in runs] == ["fp8pass dynamic", "bf16"]
    gemms = [k["what"] for k in runs[0]["kernels"] if k["kind"] == "gemm"]
    assert sorted(what.rpartition("] ")[2] for what in gemms) == [
        "e4m3 x e4m3 tensorwise", "e5m2 x e4m3 tensorwise", "e5m2 x e4m3 tensorwise",
    ]  # fmt: skip


def test_a_model_larger_than_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    with inspects_there():
        assert main(["inspect", "tests.helpers.inspected:large", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "fp8pass: a graph has no matmul in FP8" in printed  # no matmul of 16 rows is predicted to pay
    assert f"forward   [16, {1 << 20}] x [{1 << 20}, {1 << 20}] bf16 " in printed
    runs = json.loads(file.read_text())["runs"]
    assert [run["name"] for run in runs] == ["fp8pass delayed", "bf16"]
    assert [k["what"] for k in runs[0]["kernels"]] == [k["what"] for k in runs[1]["kernels"]]


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (10, 1), (10, 3), (11, 0), (12, 0), (12, 1), (13, 0)])
def test_every_capability_has_properties(capability: tuple[int, int]) -> None:
    found = properties(Target("mine", capability, 1e14, 2e14, 1e12))
    assert found.multi_processor_count > 40 and found.L2_cache_size >= 24 << 20
    assert found.shared_memory_per_block_optin == (99 if capability[0] in (8, 12, 13) else 227) << 10
    own = properties(Target("mine", capability, 1e14, 2e14, 1e12, multiprocessors=16, shared_memory=64 << 10))
    assert (own.multi_processor_count, own.shared_memory_per_block_optin) == (16, 63 << 10)


@pytest.mark.gate
def test_a_machine_that_no_table_knows(tmp_path: Path) -> None:
    """Triton compiles for the architecture of the machine's file, with the shared memory that it names."""
    file = tmp_path / "mine.json"
    mine = Target("mine", (12, 1), 1e14, 2e14, 3e11, multiprocessors=20)
    file.write_text(to_json(mine))
    its_kernels = functools.partial(inspect, "tests.helpers.inspected:linear", machine=file, recipe="dynamic", ptx=True)
    if torch.__version__.startswith("2.11."):
        unknown = r"nvdisasm of Triton 3\.6\S* says: .*'SM121a'\. A newer Triton may know this GPU; without ptx"
        with pytest.raises(Fp8Error, match=unknown):
            its_kernels(options=ANY_SIZE)
        return
    found = its_kernels(options=ANY_SIZE)
    assert found.target == "mine" and len(found.runs) == 2
    kernels = [k for run in found.runs for k in run.of("triton")]
    assert kernels and all(k.compiled is not None and k.compiled.shared <= 99 << 10 for k in kernels)
    (gemm, *_) = found.runs[0].of("gemm")
    assert gemm.seconds == gemm_seconds(mine, 512, 256, 1024, E4M3, 2)


def test_a_kernel_that_does_not_fit_is_refused() -> None:
    gpu = FakeCuda.__new__(FakeCuda)
    gpu.target, gpu.properties = TARGETS["rtx5090"], properties(TARGETS["rtx5090"])
    small, large = (Compiled((), (), 64, 0, 2, shared=size << 10) for size in (99, 100))
    assert gpu._fitting("kernel", [small, large]) == [small]
    with pytest.raises(Fp8Error, match="kernel takes 102400 bytes of shared memory, and a block has 101376 on rtx5090"):
        gpu._fitting("kernel", [large])


def test_the_command_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "model"]) == 2
    assert capsys.readouterr().err.startswith("fp8pass inspect: 'model' does not name a model")


def test_nothing_is_faked_in_this_process(linear: Inspection) -> None:
    assert hardware.pretended_device is None
    assert not torch.cuda.is_initialized()
    assert linear.torch == torch.__version__


def test_rows_are_values() -> None:
    row = Kernel("forward", "triton", "k", "what", "m", 3, 4, 5, 1e-6)
    assert row.bytes_moved == 7
    run = InspectedRun("r", (row, row), 0)
    assert (run.rest_bytes, run.gemm_bytes, run.launches, run.extern_launches) == (14, 0, 2, 0)


def test_matmuls_of_any_number_of_tokens_are_fused() -> None:
    """The compiler asks for no kernel per number: M is an argument of the one that it generates."""
    options = {**ANY_SIZE, "epilogues": "always"}
    (found,) = inspect_there(
        "tests.helpers.inspected:any_number_of_tokens", run="fp8pass delayed", ptx=True, options=options
    ).runs
    fused = [k for k in found.kernels if k.name.startswith("scaled_mm_fused")]
    rows = fused[0].what[1:].partition(",")[0]
    assert rows.startswith("s")  # torch's symbol
    assert [(k.graph, k.what) for k in fused] == [
        ("forward", f"[{rows}, 256] x [256, 1024] e4m3 x e4m3 tensorwise, its epilogue writes e4m3, bf16"),
        ("backward", f"[{rows}, 256] x [256, 1024] e5m2 x e4m3 tensorwise, its epilogue writes e5m2"),
    ]
    other = [k for k in found.kernels if k.kind == "gemm" and k not in fused]
    assert {k.pays_from for k in (*fused, *other)} == {"never"}  # these are small
    for k in found.of("gemm"):
        m = sympy.Symbol(rows)
        seconds, moved = (sympy.sympify(of, {rows: m}).subs(m, 512) for of in (k.seconds_formula, k.bytes_formula))
        if k in other and "Mod" not in k.seconds_formula:  # the summed rows are padded, by functions of torch
            assert float(seconds) == pytest.approx(k.seconds)
            assert 0 <= k.bytes_moved - int(moved) <= 2 * 256 + 16  # a bias and scales
    assert any(f"{rows} is args[0].shape[0], from 2 on; 512 in the call" in note for note in found.notes)
    assert all(k.compiled is not None and not k.compiled.spilled for k in fused)


@pytest.mark.parametrize("recipe", ["delayed", "dynamic", "rowwise"])
def test_frozen_layers_at_a_small_batch_are_not_slower_than_in_bf16(recipe: str) -> None:
    """By prediction: what would be, `min_speedup` declines, and layers that it declines are not merged."""
    ours, bf16 = inspect_there("tests.helpers.inspected:adapted", recipe=recipe).runs
    assert ours.seconds <= 1.001 * bf16.seconds


def test_each_of_equal_layers_is_counted() -> None:
    """Compiled once, as in training, they would be one."""
    run = inspect_there("tests.helpers.inspected:equal_layers", run="fp8pass delayed", options=ANY_SIZE).runs[0]
    assert [len(run.of("gemm")), {k.graph for k in run.kernels}] == [18, {"forward", "backward"}] and not run.notes


def test_a_saturated_tensor_is_quantized_again_by_one_more_kernel() -> None:
    """Each tensor is read once, as without the option; the two that activations compute are written for that kernel."""
    spec = "tests.helpers.inspected:mlp"
    once, again = (
        inspect_there(spec, recipe=recipe, run=f"fp8pass {recipe}", options=ANY_SIZE).run(f"fp8pass {recipe}")
        for recipe in ("delayed", "test-again")
    )
    for k in once.of("triton"):  # not compiled: by bytes alone
        both, moved = " x 2" in k.what and "quantize" in k.what, k.bytes_moved + k.scratch
        assert k.seconds in ({memory_seconds(H100, moved, "transposed_share")} if both else
                             {memory_seconds(H100, moved), memory_seconds(H100, moved, "rows_share")})  # fmt: skip
    quantize = [k.what for k in again.kernels if "quantize e" in k.what]
    extra = [k for k in again.kernels if k.name.startswith("requantize_if_saturated")]
    assert [(k.graph, k.bytes_read, k.bytes_written) for k in extra] == [("forward", 5, 0)] * 4 + [
        ("backward", 5, 0)
    ] * 2
    assert {k.what for k in extra} == {f"quantize {fmt} x 2 again if saturated" for fmt in ("e4m3", "e5m2")}
    assert len(quantize) == 6 + len(extra)
    written = 2 * 2 * M * N  # the result of GELU, and its gradient
    assert written <= again.rest_bytes - once.rest_bytes < 1.25 * written
    assert {k.what for k in once.of("gemm")} == {k.what for k in again.of("gemm")}


def test_kernels_that_share_a_launch_are_predicted_in_their_configurations_too() -> None:
    """Inductor times the configurations of each such kernel in turn."""

    def config(**blocks: int) -> Any:
        return SimpleNamespace(kwargs=blocks, num_warps=4)

    base = config(XBLOCK_0=1, XBLOCK_1=128, XBLOCK_2=1)
    groups = [
        {"member_indices": [0, 2], "configs": [config(XBLOCK=1), config(XBLOCK=8), config(XBLOCK=32)]},
        {"member_indices": [1], "configs": [config(XBLOCK=128), config(XBLOCK=64, R0_BLOCK=8)]},
    ]
    tuner = SimpleNamespace(configs=[base], inductor_meta={"combo_tuning_groups": groups})
    assert [c.kwargs for c in _choices(tuner)] == [
        {"XBLOCK_0": 1, "XBLOCK_1": 128, "XBLOCK_2": 1},
        {"XBLOCK_0": 8, "XBLOCK_1": 64, "XBLOCK_2": 8},
        {"XBLOCK_0": 32, "XBLOCK_1": 64, "XBLOCK_2": 32},
    ]
    assert _choices(SimpleNamespace(configs=[base], inductor_meta={})) == [base]
