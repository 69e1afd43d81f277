"""Test `FP8PASS_DUMP`: the files it writes, that they run, that a pass keeps the numbers, and errors."""

from __future__ import annotations

import logging
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.base.errors import Fp8Error
from fp8pass.compiler.kernel_passes import KernelPasses
from fp8pass.compiler.order import DYNAMO, JOINT, KERNELS
from fp8pass.dump import replay
from fp8pass.dump.source import Origins, runnable
from fp8pass.dump.writer import Dump, _run_folder
from fp8pass.options.config import Config
from fp8pass.passes.joint.scaled_mm import ScaledMM
from fp8pass.recipes import DelayedScaling
from tests.helpers.harness import capture, compiled, verdicts, without_caches
from tests.helpers.models import Block, make

FP8 = 0.3
"""The largest relative distance of gradients of tensors that were quantized twice or more."""


def files(folder: Path, pattern: str = "*") -> list[str]:
    return sorted(str(f.relative_to(folder)) for f in folder.rglob(pattern) if f.is_file())


def dumped(model: nn.Module, x: Tensor, folder: Path, **options: Any) -> Path:
    """Return `folder`, after two training steps have written their dumps to it."""
    run = compiled(model, dump_dir=str(folder), **options)
    for _ in range(2):
        run(x).sum().backward()
    return folder


@pytest.fixture(scope="module")
def of_block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the dumps of a `Block`."""
    with without_caches():
        return dumped(make(), torch.randn(16, 32), tmp_path_factory.mktemp("block"))


ROUNDING = 1e-4
"""The relative distance of sums in another order, which may round a value to the next FP8 number."""


EXAMPLE = """
import warnings
with warnings.catch_warnings():  # of torch's own imports
    warnings.simplefilter("ignore")
    import torch, torch._inductor.compile_fx
import fp8pass
from torch import nn

warnings.filterwarnings("ignore", "The .grad attribute", UserWarning)  # Dynamo's, at a graph break
model = nn.Linear(32, 64)
run = torch.compile(model, backend="fp8pass", options={"lowering": "eager"})
for _ in range(2):
    run(torch.randn(16, 32)).sum().backward()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@fp8pass.train_step(lowering="eager")
def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

for _ in range(2):
    step(torch.randn(16, 32))
"""


def results(file: Path) -> dict[str, Any]:
    """Run a dump; return its results by name."""
    made = runpy.run_path(str(file))
    return replay.run(made["GRAPH"], made["INPUTS"], made["ATTRIBUTES"])


def compare(before: Path) -> float:
    """Return the largest relative distance between the results before a pass and after it."""
    after = results(before.with_name(before.name.replace("before.py", "after.py")))
    distances = [0.0]
    for name, expected in results(before).items():
        actual = after[name]
        assert isinstance(actual, Tensor) == isinstance(expected, Tensor), (before, name)
        if isinstance(actual, Tensor):
            assert bool(torch.isfinite(expected.double()).all()), (before, name)
            norm = float(expected.double().norm())
            distances.append(float((actual.double() - expected.double()).norm()) / norm if norm else 0.0)
    return max(distances)


class Checkpointed(nn.Module):
    """A checkpointed region, with random numbers that the backward draws again."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda x: F.dropout(F.gelu(self.up(x)), 0.1), x, use_reentrant=False)
        return x + y


class Branches(nn.Module):
    """Branches with their own matmuls, which stay in high precision."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 48)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.cond(x.sum() > 0, lambda x: x @ x.t(), lambda x: x @ x.t() * 2, (self.up(x),))
        return y


class Classifier(nn.Module):
    """A model with integers as inputs, a buffer that is written, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(48, 32), nn.BatchNorm1d(32), nn.Linear(32, 48)

    def forward(self, tokens: Tensor) -> Tensor:
        scale = torch.tensor([1.0, 0.5]).sum()
        return F.cross_entropy(self.head(self.norm(self.embedding(tokens)) * scale), tokens)


