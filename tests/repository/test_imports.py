"""Test what `import fp8pass` and a training step load, and what works after the import alone: in fresh processes."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import house
import pytest

import fp8pass
from tests.helpers.asked import ask

pytestmark = pytest.mark.tools

LINES = {name: len(file.read_text().splitlines()) for name, file in house.modules().items()}
IMPORT = "import fp8pass\n"
STEP = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
optimizer = torch.optim.AdamW(model.parameters())
compiled = torch.compile(model, backend="fp8pass")
compiled(torch.ones(16, 32)).sum().backward()
optimizer.step()
found = all(p.grad is not None for p in model.parameters())
"""
"""A training step of a plain model. The backend comes from the entry point."""


def after(statements: str) -> Any:
    """Return what statements assign to `found` in a fresh process."""
    return ask("tests.helpers.fresh", statements)["found"]


def loaded_by(statements: str) -> set[str]:
    return set(ask("tests.helpers.fresh", statements)["loaded"])


def share(modules: set[str]) -> float:
    """Return the share of the product's lines that is in these modules."""
    return sum(LINES[name] for name in modules) / sum(LINES.values())


def test_the_import_loads_at_most_a_tenth() -> None:
    loaded = loaded_by(IMPORT)
    assert "fp8pass.base._torch" in loaded
    assert share(loaded) <= 0.1


def test_neither_the_import_nor_the_files_with_them_change_torch() -> None:
    modules = ("compiler.retry", "train.dtensors", "compiler.ddp_cuts", "states.checkpoint", "train.calibration")
    statements = f"""
import fp8pass
{"".join(f"import fp8pass.{module}{chr(10)}" for module in modules)}
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.convert_frame import ConvertFrame
from torch._dynamo.eval_frame import OptimizeContext
from fp8pass.states.slots import registry
functions = ConvertFrame.__call__, OptimizeContext.__call__, DDPOptimizer.compile_fn
where = sorted({{f.__module__.partition(".")[0] for f in functions}})
found = where, len(registry.on_new), len(registry.on_step)
"""
    assert after(statements) == [["torch"], 0, 0]
    assert after(f"import fp8pass.backend\n{statements}")[0] == ["fp8pass"]


def test_the_table_of_public_names_is_that_which_type_checkers_read() -> None:
    (typed,) = (n for n in ast.parse(Path(fp8pass.__file__).read_text()).body if isinstance(n, ast.If) and n.body[1:])
    imports = [(n.module, a.name, a.asname) for n in typed.body if isinstance(n, ast.ImportFrom) for a in n.names]
    assert all(name == renamed for _, name, renamed in imports)
    assert sorted(name for _, name, _ in imports) == fp8pass.__all__
    homes = {name: str(module).removeprefix("fp8pass.") for module, name, _ in imports if module != "fp8pass"}
    assert homes == fp8pass._HOMES


def test_every_public_name_is_there_and_shows_itself() -> None:
    statements = """
import fp8pass
shown = dir(fp8pass)
found = [name for name in fp8pass.__all__ if name not in shown or getattr(fp8pass, name) is None]
names = {}
exec("from fp8pass import *", names)
found += [name for name in fp8pass.__all__ if names[name] is not getattr(fp8pass, name)]
found += [type(fp8pass.state).__name__, type(fp8pass.fsdp).__name__, fp8pass.__version__, "__version__" in shown]
"""
    assert after(statements) == ["function", "module", fp8pass.__version__, True]


def test_modules_are_attributes_and_other_names_are_errors() -> None:
    statements = """
import fp8pass
found = [fp8pass.roofline.__name__, fp8pass.hardware.__name__, hasattr(fp8pass, "nothing"), hasattr(fp8pass, "__wrapped__")]
"""
    assert after(statements) == ["fp8pass.roofline", "fp8pass.hardware", False, False]
    with pytest.raises(AttributeError, match="module 'fp8pass' has no attribute 'quantise'"):
        fp8pass.quantise  # type: ignore[attr-defined]  # noqa: B018


def test_a_missing_name_of_torch_is_an_error_of_a_public_name_too() -> None:
    """`test_versions.py` has the error of `import fp8pass` itself, of a module and of the backend."""
    found = ask(
        "tests.helpers.other_torch", "from fp8pass import train_step", "2.13.0", "torch._inductor.graph.GraphLowering"
    )
    assert found["error"].startswith(
        "fp8pass needs torch._inductor.graph.GraphLowering, which torch 2.13.0 does not have"
    )


OPS = """
import torch
found = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fp8pass::"))
"""


