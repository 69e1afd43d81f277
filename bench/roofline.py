"""Compare the predictions of fp8pass/roofline.py with published measurements.

python bench/roofline.py [--measured FILE ...] [--machine FILE.json] [--write]

    --measured   use your own measurements instead of the published ones: what bench/h200.py has written, or a list of
                 objects with op ("gemm" or "linear_fwd_bwd"), m, k, n, recipe, gpu, seconds_bf16, seconds_fp8
    --machine    the target of all measurements, as `fp8pass.roofline.load_machine` reads it
    --write      write the tables into docs/roofline.md

bench/measured_points.json holds the published points, each with its source. High precision is bfloat16. The ops are:

    gemm             matmuls alone, of operands that are already in FP8
    linear_fwd       one matmul, and the quantization of both operands in all orientations that training needs
    linear_fwd_bwd   the three matmuls of a layer, and all quantization
    relu_linear_fwd  inference: a ReLU whose kernel also quantizes, and a matmul; the weight is already in FP8

A point has either m, k and n, or products, which are several matmuls that were measured together; and either seconds,
or tflops, or only the speedup. sum_loss: the program repeated `linear(x).sum().backward()`. Its times contain more, in
BF16 and in FP8: the sum reads the output, and new gradients are added to the existing ones, which reads two tensors and
writes one. All elements of the gradient of the output are the same number: BF16 writes it out in full, while
quantization does not need to read it.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from fp8pass.base.scaling import E4M3
from fp8pass.gpu.target import named
from fp8pass.graph.prediction import in_words
from fp8pass.hardware import TARGETS, Target, as_published, sizes
from fp8pass.recipes import BUILT_IN, KINDS, NAMED, Recipe
from fp8pass.roofline import (
    ROWS,
    call_seconds,
    gemm_seconds,
    load_machine,
    memory_seconds,
    overhead_seconds,
    pays_from,
    predicted_speedup,
    quantize_seconds,
    scaling_of,
)

ROOT = Path(__file__).parent.parent
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Point:
    """One measurement.

    products: (M, K, N) of each matmul. seconds_bf16, seconds_fp8: None if not published. published: the speedup.
    """

    op: str
    products: tuple[tuple[int, int, int], ...]
    recipe: str
    gpu: str
    target: Target
    fast_accum: tuple[str, ...] | None = None
    sum_loss: bool = False
    seconds_bf16: float | None = None
    seconds_fp8: float | None = None
    published: float | None = None

    @property
    def flops(self) -> int:
        """Return the FLOPs of the forward."""
        return sum(2 * m * k * n for m, k, n in self.products)

    @property
    def speedup(self) -> float | None:
        """Return the measured speedup; None if it is unknown."""
        if self.seconds_bf16 is None or self.seconds_fp8 is None:
            return self.published
        return self.seconds_bf16 / self.seconds_fp8

    def predicted(self) -> tuple[float, float]:
        """Return the seconds in BF16 and in FP8 that the model predicts."""
        recipe = NAMED[self.recipe]()
        if self.fast_accum is not None:
            recipe = replace(recipe, fast_accum=self.fast_accum)
        times = [self._product(shape, recipe) for shape in self.products]
        return sum(wide for wide, _ in times), sum(narrow for _, narrow in times)

    def _product(self, shape: tuple[int, int, int], recipe: Recipe) -> tuple[float, float]:
        target, (m, k, n) = self.target, shape
        if self.op == "linear_fwd_bwd":
            wide = call_seconds(target, *shape, None, 2, KINDS)
            narrow = call_seconds(target, *shape, recipe, 2, KINDS)
            if not self.sum_loss:
                return wide, narrow + overhead_seconds(target, *shape, recipe, 2, KINDS)
            narrow += quantize_seconds(target, m * k, recipe, "input", 2, both=True)
            narrow += quantize_seconds(target, k * n, recipe, "weight", 2, both=True)
            narrow += memory_seconds(target, 2 * m * n, "transposed_share")
            both = memory_seconds(target, 6 * (m * k + k * n) + 2 * m * n)
            return wide + memory_seconds(target, 2 * m * n) + both, narrow + both
        wide = gemm_seconds(target, *shape, BF16, 2)
        narrow = gemm_seconds(target, *shape, E4M3, 2, scaling_of(recipe), "output" in recipe.fast_accum)
        if self.op == "linear_fwd":
            narrow += quantize_seconds(target, m * k, recipe, "input", 2, both=True)
            narrow += quantize_seconds(target, k * n, recipe, "weight", 2, both=True)
        if self.op == "relu_linear_fwd":
            wide += memory_seconds(target, 4 * m * k)
            narrow += memory_seconds(target, (2 + 1 + 1 / 32) * m * k)
        return wide, narrow


def load(path: Path, machine: Target | None) -> list[Point]:
    """Return the points of a file: bench/measured_points.json, a list of measurements, or what bench/h200.py wrote."""
    if path.suffix == ".jsonl":
        return _of_bench([json.loads(text) for text in path.read_text().splitlines()], machine)
    data = json.loads(path.read_text())
    if isinstance(data, list):
        return [_point(row, row["gpu"], machine or _named(row["gpu"])) for row in data]
    gpus = {name: _target(name, values) for name, values in data["gpus"].items()}
    return [
        _point(row, source["gpu"], machine or gpus[source["gpu"]])
        for source in data["sources"]
        for row in source["points"]
    ]


def _of_bench(lines: list[dict[str, Any]], machine: Target | None) -> list[Point]:
    """Return the linear layers that bench/h200.py measured with a recipe."""
    gpu = lines[0]["environment"]["gpu"]
    points = []
    for row in lines[1:]:
        if row["work"] == "linear" and row["who"] in NAMED and row.get("status") == "ok":
            bf16, fp8 = (ms / 1e3 for ms in row["ms"])
            same = {"op": "linear_fwd_bwd", "recipe": row["who"], "seconds_bf16": bf16, "seconds_fp8": fp8}
            points.append(_point(row | same, gpu, machine or _named(gpu)))
    return points


def _target(name: str, values: dict[str, Any]) -> Target:
    """Return a known target with the values that differ."""
    changed = {key: value for key, value in values.items() if key not in ("target", "source")}
    return replace(as_published(TARGETS[values["target"]]), name=name, **changed)


def _named(gpu: str) -> Target:
    """Return the target of a GPU, by the GPU's name in CUDA."""
    if (target := named(gpu)) is None:
        raise SystemExit(f"there is no target for the GPU {gpu!r}: describe it in a file, and pass that as --machine")
    return target


