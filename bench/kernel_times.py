"""Compare predicted times of kernels with those that a GPU measured, and fit the constants of the prediction.

    python bench/kernel_times.py collect PROFILE MODEL [RECIPE]  compile a model's runs, and add their kernels' facts
    python bench/kernel_times.py fit                             fit the constants to the models in FIT
    python bench/kernel_times.py now                             compile the models with today's kernels
    python bench/kernel_times.py errors [write]                  print tables of all errors; write: into the docs

bench/results/kernel_times_h200.json holds the facts of each Triton kernel and each matmul, in all configurations that
Inductor would time, beside the measured times. PROFILE has a line per run in JSON: the keys work, who, kernels and
kernels_bf16, with (name, ms per step, launches) of each kernel. `collect` must run in the versions of torch and Triton
that were measured, because kernels are matched by their names; it needs no GPU. A kernel's time is the sum over its
launches in one step; several matmuls may share a name. The profile does not flush caches between kernels.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import measured
import roofline
import torch

from fp8pass.base.scaling import E4M3
from fp8pass.hardware import TARGETS
from fp8pass.inspect.kernel_time import FITTED, Code, Constants, Work, fastest, kernel_seconds, parts, resident
from fp8pass.inspect.kernels import CUDNN_SHARES, kernel_rows
from fp8pass.roofline import gemm_seconds

ROOT = Path(__file__).parent.parent
FACTS = ROOT / "bench" / "results" / "kernel_times_h200.json"
NOW = ROOT / "bench" / "results" / "kernels_predicted.json"
MEASURED = ROOT / "bench" / "results" / "h200.jsonl"
H200 = TARGETS["h200"]
COPY = 4.3e12
"""Bytes per second that a copy on the device moved on the H200."""
FIT = ("llama_mlp", "gpt2_mlp")
"""The models whose kernels the constants are fitted to; those of all others are kept out whole, of every contender."""
LONG = 20e-6
"""Kernels that take less are not compared: in them a launch and what the caches hold decide."""


# ----------------------------------------------------------------------------------------------------------- collect


def llama_block() -> tuple[Any, ...]:
    """Return a layer of Llama 3 8B and its input, as they were measured."""
    return _of("llama_block")


def llama_mlp() -> tuple[Any, ...]:
    """Return the MLP of Llama 3 8B and its input, as they were measured."""
    return _of("llama_mlp")


def gpt2_mlp() -> tuple[Any, ...]:
    """Return the MLP of a layer like GPT-2's and its input, as they were measured."""
    return _of("gpt2_mlp")


def relu2_mlp() -> tuple[Any, ...]:
    """Return the MLP of the size of modded-nanogpt's and its input, as they were measured."""
    return _of("relu2_mlp")


def _of(name: str) -> tuple[Any, ...]:
    import h200

    model, x = getattr(h200, name)()
    return model.bfloat16(), x.detach().bfloat16().requires_grad_()


