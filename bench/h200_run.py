"""Measure one contender on one workload: one of the processes that h200.py starts.

    python bench/h200_run.py WORK--WHO FOLDER [--device cpu] [--quick]

It compiles, makes FOLDER/WORK--WHO.ready, reads a line from its stdin, measures, and writes FOLDER/WORK--WHO.jsonl
with its results. `dB` compares output, gradient of the input and of each parameter with float32, op by op;
from there BF16 has 56 dB and FP8 less than 30, so float32 is as good as exact. Layers take turns with BF16 under
Inductor, so that a drift of clocks affects both: `ms` has both medians, and `p20_80` two percentiles of the speed-up.
`peak` are the bytes that a step needs in addition to weights, optimizer and inputs, `peak_GB` all that it needs.
`host_ms` is the time in which the host issues a step, `compile_s` that of the first two steps of a whole model, or four
of a layer. `loss` has that of the fifth step, and that of the last one, of which `steps` is the number. `kernels` is a
profile: [name, ms per step, launches per step]. `table` has each Triton kernel that stores FP8, with each of its
configurations.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from h200 import LAYERS, MODELS, OURS, QUICK, QUICK_SHAPES, SHAPES, TORCHAO, Row, linear, seconds, with_unit_products
from torch import Tensor, nn
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.profiler import ProfilerActivity, profile

import fp8pass
from fp8pass.base._torch import counters, dynamo_config, functorch_config, inductor_config
from fp8pass.graph.prediction import in_words
from fp8pass.hardware import Target, scales_rows, target_of, why_no_block_kernel, why_no_fp8
from fp8pass.recipes import DelayedScaling
from fp8pass.report.report import collect
from fp8pass.roofline import ROWS, pays_from, predicted_speedup

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


Bounds = tuple[float, float]
"""The least SQNR relative to float32, in dB: of the output, and of each single gradient."""

# Rounding to bfloat16 has 56 dB, products of e4m3 have 28 dB and those of e5m2 gradients 24 dB (docs/numerics.md), at
# any size; with wrong scales or operands less than 5 dB are left. The noise of successive layers adds up: the bounds
# are about 4 dB below the results of small models on a CPU.
LINEAR = {"bf16": (45.0, 45.0), "fp8": (26.0, 22.0)}
LAYER = {"bf16": (42.0, 33.0), "fp8": (24.0, 14.0)}
GEMM = {"exact": (45.0, 0.0), "fast_accum": (25.0, 0.0)}  # Hopper's fast accumulation keeps about 14 bits


def sqnr(wanted: Tensor, got: Tensor) -> float:
    """Return the power of a tensor over that of the differences, in dB: 300 for equal tensors, NaN with a NaN."""
    signal, noise = (float(t.double().square().sum()) for t in (wanted, wanted.double() - got.double()))
    if math.isnan(noise):
        return math.nan
    return min(300.0, 10 * math.log10(signal / noise)) if signal and noise else 300.0 if not noise else -300.0


def why_wrong(found: Sequence[float], bounds: Bounds) -> str:
    """Return a status: "ok", or a text with the figures below their bounds."""
    least = [bounds[0], *[bounds[1]] * (len(found) - 1)][: len(found)]
    low = [f"dB {i} is {dB:.1f}, not {b}" for i, (dB, b) in enumerate(zip(found, least, strict=True)) if not dB >= b]
    return f"wrong: {', '.join(low)}" if low else "ok"


# ---------------------------------------------------------------------------------------------------------- compiling


@dataclass(frozen=True)
class Job:
    """Holds the workload and the contender that this process measures."""

    work: str
    who: str
    device: torch.device
    quick: bool

    @property
    def cuda(self) -> bool:
        """Return whether there is a GPU."""
        return self.device.type == "cuda"

    @property
    def target(self) -> Target | None:
        """Return fp8pass's description of the GPU; None if there is none."""
        return target_of(self.device)

    @property
    def is_ours(self) -> bool:
        """Return whether the contender is fp8pass."""
        return self.who.removeprefix("t_") in OURS

    @property
    def options(self) -> Row:
        """Return the options of fp8pass; a dry run without a GPU runs graphs op by op, and does not test Inductor."""
        return OURS[self.who.removeprefix("t_")] | ({} if self.cuda else {"lowering": "eager"})

    @property
    def mode(self) -> str | None:
        """Return the mode of torch.compile."""
        return OURS["graphs"]["mode"] if self.who == "graphs" else None

    def why_not(self) -> str:
        """Return why this contender can't run on this device; "" if it can."""
        if self.who in ("bf16", "jax"):
            return ""
        recipe = str(OURS.get(self.who.removeprefix("t_"), {}).get("recipe"))
        if recipe in ("blockwise", "mxfp8") and (why := why_no_block_kernel(recipe, self.device, self.target)):
            return why
        rows = self.who == "ao_rowwise" or (self.work, self.who) == ("gemm", "rowwise")
        if rows and not scales_rows(self.device, self.target):
            return "torch._scaled_mm takes no scales for rows on this device"
        return why_no_fp8(self.device, self.target)


