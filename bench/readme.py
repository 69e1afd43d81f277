"""Update the figures in README.md and docs/: run the commands that print them, and paste the output between markers.

python bench/readme.py [name ...]        names of markers; all by default
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import kernel_times
import rooms_drawing
from diagram import svg
from measured import TABLES, printed

from fp8pass.pipeline import DYNAMO, JOINT, KERNELS, traced_passes, update_passes

ROOT = Path(__file__).parent.parent


def run(*command: str, **variables: str) -> str:
    """Run a command and return what it prints; exit if it fails."""
    environment = {**os.environ, "COLUMNS": "120", **variables}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout.strip()


def demo() -> str:
    """Run `fp8pass demo`: write its plot to docs/, and return its output, with the table and the progress shortened."""
    with tempfile.TemporaryDirectory() as folder:
        printed = run(sys.executable, "-m", "fp8pass.cli", "demo", "--out", folder)
        (ROOT / "docs" / "demo.png").write_bytes((Path(folder) / "loss.png").read_bytes())
        printed = printed.replace(folder, "fp8pass-demo")
    lines = [line for line in printed.splitlines() if not re.search(r"^  \d+ s$| \.\.\.$", line)]
    steps = [line for line in lines if line.startswith("  step ")]
    lines = [line for line in lines if line not in steps[:-1]]
    rows = [i for i, line in enumerate(lines) if re.search(r"demo\.py:\d+$", line)]
    middle = f"... {len(rows) - 3} more"
    return block("\n".join([*lines[: rows[0] + 2], middle, *lines[rows[-1] :]]))


def example(name: str) -> str:
    """Return an example's source and its output."""
    file = ROOT / "examples" / name
    return block(file.read_text().strip(), "python") + "\n\n" + block(run(sys.executable, str(file)))


def table_of_passes() -> str:
    """Return a table of all passes in order, each with its graph and the first line of its docstring."""
    stages: dict[str, Any] = {"Dynamo's graph": DYNAMO, "Dynamo's graph of an update": update_passes()}
    stages |= {"graph of another tracer": traced_passes(), "joint graph": JOINT}
    stages |= {"forward, backward, update": KERNELS}
    graphs = {p.name: graph for graph, passes in stages.items() for p in passes}
    rows = ["| pass | works on | what it does |", "|---|---|---|"]
    for name, graph in graphs.items():
        doc = ast.get_docstring(ast.parse((file := next((ROOT / "passes").rglob(f"{name}.py"))).read_text())) or ""
        rows.append(f"| [`{name}`](../{file.relative_to(ROOT)}) | {graph} | {doc.splitlines()[0]} |")
    return "\n".join(rows)


def pipeline() -> str:
    """Write the drawing of the pipeline to docs/images/; return the link to it."""
    (ROOT / "docs" / "images" / "pipeline.svg").write_text(svg())
    return "![From torch.compile to kernels, with the passes in order](images/pipeline.svg)"


def rooms() -> str:
    """Draw the rooms of the code, in docs/images/; return the picture and the tables of rooms."""
    (ROOT / "docs" / "images" / "rooms.svg").write_text(rooms_drawing.svg())
    return f"![The rooms of the code by floor](images/rooms.svg)\n\n{rooms_drawing.tables()}"


SMALL_LAYER = """
import torch
layer = torch.nn.Linear(64, 32, bias=False)
compiled = torch.compile(layer, backend="fp8pass", options={"recipe": "dynamic", "lowering": "eager"})
compiled(torch.randn(16, 64, requires_grad=True)).sum().backward()
"""
MATMULS = r"_scaled_mm\.|\bmm\.|convert_element_type\.default\(.*torch\.float8"
STEPS = {
    "dynamo.annotate.before": (".", "Dynamo's graph:"),
    "dynamo.annotate.after": (
        ".",
        "After `annotate`. `qdq_gradient` is the identity in the forward, and quantizes the gradient in the backward:",
    ),
    "joint.scaled_mm.before": (MATMULS, "In the joint graph, of 89 ops, `mm` multiplies dequantized tensors:"),
    "joint.scaled_mm.after": (MATMULS, "After `scaled_mm` all three matmuls multiply the FP8 tensors themselves:"),
    "forward.fold_quantizes.after": (
        r"fp8pass\.quantize|_scaled_mm\.|permute\.|clone\.",
        "The forward graph after `fold_quantizes`, which makes one node of each quantize. The last lines are for the "
        "backward:",
    ),
}
"""{part of a dump's name: (pattern of the lines to show, title)}, for the graphs of a small layer."""