class ByUser(nn.Module):
    """A model whose quantize and dequantize the user wrote, with states."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))
        self.x, self.w, self.g = fp8pass.ScaleState(), fp8pass.ScaleState(), fp8pass.ScaleState()

    def forward(self, x: Tensor) -> Tensor:
        product = fp8pass.in_qdq(x, self.x) @ fp8pass.in_qdq(self.weight, self.w)
        return fp8pass.out_qdq(product, self.g)


@pytest.mark.compiled
def test_the_graph_says_what_it_is(of_block: Path) -> None:
    """It has shape, strides, dtype and device of each tensor, names of inputs, and the user's source lines."""
    (file,) = of_block.rglob("*joint.scaled_mm.after.py")
    text = file.read_text()
    assert 'primals_1: "f32[32][1]cpu",' in text
    assert re.search(r"'primals_1': replay.Random\(\[32\], \[1\], torch.float32, \"cpu\"\),  # L_.*norm.*weight_", text)
    assert re.search(r'_scaled_mm_default\w*: "f32\[16, 32\]\[32, 1\]cpu" = torch.ops.aten._scaled_mm.default\(', text)
    (file,) = of_block.rglob("*dynamo.annotate.after.py")
    assert "from fp8pass.quant.ops import qdq_operand as fp8pass_quant_ops_qdq_operand" in file.read_text()
    assert "models.py:" in file.read_text()


@pytest.mark.compiled
def test_the_index_of_a_run(tmp_path: Path) -> None:
    """It has one line for each graph, and says that torch's caches are not used."""
    run = compiled(nn.Linear(32, 48).requires_grad_(False), dump_dir=str(tmp_path))
    run(torch.randn(16, 32))
    run(torch.randn(16, 2, 32))
    head, *rows = (tmp_path / "run_000" / "index.md").read_text().split("|---|---|---|---:|\n")[0:2]
    assert f"torch {torch.__version__}" in head
    assert "Torch's caches of compiled graphs are not used" in head
    graphs = rows[0].splitlines()
    assert len(graphs) == 2
    assert all(re.search(r"graph_\d+.Linear/index.md\) \| 0/\d \| \d of \d matmuls in FP8", row) for row in graphs)