def by_inductor(job: Job, model: nn.Module) -> Callable[..., Any]:
    """Compile a model with Inductor, or, in a dry run without a GPU, with "aot_eager"."""
    if not job.cuda:
        return torch.compile(model, backend="aot_eager", dynamic=False)
    return torch.compile(model, dynamic=False, mode=job.mode)


def compiled(job: Job, model: nn.Module, **options: Any) -> tuple[nn.Module, Callable[..., Any]]:
    """Compile a model, which may be changed, for the contender; return it and its compiled function."""
    if job.who in TORCHAO:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(job.who.removeprefix("ao_"))
        model = convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name)
    if job.who not in OURS:
        return model, by_inductor(job, model)
    return model, torch.compile(model, backend="fp8pass", dynamic=False, options=job.options | options)


def patiently(call: Callable[[], Any]) -> Any:
    """Call again while there is no memory, which the other runs have as long as they compile."""
    for _ in range(20):
        with contextlib.suppress(torch.OutOfMemoryError):
            return call()
        free()
        time.sleep(5)
    return call()


def free() -> None:
    """Give memory that is not in use to the other runs."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ----------------------------------------------------------------------------------------------------------- measuring


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values does not exceed."""
    return sorted(values)[round(share * (len(values) - 1))]


def in_turns(job: Job, base: Callable[[], Any], call: Callable[[], Any], rounds: int = 40) -> Row:
    """Time BF16 and the contender in turns; return both medians, and the speed-up of pairs."""
    bf16, fp8 = (found[3:] for found in seconds(job.device, [base, call], 3 + (3 if job.quick else rounds)))
    ratios = [b / f for b, f in zip(bf16, fp8, strict=True)]
    return {
        "ms": [round(1e3 * statistics.median(times), 4) for times in (bf16, fp8)],
        "speedup": round(statistics.median(ratios), 3),
        "p20_80": [round(percentile(ratios, share), 3) for share in (0.2, 0.8)],
    }


def host_seconds(job: Job, call: Callable[[], Any]) -> float:
    """Return the seconds that the host takes to issue a call, median of 5; 0 on a CPU, where it issues nothing.

    If the GPU is faster than the host, `seconds` has measured the host.
    """
    found = [0.0]
    for _ in range(5 if job.cuda else 0):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:] or found)


def peak_memory(job: Job, call: Callable[[], Any]) -> tuple[int, int] | tuple[None, None]:
    """Return the most bytes that are allocated in a call, without those before it and with them; None on a CPU."""
    if not job.cuda:
        return None, None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    return peak - before, peak