def _point(row: dict[str, Any], gpu: str, target: Target) -> Point:
    products = row.get("products") or [[row["m"], row["k"], row["n"]]]
    shapes = tuple((int(m), int(k), int(n)) for m, k, n in products)
    flops = sum(2 * m * k * n for m, k, n in shapes)
    seconds = {
        name: flops / row[f"tflops_{name}"] / 1e12 if f"tflops_{name}" in row else row.get(f"seconds_{name}")
        for name in ("bf16", "fp8")
    }
    fast = row.get("fast_accum")
    return Point(
        row["op"],
        shapes,
        row["recipe"],
        gpu,
        target,
        None if fast is None else tuple(fast),
        row.get("sum_loss", False),
        seconds["bf16"],
        seconds["fp8"],
        row.get("speedup"),
    )


def errors(points: list[Point]) -> str:
    """Return a table of predicted over measured speed-ups and times, median and worst, by GPU, op and recipe."""
    groups: dict[tuple[str, str, str], list[Point]] = defaultdict(list)
    for point in points:
        recipe = scaling_of(NAMED[point.recipe]()) if point.op == "gemm" else point.recipe
        groups[point.gpu, point.op, recipe].append(point)
    lines = [
        "| GPU | op | recipe | points | measured speed-up | its prediction: median, worst "
        "| BF16 time: median, worst | FP8 time: median, worst |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (gpu, op, recipe), group in sorted(groups.items()):
        gains = [p.speedup for p in group if p.speedup is not None]
        span = f"{min(gains):.2f} to {max(gains):.2f}" if gains else ""
        cells = (gpu, f"`{op}`", recipe, str(len(group)), span, *(_ratios(r) for r in _all_ratios(group)))
        lines.append(f"| {' | '.join(cells)} |")
    for name, chosen in (("all alone", alone(points)), ("all with quantization", with_quantization(points))):
        if chosen:
            cells = (f"**{name}**", "", "", str(len(chosen)), "", *(_ratios(r) for r in _all_ratios(chosen)))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def alone(points: list[Point]) -> list[Point]:
    """Return the points of matmuls without quantization."""
    return [p for p in points if p.op == "gemm"]


def with_quantization(points: list[Point]) -> list[Point]:
    """Return the points with quantization."""
    return [p for p in points if p.op != "gemm"]


def decisions(points: list[Point]) -> str:
    """Return a sentence that says for how many points the model predicts correctly whether FP8 pays."""
    chosen = [(p.speedup, wide / narrow) for p in with_quantization(points) for wide, narrow in [p.predicted()]]
    known = [(measured, predicted) for measured, predicted in chosen if measured is not None]
    faster = [predicted for measured, predicted in known if measured >= 1]
    slower = [predicted for measured, predicted in known if measured < 1]
    return (
        f"Of {len(known)} points with quantization, {len(faster)} are faster in FP8 than in BF16, and the model "
        f"predicts this for {sum(p >= 1 for p in faster)} of them. {len(slower)} are slower in FP8, and the model "
        f"predicts this for {sum(p < 1 for p in slower)} of them."
    )


def _all_ratios(points: Iterable[Point]) -> tuple[list[float], list[float], list[float]]:
    """Return predicted over measured of speed-ups, of times in BF16 and of times in FP8."""
    gains, wides, narrows = [], [], []
    for point in points:
        wide, narrow = point.predicted()
        if point.speedup is not None:
            gains.append(wide / narrow / point.speedup)
        if point.seconds_bf16 is not None:
            wides.append(wide / point.seconds_bf16)
        if point.seconds_fp8 is not None:
            narrows.append(narrow / point.seconds_fp8)
    return gains, wides, narrows


def _ratios(ratios: list[float]) -> str:
    if not ratios:
        return ""
    return f"{median(ratios):.2f}, {max(ratios, key=lambda r: abs(math.log(r))):.2f}"


# For `_whole_waves`: numbers of multiprocessors by capability; and tiles of a matmul's output, as (rows, columns, share
# of the peak that kernels with this tile reach).
_MULTIPROCESSORS = {(9, 0): 132, (10, 0): 148}
_TILES = ((256, 256, 1.0), (128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.9), (64, 128, 0.8), (64, 64, 0.6))


def times_alone(points: list[Point]) -> list[tuple[Point, bool, float]]:
    """Return each published time of matmuls without quantization once, as (point, time is in FP8, seconds)."""
    found = {
        (p.gpu, p.products, scaling_of(NAMED[p.recipe]()) if fp8 else "", seconds): (p, fp8, seconds)
        for p in alone(points)
        for fp8, seconds in ((False, p.seconds_bf16), (True, p.seconds_fp8))
        if seconds is not None
    }
    return list(found.values())


def fit(points: list[Point]) -> str:
    """Return a table of the two fitted constants and their error, also for a model with whole waves of tiles."""
    times = times_alone(points)
    lines = [
        f"Two constants are fitted to {len(times)} times of matmuls alone: they minimize the mean absolute logarithm\n"
        "of predicted over measured.",
        "",
        "| model | gemm_share | gemm_start | mean error |",
        "|---|---|---|---|",
    ]
    for name, tiles in (("roofline", False), ("roofline with waves of tiles", True)):
        log, share, start = min(
            (error(times, share / 100, start * 1e-6, tiles), share / 100, start)
            for share in range(50, 91)
            for start in range(9)
        )
        lines.append(f"| {name} | {share:.2f} | {start} us | {math.exp(log) - 1:.0%} |")
    return "\n".join(lines)


def error(times: list[tuple[Point, bool, float]], share: float, start: float, tiles: bool) -> float:
    """Return the mean absolute logarithm of predicted over measured times, with these two constants."""
    logs = []
    for point, fp8, seconds in times:
        target = replace(point.target, gemm_share=share, gemm_start=start)
        scaling, dtype = scaling_of(NAMED[point.recipe]()), E4M3 if fp8 else BF16
        shapes = [_whole_waves(target, *shape) if tiles else shape for shape in point.products]
        predicted = sum(gemm_seconds(target, *shape, dtype, 2, scaling) for shape in shapes)
        logs.append(abs(math.log(predicted / seconds)))
    return mean(logs)


def _whole_waves(target: Target, m: int, k: int, n: int) -> tuple[int, int, int]:
    """Return this matmul with M increased, so that its time is that of whole waves of one tile per multiprocessor."""
    count = _MULTIPROCESSORS[target.capability]
    area = min(
        math.ceil(math.ceil(m / rows) * math.ceil(n / columns) / count) * count * rows * columns / share
        for rows, columns, share in _TILES
    )
    return max(m, round(area / n)), k, n


SHAPES = [
    (16, 8192, 8192),
    (256, 8192, 8192),
    (1024, 8192, 8192),
    (8192, 8192, 8192),
    (8192, 4096, 14336),
    (8192, 1024, 1024),
    (16384, 8192, 1280),
]


def predictions() -> str:
    """Return a table of predicted speed-ups in training, by shape and recipe, without and with fused quantization."""
    names = list(BUILT_IN)
    lines = [f"| GPU | M, K, N | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for gpu in ("h100", "h200", "b200"):
        for shape in SHAPES:
            cells = [_both(TARGETS[gpu], shape, NAMED[name]()) for name in names]
            lines.append(f"| {gpu} | {', '.join(map(str, shape))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def thresholds() -> str:
    """Return a table of the number of rows M from which FP8 pays in training, by K, N and recipe, without fusion."""
    names = list(BUILT_IN)
    lines = [f"| GPU | K, N | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for gpu in ("h100", "h200", "b200"):
        for k, n in dict.fromkeys(shape[1:] for shape in SHAPES):
            solved = [pays_from(TARGETS[gpu], ROWS, k, n, NAMED[name]()) for name in names]
            cells = [in_words(pays) if pays is not None else "no kernel" for pays in solved]
            lines.append(f"| {gpu} | {k}, {n} | {' | '.join(cells)} |")
    return "\n".join(lines)


FAMILIES = (
    "rtx4090", "l4", "l40s", "h20", "h100", "h100_pcie", "h200", "gh200", "b200", "b300", "rtx5090", "rtx_pro_6000",
    "gb10",
)  # fmt: skip
LAYERS = (2048, 1024, 1024), (8192, 768, 3072), (8192, 4096, 4096)
"""M, K, N of layers, as docs/gpus.md has them."""


def gains() -> str:
    """Return a table of predicted speed-ups in training on each GPU, and of the rows from which FP8 pays."""
    names = "delayed", "rowwise", "mxfp8"
    lines = [f"| GPU | M x K x N | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for gpu in FAMILIES:
        for m, k, n in LAYERS:
            cells = []
            for name in names:
                gain = predicted_speedup(TARGETS[gpu], m, k, n, NAMED[name]())
                pays = pays_from(TARGETS[gpu], ROWS, k, n, NAMED[name]())
                cells.append("no kernel" if gain is None else f"{gain:.2f} ({in_words(pays)})")
            lines.append(f"| {gpu} | {m} x {k} x {n} | {' | '.join(cells)} |")
    return "\n".join(lines)


def figures() -> str:
    """Return a table of the figures of the GPUs that are known by name."""
    lines = [
        "| target | architecture | BF16 TFLOPS, reached | FP8, reached | MXFP8 | TB/s, reached | multiprocessors "
        "| L2 MiB | GiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for target in dict.fromkeys(TARGETS.values()):
        of, tera = sizes(target), 1e12
        fp8 = f"{target.fp8_peak / tera:g}, {target.fp8_rate / tera:.0f}" if target.has_fp8 else ""
        cells = (
            target.name, target.sm, f"{target.bf16_peak / tera:g}, {target.bf16_rate / tera:.0f}", fp8,
            f"{(target.mxfp8_peak or target.fp8_peak) / tera:g}" if target.capability >= (10, 0) else "",
            f"{target.bandwidth / tera:g}, {target.copy_rate / tera:.2f}", of.multiprocessors, of.cache >> 20,
            of.memory >> 30,
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _both(target: Target, shape: tuple[int, int, int], recipe: Recipe) -> str:
    gains = [predicted_speedup(target, *shape, recipe, fused=fused) for fused in (False, True)]
    return " to ".join(f"{gain:.2f}" for gain in gains if gain is not None) or "no kernel"


def write(tables: dict[str, str]) -> None:
    """Write tables between `<!-- name -->` and `<!-- /name -->` of docs/roofline.md, or docs/gpus.md."""
    for name, table in tables.items():
        page = ROOT / "docs" / ("gpus.md" if name in ("gains", "figures") else "roofline.md")
        text = page.read_text()
        pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        assert pattern.search(text), f"{page} has no markers for {name!r}"
        before, after = pattern.split(text)[0], pattern.split(text)[-1]
        page.write_text(f"{before}<!-- {name} -->\n{table}\n<!-- /{name} -->{after}")


def main() -> None:
    """Print the tables, and write them into the page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, nargs="+")
    parser.add_argument("--machine", type=Path)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    machine = load_machine(arguments.machine) if arguments.machine else None
    files = arguments.measured or [ROOT / "bench" / "measured_points.json"]
    points = [point for file in files for point in load(file, machine)]
    tables = {"errors": f"{errors(points)}\n\n{decisions(points)}"}
    if arguments.measured is None:
        tables |= {"fit": fit(points), "predictions": predictions(), "thresholds": thresholds()}
        tables |= {"gains": gains(), "figures": figures()}
    for name, table in tables.items():
        print(f"{name}\n\n{table}\n")
    if arguments.write:
        write(tables)


if __name__ == "__main__":
    main()