class _Norm(torch.autograd.Function):
    """RMSNorm as one op with one op for its backward, as on CUDA; on CPUs it is many, and kernels get other names."""

    @staticmethod
    def forward(ctx: Any, x: Any, shape: Any, weight: Any, eps: Any) -> Any:
        from torch._decomp.decompositions import _fused_rms_norm
        from torch.fx.experimental.proxy_tensor import set_original_aten_op

        with set_original_aten_op(torch.ops.aten._fused_rms_norm.default):
            y, rstd = _fused_rms_norm(x, shape, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.shape = shape
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        from torch._decomp.decompositions import _fused_rms_norm_backward
        from torch.fx.experimental.proxy_tensor import set_original_aten_op

        x, weight, rstd = ctx.saved_tensors
        with set_original_aten_op(torch.ops.aten._fused_rms_norm_backward.default):
            of_x, of_weight = _fused_rms_norm_backward(grad, x, ctx.shape, rstd, weight, [True, True])
        return of_x, None, of_weight, None


def _child(request: dict[str, Any], answer: Path) -> None:
    """Inspect a model with RMSNorm as on CUDA; write all kernels with the code of every configuration."""
    from fp8pass.base._torch import COMPOSITE
    from fp8pass.inspect import process

    apply: Any = _Norm.apply
    torch.ops.aten.rms_norm.default.py_impl(COMPOSITE)(
        lambda x, shape, weight=None, eps=None: apply(x, list(shape), weight, eps)
    )
    rows: list[dict[str, Any]] = []
    run = process._run

    def kernels(gpu: Any, graph: Any, name: str, ptx: bool) -> list[Any]:
        found = kernel_rows(graph, name, gpu.target)
        compiled = gpu.compile_kernels(graph.code, graph.values)
        for k in found:
            codes = [asdict(c.code) for c in compiled.get(k.name, []) if c.code is not None]
            rows.append({**asdict(k), "codes": codes, "run": name_of_run[0]})
        return found

    def noted(gpu: Any, way: Any, *args: Any, **kwargs: Any) -> Any:
        name_of_run[:] = [way.name]
        return run(gpu, way, *args, **kwargs)

    name_of_run = [""]
    process._kernels, process._run = kernels, noted
    process.main(request, answer)
    answer.write_text(json.dumps(rows))


RUNS = {"fp8pass": "kernels", "bf16": "kernels_bf16", "torchao": "kernels"}


def _inspected(model: str, recipe: str, peer: str | None) -> list[dict[str, Any]]:
    """Return all kernels of a model's runs, as `fp8pass inspect` has them, with the code of every configuration."""
    request = {
        "spec": f"kernel_times:{model}", "target": "h200", "optimizer": None, "ptx": True, "machine": None,
        "peer": peer, "options": {"recipe": recipe, "epilogues": "off", "min_speedup": 0},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        caches = dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), folder)
        paths = {"PYTHONPATH": os.pathsep.join([str(ROOT / "bench"), *(p for p in sys.path if p)])}
        command = [sys.executable, __file__, "child", json.dumps(request), str(answer)]
        subprocess.run(command, env={**os.environ, **caches, **paths}, check=True)
        rows: list[dict[str, Any]] = json.loads(answer.read_text())
    return rows


def collect(profile: Path, model: str, recipe: str = "delayed") -> None:
    """Compile the runs of a model, match their kernels with a profile by name, and add them to the file of facts."""
    rows = _inspected(model, recipe, "torchao:tensorwise" if recipe == "delayed" else None)
    measured = [json.loads(line) for line in profile.read_text().splitlines()]
    facts = json.loads(FACTS.read_text()) if FACTS.exists() else []
    runs = [run for run in dict.fromkeys(row["run"] for row in rows) if recipe == "delayed" or run != "bf16"]
    facts = [f for f in facts if (f["model"], f["run"]) not in {(model, run) for run in runs}]
    for run in runs:
        who = "ao_tensorwise" if "torchao" in run else recipe
        mine = [r for r in rows if r["run"] == run]
        for of in (m for m in measured if m["work"] == model and m["who"] == who):
            facts.append({"model": model, "run": run, "kernels": matched(mine, of[RUNS[run.split()[0]]])})
    FACTS.write_text("[\n" + ",\n".join(_line(f) for f in facts) + "\n]\n")


def _line(run: dict[str, Any]) -> str:
    head = json.dumps({key: value for key, value in run.items() if key != "kernels"})[:-1]
    return f'{head}, "kernels": [\n' + ",\n".join(json.dumps(k) for k in run["kernels"]) + "]}"


def matched(rows: list[dict[str, Any]], profile: Sequence[Any]) -> list[dict[str, Any]]:
    """Return an entry per name in the profile, with the facts of the kernels of that name; without facts for others."""
    by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_name[row["name"][:150]].append(row)
    found = []
    for name, ms, launches in profile:
        of = by_name.pop(name, [])
        compact = [{"bytes": r["bytes_read"] + r["bytes_written"] + r["scratch"], "what": r["what"],
                    "codes": [_compact(code) for code in r["codes"]]} for r in of]  # fmt: skip
        found.append({"name": name, "us": round(ms * 1e3, 2), "launches": launches, "of": compact})
    missing = [f["name"] for f in found if f["name"].startswith("triton") and not f["of"] and f["us"] >= 1e6 * LONG]
    print("not matched:", missing)
    products = [r["what"] for r in rows if r["kind"] == "gemm"]
    return [*found, {"name": "matmuls", "us": 0, "launches": len(products), "of": products}]


def _compact(code: dict[str, Any]) -> dict[str, Any]:
    return {**code, "once": list(code["once"].values()), "loop": list(code["loop"].values())}


# --------------------------------------------------------------------------------------------------------------- now