def kernels_of(job: Job, call: Callable[[], Any], steps: int = 3) -> list[tuple[str, float, float]]:
    """Return the longest kernels, on a CPU operators: name, ms per step, launches per step."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if job.cuda else [])]
    with profile(activities=activities, acc_events=True) as profiled:
        for _ in range(steps):
            call()
        if job.cuda:
            torch.cuda.synchronize()
    found = []
    for event in profiled.key_averages():
        if (event.device_type.name == "CUDA") == job.cuda and not event.is_user_annotation:
            took = event.self_device_time_total if job.cuda else event.self_cpu_time_total
            found.append((event.key[:150], took / steps / 1e3, event.count / steps))
    return sorted(found, key=lambda kernel: -kernel[1])[:45]


# ------------------------------------------------------------------------------------------------- configurations


@contextlib.contextmanager
def tuning_later() -> Iterator[None]:
    """Let kernels run in their first configuration until `tuned` chooses: times are wrong while others compile."""

    def first(tuner: Any, *_: Any, **__: Any) -> None:
        tuner.all_launchers = tuner.launchers
        tuner.launchers = tuner.launchers[:1]

    with mock.patch.object(CachingAutotuner, "autotune_to_one_config", first):
        yield


def tuned(device: torch.device, step: Callable[[], Any]) -> list[Row]:
    """Run a step, and before the first launch of each kernel choose its fastest configuration.

    Returns a row for each kernel that stores FP8.
    """
    run, rows = CachingAutotuner.run, {}

    def choose_and_run(tuner: Any, *arguments: Any, stream: Any, **named: Any) -> Any:
        if id(tuner) not in rows:
            rows[id(tuner)] = choose(device, tuner, arguments, stream)
        return run(tuner, *arguments, stream=stream, **named)

    with mock.patch.object(CachingAutotuner, "run", choose_and_run):
        step()
    return [row for row in rows.values() if row["stores_fp8"]]


def choose(device: torch.device, tuner: Any, arguments: Sequence[Any], stream: Any, rounds: int = 15) -> Row:
    """Time all configurations of a kernel in turns with a copy of as many bytes; set and return the fastest.

    Configurations whose registers spill are not chosen, as Inductor does not.
    """
    launchers = getattr(tuner, "all_launchers", tuner.launchers)
    stores_fp8 = any("out" in name and str(t).startswith("*fp8") for name, t in tuner.triton_meta["signature"].items())
    if not launchers or not (stores_fp8 or len(launchers) > 1):  # it has yet to compile, or has nothing to choose
        return {"stores_fp8": False}
    given, _ = tuner.clone_args(*arguments)
    moved = moved_bytes(tuner, arguments)
    source, into = torch.empty(2, max(1, moved // 2), dtype=torch.uint8, device=device)
    calls = [lambda: into.copy_(source), *(partial(launcher, *given, stream=stream) for launcher in launchers)]
    copy_us, *us = (1e6 * statistics.median(times[2:]) for times in seconds(device, calls, rounds))
    held = [tuner.custom_kernel or (launcher.n_spills or 0) <= 16 for launcher in launchers]
    tuner.reset_to_zero_args(*arguments)
    best = min(range(len(us)), key=lambda i: (not held[i], us[i]))
    tuner.launchers, tuner._cached_launcher = [launchers[best]], None
    configurations = [
        {
            **launcher.config.kwargs,
            "num_warps": launcher.config.num_warps,
            "num_stages": launcher.config.num_stages,
            "registers": launcher.n_regs,
            "spills": launcher.n_spills,
            "us": round(time, 2),
            "GB_s": round(moved / time / 1e3, 1),
            "share_of_copy": round(copy_us / time, 3),
            "chosen": i == best,
        }
        for i, (launcher, time) in enumerate(zip(launchers, us, strict=True))
    ]
    return {"stores_fp8": stores_fp8, "kernel": tuner.fn.__name__, "bytes": moved, "configurations": configurations}


def moved_bytes(tuner: Any, arguments: Sequence[Any]) -> int:
    """Return the bytes that a kernel reads and writes, as Inductor counts them; of a fused matmul, all its tensors."""
    if counted := tuner.inductor_meta.get("kernel_num_gb"):
        return round(1e9 * counted)
    return sum({a.data_ptr(): a.nbytes for a in arguments if isinstance(a, Tensor)}.values())


# -------------------------------------------------------------------------------------------------------------- layers


@dataclass
class Subject:
    """A compiled model with its input."""

    model: nn.Module
    run: Callable[..., Tensor]
    x: Tensor
    cotangent: Tensor

    def step(self) -> Tensor:
        """Run forward and backward; return the output."""
        torch.compiler.cudagraph_mark_step_begin()
        self.clear()
        output = self.run(self.x)
        output.backward(self.cotangent.to(output.dtype))
        return output

    def clear(self) -> None:
        """Set all gradients to None."""
        for t in (*self.model.parameters(), self.x):
            t.grad = None

    def results(self) -> list[Tensor]:
        """Run a step, and return output and gradients, cloned, because a CUDA graph writes its next ones there."""
        output = self.step()
        grads = [t.grad for t in (self.x, *self.model.parameters())]
        return [t.detach().clone() for t in (output, *grads) if t is not None]


def prepare_layer(job: Job, made: nn.Module, x: Tensor, bounds: dict[str, Bounds], row: Row) -> Callable[[], Row]:
    """Compile BF16 and the contender, compare the contender with float32; return the function that times them."""
    model = with_unit_products(made).to(BF16)
    x = x.detach().to(BF16).requires_grad_()
    with torch.no_grad():
        cotangent = torch.randn_like(model(x))
    exact = Subject(wide := copy.deepcopy(model).float(), wide, x.detach().float().requires_grad_(), cotangent)
    wanted = patiently(exact.results)
    del exact, wide
    # torchao comes after BF16, for it patches Inductor's min and max
    base = Subject(same := copy.deepcopy(model), by_inductor(job, same), x, cotangent)
    for _ in range(4):
        patiently(base.step)
    begun = time.perf_counter()
    with collect() as report:
        options = {"min_speedup": 0} if job.work == "linear" else {}  # to check the rule, even what it would decline
        subject = Subject(*compiled(job, model, **options), x, cotangent)
        for _ in range(4):  # delayed scaling has its scales after one step, CUDA graphs are recorded in the third
            patiently(subject.step)
    row |= {"compile_s": round(time.perf_counter() - begun, 1)}
    row["dB"] = [round(sqnr(*pair), 1) for pair in zip(wanted, patiently(subject.results), strict=True)]
    row["status"] = why_wrong(row["dB"], bounds["bf16" if job.who == "bf16" else "fp8"])
    if job.is_ours:
        row |= {"matmuls": report.summary(), "declined": sorted(report.rules())}
        if not report.rewritten:
            row["status"] = f"wrong: nothing runs in FP8; {report.summary()}"
    if job.mode and job.cuda and (count := counters["inductor"]["cudagraph_skips"]):
        row["status"] = f"wrong: {count} CUDA graphs skipped; TORCH_LOGS=cudagraphs says why"
    base.clear()
    subject.clear()
    return partial(time_layer, job, row, base, subject)


def time_layer(job: Job, row: Row, base: Subject, subject: Subject) -> Row:
    """Return the row with times, memory and kernels."""
    if not job.mode:
        tuned(job.device, base.step)
        row["table"] = tuned(job.device, subject.step)
    row |= in_turns(job, base.step, subject.step)
    row["host_ms"] = round(1e3 * host_seconds(job, subject.step), 3)
    for name, one in (("peak_bf16", base), ("peak", subject)):
        base.clear()
        subject.clear()
        row[name], _ = peak_memory(job, one.step)
    row["kernels"] = kernels_of(job, subject.step)
    if job.who == "delayed":
        row["kernels_bf16"] = kernels_of(job, base.step)
    return row


def layers(job: Job) -> Iterator[Callable[[], Row]]:
    """Prepare one of the layers."""
    make = LAYERS[job.work]
    with job.device:
        made, x = make(**(QUICK[make] if job.quick else {}))
        yield prepare_layer(job, made, x, LAYER, {})


def linears(job: Job) -> Iterator[Callable[[], Row]]:
    """Prepare a linear layer of each shape, with what the roofline predicts for delayed scaling."""
    for m, k, n in QUICK_SHAPES if job.quick else SHAPES:
        row: Row = {"m": m, "k": k, "n": n}
        if job.target is not None:
            row["predicted_speedup"] = predicted_speedup(job.target, m, k, n, DelayedScaling())
            row["pays_from_m"] = in_words(pays_from(job.target, ROWS, k, n, DelayedScaling()))
        with job.device:
            made, x = linear(m, k, n)
            yield prepare_layer(job, made, x, LINEAR, row)


# --------------------------------------------------------------------------------------------------------- whole steps


SAME: Row = {"use_cache": False, "vocab_size": 32000, "num_attention_heads": 32, "num_key_value_heads": 8}
WIDTHS: dict[str, Row] = {
    "hf_8b_4l": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4},
    "hf_1b_8l": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8},
    "hf_160m": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
    | dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 12),
}
VOCABULARY = {"gpt2": (50304, 128), "gpt2_50257": (50257, 129)}
"""The words of each GPT-2, and of its tiny form: a multiple of 64, and transformers' own number, which is odd."""


