"""Measure speed, memory and correctness on one GPU, in one command that ends within 8 minutes.

    python bench/h200.py                           prints a table, and writes all of it to h200.json
    python bench/h200.py --kernels                 also lists the MLP's kernels, and the share of GEMMs in its time
    python bench/h200.py --device cpu --quick      is a dry run without a GPU: its tiny sizes say nothing about speed

It needs torch, and fp8pass installed (`pip install -e .`; offline with --no-build-isolation --no-deps). Peers that are
not installed are skipped, with the reason. Every contender takes turns with BF16 under Inductor, so that a drift of
clocks affects both. Times are of CUDA events, with caches flushed in between, as medians and 20th and 80th percentiles.
Before a contender is timed, its outputs and gradients are compared with float64. Sections run in the order of
importance; sections and points for which no time is left say so. The exit status is 1 if a result is wrong or fp8pass
failed, 3 if the time was up during a measurement.

Points have `seconds_bf16`, `seconds_fp8` and `speedup`, each with `_p20` and `_p80`; for the recipe "bf16" both times
are BF16's, and the speedup shows the noise. `peak_bytes` are the bytes that a step needs in addition to weights,
optimizer and inputs. `host_bound` says that the host issued kernels more slowly than they ran. `predicted_speedup` is
computed by fp8pass's rule, and not measured; so is `pays_from_m`, the rows M from which that rule takes such a layer.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import importlib.metadata
import importlib.util
import inspect
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from blocks import GPT2MLP, LlamaBlock, LlamaMLP
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fp8pass._torch import counters, dynamo_config, functorch_config
from fp8pass.graph.prediction import in_words
from fp8pass.hardware import Target, scales_rows, target_of, why_no_block_kernel, why_no_fp8
from fp8pass.recipes import DelayedScaling
from fp8pass.report.report import collect
from fp8pass.roofline import ROWS, pays_from, predicted_speedup

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
OUT_OF_TIME = "skipped: out of time"
DRY_RUN = "a dry run: tiny sizes, wall clock, graphs run op by op; it says nothing about speed"

# The shapes of Llama 2 70B that torchao benchmarks (M = 4 x 4096), the two of torchao's README, a square for the peak.
LLAMA_SHAPES = (16384, 8192, 7168), (16384, 3584, 8192), (16384, 1024, 8192), (16384, 8192, 1280)
README_SHAPES = (4096, 8192, 16384), (1024, 2048, 1024)
SHAPES = *LLAMA_SHAPES, *README_SHAPES
SQUARE = 8192, 8192, 8192
QUICK_SHAPES = ((128, 64, 96),)

RECIPES = ("delayed", "dynamic", "rowwise", "blockwise", "mxfp8")
TORCHAO = ("tensorwise", "rowwise")
VARIANTS: dict[str, dict[str, Any]] = {
    "delayed, fused": {"epilogues": "always"},  # matmuls that quantize their result, wherever it is possible
    "delayed, save_fp8": {"save_fp8": True},
    "delayed, save_fp8, fused": {"save_fp8": True, "epilogues": "always"},
}
"""Recipes with further options."""
ALL = (*RECIPES, *VARIANTS, *(f"torchao {recipe}" for recipe in TORCHAO))


@dataclass(frozen=True)
class Bounds:
    """The least SQNR relative to float64, in dB. worst: the bound for each single parameter's gradient."""

    output: float
    gradients: float
    worst: float


# Rounding to bfloat16 has 56 dB, products of e4m3 have 28 dB and those of e5m2 gradients 24 dB (docs/numerics.md), at
# any size; with wrong scales or operands less than 5 dB are left. The noise of successive layers adds up: the bounds
# are about 4 dB below the results of small models on a CPU.
LINEAR = {"bf16": Bounds(45, 45, 45), "fp8": Bounds(26, 22, 22)}
LAYER = {"bf16": Bounds(42, 38, 33), "fp8": Bounds(24, 16, 14)}
LLAMA = {"bf16": Bounds(35, 34, 30), "fp8": Bounds(35, 13, 10)}
GEMM = {"exact": Bounds(45, 0, 0), "fast_accum": Bounds(25, 0, 0)}  # Hopper's fast accumulation keeps about 14 bits


# ---------------------------------------------------------------------------------------------------------- models


class Llama(nn.Module):
    """A Llama that maps tokens and next tokens, both i64[B, S], to the mean cross-entropy."""

    def __init__(self, layers: int, width: int, hidden: int, heads: int, groups: int, length: int, words: int) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(words, width), nn.RMSNorm(width, eps=1e-5)
        self.layers = nn.Sequential(*(LlamaBlock(width, hidden, heads, groups, length) for _ in range(layers)))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy f32[] of tokens and targets, both i64[B, S]."""
        logits = self.head(self.norm(self.layers(self.embed(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def llama_mlp(tokens: int = 8192, width: int = 4096, hidden: int = 14336) -> tuple[Any, ...]:
    """Return the MLP of Llama 3 8B, with its residual, and its input."""
    return LlamaMLP(width, hidden), torch.randn(tokens, width, requires_grad=True)


def gpt2_mlp(tokens: int = 8192, width: int = 4096, hidden: int = 16384) -> tuple[Any, ...]:
    """Return the MLP of a layer like GPT-2's, with GELU, biases and its residual, and its input."""
    return GPT2MLP(width, hidden), torch.randn(tokens, width, requires_grad=True)


