"""Write the parts of README.md and docs/ that are made from sources, or check that they are up to date.

    python docs/generate.py              write the parts that are read from the sources; this takes seconds
    python docs/generate.py --check      write nothing; exit with 1 and list the files if such parts are out of date
    python docs/generate.py NAME ...     write these parts; those with figures run what measures them
    python docs/generate.py --all        write all parts, which takes hours and needs an otherwise idle machine

A part of a page stands between `<!-- name -->` and `<!-- /name -->`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "bench"))  # for the tables of what was measured

import diagram  # noqa: E402
import kernel_times  # noqa: E402
import limits  # noqa: E402
from measured import TABLES, printed  # noqa: E402
from sections import demo, dumps, example, graphs, monitor_cost, script, shown, table_of_folders, table_of_passes  # noqa: E402

COMMAND = ".venv/bin/python docs/generate.py"


class Part(NamedTuple):
    """A part of a page: the page's path, and a function that returns the text."""

    page: str
    text: Callable[[], str]


def compile_time() -> str:
    """Return the table of bench/compile_time.py, which needs an otherwise idle machine."""
    backends = ("inductor", "casts", "torchao", "delayed", "delayed:blocks", "inductor:blocks", "explain")
    return script("bench/compile_time.py", "--layers", "1", "8", "32", "--backends", *backends, "--repeat", "1")


def compile_time_of_steps() -> str:
    """Return the table of bench/compile_time.py for steps with an optimizer, which needs an otherwise idle machine."""
    backends = ("inductor:compiled_adamw", "delayed:adamw", "delayed:train_step", "delayed:train_step_fused")
    return script("bench/compile_time.py", "--layers", "1", "8", "32", "--backends", *backends, "--repeat", "1")