def test_every_op_is_there_after_the_import() -> None:
    everything = "".join(f"import {name}\n" for name in LINES if not name.endswith(("torchtitan", "lightning")))
    ops = after(everything + OPS)
    assert len(ops) > 10
    assert after(IMPORT + OPS) == []  # and yet each is found:
    missing = f"""
import torch, fp8pass
found = [op for op in {ops!r} if not hasattr(torch.ops.fp8pass, op.partition("::")[2].partition(".")[0])]
found.append(hasattr(torch.ops.fp8pass, "nothing"))
"""
    assert after(missing) == [False]


def test_threads_that_ask_for_an_op_first_all_get_it() -> None:
    asking = """
import threading
import fp8pass, torch
ops, threads = [], [threading.Thread(target=lambda: ops.append(torch.ops.fp8pass.record)) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
found = len(ops)
"""
    assert after(asking) == 8


def test_an_exported_program_loads_after_the_import(tmp_path: Path) -> None:
    file = str(tmp_path / "exported.pt2")
    saved = f"""
import torch, fp8pass
class Quantizes(torch.nn.Module):
    def forward(self, x):
        return torch.ops.fp8pass.quantize(x, torch.ones(()), torch.float8_e4m3fn).float() + 1
torch.export.save(torch.export.export(Quantizes(), (torch.ones(4),)), {file!r})
found = sorted(fp8pass.__all__)[0]
"""
    assert after(saved) == "Config"
    loaded = f"""
import torch, fp8pass
program = torch.export.load({file!r})
found = [program.module()(torch.tensor([1.0, 2.03, 500.0, -1.0])).tolist(), "fp8pass.quantize" in str(program.graph)]
"""
    assert after(loaded) == [[2.0, 3.0, 449.0, 0.0], True]


def test_pickles_load_without_an_import(tmp_path: Path) -> None:
    file = str(tmp_path / "pickled.pt")
    after(f"""
import torch, fp8pass
from fp8pass.frozen.weight import FrozenWeight
things = [fp8pass.Config(recipe="rowwise"), fp8pass.recipes.DelayedScaling(margin=1), fp8pass.ScaleState(amax_history_len=4)]
torch.save([*things, FrozenWeight.of(torch.ones(16, 16), "tensor")], {file!r})
""")
    loaded = f"""
import torch
config, recipe, state, weight = torch.load({file!r}, weights_only=False)
found = [config.recipe.name, recipe.margin, list(state.amax_history.shape), type(weight).__name__, weight.sum().item()]
"""
    assert after(loaded) == ["rowwise", 1, [4], "FrozenWeight", 256.0]


def test_a_dumped_graph_runs_without_an_import(tmp_path: Path) -> None:
    after(STEP.replace('"fp8pass"', f'"fp8pass", options={{"dump_dir": {str(tmp_path)!r}, "lowering": "eager"}}'))
    (dumped,) = tmp_path.glob("**/*.joint.scaled_mm.after.py")
    assert "fp8pass" in dumped.read_text()
    ran = f"""
import contextlib, io, runpy, sys
sys.argv = [{str(dumped)!r}]
with contextlib.redirect_stdout(io.StringIO()) as printed:
    runpy.run_path(sys.argv[0], run_name="__main__")
found = printed.getvalue()
"""
    assert "float32[16, 32]" in after(ran)


OFF = [
    "compiler.update_compiler",
    "ddp",
    "dump.source",
    "dump.replay",
    "frozen",
    "fsdp",
    "inspect",
    "integrations",
    "passes.joint.collective_rewriter",
    "passes.kernels.fused_matmul",
    "passes.kernels.matmul_source",
    "passes.kernels.quantize_groups",
    "passes.kernels.tiles_source",
    "passes.traced",
    "passes.update.find_moments",
    "report.graph_view",
    "report.html",
    "report.report_table",
    "states.checkpoint",
    "train",
    "weights.update_graph",
]
"""Folders and files of features that a plain model on a CPU does not use."""


def test_a_step_through_the_entry_point_loads_no_feature_that_is_off() -> None:
    answer = ask("tests.helpers.fresh", STEP)
    loaded = set(answer["loaded"])
    assert answer["found"] is True
    assert "fp8pass.backend" in loaded and "fp8pass.compiler.compiled_graph" in loaded
    assert share(loaded) <= 0.65
    off = tuple(f"fp8pass.{name}" for name in OFF)
    assert sorted(name for name in loaded if name in off or name.startswith(tuple(f"{o}." for o in off))) == []
    assert [o for o in off if o not in LINES] == []
