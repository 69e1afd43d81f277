"""The texts of the parts of pages that `generate.py` writes, as far as they are more than what one command prints."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fp8pass.compiler.order import DYNAMO, JOINT, KERNELS, TRACED, UPDATE

ROOT = Path(__file__).parent.parent


def run(*command: str, **variables: str) -> str:
    """Run a command in the repository's root and return what it prints; exit if it fails."""
    environment = {**os.environ, "COLUMNS": "120", **variables}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout.strip()


def script(*command: str) -> str:
    """Return what a Python script prints, without its warnings."""
    return run(sys.executable, "-W", "ignore", *command)


def shown(*command: str) -> str:
    """Return what a Python script prints, as a fenced block."""
    return block(script(*command))


def demo() -> str:
    """Run `fp8pass demo`: write its plot to docs/, and return its output, with the table and the progress shortened."""
    with tempfile.TemporaryDirectory() as folder:
        printed = run(sys.executable, "-m", "fp8pass.inspect.cli", "demo", "--out", folder)
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
    stages: dict[str, Any] = {"Dynamo's graph": DYNAMO, "Dynamo's graph of an update": UPDATE}
    stages |= {"graph of another tracer": TRACED, "joint graph": JOINT}
    stages |= {"forward, backward, update": KERNELS}
    graphs = {p.name: graph for graph, passes in stages.items() for p in passes}
    rows = ["| pass | works on | what it does |", "|---|---|---|"]
    for name, graph in graphs.items():
        doc = ast.get_docstring(ast.parse((file := next((ROOT / "passes").rglob(f"{name}.py"))).read_text())) or ""
        rows.append(f"| [`{name}`](../{file.relative_to(ROOT)}) | {graph} | {doc.splitlines()[0]} |")
    return "\n".join(rows)


def table_of_folders() -> str:
    """Return a table of the folders of fp8pass and the files at its top, with the first lines of their docstrings."""
    tops = {path for top in ("fp8pass", "passes") for path in (ROOT / top).iterdir() if not path.is_symlink()}
    files = {path: path / "__init__.py" if path.is_dir() else path for path in sorted(tops)}
    rows = ["| folder or file | what lives there |", "|---|---|"]
    for path, file in files.items():
        if file.suffix == ".py" and path.name != "__init__.py" and file.exists():
            doc = ast.get_docstring(ast.parse(file.read_text())) or ""
            name = f"{path.relative_to(ROOT)}/" if path.is_dir() else str(path.relative_to(ROOT))
            rows.append(f"| [`{name}`](../{file.relative_to(ROOT)}) | {doc.splitlines()[0]} |")
    return "\n".join(rows)


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


def monitor_cost() -> str:
    """Return the totals of `fp8pass inspect` for an MLP, with the monitor and without."""
    command = (sys.executable, "-m", "fp8pass.inspect.cli", "inspect", "bench.blocks:llama_mlp")
    off, on = (run("env", f"FP8PASS_MONITOR={flag}", *command).splitlines() for flag in "01")
    totals = next(i for i, line in enumerate(off) if line == "totals")
    row = {
        name: next(line for line in lines[::-1] if line.startswith("fp8pass"))
        for name, lines in (("", off), ("monitor", on))
    }
    return block(
        "\n".join([off[totals + 1], row[""], row["monitor"].replace("fp8pass delayed", "with monitor   "), off[-1]])
    )


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


def block(text: str, language: str = "") -> str:
    """Return text as a fenced block."""
    return f"```{language}\n{text}\n```"