def config_of(job: Job) -> tuple[Any, int, int]:
    """Return the config of a model of transformers, the batch, and the length."""
    from transformers import GPT2Config, LlamaConfig

    if job.work in VOCABULARY:
        words, few = VOCABULARY[job.work]
        off = {"use_cache": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        if job.quick:
            return GPT2Config(vocab_size=few, n_embd=64, n_layer=2, n_head=4, n_positions=16, **off), 2, 16
        return GPT2Config(vocab_size=words, **off), 8, 1024
    if job.quick:
        tiny = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
        return LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, **SAME | tiny), 2, 16
    return LlamaConfig(**SAME | WIDTHS[job.work], max_position_embeddings=2048), 4, 2048


def steps(job: Job) -> Iterator[Callable[[], Row]]:
    """Prepare whole steps, with AdamW, of a model of transformers."""
    from transformers import AutoModelForCausalLM

    config, batch, length = config_of(job)
    with job.device:
        # some CPUs multiply BF16 100 times slower than float32
        model = AutoModelForCausalLM.from_config(config).to(BF16 if job.cuda else torch.float32)
        ids = torch.randint(config.vocab_size, (batch, length))
    row: Row = {"params": sum(p.numel() for p in model.parameters()), "tokens": ids.numel(), "steps": 0}

    def step() -> Tensor:
        loss = call()
        row["steps"] += 1
        return loss

    begun = time.perf_counter()
    with collect() as report:
        call = step_of(job, model, ids)
        for _ in range(5):
            loss = patiently(step)
            if row["steps"] <= 2:  # the second step is the first with state of FP8 and of AdamW
                row["compile_s"] = round(time.perf_counter() - begun, 1)
            free()
    row["loss"] = [round(loss.item(), 4)]
    if job.is_ours:
        row |= {"matmuls": report.summary(), "fp8_share": report.fp8_share, "declined": sorted(report.rules())}
    if job.who in TORCHAO:
        row["converted"] = sum(type(module).__name__ == "Float8Linear" for module in model.modules())
    yield partial(time_step, job, row, step)