def now() -> None:
    """Compile the measured models with the kernels of today, which nothing has measured; write their facts."""
    runs = []
    for model, recipe in RECIPES:
        rows = _inspected(model, recipe, None)
        for name in dict.fromkeys(row["run"] for row in rows if recipe == "delayed" or row["run"] != "bf16"):
            of = [
                {"graph": r["graph"], "kind": r["kind"], "what": r["what"], "seconds": r["seconds"],
                 "bytes": r["bytes_read"] + r["bytes_written"] + r["scratch"],
                 "codes": [_compact(code) for code in r["codes"]]}
                for r in rows if r["run"] == name
            ]  # fmt: skip
            runs.append({"model": model, "run": name, "kernels": of})
    NOW.write_text("[\n" + ",\n".join(map(_line, runs)) + "\n]\n")


@dataclass(frozen=True)
class Predicted:
    """A kernel of today. seconds: predicted, from `code` if it has any."""

    model: str
    run: str
    what: str
    kind: str
    bytes: int
    seconds: float
    code: Code | None

    @property
    def quantizes(self) -> bool:
        """Return whether it is a Triton kernel that takes an amax and writes FP8."""
        return self.kind == "triton" and "amax, quantize" in self.what


def predicted_now() -> list[Predicted]:
    """Return the kernels that `now` wrote, each in the configuration that is predicted to be the fastest."""
    found = []
    for run in json.loads(NOW.read_text()):
        for k in run["kernels"]:
            codes = [_code(c) for c in k["codes"]]
            best = codes[fastest(H200, k["bytes"], codes)] if codes and k["kind"] != "gemm" else None
            seconds = k["seconds"] if best is None else kernel_seconds(H200, k["bytes"], best)
            found.append(Predicted(run["model"], run["run"], k["what"], k["kind"], k["bytes"], seconds, best))
    return found


def _facts(code: Code) -> str:
    """Return a kernel's configuration, instructions per element, warps per multiprocessor, and KB in flight there."""
    numbers = [int(n) for n in re.findall(r"(?:ROWS|COLUMNS|XBLOCK|YBLOCK|R0_BLOCK) (\d+)", code.config)]
    elements = math.prod(numbers) * code.programs * code.iterations
    issued = code.once.instructions + code.iterations * code.loop.instructions * bool(code.loop.instructions)
    programs = resident(H200, code)
    loaded = code.loop.loaded if code.loop.loaded else code.once.loaded
    in_flight = programs * code.warps * 32 * loaded / 1e3
    per_element = 32 * code.warps * code.programs * issued / elements
    return f"{code.config.lower()}, {code.warps} warps | {per_element:.0f} | {programs * code.warps}, {in_flight:.0f}"


MODELS = ("llama_mlp", "gpt2_mlp", "llama_block", "relu2_mlp")
DELAYED = "fp8pass delayed"


def _measured(model: str) -> list[dict[str, Any]]:
    """Return the launches of a model's kernels that quantized when they were measured, with their microseconds."""
    of = next(run for run in json.loads(FACTS.read_text()) if (run["model"], run["run"]) == (model, DELAYED))
    return [
        {**launch, "us": k["us"] / k["launches"]}
        for k in of["kernels"]
        if k["name"].startswith("triton_")
        for launch in k["of"]
        if "amax, quantize" in launch["what"]
    ]


def now_table() -> str:
    """Return a table of each large kernel that quantizes: as it was measured, and as it is predicted now."""
    lines = [
        "| model: kernel, MB | configuration | instructions per element | warps, KB in flight | us | of a copy |",
        "|---|---|---:|---:|---:|---:|",
    ]
    today = [k for k in predicted_now() if k.code is not None and k.bytes >= SMALLEST]
    for model in MODELS:
        old = _measured(model)
        for k in (k for k in today if (k.model, k.run) == (model, DELAYED) and k.quantizes):
            assert k.code is not None
            was = min(old, key=lambda o: (o["what"].split(", ")[0] != k.what.split(", ")[0], abs(o["bytes"] - k.bytes)))
            old.remove(was)
            words = f"{model}: {k.what}, {k.bytes / 1e6:.0f}"
            share = was["bytes"] / (1e-6 * was["us"]) / COPY
            lines.append(f"| {words} | was: {_facts(_code(was['codes'][0]))} | {was['us']:.0f} | {share:.0%} |")
            lines.append(f"| | {_now(k)}")
    others = (k for k in today if k.run.startswith("fp8pass") and k.run != DELAYED and "quantize" in k.what)
    lines += (f"| {k.run.removeprefix('fp8pass ')}: {k.what}, {k.bytes / 1e6:.0f} | {_now(k)}" for k in others)
    return "\n".join(lines)