FROM_SOURCES = {
    "folders": Part("docs/architecture.md", table_of_folders),
    "passes": Part("docs/passes.md", table_of_passes),
    **{f"limits_{name}": Part("docs/limits.md", partial(limits.table, name)) for name in limits.TABLES},
    "guides": Part("docs/guides.md", partial(script, "-m", "tests.guides")),
    "kernels_now": Part("docs/kernels.md", kernel_times.now_table),
    "speedups_now": Part("docs/kernels.md", kernel_times.now_totals),
    **{f"measured_{name}": Part("docs/measured.md", partial(printed, name)) for name in ("h100", *TABLES)},
    "measured_short": Part("README.md", partial(printed, "short")),
}
"""{name: part that is read from the sources, or from results that are committed}."""
PICTURES: dict[str, Callable[[], str]] = {
    "docs/images/pipeline.svg": diagram.svg,
}
"""{path: function that returns the picture}, from the sources too."""
_TRAFFIC_OF_STEPS = ("bench/traffic.py", "--optimizer", "AdamW", "--blocks", "llama_mlp", "llama_block")
RUN = {
    "demo": Part("README.md", demo),
    "example": Part("README.md", partial(example, "train.py")),
    "train_step": Part("docs/train-step.md", partial(example, "train_step.py")),
    "qdq": Part("docs/quantize-dequantize.md", partial(example, "qdq.py")),
    "transformers_trainer": Part("docs/transformers.md", partial(example, "transformers_trainer.py")),
    "own_recipe": Part("docs/recipes.md", partial(example, "own_recipe.py")),
    "rewrite_graph": Part("docs/rewrite.md", partial(example, "rewrite_graph.py")),
    "accelerate_loop": Part("docs/accelerate.md", partial(example, "accelerate_loop.py")),
    "lightning_module": Part("docs/lightning.md", partial(example, "lightning_module.py")),
    "lora": Part("docs/lora.md", partial(example, "lora.py")),
    "export_fp8": Part("docs/export.md", partial(example, "export_fp8.py")),
    "torchtitan_train": Part("docs/torchtitan.md", partial(example, "torchtitan_train.py")),
    "divergence": Part("docs/debugging.md", partial(example, "divergence.py")),
    "monitor": Part("docs/monitor.md", partial(shown, "examples/monitor.py")),
    "monitor_cost": Part("docs/monitor.md", monitor_cost),
    "graphs": Part("docs/compiler.md", graphs),
    "dumps": Part("docs/dumps.md", dumps),
    "inspect": Part(
        "docs/inspect.md", partial(shown, "-m", "fp8pass.inspect.cli", "inspect", "bench.blocks:llama_mlp", "--ptx")
    ),
    "fused_kernel": Part("docs/fused-matmuls.md", partial(script, "docs/fused_kernel.py")),
    "export_formats": Part("docs/export.md", partial(script, "bench/export_formats.py")),
    "first_step": Part("docs/recipes.md", partial(script, "bench/first_step.py")),
    "recipes": Part("docs/recipes.md", partial(script, "bench/recipes.py")),
    "traffic": Part("docs/kernels.md", partial(script, "bench/traffic.py")),
    "saved": Part("docs/saved-tensors.md", partial(script, "bench/saved.py")),
    "saved_verdicts": Part("docs/saved-tensors.md", partial(shown, "bench/saved.py", "--verdicts")),
    "step_traffic": Part("docs/train-step.md", partial(script, *_TRAFFIC_OF_STEPS)),
    "accumulation": Part("docs/train-step.md", partial(script, "bench/accumulation.py")),
    "weight_copies": Part("docs/train-step.md", partial(script, "bench/weight_copies.py")),
    "weight_amax": Part("docs/train-step.md", partial(script, "bench/weight_amax.py")),
    "comms": Part("docs/distributed.md", partial(script, "bench/comms.py")),
    "thousand_ranks": Part("docs/thousand-ranks.md", partial(script, "bench/thousand_ranks.py")),
    "cpu_matmuls": Part("docs/cpu.md", partial(script, "bench/cpu_matmuls.py")),
    "memory": Part("docs/memory.md", partial(script, "bench/memory.py")),
    "seeds": Part("docs/memory.md", partial(script, "bench/seeds.py")),
    "smooth_swiglu": Part("docs/numerics.md", partial(script, "bench/smooth_swiglu.py")),
    "compile_time": Part("docs/kernels.md", compile_time),
    "op_by_op": Part(
        "docs/kernels.md",
        partial(script, "bench/op_by_op.py", "--zoo", "--ways", "aot_eager", "delayed", "--repeat", "2"),
    ),
    "when_it_pays": Part("docs/train-step.md", partial(script, "bench/when_it_pays.py")),
    "updates": Part("docs/train-step.md", partial(script, "bench/when_it_pays.py", "--updates")),
    "compile_time_of_steps": Part("docs/train-step.md", compile_time_of_steps),
    "host_overhead": Part("docs/kernels.md", partial(script, "bench/host_overhead.py", "--steps", "50")),
    "zoo": Part("docs/zoo.md", partial(script, "-m", "tests.zoo", "--page")),
}
"""{name: part that shows what a program prints}."""
PARTS = {**FROM_SOURCES, **RUN}


def made(name: str) -> tuple[Path, str]:
    """Return the file that has a part, or is a picture, and the whole text that it should have."""
    if name in PICTURES:
        return ROOT / name, PICTURES[name]()
    page, text = PARTS[name]
    return ROOT / page, replaced((ROOT / page).read_text(), name, text())


def replaced(page: str, name: str, text: str) -> str:
    """Return the page with a text between the markers of a name; raises ValueError unless it has both of them."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, begins, rest = page.partition(begin)
    _, ends, after = rest.partition(end)
    if not (begins and ends):
        raise ValueError(f"no markers {begin.strip()} and {end}")
    return f"{before}{begin}{text}\n{end}{after}"


def main() -> None:
    """Write parts of pages, or check them: see the file's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join((*PARTS, *PICTURES)))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--all", action="store_true")
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - {*PARTS, *PICTURES}:
        parser.error(f"nothing is named {', '.join(sorted(unknown))}")
    differ = []
    for name in chosen.names or (*(PARTS if chosen.all else FROM_SOURCES), *PICTURES):
        file, text = made(name)
        if file.read_text() == text:
            continue
        differ.append(f"{name} ({file.relative_to(ROOT)})" if name in PARTS else name)
        if not chosen.check:
            file.write_text(text)  # at once, as others may take hours
    if chosen.check and differ:
        sys.exit(f"out of date: {', '.join(differ)}. To update: {COMMAND}")
    print(f"updated: {', '.join(differ)}" if differ else "nothing is out of date")


if __name__ == "__main__":
    main()