class SquaredMLP(nn.Module):
    """down(relu(up(x)) squared), without a residual, as in modded-nanogpt."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., width] to the same shape."""
        result: Tensor = self.down(F.relu(self.up(x)).square())
        return result


def relu2_mlp(tokens: int = 32768, width: int = 768, hidden: int = 3072) -> tuple[Any, ...]:
    """Return an MLP of the size of modded-nanogpt's, and its input."""
    return SquaredMLP(width, hidden), torch.randn(tokens, width, requires_grad=True)


def llama_block(
    batch: int = 4, length: int = 2048, width: int = 4096, hidden: int = 14336, heads: int = 32, groups: int = 8
) -> tuple[Any, ...]:
    """Return one layer of Llama 3 8B, and its input."""
    model = LlamaBlock(width, hidden, heads, groups, length)
    return model, torch.randn(batch, length, width, requires_grad=True)


def llama(
    batch: int = 4,
    length: int = 2048,
    words: int = 32000,
    layers: int = 4,
    width: int = 2048,
    hidden: int = 5632,
    heads: int = 16,
    groups: int = 8,
) -> tuple[Any, ...]:
    """Return a Llama with 0.3 billion parameters, tokens, and the next tokens."""
    text = torch.randint(words, (batch, length + 1))
    model = Llama(layers, width, hidden, heads, groups, length, words)
    return model, text[:, :-1].contiguous(), text[:, 1:].contiguous()


def linear(m: int, k: int, n: int) -> tuple[Any, ...]:
    """Return one linear layer, and its input."""
    return nn.Linear(k, n, bias=False), torch.randn(m, k, requires_grad=True)


QUICK = {
    llama_mlp: {"tokens": 64, "width": 64, "hidden": 96},
    gpt2_mlp: {"tokens": 64, "width": 64, "hidden": 96},
    relu2_mlp: {"tokens": 64, "width": 64, "hidden": 96},
    llama_block: {"batch": 2, "length": 16, "width": 64, "hidden": 96, "heads": 4, "groups": 2},
    llama: {"batch": 2, "length": 16, "words": 128, "layers": 1, "width": 64, "hidden": 96, "heads": 4, "groups": 2},
}


# ------------------------------------------------------------------------------------------------------ correctness


def sqnr(wanted: Iterable[Tensor], got: Iterable[Tensor]) -> float:
    """Return the power of the wanted tensors over that of the differences, in dB.

    It is 300 for equal tensors, and NaN if a tensor has a NaN.
    """
    pairs = [(w.double(), g.double()) for w, g in zip(wanted, got, strict=True)]
    signal, noise = (
        sum(float(t.square().sum()) for t in ts) for ts in zip(*((w, w - g) for w, g in pairs), strict=True)
    )
    if math.isnan(noise):
        return math.nan
    return min(300.0, 10 * math.log10(signal / noise)) if signal and noise else 300.0 if not noise else -300.0


@dataclass(frozen=True)
class Gradients:
    """The results of one step, detached."""

    output: Tensor
    inputs: list[Tensor]
    parameters: dict[str, Tensor]


def gradients(model: nn.Module, run: Callable[..., Tensor], inputs: Sequence[Tensor], cotangent: Tensor) -> Gradients:
    """Run one forward and backward, and return the results."""
    clear(model, inputs)
    output = run(*inputs)
    output.backward(cotangent.to(output.dtype))
    # cloned, because a CUDA graph writes its next results into the same memory
    of_inputs = [x.grad.clone() for x in inputs if x.grad is not None]
    of_parameters = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Gradients(output.detach().clone(), of_inputs, of_parameters)


