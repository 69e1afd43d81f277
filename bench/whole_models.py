"""Train whole models on one GPU, by BF16, by fp8pass in two ways, and by torchao.

    python bench/whole_models.py                             trains all, prints a table, and writes whole_models.jsonl
    python bench/whole_models.py --models gpt2_50257 --who t_delayed           trains one model in one way, and by BF16
    python bench/whole_models.py --toy --device cpu          is a dry run of one tiny model, op by op, in float32

Models are transformers', with random weights, the same random tokens in each step, and their own loss: Llamas of 4
layers of Llama 3 8B's shapes, 8 layers of 1B's and 12 layers of 160M's, each with 32000 words, for with few layers more
words would outweigh them; and GPT-2, without dropout. All have BF16 weights and moments of AdamW, which is how one
fine-tunes a model that fills a GPU. A step is forward, backward and AdamW:

- bf16: `torch.compile(model)`, fused AdamW
- delayed: `torch.compile(model, backend="fp8pass")`, fused AdamW
- t_delayed: `@fp8pass.train_step()`, AdamW that it compiles
- ao_tensorwise: torchao's `convert_to_float8_training` without `lm_head`, `torch.compile(model)`, fused AdamW

Each of them is a process, h200_run.py. All compile side by side, so `compile_s`, the seconds of the first two steps, is
longer than on an idle machine. Then one after the other is timed alone, BF16 before the others of its model. `host_ms`
is the time in which the host issues a step without waiting for the GPU. A row is marked

- host-bound, if that is at least 90% of the step: a faster GPU would change nothing
- a fault of the plan, if fp8pass is slower than BF16 though the GPU is busy: the rule that decides what pays was wrong
- nothing converted, if torchao found no layer: it knows nn.Linear, and GPT-2 has Conv1D

`fp8_share` is the share of the FLOPs of matmuls that run in FP8, as fp8pass reports it. `loss` is that of step `steps`.
What a CPU can't measure is null. What has not run says why in `status`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from h200 import MODELS, OURS, STEP, Row, environment_of, exit_status, line, measure
from measured import named, table, where

WHO = ("bf16", "delayed", "t_delayed", "ao_tensorwise")
USUAL = ("hf_8b_4l", "hf_1b_8l", "hf_160m", "gpt2_50257")
TOYS = ("hf_160m",)
"""The models without `--models`, and those of a dry run, in which all Llamas are the same."""
KEPT = ("date", "gpu", "torch", "triton", "torchao", "transformers", "fp8pass", "commit")
"""The fields of the environment that each row repeats."""
FIGURES = ("tokens_s", "speedup", "ms", "host_ms", "peak_GB", "compile_s", "fp8_share", "steps", "loss", "loss_bf16")
"""The figures of a row; null where nothing was measured."""
TURN = 30
"""Seconds for each turn, on average; what is left of them is the next one's."""
HOST_BOUND = 0.9
"""The least share of a step that issuing it takes in a row that is marked."""


def finished(row: Row, environment: Row, base: Row | None) -> Row:
    """Return a result of h200_run.py with its environment, and compared with the row of BF16, which may be itself."""
    found = {**{key: environment[key] for key in KEPT}, "toy": environment["dry_run"], **dict.fromkeys(FIGURES), **row}
    if "ms" in row:
        found["loss"] = row["loss"][-1]
        found["host_ms"] = row["host_ms"] if environment["gpu"] else None
        if base := found if row["who"] == "bf16" else base:
            found |= {"speedup": round(found["tokens_s"] / base["tokens_s"], 3), "loss_bf16": base["loss"]}
    return found | {"mark": mark(found)}


def mark(row: Row) -> str:
    """Return what a reader must know of a row; "" if nothing."""
    marks = ["nothing converted"] if row.get("converted") == 0 else []
    if row["host_ms"] is not None:  # else a CPU has measured it, or nothing has
        is_ours = row["who"].removeprefix("t_") in OURS
        if row["host_ms"] >= HOST_BOUND * row["ms"]:
            marks.append(f"host-bound: {row['host_ms']:.1f} ms")
        elif is_ours and row["speedup"] is not None and row["speedup"] < 1:
            marks.append("a fault of the plan")
    return ", ".join(marks)


def cells(row: Row) -> tuple[str, ...]:
    """Return a row of the table."""

    def text(name: str, form: str) -> str:
        return "" if row[name] is None else format(row[name], form)

    return (
        *named(row),
        text("tokens_s", ",.0f"),
        text("speedup", ".2f"),
        text("ms", ".1f"),
        text("host_ms", ".1f"),
        text("peak_GB", ".2f"),
        text("compile_s", ".0f"),
        text("fp8_share", ".0%"),
        *(text(name, ".4f") for name in ("loss", "loss_bf16")),
        row["mark"] if row["status"] == "ok" else row["status"].replace("|", "/"),
    )


def printed(rows: Sequence[Row]) -> str:
    """Return the rows as a table in Markdown."""
    steps = " and ".join(map(str, sorted({row["steps"] for row in rows if row["steps"]})))
    head = (
        "| step with AdamW | contender | tokens/s | speed-up | ms | host ms | peak GB | compiles in s | FLOPs in FP8 "
        f"| loss after {steps} steps | BF16's | mark |"
    )
    return table(head, map(cells, rows))


def train(names: Sequence[str], device: torch.device, toy: bool, compiling: float, out: Path) -> list[Row]:
    """Measure these runs, of which each model's BF16 is the first, and write each row as soon as it is there."""
    environment, rows = environment_of(device) | {"dry_run": toy}, list[Row]()
    bf16: dict[str, Row] = {}
    if device.type == "cuda":
        torch.cuda.empty_cache()  # environment_of has copied; the runs need the memory
    print(where(environment), flush=True)
    with out.open("w") as file:

        def record(row: Row) -> None:
            rows.append(done := finished(row, environment, bf16.get(row["work"])))
            if done["who"] == "bf16" and done["ms"] is not None:
                bf16[done["work"]] = done
            file.write(json.dumps(done) + "\n")
            file.flush()
            print(line(row), flush=True)

        options = [f"--device={device.type}", *(["--quick"] if toy else [])]
        measure(names, options, compiling + TURN * len(names), record, compiling)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what the arguments ask for, print the table, and return the exit status, as h200.py does."""
    parser = argparse.ArgumentParser(description="Train whole models on one GPU.")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="(default: %(default)s)")
    parser.add_argument("--toy", action="store_true", help="use tiny sizes: tests the script, measures nothing")
    parser.add_argument("--models", nargs="+", choices=MODELS, help=f"(default: {' '.join(USUAL)})")
    parser.add_argument("--who", nargs="+", default=WHO, choices=STEP, help="besides bf16 (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("whole_models.jsonl"), help="(default: %(default)s)")
    parser.add_argument("--seconds-to-compile", type=float, default=240, help="at most (default: %(default)s)")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU here; --device cpu --toy tests everything else")
    if given.device == "cpu" and not given.toy:
        parser.error("on a CPU there is nothing to measure: add --toy for a dry run")
    begun, who = time.monotonic(), ["bf16", *(name for name in given.who if name != "bf16")]
    names = [f"{model}--{name}" for model in given.models or (TOYS if given.toy else USUAL) for name in who]
    rows = train(names, torch.device(given.device), given.toy, given.seconds_to_compile, given.out)
    print(f"\n{printed(rows)}\n\n{time.monotonic() - begun:.0f} s; {given.out}")
    return exit_status(rows)


if __name__ == "__main__":
    sys.exit(main())