@pytest.mark.compiled
def test_processes_have_their_own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have their own folders, too; and no existing file is overwritten."""
    assert [_run_folder(str(tmp_path), pid).name for pid in (-1, -2, -1)] == ["run_000", "run_001", "run_000"]
    monkeypatch.setenv("RANK", "3")
    assert _run_folder(str(tmp_path), -3).name == "run_000.rank3"
    assert "process -1" in (tmp_path / "run_000" / "index.md").read_text()


@pytest.mark.compiled
def test_every_pass_is_an_artifact_of_torchs_trace() -> None:
    """`tlparse` shows these artifacts, with or without a folder."""
    records: list[Any] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    trace, handler = logging.getLogger("torch.__trace"), Handler()
    trace.addHandler(handler)
    try:
        compiled(nn.Linear(32, 48))(torch.randn(16, 32)).sum().backward()
    finally:
        trace.removeHandler(handler)
    found = {r.metadata["artifact"]["name"]: r.payload for r in records if "artifact" in r.metadata}
    ours = {name.split(".", 2)[2]: text for name, text in found.items() if name.startswith("fp8pass.")}
    assert {"dynamo.annotate", "joint.scaled_mm", "report"} <= set(ours)
    assert "qdq_operand" in ours["dynamo.annotate"]
    assert "_scaled_mm" in ours["joint.scaled_mm"]
    assert "2 of 2 matmuls in FP8" in ours["report"]
    assert "joint.canonicalize" not in ours  # this pass changed nothing


@pytest.mark.compiled
@pytest.mark.parametrize(
    "kind", [Block, Checkpointed, Branches, pytest.param(Classifier, marks=pytest.mark.variant), ByUser]
)
def test_dumps_run_and_agree(kind: Callable[[], nn.Module], tmp_path: Path, of_block: Path) -> None:
    x = torch.randint(0, 48, (16,)) if kind is Classifier else torch.randn(16, 32)
    recipe = None if kind is ByUser else "delayed"
    folder = of_block if kind is Block else dumped(make(kind), x, tmp_path, recipe=recipe)
    distances = {file.name: compare(file) for file in sorted(folder.rglob("*.before.py"))}
    assert len(distances) >= 2 + 9 + 6 * 2
    # `ByUser` is quantized from the start; once its states are lifted, each call is a step, which gives other scales
    changed = "001.dynamo.lift_scale_states" if kind is ByUser else "008.dynamo.annotate"
    assert 1e-3 < distances.pop(f"{changed}.before.py") < FP8
    assert max(distances.values()) < ROUNDING, distances


@pytest.mark.compiled
def test_dumps_of_another_recipe(tmp_path: Path) -> None:
    compiled(nn.Linear(32, 48), dump_dir=str(tmp_path), recipe="rowwise")(torch.randn(16, 32)).sum().backward()
    distances = {file.name: compare(file) for file in sorted(tmp_path.rglob("*.before.py"))}
    assert 1e-3 < distances.pop("008.dynamo.annotate.before.py") < FP8
    assert max(distances.values()) < ROUNDING


@pytest.mark.compiled
def test_dumps_of_bfloat16(tmp_path: Path) -> None:
    """A dequantized operand is rounded to bfloat16, by 2**-9 at most; a scaled matmul's operands are not rounded."""
    run = compiled(nn.Linear(32, 48).bfloat16(), dump_dir=str(tmp_path))
    run(torch.randn(16, 32, dtype=torch.bfloat16)).sum().backward()
    distances = {file.name: compare(file) for file in sorted(tmp_path.rglob("*.before.py"))}
    assert 1e-3 < distances.pop("008.dynamo.annotate.before.py") < FP8
    assert 1e-4 < distances.pop("019.joint.scaled_mm.before.py") < 3 * 2**-9  # the output is rounded, too
    assert max(distances.values()) < ROUNDING, distances


@pytest.mark.compiled
@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.variant)])
def test_symbolic_sizes_are_as_they_were_first(lowering: str, tmp_path: Path) -> None:
    run = compiled(nn.Linear(32, 48), dump_dir=str(tmp_path), dynamic=True, lowering=lowering)
    run(torch.randn(16, 32)).sum().backward()
    assert max(compare(file) for file in tmp_path.rglob("*.before.py") if "annotate" not in file.name) < ROUNDING
    (file,) = tmp_path.rglob("*joint.scaled_mm.after.py")
    assert re.search(r"'primals_\d': 16,  # s\d+\n", file.read_text())


@pytest.mark.compiled
def test_updates(tmp_path: Path) -> None:
    """A forward is given copies that hold its weights, and transposed copies that hold the transposed weights."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)

    @fp8pass.train_step(lowering="eager", skip_nonfinite=True, optimizer_state="fp8", dump_dir=str(tmp_path))
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(3):
        step(torch.randn(32, 64))
    distances = {
        f"{f.parent.name.split('.', 1)[1]} {f.name}": compare(f)
        for f in sorted(tmp_path.rglob("*.before.py"))
        if "graph" in f.parent.name and ".update" not in f.parent.name
    }
    changed = {name for name, distance in distances.items() if distance > ROUNDING}
    assert {name.split(" ")[1] for name in changed} == {"008.dynamo.annotate.before.py"}
    assert all(distances[name] < FP8 for name in changed)
    updates = sorted(tmp_path.rglob("*dynamo.expand_foreach.before.py"))
    assert updates
    for file in updates:
        before, after = results(file), results(next(file.parent.glob("*dynamo.write_weights.after.py")))
        parameters = [name for name in before if "params" in name]
        assert len(parameters) == 2
        for name in parameters:
            assert float((after[name] - before[name]).norm() / before[name].norm()) < FP8
        assert {"written into fp8pass_weight_0_x_q_0", "written into fp8pass_counts"} <= set(after) - set(before)


@pytest.mark.compiled
@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.variant)], ids=["here", "alone"])
def test_a_dump_alone(
    alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Users run a dump as a script. The variant does so in another process, which takes long."""
    compiled(nn.Linear(32, 48), dump_dir=str(tmp_path))(torch.randn(16, 32)).sum().backward()
    (file,) = tmp_path.rglob("*joint.scaled_mm.after.py")
    torch.save({"tangents_1": torch.zeros(16, 48)}, tmp_path / "inputs.pt")
    against = str(file).replace("after", "before")
    command = [str(file), "--against", against, "--inputs", str(tmp_path / "inputs.pt")]
    if alone:
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True).stdout
    else:
        monkeypatch.setattr(sys, "argv", command)
        runpy.run_path(str(file), run_name="__main__")
        done = capsys.readouterr().out
    lines = done.splitlines()
    assert re.match(r"019.joint.scaled_mm.after.py: \d+ inputs of seed 0", lines[0])
    assert re.match(
        r"output 0 +float32\[16, 48\] +sum \S+, norm \S+, max \S+  (equal|relative distance \S+)$", lines[1]
    )
    gradient = next(line for line in lines if "float32[48, 32]" in line)  # the gradient is zero, and so is the weight's
    assert gradient.endswith("sum 0, norm 0, max 0  equal")