def clear(model: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Set all gradients to None."""
    for t in (*model.parameters(), *inputs):
        t.grad = None


def in_float64(model: nn.Module, inputs: Sequence[Tensor], cotangent: Tensor) -> Gradients:
    """Run the same step in float64, from the same rounded weights and inputs, without a compiler."""
    exact = copy.deepcopy(model).double()
    exact_inputs = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in inputs]
    return gradients(exact, exact, exact_inputs, cotangent)


def compare(exact: Gradients, got: Gradients) -> dict[str, float]:
    """Return the SQNR of each kind of result, in dB. "worst": the least of a single parameter's gradient."""
    names = exact.parameters.keys()
    found = {"output": sqnr([exact.output], [got.output])}
    if exact.inputs:
        found["grad_input"] = sqnr(exact.inputs, got.inputs)
    found["grad_weight"] = sqnr(exact.parameters.values(), (got.parameters[n] for n in names))
    each = [sqnr([exact.parameters[n]], [got.parameters[n]]) for n in names]
    found["worst"] = min(each, key=lambda dB: -math.inf if math.isnan(dB) else dB)
    return found


def why_wrong(found: dict[str, float], bounds: Bounds) -> str:
    """Return a text that names the figures below their bounds; "" if there are none."""
    wanted = {"output": bounds.output, "worst": bounds.worst}
    low = [(name, dB, wanted.get(name, bounds.gradients)) for name, dB in found.items()]
    return ", ".join(f"{name} has {dB:.1f} dB, not {least}" for name, dB, least in low if not dB >= least)


# ------------------------------------------------------------------------------------------------------------- time


class EventClock:
    """A clock of CUDA events.

    Before each call the GPU overwrites a buffer larger than any L2 cache; meanwhile the host runs ahead.
    """

    name = "CUDA events"

    def __init__(self, device: torch.device) -> None:
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)

    def seconds(self, calls: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
        """Return the seconds of each call in each round; the calls take turns."""
        marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
        for _ in range(rounds):
            for call, found in zip(calls, marks, strict=True):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                self.flush.zero_()
                start.record()
                call()
                end.record()
                found.append((start, end))
        torch.cuda.synchronize()
        return [[start.elapsed_time(end) / 1e3 for start, end in found] for found in marks]

    def host_seconds(self, call: Callable[[], Any]) -> float:
        """Return the seconds that the host takes to issue a call, median of 5.

        If the GPU is faster than the host, `seconds` has measured the host.
        """
        found = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        return statistics.median(found)


class WallClock:
    """A clock for machines without a GPU: the host itself computes, and does not run ahead."""

    name = "wall clock"

    def seconds(self, calls: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
        """Return the seconds of each call in each round; the calls take turns."""
        found: list[list[float]] = [[] for _ in calls]
        for _ in range(rounds):
            for call, times in zip(calls, found, strict=True):
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
        return found

    def host_seconds(self, call: Callable[[], Any]) -> float:
        """Return 0: the host issues nothing."""
        return 0.0


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values does not exceed."""
    return sorted(values)[round(share * (len(values) - 1))]


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return median, 20th and 80th percentile, under names with this prefix."""
    cuts = ("", 0.5), ("_p20", 0.2), ("_p80", 0.8)
    return {name + suffix: percentile(values, share) for suffix, share in cuts}


def timed(bench: Bench, base: Callable[[], Any], call: Callable[[], Any]) -> dict[str, Any]:
    """Time both calls in turns; return seconds, ratios of pairs, and the seconds of the host."""
    trial = sum(min(times) for times in bench.clock.seconds([base, call], 3))
    rounds = 3 if bench.quick else max(10, min(100, int(bench.seconds_per_point / trial)))
    bf16, fp8 = bench.clock.seconds([base, call], rounds)
    found: dict[str, Any] = {**spread("seconds_bf16", bf16), **spread("seconds_fp8", fp8)}
    found |= spread("speedup", [b / f for b, f in zip(bf16, fp8, strict=True)])
    found["rounds"] = rounds
    found["host_seconds_bf16"], found["host_seconds_fp8"] = (bench.clock.host_seconds(c) for c in (base, call))
    found["host_bound"] = found["host_seconds_fp8"] > found["seconds_fp8"]
    return found


def peak_memory(bench: Bench, call: Callable[[], Any]) -> int | None:
    """Return the most bytes that a call allocates in addition to those allocated before it; None on a CPU."""
    if bench.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# ---------------------------------------------------------------------------------------------------------- kernels

_GEMM_NAMES = ("gemm", "nvjet", "cutlass", "wgmma", "xmma", "cublas", "_mm", "::mm", "addmm", "bmm", "matmul")
_NO_GEMMS = ("triton_poi", "triton_red", "triton_per", "flash")


def kernels_of(bench: Bench, call: Callable[[], Any], steps: int = 3) -> dict[str, Any]:
    """Return seconds per step, and the share of GEMMs in them: of kernels on a GPU, of operators on a CPU."""
    cuda = bench.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, acc_events=True) as profiled:
        for _ in range(steps):
            call()
        if cuda:
            torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profiled.key_averages():
        on_gpu = event.device_type.name == "CUDA"
        if on_gpu == cuda and not event.is_user_annotation:
            took = event.self_device_time_total if cuda else event.self_cpu_time_total
            found[event.key] = [took / steps / 1e6, event.count / steps]
    total = sum(took for took, _ in found.values())
    gemms = sum(took for name, (took, _) in found.items() if is_gemm(name))
    top = sorted(found.items(), key=lambda item: -item[1][0])[:15]
    return {
        "gemm_share": gemms / total if total else None,
        "gemm_seconds": gemms,
        "other_seconds": total - gemms,
        "launches": sum(count for _, count in found.values()),
        "top": [{"kernel": name[:120], "seconds": took, "count": count} for name, (took, count) in top],
    }


def is_gemm(kernel: str) -> bool:
    """Return whether this is the name of a matmul's kernel on a GPU, or of a matmul operator on a CPU.

    Fused Triton kernels and attention do not count as matmuls.
    """
    name = kernel.lower()
    return any(part in name for part in _GEMM_NAMES) and not any(part in name for part in _NO_GEMMS)


# --------------------------------------------------------------------------------------------------------- contenders


@dataclass(frozen=True)
class Contender:
    """A way to run a model.

    compile: takes a copy of the model, which it may change or replace; returns the model, and its compiled function.
    skip: the reason not to run it. ours: it is fp8pass.
    """

    name: str
    compile: Callable[[nn.Module], tuple[nn.Module, Callable[..., Tensor]]]
    skip: str = ""
    ours: bool = False


def contenders(bench: Bench, workload: Workload) -> list[Contender]:
    """Return all contenders that are compared with BF16."""
    target, mode = bench.target, workload.mode
    no_fp8 = why_no_fp8(bench.device, target)
    found = []
    for name in (*RECIPES, *VARIANTS):
        recipe = name.partition(",")[0]
        no_blocks = why_no_block_kernel(recipe, bench.device, target) if recipe in ("blockwise", "mxfp8") else ""
        options = {"recipe": recipe, "mode": mode, "lowering": bench.lowering, **VARIANTS.get(name, {})}
        ours = partial(by_fp8pass, min_speedup=workload.min_speedup, **options)
        found.append(Contender(name, ours, no_fp8 or no_blocks, ours=True))
    peers = TORCHAO if workload.peers else ()
    for recipe in peers:
        why = no_fp8 or why_no_kernel(bench, recipe)
        found.append(Contender(f"torchao {recipe}", partial(by_torchao, bench, recipe, mode), why))
    return [c for c in found if c.name in bench.recipes]


def why_no_kernel(bench: Bench, recipe: str) -> str:
    """Return why `torch._scaled_mm` has no kernel for tensorwise or rowwise scales on this device; "" if it has."""
    rows = recipe == "tensorwise" or scales_rows(bench.device, bench.target)
    return "" if rows else "torch._scaled_mm takes no scales for rows on this device"


def by_inductor(bench: Bench, mode: str | None, model: nn.Module) -> tuple[nn.Module, Callable[..., Tensor]]:
    """Compile a model with Inductor, or, in a dry run on a CPU, with "aot_eager"."""
    if bench.lowering == "eager":
        return model, torch.compile(model, backend="aot_eager", dynamic=False)
    return model, torch.compile(model, dynamic=False, mode=mode)


def by_fp8pass(model: nn.Module, **options: Any) -> tuple[nn.Module, Callable[..., Tensor]]:
    """Compile a model with fp8pass and these options."""
    return model, torch.compile(model, backend="fp8pass", dynamic=False, options=options)


def by_torchao(
    bench: Bench, recipe: str, mode: str | None, model: nn.Module
) -> tuple[nn.Module, Callable[..., Tensor]]:
    """Replace nn.Linear by torchao's modules, and compile the model with Inductor.

    torchao runs last, because it patches Inductor's min and max for the whole process.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    converted = convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    return by_inductor(bench, mode, converted)


@dataclass
class Subject:
    """A compiled model with its inputs."""

    model: nn.Module
    run: Callable[..., Tensor]
    inputs: Sequence[Tensor]
    cotangent: Tensor
    optimizer: torch.optim.Optimizer | None = None

    def step(self) -> Tensor:
        """Run forward, backward, and the optimizer if there is one; return the output."""
        torch.compiler.cudagraph_mark_step_begin()
        clear(self.model, self.inputs)
        output = self.run(*self.inputs)
        output.backward(self.cotangent)
        if self.optimizer is not None:
            self.optimizer.step()
        return output


@dataclass(frozen=True)
class Workload:
    """A model to train.

    make: returns the model and its inputs. labels: fields that identify its points. bounds: of the SQNR, for "bf16" and
    "fp8". mode: of torch.compile. kernels: profile it with `--kernels`. peers: run torchao too.
    """

    make: Callable[[], tuple[Any, ...]]
    labels: dict[str, Any]
    bounds: dict[str, Bounds]
    min_speedup: float = 1.0
    mode: str | None = None
    optimizer: bool = False
    kernels: bool = False
    peers: bool = True


@dataclass
class Baseline:
    """A workload in BF16, and its results in float64, which all results are compared with."""

    workload: Workload
    model: nn.Module
    exact: Gradients
    subject: Subject


def versus_bf16(bench: Bench, section: Section, workload: Workload) -> None:
    """Record one point for BF16, and one for each contender."""
    found: list[Baseline] = []

    def baseline() -> dict[str, Any]:
        base, fields = start(bench, workload)
        found.append(base)
        return fields

    of_baseline = bench.point(section, {**workload.labels, "recipe": "bf16"}, baseline, ours=True)
    for contender in contenders(bench, workload):
        why = contender.skip or ("" if found else f"no BF16 to compare with, which was {of_baseline}")
        labels = {**workload.labels, "recipe": contender.name}
        measure = partial(against, bench, found[0], contender) if found else dict
        bench.point(section, labels, measure, skip=why, ours=contender.ours)
    found.clear()
    torch.compiler.reset()
    bench.free()


def start(bench: Bench, workload: Workload) -> tuple[Baseline, dict[str, Any]]:
    """Compile and check BF16, and time it against itself, which shows the noise; return it with its point."""
    torch.manual_seed(0)
    with bench.device:
        made, *raw = workload.make()
        model = with_unit_products(made).to(BF16)
        inputs = [x.detach().to(BF16).requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in raw]
        with torch.no_grad():
            cotangent = torch.randn_like(model(*inputs))
    if cotangent.dim() == 0:  # the output is a loss
        cotangent = torch.ones_like(cotangent)
    exact = in_float64(model, inputs, cotangent)
    subject = Subject(*by_inductor(bench, workload.mode, copy.deepcopy(model)), inputs, cotangent)
    base = Baseline(workload, model, exact, subject)
    fields = checked(bench, base, subject, workload.bounds["bf16"])
    fields |= timed(bench, subject.step, subject.step)
    return base, fields


def with_unit_products(model: nn.Module) -> nn.Module:
    """Initialize weights so that products are as large as inputs: else a residual would hide wrong products."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    return model


def against(bench: Bench, base: Baseline, contender: Contender) -> dict[str, Any]:
    """Compile a contender, check it against float64, and time it in turns with BF16; return its point."""
    workload = base.workload
    with collect() as report:
        model, run = contender.compile(copy.deepcopy(base.model))
        subject = Subject(model, run, base.subject.inputs, base.subject.cotangent)
        fields = checked(bench, base, subject, workload.bounds["fp8"])
    if contender.ours:
        fields["matmuls"], fields["declined"] = report.summary(), sorted(report.rules())
        if not report.rewritten:
            fields["status"] = f"wrong: nothing runs in FP8; {report.summary()}"
    fields |= timed(bench, base.subject.step, subject.step)
    if workload.optimizer:
        fields["loss_bf16"], fields["loss_fp8"] = (s.step().item() for s in (base.subject, subject))
    return fields


def checked(bench: Bench, base: Baseline, subject: Subject, bounds: Bounds) -> dict[str, Any]:
    """Warm a subject up, compare it with float64, and measure its peak memory.

    Then it gets an optimizer, if its workload has one, before the peak is measured.
    """
    skipped = cudagraphs_skipped()
    begun = time.perf_counter()
    for _ in range(4):  # delayed scaling has its scales after one step, CUDA graphs are recorded in the third
        subject.step()
    warm = time.perf_counter() - begun
    torch.compiler.cudagraph_mark_step_begin()
    found = compare(base.exact, gradients(subject.model, subject.run, subject.inputs, subject.cotangent))
    wrong = why_wrong(found, bounds)
    fields: dict[str, Any] = {"status": f"wrong: {wrong}" if wrong else "ok", "sqnr_db": found}
    fields["compile_seconds"] = warm
    if base.workload.mode == "reduce-overhead":
        fields["cudagraphs_skipped"] = count = cudagraphs_skipped() - skipped
        if count and bench.device.type == "cuda" and not wrong:
            fields["status"] = f"wrong: {count} CUDA graphs skipped; TORCH_LOGS=cudagraphs says why"
    if base.workload.optimizer:
        subject.optimizer = torch.optim.AdamW(subject.model.parameters(), lr=1e-5, fused=True)
        subject.step()
    clear(subject.model, subject.inputs)
    fields["peak_bytes"] = peak_memory(bench, subject.step)
    if base.workload.kernels and bench.kernels:
        fields["kernels"] = kernels_of(bench, subject.step)
    return fields


def cudagraphs_skipped() -> int:
    """Return how many CUDA graphs Inductor has skipped in this process."""
    return int(counters["inductor"]["cudagraph_skips"])


# ----------------------------------------------------------------------------------------------------------- sections


def gemm(bench: Bench, section: Section) -> None:
    """Measure `torch._scaled_mm` alone against `torch.mm`, which bounds the gain of FP8."""
    for m, k, n in QUICK_SHAPES if bench.quick else (SQUARE, *SHAPES):
        for recipe in ("tensorwise", "rowwise"):
            for fast in (True, False):
                labels = {"op": "gemm", "m": m, "k": k, "n": n, "recipe": recipe, "fast_accum": fast}
                why = why_no_fp8(bench.device, bench.target) or why_no_kernel(bench, recipe)
                bench.point(section, labels, partial(one_gemm, bench, (m, k, n), recipe, fast), why, ours=True)


def one_gemm(bench: Bench, shape: tuple[int, int, int], recipe: str, fast: bool) -> dict[str, Any]:
    """Measure one shape on random data, with scales from the data's amaxes."""
    m, k, n = shape
    torch.manual_seed(0)
    a, b = (torch.randn(rows, k, device=bench.device, dtype=BF16) for rows in (m, n))
    (a_q, a_inv), (b_q, b_inv) = (quantized(t, recipe) for t in (a, b))

    def fp8() -> Tensor:
        return torch._scaled_mm(a_q, b_q.t(), a_inv, b_inv.t(), out_dtype=BF16, use_fast_accum=fast)

    def bf16() -> Tensor:
        return a @ b.t()

    exact = (a_q.double() * a_inv) @ (b_q.double() * b_inv).t()
    found = {"output": sqnr([exact], [fp8()])}
    wrong = why_wrong(found, GEMM["fast_accum" if fast else "exact"])
    del exact
    fields: dict[str, Any] = {"status": f"wrong: {wrong}" if wrong else "ok", "sqnr_db": found}
    fields |= timed(bench, bf16, fp8)
    fields["tflops_bf16"], fields["tflops_fp8"] = (2e-12 * m * k * n / fields[f"seconds_{t}"] for t in ("bf16", "fp8"))
    return fields


def quantized(x: Tensor, recipe: str) -> tuple[Tensor, Tensor]:
    """Quantize x [R, K]; return f8e4m3fn[R, K] and scale_inv, f32[] or f32[R, 1]."""
    amax = (x.abs().amax(1, keepdim=True) if recipe == "rowwise" else x.abs().amax()).float()
    scale = 448 / amax
    return (x.float() * scale).clamp(-448, 448).to(E4M3), 1 / scale


def linear_fwd_bwd(bench: Bench, section: Section) -> None:
    """Measure one linear layer with every recipe, even if fp8pass's rule would decline it, to judge the rule."""
    for m, k, n in QUICK_SHAPES if bench.quick else SHAPES:
        labels: dict[str, Any] = {"op": "linear_fwd_bwd", "m": m, "k": k, "n": n}
        if bench.target is not None:
            labels["predicted_speedup"] = predicted_speedup(bench.target, m, k, n, DelayedScaling())
            labels["pays_from_m"] = in_words(pays_from(bench.target, ROWS, k, n, DelayedScaling()))
        versus_bf16(bench, section, Workload(partial(linear, m, k, n), labels, LINEAR, min_speedup=0))


def model_section(
    make: Callable[..., tuple[Any, ...]], bounds: dict[str, Bounds], **options: Any
) -> Callable[[Bench, Section], None]:
    """Return a section that trains one model."""

    def section_of_model(bench: Bench, section: Section) -> None:
        sizes = QUICK[make] if bench.quick else {}
        defaults = {name: p.default for name, p in inspect.signature(make).parameters.items()}
        labels = {"op": section.name, **defaults, **sizes}
        versus_bf16(bench, section, Workload(partial(make, **sizes), labels, bounds, **options))

    return section_of_model


def xla(bench: Bench, section: Section) -> None:
    """Measure XLA through JAX against its own BF16.

    It runs in another process, because it allocates memory and loads libraries as it likes.
    """
    shapes = QUICK_SHAPES if bench.quick else SHAPES[:2]
    absent = "" if importlib.util.find_spec("jax") else "No module named 'jax'"
    for m, k, n in shapes:
        labels = {"op": "linear_fwd_bwd", "m": m, "k": k, "n": n, "recipe": "xla"}
        found: list[dict[str, Any]] = []
        if absent:
            bench.record(section, {**labels, "status": f"skipped: {absent}"})
            continue
        fields = bench.attempt(section, partial(by_xla, bench, (m, k, n), found))
        for row in found or [fields]:
            bench.record(section, {**labels, **row})


def by_xla(bench: Bench, shape: tuple[int, int, int], found: list[dict[str, Any]]) -> dict[str, Any]:
    """Run bench/xla_linear.py, add its points to `found`, and return a status."""
    worker = Path(__file__).parent / "xla_linear.py"
    command = [sys.executable, str(worker), *map(str, shape), "cpu" if bench.device.type == "cpu" else "cuda"]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=max(1, bench.left() - 10), env=environment, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{worker.name} ended with {done.returncode}: {done.stderr[-300:]}")
    found += [judged(fields) for fields in json.loads(done.stdout.splitlines()[-1])]
    return {"status": "ok"}


def judged(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a peer's point with a status."""
    if "status" in fields:
        return fields
    wrong = why_wrong(fields["sqnr_db"], LINEAR["fp8"])
    return {**fields, "status": f"wrong: {wrong}" if wrong else "ok"}


@dataclass(frozen=True)
class Section:
    """A section of the run.

    until: a share of the whole time; a point that would probably end later is not begun. cost: guessed seconds of the
    first point.
    """

    name: str
    run: Callable[[Bench, Section], None]
    until: float
    cost: float


SECTIONS = (
    Section("gemm", gemm, 0.08, 3),
    Section("linear_fwd_bwd", linear_fwd_bwd, 0.3, 12),
    Section("llama_mlp", model_section(llama_mlp, LAYER, kernels=True), 0.43, 20),
    Section("gpt2_mlp", model_section(gpt2_mlp, LAYER, kernels=True), 0.52, 15),
    Section("relu2_mlp", model_section(relu2_mlp, LAYER, kernels=True), 0.58, 10),
    Section("llama_block", model_section(llama_block, LAYER), 0.71, 30),
    Section("llama_step", model_section(llama, LLAMA, optimizer=True), 0.83, 40),
    Section("cudagraphs", model_section(llama_mlp, LAYER, mode="reduce-overhead", peers=False), 0.89, 15),
    Section("xla", xla, 1, 40),
)


# --------------------------------------------------------------------------------------------------------------- run

FAILURES: tuple[type[Exception], ...] = (
    RuntimeError,  # CUDA's, Dynamo's, Inductor's, fp8pass's
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    OSError,
    subprocess.SubprocessError,
)
if importlib.util.find_spec("triton"):
    from triton.errors import TritonError

    FAILURES = (*FAILURES, TritonError)


@dataclass
class Bench:
    """The settings of a run, its clock, and all results so far.

    budget: seconds for the whole run. bad: a result is wrong, or fp8pass failed. lock: held while results change,
    because `stop` runs in another thread.
    """

    device: torch.device
    quick: bool
    kernels: bool
    budget: float
    path: Path
    clock: EventClock | WallClock
    recipes: Sequence[str] = ALL
    seconds_per_point: float = 0.6
    started: float = field(default_factory=time.perf_counter)
    environment: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    bad: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def target(self) -> Target | None:
        """Return fp8pass's description of the GPU; None if there is none."""
        return target_of(self.device)

    @property
    def lowering(self) -> str:
        """Return the lowering: a dry run on a CPU runs graphs op by op, since it does not test Inductor."""
        return "eager" if self.quick and self.device.type == "cpu" else "inductor"

    def left(self) -> float:
        """Return the seconds until the time is up."""
        return self.budget - (time.perf_counter() - self.started)

    def point(
        self,
        section: Section,
        labels: dict[str, Any],
        measure: Callable[[], dict[str, Any]],
        skip: str = "",
        ours: bool = False,
    ) -> str:
        """Measure one point, and write all results so far, even if it fails. Return its status.

        skip: a reason not to measure it. ours: a failure makes the whole run bad, unlike a peer's failure.
        """
        fields = {"status": f"skipped: {skip}"} if skip else self.attempt(section, measure)
        self.record(section, {**labels, **fields}, ours)
        return str(fields["status"])

    def record(self, section: Section, row: dict[str, Any], ours: bool = False) -> None:
        """Add a row to the results, write them, and print the row."""
        row = {**row, "gpu": self.environment.get("gpu")}
        status = str(row["status"])
        with self.lock:
            self.sections[section.name]["points"].append(row)
            self.bad |= status.startswith("wrong") or (ours and status.startswith("failed"))
        self.write()
        print(line(row), flush=True)

    def attempt(self, section: Section, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Measure one point if there is time; catch its exceptions, and return them as a status.

        No other place catches them.
        """
        of_section = self.sections[section.name]
        cost = of_section.get("slowest_point", section.cost)
        if self.left() - cost < self.budget * (1 - section.until):
            return {"status": OUT_OF_TIME}
        begun = time.perf_counter()
        try:
            fields = measure()
        except ImportError as error:
            fields = {"status": f"skipped: {error}"}
        except subprocess.TimeoutExpired:
            fields = {"status": OUT_OF_TIME}
        except FAILURES as error:
            fields = {"status": f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        took = time.perf_counter() - begun
        if not fields["status"].startswith("skipped"):
            of_section["slowest_point"] = max(of_section.get("slowest_point", 0), took)
        self.free()
        return {**fields, "point_seconds": took}

    def free(self) -> None:
        """Free the memory of the last point."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def plan(self, chosen: Sequence[str]) -> None:
        """Enter all sections into the results. Chosen sections count as out of time until they have run."""
        for section in SECTIONS:
            why = OUT_OF_TIME if section.name in chosen else "skipped: not among --sections"
            self.sections[section.name] = {"status": why, "points": []}

    def run(self, chosen: Sequence[str]) -> None:
        """Run the chosen sections."""
        for section in SECTIONS:
            if section.name in chosen:
                print(f"\n{section.name}", flush=True)
                section.run(self, section)
                found = self.sections[section.name]
                found["status"] = "done" if "slowest_point" in found else found["points"][0]["status"]
        self.write()

    def write(self) -> None:
        """Write everything so far into the file."""
        found = {
            "dry_run": DRY_RUN if self.quick or self.device.type == "cpu" else None,
            "timer": self.clock.name,
            "budget_seconds": self.budget,
            "seconds": self.budget - self.left(),
            "bad": self.bad,
            "recipes": list(self.recipes),
            "environment": self.environment,
            "sections": self.sections,
        }
        with self.lock:
            self.path.write_text(json.dumps(finite(found), indent=1) + "\n")

    def stop(self) -> None:
        """Write the results and end the process: the time is up, and a running measurement can't be interrupted."""
        self.write()
        print(f"\nthe time is up after {self.budget:.0f} s; the results so far are in {self.path}", flush=True)
        os._exit(3)


def finite(value: Any) -> Any:
    """Return a value for JSON, which has neither NaN nor infinities: they become text."""
    if isinstance(value, dict):
        return {name: finite(v) for name, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def line(row: dict[str, Any]) -> str:
    """Return a point as one row of the table."""
    shape = "x".join(str(row[x]) for x in "mkn") if "m" in row else ""
    recipe = row["recipe"] + (", fast" if row.get("fast_accum") else "")
    text = f"  {shape:<17} {recipe:<20}"
    if "seconds_fp8" in row:
        times = f"{row['seconds_bf16'] * 1e3:9.3f} {row['seconds_fp8'] * 1e3:9.3f} ms"
        ratio = f"{row['speedup']:6.2f}x ({row['speedup_p20']:.2f} to {row['speedup_p80']:.2f})"
        memory = f"{row['peak_bytes'] / 1e9:7.2f} GB" if row.get("peak_bytes") is not None else ""
        noise = " ".join(f"{name} {dB:.1f}" for name, dB in row["sqnr_db"].items())
        text += f"{times} {ratio} {memory}  dB: {noise}{'  host-bound' if row.get('host_bound') else ''}"
    if row.get("pays_from_m"):
        text += f"  pays from M = {row['pays_from_m']}"
    if "kernels" in row:
        text += f"  GEMMs {row['kernels']['gemm_share']:.0%} of {row['kernels']['launches']:.0f} launches' time"
    return text + ("" if row["status"] == "ok" else f"  {row['status']}")


def environment_of(device: torch.device) -> dict[str, Any]:
    """Return the versions, hardware and state of the GPU that the figures depend on."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cpu_threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        **{name: version(name) for name in ("triton", "torchao", "jax", "flax", "fp8pass")},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"capability": [properties.major, properties.minor], "sms": properties.multi_processor_count}
        found |= {"memory_bytes": properties.total_memory, "l2_bytes": properties.L2_cache_size}
        found |= {"before": state_of_gpu(), "copy_bytes_per_second": copy_rate(device)}
    return found


def version(package: str) -> str | None:
    """Return the version of a package; None, or a text for fp8pass, if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed, run from its sources" if package == "fp8pass" else None


_STATE = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "temperature.gpu")


def state_of_gpu() -> dict[str, str]:
    """Return driver, clocks, power and temperature as nvidia-smi reports them, or why it does not."""
    query = ["nvidia-smi", f"--query-gpu={','.join(_STATE)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return {"unknown": str(error)[:200]}
    return dict(zip(_STATE, (text.strip() for text in done.stdout.split(",")), strict=False))


def copy_rate(device: torch.device) -> float:
    """Return the bytes per second that a large copy reads and writes, which other memory-bound kernels could reach."""
    source = torch.randint(256, (4 << 30,), dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    times = EventClock(device).seconds([lambda: into.copy_(source)], 10)[0]
    return 2 * source.numel() / percentile(times[2:], 0.5)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark that the arguments ask for; return the exit status."""
    parser = argparse.ArgumentParser(description="Measure speed, memory and correctness on one GPU.")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="use tiny sizes: tests the script, measures nothing")
    parser.add_argument("--kernels", action="store_true", help="profile the MLP: list kernels, and the share of GEMMs")
    names = [s.name for s in SECTIONS]
    parser.add_argument("--sections", nargs="+", choices=names, default=names, help="sections to run (default: all)")
    parser.add_argument("--recipes", nargs="+", choices=ALL, default=ALL, help="for layers and models (default: all)")
    parser.add_argument("--minutes", type=float, default=7.5, help="end after this time at the latest (default: 7.5)")
    parser.add_argument("--json", type=Path, default=Path("h200.json"), help="file of results (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU here; --device cpu --quick tests everything else")
    if chosen.device == "cpu" and not chosen.quick:
        parser.error("on a CPU there is nothing to measure: add --quick for a dry run")
    if chosen.device == "cpu":
        torch.set_num_threads(1)  # the sizes are too small for more
    device = torch.device(chosen.device, 0) if chosen.device == "cuda" else torch.device("cpu")
    clock = EventClock(device) if chosen.device == "cuda" else WallClock()
    bench = Bench(device, chosen.quick, chosen.kernels, chosen.minutes * 60, chosen.json, clock, chosen.recipes)
    bench.plan(chosen.sections)
    watchdog = threading.Timer(bench.budget, bench.stop)
    watchdog.daemon = True
    watchdog.start()
    bench.environment = environment_of(device)
    if chosen.quick:
        print(f"This is {DRY_RUN}.")
    print(json.dumps(bench.environment))
    warnings.filterwarnings("ignore", message="fp8pass: .* kernels exist")
    # the same code is compiled once per contender and shape, which torch would limit; and on a cache hit there would be
    # no verdicts to report
    with dynamo_config.patch(recompile_limit=256), functorch_config.patch(enable_autograd_cache=False):
        bench.run(chosen.sections)
    if device.type == "cuda":
        bench.environment["after"] = state_of_gpu()
        bench.write()
    watchdog.cancel()
    print(f"\n{bench.budget - bench.left():.0f} s; {bench.path}" + ("; SOMETHING IS WRONG: see above" * bench.bad))
    return int(bench.bad)


if __name__ == "__main__":
    sys.exit(main())
