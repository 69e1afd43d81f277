"""Test torch's caches with fp8pass: what a second process finds there, and what it must not take for its own."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8pass.compiler.cache_keys import known_to_caches
from fp8pass.compiler.dynamo_passes import annotated
from fp8pass.compiler.joint_passes import JointPasses
from fp8pass.compiler.kernel_passes import KernelPasses
from fp8pass.graph.annotation import MatmulChoice
from fp8pass.options.config import make_config
from fp8pass.recipes import DelayedScaling
from tests.helpers import ROOT, forked

pytestmark = pytest.mark.tools

PROGRAM = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from torch._dynamo.utils import counters

import fp8pass

def step(recipe):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model, x = nn.Linear(32, 16, bias=False), torch.randn(16, 32)
    run = torch.compile(model, backend="fp8pass", options={"recipe": recipe})
    for _ in range(2):  # delayed: the first runs eagerly
        run(x).square().sum().backward()
    names = ("hit", "miss", "bypass")
    found = {f"{of}_{n}": counters[group][f"{of}_cache_{n}"]
             for group, of in (("aot_autograd", "autograd"), ("inductor", "fxgraph")) for n in names}
    counts = {"root": str(Path(fp8pass.__file__).parent.parent), **{k: n for k, n in found.items() if n}}
    return counts, model.weight.grad.tolist()

print(json.dumps([step(recipe) for recipe in sys.argv[1:]]))
"""


def started(folder: Path, *programs: tuple[Path, list[str]]) -> list[list[list[Any]]]:
    """Run each program in its own process; return, by recipe, what the caches counted, and the gradients of two steps.

    folder: that of the caches; it must not hold an fp8pass that Python would find. programs: the folder of fp8pass and
    the recipes, for each.
    """
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_VEC_ISA_OK": "0",  # with an empty folder, trying the processor's vectors takes 20 seconds
    }
    file = folder / "program.py"
    file.write_text(PROGRAM)
    done = forked.run([forked.Program(file, recipes, folder, root) for root, recipes in programs], environment)
    assert [each.returncode for each in done] == [0] * len(programs), done
    return [json.loads(each.stdout.splitlines()[-1]) for each in done]


@pytest.mark.gate
def test_a_second_process_finds_what_is_its_own_and_nothing_else(tmp_path: Path) -> None:
    """There is one graph of AOTAutograd's, and Inductor's of forward and backward. Another copy of fp8pass misses."""
    hits, misses = {"autograd_hit": 1, "fxgraph_hit": 2}, {"autograd_miss": 1, "fxgraph_miss": 2}
    folder, copy, changed = (tmp_path / name for name in ("caches", "copy", "changed"))
    folder.mkdir()
    for target in copy, changed:  # installed as a folder
        for source, package in (("fp8pass", "fp8pass"), ("passes", "fp8pass/passes")):
            ignored = shutil.ignore_patterns("__pycache__", "passes")
            shutil.copytree(ROOT / source, target / package, ignore=ignored)
    with (changed / "fp8pass" / "passes" / "joint" / "operand_layout.py").open("a") as file:
        file.write("# changed\n")

    delayed = ["delayed"]
    first, second, third = started(folder, (ROOT, delayed), (copy, ["delayed", "dynamic"]), (changed, delayed))
    ((counts, gradients),) = first
    assert counts == {"root": str(ROOT), **misses}
    (same, same_gradients), (other, _) = second
    assert (same, same_gradients) == ({"root": str(copy), **hits}, gradients)
    assert other == {"root": str(copy), **misses}  # another recipe
    assert third == [[{"root": str(changed), **misses}, gradients]]  # another source


def test_what_a_graph_does_not_say_of_the_choices_is_in_the_key() -> None:
    """AOTAutograd's key has no names of modules; a recipe by module may treat two equal graphs differently."""

    def uuid(**choice: Any) -> bytes:
        return JointPasses(make_config({}), [MatmulChoice("up", "model.py:1", **choice)]).uuid()

    assert uuid() == uuid()
    assert uuid() != uuid(fast_accum=())
    assert uuid() != uuid(wanted=True)
    assert uuid() != uuid(scaling="delayed")


@pytest.mark.parametrize("of", [KernelPasses, functools.partial(JointPasses, choices=[])])
def test_what_the_processor_can_is_in_the_key(of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's own keys lack it, and C++ for other vectors than the processor's writes past the end of buffers."""

    def uuid(**can: bool) -> bytes:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: can)
        return of(make_config({})).uuid()

    assert uuid(avx2=True, avx512_f=True) == uuid(avx2=True, avx512_f=True)
    assert uuid(avx2=True, avx512_f=True) != uuid(avx2=True, avx512_f=False)


def last(history: Tensor) -> Tensor:
    """Return the last element: f32[H] -> f32[]. It stands for a function of the user's."""
    return history[0]


@pytest.mark.parametrize("algo", ["max", last])
def test_a_function_in_a_recipe_is_in_no_cache(algo: str | Callable[[Tensor], Tensor]) -> None:
    """A graph has only the function's name."""
    recipe, known = DelayedScaling(amax_compute_algo=algo), []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        known.append(known_to_caches(annotated(module, make_config({"recipe": recipe})).module))
        return module.forward

    torch.compile(torch.nn.Linear(32, 32), backend=backend)(torch.randn(16, 32))
    names = ["begin_step", "qdq_gradient", "qdq_operand", "scales_or_one"]
    expected = ["fp8pass.quant.ops." + name for name in ["add_bias", *names]]
    assert [found and list(found) for found in known] == [expected if algo == "max" else None]