@pytest.mark.compiled
def test_a_graph_for_a_gpu_on_a_machine_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU is here")
    module = capture(lambda x: x + torch.ones(4, device=x.device), torch.randn(4, 4), device="cuda")
    file = tmp_path / "graph.py"
    file.write_text(runnable(module, Origins()))
    monkeypatch.setattr(sys, "argv", [str(file)])
    with pytest.raises(
        SystemExit, match=r"this graph was compiled for cuda:0, which is not here \(.*\)\. --device cpu runs it on"
    ):
        runpy.run_path(str(file), run_name="__main__")
    monkeypatch.setattr(sys, "argv", [str(file), "--device", "cpu"])
    monkeypatch.setattr(replay, "_on", [])
    runpy.run_path(str(file), run_name="__main__")
    assert "output 0  float32[4, 4]" in capsys.readouterr().out


@pytest.mark.compiled
def test_what_has_no_text_says_so(tmp_path: Path) -> None:
    """The text of a function of the user's is missing; the rest of the graph is there, and later passes' dumps run."""
    recipe = DelayedScaling(amax_compute_algo=lambda history: history.amax(0))
    compiled(nn.Linear(32, 48), dump_dir=str(tmp_path), recipe=recipe)(torch.randn(16, 32)).sum().backward()
    with pytest.raises(NotImplementedError, match=r"this dump needs .*<lambda>, which can't be written as source"):
        results(next(tmp_path.rglob("008.dynamo.annotate.after.py")))
    assert compare(next(tmp_path.rglob("*joint.scaled_mm.before.py"))) < ROUNDING


# ---------------------------------------------------------------------------------------------------------------------
# Errors
@pytest.mark.compiled
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """The error comes before anything is compiled."""
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "dumps"
    with (
        verdicts() as report,
        pytest.raises(Exception, match=r"dumps can't be written into .*: Not a directory\. Name"),
    ):
        compiled(nn.Linear(32, 48), dump_dir=str(folder))(torch.randn(16, 32))
    assert report.graphs == 0
    with pytest.raises(Fp8Error, match=re.escape(repr(str(folder)))):
        Dump.of(Config(dump_dir=str(folder)), "graph")


@pytest.mark.compiled
def test_a_fault_in_a_pass_keeps_the_dumps_and_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> int:
        raise KeyError("broken")

    monkeypatch.setattr(ScaledMM, "run", run)
    with pytest.raises(Exception, match=r"(?s)a fault of fp8pass in its pass scaled_mm.*The dumps so far are in ") as e:
        compiled(nn.Linear(32, 48), dump_dir=str(tmp_path))(torch.randn(16, 32))
    (folder,) = (tmp_path / "run_000").glob("graph_*")
    assert str(folder) in str(e.value)
    assert str(e.value).count("The dumps so far are in") == 1
    assert files(folder, "*.py")[-1] == "019.joint.scaled_mm.before.py"
    head = (folder / "019.joint.scaled_mm.before.py").read_text().splitlines()[0]
    assert head.startswith("# the graph before scaled_mm failed: a fault of fp8pass in its pass scaled_mm: 'broken'")
    assert results(folder / "019.joint.scaled_mm.before.py")
    assert "| failed: a fault of fp8pass" in (tmp_path / "run_000" / "index.md").read_text()