def graphs() -> str:
    """Return the graphs of a small layer from dumps, shortened, with titles."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-c", SMALL_LAYER, FP8PASS_DUMP=folder)
        (dump,) = Path(folder).glob("run_000/graph_*")
        texts = {name: next(dump.glob(f"*.{name}.py")).read_text() for name in STEPS}
    ops = texts["joint.scaled_mm.before"].count("torch.ops.")
    said = {name: re.sub(r"\d+ ops", f"{ops} ops", title) for name, (_, title) in STEPS.items()}
    return "\n\n".join(f"{said[name]}\n\n{block(shortened(texts[name], STEPS[name][0]), 'python')}" for name in STEPS)


def shortened(text: str, shown: str) -> str:
    """Return the body of a dumped graph: the lines that match `shown`, and `...` for the others."""
    body = text[text.index("    ):\n") + 7 : text.index("\n\n\nGRAPH")]
    lines: list[str] = []
    for line in (each.split(";")[0].split("#")[0].strip() for each in body.splitlines()):
        if line.endswith(("[", "(")):
            break  # here the return statement begins
        if not line or re.match(r"\w+ = \w+$", line):
            continue
        if not re.search(shown, line):
            lines += ["..."] if lines[-1:] != ["..."] else []
            continue
        short = re.sub(r"\]\[[\d, ]*\]cpu", "]", line).replace("torch.ops.", "").replace("fp8pass_quant_ops_", "")
        lines.append(short.replace("torch.float", "float").replace(", memory_format = torch.contiguous_format", ""))
    return "\n".join(lines)


def first_step() -> str:
    """Return the table of bench/first_step.py."""
    return run(sys.executable, "bench/first_step.py")


def recipes() -> str:
    """Return the table of bench/recipes.py."""
    return run(sys.executable, "bench/recipes.py")


def inspect() -> str:
    """Return the output of `fp8pass inspect` for an MLP."""
    return block(run(sys.executable, "-m", "fp8pass.cli", "inspect", "bench.blocks:llama_mlp", "--ptx"))


def traffic() -> str:
    """Return the table of bench/traffic.py, without an optimizer."""
    return run(sys.executable, "bench/traffic.py")


def fused_kernel() -> str:
    """Return a generated kernel of a fused matmul, and what it moves."""
    return run(sys.executable, "bench/fused_kernel.py")


def saved() -> str:
    """Return the tables of bench/saved.py."""
    return run(sys.executable, "-W", "ignore", "bench/saved.py")


def saved_verdicts() -> str:
    """Return the verdicts on the tensors that a layer saves."""
    return block(run(sys.executable, "-W", "ignore", "bench/saved.py", "--verdicts"))


def step_traffic() -> str:
    """Return the table of bench/traffic.py for whole steps."""
    return run(sys.executable, "bench/traffic.py", "--optimizer", "AdamW", "--blocks", "llama_mlp", "llama_block")


def comms() -> str:
    """Return the table of bench/comms.py, which first compares its formulas with what runs."""
    return run(sys.executable, "bench/comms.py")


def accumulation() -> str:
    """Return the table of bench/accumulation.py."""
    return run(sys.executable, "bench/accumulation.py")


def memory() -> str:
    """Return the table of bench/memory.py."""
    return run(sys.executable, "-W", "ignore", "bench/memory.py")


def seeds() -> str:
    """Return the table of bench/seeds.py."""
    return run(sys.executable, "-W", "ignore", "bench/seeds.py")


def smooth_swiglu() -> str:
    """Return the table of bench/smooth_swiglu.py."""
    return run(sys.executable, "bench/smooth_swiglu.py")


def monitor() -> str:
    """Return the output of examples/monitor.py."""
    return block(run(sys.executable, "examples/monitor.py"))


def monitor_cost() -> str:
    """Return the totals of `fp8pass inspect` for an MLP, with the monitor and without."""
    command = (sys.executable, "-m", "fp8pass.cli", "inspect", "bench.blocks:llama_mlp")
    off, on = (run("env", f"FP8PASS_MONITOR={flag}", *command).splitlines() for flag in "01")
    totals = next(i for i, line in enumerate(off) if line == "totals")
    row = {
        name: next(line for line in lines[::-1] if line.startswith("fp8pass"))
        for name, lines in (("", off), ("monitor", on))
    }
    return block(
        "\n".join([off[totals + 1], row[""], row["monitor"].replace("fp8pass delayed", "with monitor   "), off[-1]])
    )


def cpu_matmuls() -> str:
    """Return the tables of bench/cpu_matmuls.py."""
    return run(sys.executable, "bench/cpu_matmuls.py")


def compile_time() -> str:
    """Return the table of bench/compile_time.py, which needs an otherwise idle machine."""
    backends = ("inductor", "casts", "torchao", "delayed", "delayed:blocks", "inductor:blocks", "explain")
    options = ("--layers", "1", "8", "32", "--backends", *backends, "--repeat", "1")
    return run(sys.executable, "bench/compile_time.py", *options)


def host_overhead() -> str:
    """Return the table of bench/host_overhead.py, which needs an otherwise idle machine."""
    return run(sys.executable, "bench/host_overhead.py", "--steps", "50")


def dumps() -> str:
    """Return the index of an example's dump, without passes that change nothing, and the output of one of its files."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "examples/train.py", FP8PASS_DUMP=folder)
        graph = min(Path(folder).glob("run_000/graph_*"))  # the second graph is from `explain`, which stops earlier
        rows = [row for row in (graph / "index.md").read_text().splitlines() if "changes nothing" not in row]
        after = next(graph.glob("*joint.scaled_mm.after.py"))
        before = after.with_name(after.name.replace("after", "before"))
        printed = run(sys.executable, str(after), "--against", str(before))
    command = f"$ python {after.name} --against {before.name}"
    table = re.sub(r"\[(\S+?)\]\(\S+?\)", r"`\1`", "\n".join(rows[4:]))
    return table + "\n\n" + block(f"{command}\n{printed}")


