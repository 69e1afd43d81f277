"""`FP8PASS_DUMP`: the files that a training step writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from fp8pass.compiler.order import DYNAMO, JOINT, KERNELS
from tests.helpers.dump import dumped, files
from tests.helpers.dump import of_block as of_block


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
    assert heads["018.joint.scaled_mm.after.py"].startswith(f"# made by scaled_mm: applied {n} times in ")
    assert f"{n} of {n} matmuls in FP8" in (folder / "report.txt").read_text()
    diff = (folder / "018.joint.scaled_mm.diff").read_text()
    assert re.search(r"^\+.*_scaled_mm", diff, re.MULTILINE) and not re.search(r"^-.*_scaled_mm", diff, re.MULTILINE)
    index = (folder / "index.md").read_text()
    assert next(row for row in index.splitlines() if "scaled_mm.after" in row).endswith(" lines differ |")
    assert re.search(r"canonicalize: applied 0 times in .* changes nothing \|", index)