@pytest.mark.compiled
def test_a_fault_in_the_kernel_passes_names_the_dumps(tmp_path: Path) -> None:
    module = capture(lambda x: torch.cat([x, x]), torch.randn(4))
    for node in module.graph.nodes:
        node.meta.pop("val", None)
    with pytest.raises(Fp8Error, match=f"The dumps so far are in {re.escape(str(tmp_path))}"):
        KernelPasses(Config(), Dump(tmp_path))(module.graph)


# ---------------------------------------------------------------------------------------------------------------------
# Log lines
@pytest.mark.compiled
def test_a_line_for_each_graph_and_no_warning() -> None:
    """A process that stops at any warning can import, compile, and train by the backend and by `train_step`."""
    environment = {**os.environ, "TORCH_LOGS": "fp8pass"}
    command = [sys.executable, "-W", "error", "-c", EXAMPLE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "fp8pass/" in line]
    assert len(lines) >= 3
    for line in lines:
        assert re.match(r"I\d.*graph \d, [\w.]+: \d+ of \d+ matmuls in FP8.*, compiled in \d+\.\d s$", line), line
    assert len({re.search(r"graph \d+", line).group() for line in lines}) == len(lines)


@pytest.mark.inductor
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_written_files(lowering: str, tmp_path: Path, of_block: Path) -> None:
    """Inductor, which takes long, compiles one layer."""
    layer, x = nn.Linear(32, 48), torch.randn(16, 32)
    of_run, n = (of_block, 6) if lowering == "eager" else (dumped(layer, x, tmp_path, lowering=lowering), 2)
    (folder,) = (of_run / "run_000").glob("graph_*")
    joint, kernels = [f"joint.{p.name}" for p in JOINT], [p.name for p in KERNELS]
    code = ["output_code"] if lowering == "inductor" else []
    steps = [*(f"dynamo.{p.name}" for p in DYNAMO if p.name != "insert_monitors"), *joint]
    parts = ("forward", "backward")
    if lowering == "inductor":
        steps += [f"{part}.{name}" for part in parts for name in (*kernels, *code)]
        found = [re.sub(r"(\.after)?\.py$", "", f) for f in files(folder, "*.py") if "before" not in f]
        assert found == [f"{i:03d}.{step}" for i, step in enumerate(steps)]
    stems = {f.removesuffix(".diff") for f in files(folder, "*.diff")}
    assert {f.removesuffix(".before.py") for f in files(folder, "*.before.py")} == stems
    assert {s.split(".", 1)[1] for s in stems} >= {*joint, *(f"{p}.{k}" for p in parts for k in kernels)}
    heads = {f: (folder / f).read_text().splitlines()[0] for f in files(folder) if f != "index.md"}
    assert all(re.search(r"made by .* in \d+\.\d m?s|the graph before \w+: applied", h) for h in heads.values()), heads
    assert heads["019.joint.scaled_mm.after.py"].startswith(f"# made by scaled_mm: applied {n} times in ")
    assert f"{n} of {n} matmuls in FP8" in (folder / "report.txt").read_text()
    diff = (folder / "019.joint.scaled_mm.diff").read_text()
    assert re.search(r"^\+.*_scaled_mm", diff, re.MULTILINE) and not re.search(r"^-.*_scaled_mm", diff, re.MULTILINE)
    index = (folder / "index.md").read_text()
    assert next(row for row in index.splitlines() if "scaled_mm.after" in row).endswith(" lines differ |")
    assert re.search(r"canonicalize: applied 0 times in .* changes nothing \|", index)