def _now(k: Predicted) -> str:
    assert k.code is not None
    return f"now: {_facts(k.code)} | {1e6 * k.seconds:.0f} | {k.bytes / k.seconds / COPY:.0%} |"


SMALLEST = 64e6
"""Kernels that move fewer bytes are not listed."""
RECIPES = (*((model, "delayed") for model in MODELS), ("llama_block", "rowwise"), ("llama_block", "blockwise"))
"""The models and recipes that are compiled with the kernels of today."""


def now_totals() -> str:
    """Return a table of the models' speed-ups: measured, and predicted then and now.

    The last column is the prediction now, times what the clock has measured over what was predicted then. The GPU has
    not measured blockwise.
    """
    then = {(t.model, t.run): t for t in totals()}
    lines = [
        "| model | by the clock, measured | by sums, measured | then predicted | now predicted | so by the clock |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    today = predicted_now()
    _, by_clock = measured.load(MEASURED)
    speedups = {(row["work"], row["who"]): row["speedup"] for row in by_clock if "speedup" in row}
    for model, recipe in RECIPES:
        runs = "bf16", f"fp8pass {recipe}"
        now_bf16, now_ours = (sum(k.seconds for k in today if (k.model, k.run) == (model, run)) for run in runs)
        now = now_bf16 / now_ours
        if (model, recipe) not in speedups:
            lines.append(f"| {model}, {recipe} | | | | {now:.2f} | |")
            continue
        clock, (bf16, ours) = speedups[model, recipe], (then[model, run] for run in runs)
        predicted = bf16.predicted / ours.predicted
        cells = clock, bf16.all / ours.all, predicted, now, now * clock / predicted
        lines.append(f"| {model}, {recipe} | {' | '.join(f'{c:.2f}' for c in cells)} |")
        if (model, recipe) == ("llama_block", "delayed"):
            lines.append(_whole_step(by_clock, cells[-1]))
    return "\n".join(lines)


def _whole_step(rows: Sequence[dict[str, Any]], layer: float) -> str:
    """Return the row of the measured step with four such layers, of which each takes as much less time as one alone."""
    ms = {(row["work"], row["who"]): row["ms"] for row in rows if "ms" in row}
    (bf16, then), step = ms["llama_block", "delayed"], ms["hf_8b_4l", "t_delayed"]
    now = step - 4 * (then - bf16 / layer)
    whole = ms["hf_8b_4l", "bf16"]
    return f"| a step of transformers' Llama, 4 layers | {whole / step:.2f} | | | | {whole / now:.2f} |"


# --------------------------------------------------------------------------------------------------------------- fit


@dataclass(frozen=True)
class Timed:
    """A Triton kernel of a run, by name: seconds measured for all of its launches in a step.

    of: for each launch the bytes that it moves, and the code of each configuration that Inductor would time.
    """

    model: str
    run: str
    name: str
    seconds: float
    launches: int
    of: tuple[tuple[int, tuple[Code, ...]], ...]

    @property
    def kept_out(self) -> bool:
        """True if the constants are not fitted to it."""
        return self.model not in FIT

    def predicted(self, constants: Constants = FITTED) -> float:
        """Return the predicted seconds of all launches, each in the configuration that is predicted to be fastest."""
        each = [
            kernel_seconds(H200, moved, codes[fastest(H200, moved, codes, constants)], constants)
            for moved, codes in self.of
        ]
        return sum(each) / len(each) * self.launches


def load() -> list[Timed]:
    """Return all Triton kernels of the file of facts."""
    return [
        Timed(run["model"], run["run"], k["name"], 1e-6 * k["us"], round(k["launches"]), _launches(k["of"]))
        for run in json.loads(FACTS.read_text())
        for k in run["kernels"]
        if k["name"].startswith("triton_") and k["of"] and all(of["codes"] for of in k["of"])
    ]


def _launches(of: list[dict[str, Any]]) -> tuple[tuple[int, tuple[Code, ...]], ...]:
    return tuple((launch["bytes"], tuple(map(_code, launch["codes"]))) for launch in of)


def _code(found: dict[str, Any]) -> Code:
    return Code(**{**found, "once": Work(*found["once"]), "loop": Work(*found["loop"])})


def error(kernels: Sequence[Timed], constants: Constants) -> float:
    """Return the mean absolute logarithm of predicted over measured times."""
    return sum(abs(math.log(k.predicted(constants) / k.seconds)) for k in kernels) / len(kernels)


FITTED_TO = ("issue", "dependent", "barrier", "norm")


def fit(kernels: Sequence[Timed], start: Constants = FITTED) -> Constants:
    """Return the constants with the least error around `start`: one after the other is moved by ever smaller steps."""
    best, least, step = start, error(kernels, start), 0.2
    while step > 0.01:
        tried = [replace(best, **{n: getattr(best, n) * f}) for n in FITTED_TO for f in (1 + step, 1 / (1 + step))]
        nearest = min(tried, key=lambda c: error(kernels, c))
        if (found := error(kernels, nearest)) < least - 1e-6:
            best, least = nearest, found
        else:
            step /= 2
    return best


def long_ones(kernels: Sequence[Timed]) -> list[Timed]:
    """Return the kernels that are compared: those that took `LONG`."""
    return [k for k in kernels if k.seconds >= LONG]


def within(kernels: Sequence[Timed], bound: float = 1.25, constants: Constants = FITTED) -> float:
    """Return the share of the kernels whose prediction is off by at most this factor."""
    return sum(abs(math.log(k.predicted(constants) / k.seconds)) <= math.log(bound) for k in kernels) / len(kernels)


# ----------------------------------------------------------------------------------------------------------- matmuls


@dataclass(frozen=True)
class Total:
    """The sums over one run: seconds measured, of matmuls and of all kernels, and what is predicted for them.

    The few kernels of torch itself, sums of partial results and fills, are measured and not predicted.
    """

    model: str
    run: str
    matmuls: float
    predicted_matmuls: float
    all: float
    predicted: float


ATTENTION = {"fprop": 2 * 256, "bprop": 2 * 640}
"""Operations for each pair of a query and a key, in the forward and backward of attention with a head dim of 128."""
PAIRS = 4 * 32 * 2048 * 2048 // 2
"""Pairs of queries and keys in the layer measured: 4 sequences, 32 heads, 2048 positions, causal."""


def totals() -> list[Total]:
    """Return the sums of all runs."""
    return [_total(run) for run in json.loads(FACTS.read_text())]


def _total(run: dict[str, Any]) -> Total:
    named = [k for k in run["kernels"] if k["name"] != "matmuls"]
    triton = sum(k.predicted() for k in load() if (k.model, k.run) == (run["model"], run["run"]))
    matmuls = 1e-6 * sum(k["us"] for k in named if k["name"].startswith("nvjet") or "splitK" in k["name"])
    predicted = sum(_matmul(what) for k in run["kernels"] if k["name"] == "matmuls" for what in k["of"])
    attention = sum(
        PAIRS * ATTENTION[way] / (H200.bf16_peak * share)
        for way, share in zip(ATTENTION, CUDNN_SHARES, strict=True)
        if any(way in k["name"] for k in named)
    )
    return Total(
        run["model"], run["run"], matmuls, predicted, 1e-6 * sum(k["us"] for k in named), triton + predicted + attention
    )


def _matmul(what: str) -> float:
    """Predict the seconds of a matmul in the words of `fp8pass inspect`: "[8192, 4096] x [4096, 1024] bf16"."""
    m, k, _, n = map(int, re.findall(r"\d+", what)[:4])
    fp8 = "e4m3" in what
    scaling = "rowwise" if "rowwise" in what else "tensorwise"
    return float(gemm_seconds(H200, m, k, n, E4M3 if fp8 else torch.bfloat16, 2, scaling, "e5m2" not in what))


# ------------------------------------------------------------------------------------------------------------- tables


def ratio(kernel: Timed) -> float:
    """Return predicted over measured."""
    return kernel.predicted() / kernel.seconds


def constants() -> str:
    """Return a table of the constants."""
    meanings = {
        "latency": (f"{1e9 * FITTED.latency:.0f} ns", "a load from memory, published; not fitted"),
        "issue": (f"{FITTED.issue:.2f}", "share of a scheduler's cycles that kernels use at best"),
        "dependent": (f"{FITTED.dependent:.1f} cycles", "from an instruction of a warp to the next one"),
        "barrier": (f"{FITTED.barrier:.0f} cycles", "a barrier"),
        "norm": (f"{FITTED.norm:.1f}", "the p of the p-norm"),
    }
    rows = [f"| `{name}` | {value} | {words} |" for name, (value, words) in meanings.items()]
    return "\n".join(["| constant | value | meaning |", "|---|---|---|", *rows])


def summary() -> str:
    """Return a table of errors by model and run, those kept out of the fit apart."""
    lines = ["| | model | run | kernels above 20 us | within 25% | median, worst |", "|---|---|---|---|---|---|"]
    kernels = long_ones(load())
    for kept_out in (False, True):
        words = "kept out" if kept_out else "fitted"
        chosen = [k for k in kernels if k.kept_out == kept_out]
        for model, run in dict.fromkeys((k.model, k.run) for k in chosen):
            lines.append(_errors((words, model, run), [k for k in chosen if (k.model, k.run) == (model, run)]))
        lines.append(_errors((f"**{words}, all**", "", ""), chosen))
    return "\n".join(lines)


def _errors(heads: tuple[str, ...], kernels: Sequence[Timed]) -> str:
    ratios = sorted(map(ratio, kernels))
    worst = max(ratios, key=lambda r: abs(math.log(r)))
    cells = *heads, str(len(kernels)), f"{within(kernels):.0%}", f"{ratios[len(ratios) // 2]:.2f}, {worst:.2f}"
    return f"| {' | '.join(cells)} |"


def all_errors() -> str:
    """Return a table with each kernel's measured and predicted time, those kept out of the fit apart."""
    lines = [
        "| model | run | kernel | measured us | predicted us | ratio | memory, issue, chain us | programs, at once |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for k in sorted(long_ones(load()), key=lambda k: k.kept_out):
        moved, codes = k.of[0]
        code = codes[fastest(H200, moved, codes)]
        of = ", ".join(f"{1e6 * k.launches * t:.0f}" for t in parts(H200, moved, code))
        off = "**" if abs(math.log(ratio(k))) > math.log(1.25) else ""
        cells = (
            f"{k.model}{', kept out' if k.kept_out else ''}", k.run.removeprefix("fp8pass "), f"`{_short(k.name)}`",
            f"{1e6 * k.seconds:.1f}", f"{1e6 * k.predicted():.1f}", f"{off}{ratio(k):.2f}{off}", of,
            f"{code.programs}, {132 * resident(H200, code)}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _short(name: str) -> str:
    """Return the first words of a kernel's name, and its number."""
    kind, number = name.split("_fused")[0].removeprefix("triton_"), name.rpartition("_")[2]
    return f"{kind} {number}" if number.isdigit() else f"{kind} {name.split('_fused')[1][:30].strip('_')}..."


def sums() -> str:
    """Return a table of predicted and measured sums over each run."""
    lines = [
        "| model | run | matmuls ms | predicted | ratio | all kernels ms | predicted | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for t in totals():
        cells = (
            f"{t.model}{'' if t.model in FIT else ', kept out'}", t.run.removeprefix("fp8pass "),
            f"{1e3 * t.matmuls:.2f}", f"{1e3 * t.predicted_matmuls:.2f}", f"{t.predicted_matmuls / t.matmuls:.2f}",
            f"{1e3 * t.all:.2f}", f"{1e3 * t.predicted:.2f}", f"{t.predicted / t.all:.2f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


NOW_TABLES: dict[str, Callable[[], str]] = {"kernels_now": now_table, "speedups_now": now_totals}
TABLES: dict[str, Callable[[], str]] = {
    "kernel_constants": constants, "kernel_errors": summary, "kernel_sums": sums, "all_kernel_errors": all_errors,
}  # fmt: skip


def main(command: str, *rest: str) -> None:
    """Run one of the commands above."""
    if command == "child":
        _child(json.loads(rest[0]), Path(rest[1]))
    elif command == "collect":
        collect(Path(rest[0]), *rest[1:])
    elif command == "now":
        now()
    elif command == "fit":
        print(fit([k for k in long_ones(load()) if not k.kept_out]))
    else:
        tables = {name: table() for name, table in TABLES.items()}
        for name, table in tables.items():
            print(f"{name}\n\n{table}\n")
        if "write" in rest:
            roofline.write(tables)


if __name__ == "__main__":
    main(*sys.argv[1:])