def step_of(job: Job, model: nn.Module, ids: Tensor) -> Callable[[], Tensor]:
    """Return a compiled step of a model, which returns the loss."""
    if whole := job.who.startswith("t_"):
        run: Callable[..., Any] = model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)
    else:
        model, run = compiled(job, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=job.cuda)

    def step(ids: Tensor) -> Tensor:
        loss: Tensor = run(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    call = fp8pass.train_step(**job.options)(step) if whole else step

    def marked() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return call(ids)

    return marked


def time_step(job: Job, row: Row, step: Callable[[], Tensor]) -> Row:
    """Return the row with times, memory and kernels."""
    if not job.mode:
        row["table"] = tuned(job.device, step)
    ms = [1e3 * s for s in seconds(job.device, [step], 6 if job.quick else 18)[0][3:]]
    row["ms"] = round(statistics.median(ms), 3)
    row["spread"] = [round(percentile(ms, share), 3) for share in (0.15, 0.85)]
    row["tokens_s"] = round(1e3 * row["tokens"] / row["ms"])
    row["host_ms"] = round(1e3 * host_seconds(job, step), 3)
    _, peak = peak_memory(job, step)
    row["peak_GB"] = None if peak is None else round(peak / 1e9, 2)
    row["kernels"] = kernels_of(job, step, 2)
    row["loss"].append(round(step().item(), 4))
    row["status"] = "ok" if math.isfinite(row["loss"][-1]) else f"wrong: the loss is {row['loss'][-1]}"
    return row


# ------------------------------------------------------------------------------------------------- matmuls alone, peers


def gemms(job: Job) -> Iterator[Callable[[], Row]]:
    """Prepare `torch._scaled_mm` alone against `torch.mm`, which bounds the gain of FP8."""
    for shape in QUICK_SHAPES if job.quick else ((8192, 8192, 8192), *SHAPES):
        for fast in (True, False):
            yield partial(one_gemm, job, shape, fast)


def one_gemm(job: Job, shape: tuple[int, int, int], fast: bool) -> Row:
    """Measure one shape on random data, with scales from the data's amaxes."""
    m, k, n = shape
    torch.manual_seed(0)
    a, b = (torch.randn(rows, k, device=job.device, dtype=BF16) for rows in (m, n))
    (a_q, a_inv), (b_q, b_inv) = (quantized(t, job.who) for t in (a, b))

    def fp8() -> Tensor:
        return torch._scaled_mm(a_q, b_q.t(), a_inv, b_inv.t(), out_dtype=BF16, use_fast_accum=fast)

    dB = [round(sqnr((a_q.float() * a_inv) @ (b_q.float() * b_inv).t(), fp8()), 1)]
    row: Row = {"m": m, "k": k, "n": n, "fast_accum": fast, "dB": dB}
    row["status"] = why_wrong(dB, GEMM["fast_accum" if fast else "exact"])
    row |= in_turns(job, lambda: a @ b.t(), fp8)
    return row | {"tflops": [round(2e-9 * m * k * n / ms, 1) for ms in row["ms"]]}


def quantized(x: Tensor, recipe: str) -> tuple[Tensor, Tensor]:
    """Quantize x [R, K]; return f8e4m3fn[R, K] and scale_inv, f32[] or f32[R, 1]."""
    amax = (x.abs().amax(1, keepdim=True) if recipe == "rowwise" else x.abs().amax()).float()
    scale = 448 / amax
    return (x.float() * scale).clamp(-448, 448).to(E4M3), 1 / scale


def xla(job: Job) -> Iterator[Callable[[], Any]]:
    """Prepare XLA against its own BF16, in another process, which loads libraries and allocates as it likes."""
    if importlib.util.find_spec("jax") is None:
        raise ModuleNotFoundError("No module named 'jax'")
    for shape in QUICK_SHAPES if job.quick else SHAPES[:1]:
        yield partial(by_xla, job, shape)


def by_xla(job: Job, shape: tuple[int, int, int]) -> list[Row]:
    """Run bench/xla_linear.py, and return its results; those that it has measured have no status yet."""
    command = [sys.executable, str(Path(__file__).with_name("xla_linear.py")), *map(str, shape), job.device.type]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    rows = json.loads(done.stdout.splitlines()[-1])
    return [{"status": why_wrong(row.get("dB", []), LINEAR["fp8"])} | row for row in rows]


WORKS: dict[str, Callable[[Job], Iterator[Callable[[], Any]]]] = {
    **dict.fromkeys(LAYERS, layers),
    **dict.fromkeys(MODELS, steps),
    "linear": linears,
    "gemm": gemms,
    "xla": xla,
}


def results(job: Job, ready: Callable[[], None]) -> Iterator[Row]:
    """Yield the results of a run, or why it has none. ready: called when all is compiled; returns in its turn."""
    if why := job.why_not():
        yield {"status": f"skipped: {why}"}
        return
    torch.manual_seed(0)
    try:
        prepared = list(WORKS[job.work](job))
    except ImportError as error:
        yield {"status": f"skipped: {error}"}
        return
    free()
    ready()
    for measure in prepared:
        found = measure()
        yield from found if isinstance(found, list) else [found]


def main() -> None:
    """Measure what the arguments name; append each result to the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    work, who = given.name.split("--")
    job = Job(work, who, torch.device(given.device), given.quick)

    def ready() -> None:
        (given.folder / f"{given.name}.ready").touch()
        if not sys.stdin.readline():
            sys.exit("h200.py has ended")

    warnings.filterwarnings("ignore", message="fp8pass: .* kernels exist")
    # on a cache hit there would be no verdicts to report; Inductor counts a kernel's bytes with `benchmark_kernel` only
    settings = dynamo_config.patch(recompile_limit=64), functorch_config.patch(enable_autograd_cache=False)
    with contextlib.ExitStack() as stack, (given.folder / f"{given.name}.jsonl").open("w") as file:
        for setting in (*settings, inductor_config.patch(benchmark_kernel=True)):
            stack.enter_context(setting)
        if not job.mode:  # kernels in a CUDA graph can't be chosen later
            stack.enter_context(tuning_later())
        for row in results(job, ready):
            file.write(json.dumps(row) + "\n")
            file.flush()
    os._exit(0)  # giving the memory back takes a second, in which the next run would wait


if __name__ == "__main__":
    main()