def kernels_now() -> str:
    """Return the table of kernels that quantize, as measured and as they are now."""
    return kernel_times.now_table()


def speedups_now() -> str:
    """Return the table of the speed-ups that follow."""
    return kernel_times.now_totals()


def zoo() -> str:
    """Return the tables of the rows that bench/zoo.py has."""
    return run(sys.executable, "bench/zoo.py", "--page")


def block(text: str, language: str = "") -> str:
    """Return text as a fenced block."""
    return f"```{language}\n{text}\n```"


SECTIONS = {
    "demo": demo,
    "example": lambda: example("train.py"),
    "train_step": lambda: example("train_step.py"),
    "qdq": lambda: example("qdq.py"),
    "transformers_trainer": lambda: example("transformers_trainer.py"),
    "own_recipe": lambda: example("own_recipe.py"),
    "rewrite_graph": lambda: example("rewrite_graph.py"),
    "accelerate_loop": lambda: example("accelerate_loop.py"),
    "lightning_module": lambda: example("lightning_module.py"),
    "lora": lambda: example("lora.py"),
    "export_fp8": lambda: example("export_fp8.py"),
    "export_formats": lambda: run(sys.executable, "bench/export_formats.py"),
    "torchtitan_train": lambda: example("torchtitan_train.py"),
    "divergence": lambda: example("divergence.py"),
    "passes": table_of_passes,
    "pipeline": pipeline,
    "rooms": rooms,
    "graphs": graphs,
    "add_a_pass": lambda: example("add_a_pass.py"),
    "first_step": first_step,
    "recipes": recipes,
    "inspect": inspect,
    "traffic": traffic,
    "kernels_now": kernels_now,
    "speedups_now": speedups_now,
    "fused_kernel": fused_kernel,
    "saved": saved,
    "saved_verdicts": saved_verdicts,
    "step_traffic": step_traffic,
    "compile_time": compile_time,
    "host_overhead": host_overhead,
    "comms": comms,
    "cpu_matmuls": cpu_matmuls,
    "accumulation": accumulation,
    "weight_copies": lambda: run(sys.executable, "bench/weight_copies.py"),
    "weight_amax": lambda: run(sys.executable, "-W", "ignore", "bench/weight_amax.py"),
    "guides": lambda: run(sys.executable, "bench/guides.py"),
    "memory": memory,
    "seeds": seeds,
    "smooth_swiglu": smooth_swiglu,
    "monitor": monitor,
    "monitor_cost": monitor_cost,
    "dumps": dumps,
    **{f"measured_{name}": partial(printed, name) for name in ("h100", *TABLES)},
    "zoo": zoo,
}
FILES = {
    "demo": "README.md",
    "example": "README.md",
    "train_step": "docs/train-step.md",
    "qdq": "docs/quantize-dequantize.md",
    "transformers_trainer": "docs/transformers.md",
    "own_recipe": "docs/recipes.md",
    "rewrite_graph": "docs/rewrite.md",
    "accelerate_loop": "docs/accelerate.md",
    "lightning_module": "docs/lightning.md",
    "lora": "docs/lora.md",
    "export_fp8": "docs/export.md",
    "export_formats": "docs/export.md",
    "torchtitan_train": "docs/torchtitan.md",
    "passes": "docs/passes.md",
    "first_step": "docs/recipes.md",
    "recipes": "docs/recipes.md",
    "traffic": "docs/kernels.md",
    "kernels_now": "docs/kernels.md",
    "speedups_now": "docs/kernels.md",
    "fused_kernel": "docs/fused-matmuls.md",
    "inspect": "docs/inspect.md",
    "saved": "docs/saved-tensors.md",
    "saved_verdicts": "docs/saved-tensors.md",
    "step_traffic": "docs/train-step.md",
    "comms": "docs/distributed.md",
    "cpu_matmuls": "docs/cpu.md",
    "accumulation": "docs/train-step.md",
    "weight_copies": "docs/train-step.md",
    "weight_amax": "docs/train-step.md",
    "guides": "docs/guides.md",
    "memory": "docs/memory.md",
    "seeds": "docs/memory.md",
    "smooth_swiglu": "docs/numerics.md",
    "compile_time": "docs/kernels.md",
    "host_overhead": "docs/kernels.md",
    "dumps": "docs/dumps.md",
    **{f"measured_{name}": "docs/measured.md" for name in ("h100", *TABLES)},
    "measured_short": "README.md",
    "monitor": "docs/monitor.md",
    "monitor_cost": "docs/monitor.md",
    "divergence": "docs/debugging.md",
    "pipeline": "docs/compiler.md",
    "rooms": "docs/architecture.md",
    "graphs": "docs/compiler.md",
    "add_a_pass": "docs/add-a-pass.md",
    "zoo": "docs/zoo.md",
}
"""{section: the page that has its markers}."""


def main(names: list[str]) -> None:
    """Replace the text between `<!-- name -->` and `<!-- /name -->` for each name; for all without names."""
    for name in names or SECTIONS:
        file = ROOT / FILES[name]
        text = file.read_text()
        pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        assert pattern.search(text), f"{file} has no markers for {name!r}"
        before, after = pattern.split(text)[0], pattern.split(text)[-1]
        text = f"{before}<!-- {name} -->\n{SECTIONS[name]()}\n<!-- /{name} -->{after}"
        file.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
