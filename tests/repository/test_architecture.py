"""Test the page on where things are: its drawing shows the imports, and its walks name what a training step calls."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import house
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fp8pass
from fp8pass.compiler.compiled_graph import CompiledGraph
from tests.helpers.harness import compiled, without_caches

pytestmark = pytest.mark.tools

PAGE = house.ROOT / "docs" / "architecture.md"
TEXT = PAGE.read_text()
WALKS = {
    "The life of one matmul": {"While the model is compiled": "compile", "In the second step": "step 2"},
    "The life of one scale": {
        "While the model is compiled": "compile",
        "In the first step": "step 1",
        "In the second step": "step 2",
        "Saved": "save",
        "Loaded into a new model": "load",
    },
}
"""The parts of each walk, by their headings, and the parts of a training that they tell: see `train`."""
CONDITIONS = {"with Inductor": "inductor", "op by op": "eager"}
"""The condition that a step names, and the lowering that it stands for."""


class Named(NamedTuple):
    """A function that a walk names. file: relative to the repository. condition: that of its step, "" for always."""

    file: str
    function: str
    condition: str


def steps_of(text: str) -> list[list[Named]]:
    """Return the functions that each numbered step of a text names, in its order."""
    found = []
    for step in re.findall(r"^\d+\. (.*?)(?=^\d+\. |^\S|\Z)", text, re.MULTILINE | re.DOTALL):
        condition = re.search(r"\*\(([^)]*)\)\*", step)
        links = re.findall(r"\[`([\w.]+\.py):([\w.]+)`\]\(\.\./([^)]*)\)", step)
        for shown, _, target in links:
            assert Path(target).name == shown, f"{shown} is not the name of {target}"
        found.append([Named(target, function, condition[1] if condition else "") for _, function, target in links])
    return found


def part(text: str, level: str, heading: str) -> str:
    """Return the text below a heading, up to the next one of its level or above it."""
    found = re.search(
        rf"^{level} {re.escape(heading)}\n(.*?)(?=^#{{1,{len(level)}}} |\Z)", text, re.MULTILINE | re.DOTALL
    )
    assert found, heading
    return found[1]


def walk(name: str) -> dict[str, list[list[Named]]]:
    """Return the steps of a walk, by its parts."""
    text = part(TEXT, "##", name)
    assert re.findall(r"^### (.*)", text, re.MULTILINE) == list(WALKS[name])
    return {heading: steps_of(part(text, "###", heading)) for heading in WALKS[name]}


def functions(file: str) -> dict[int, str]:
    """Return the functions of a file by the line where their code begins: "Class.method", "function.inner"."""
    found = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = f"{prefix}{child.name}."
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                # the code of a decorated function begins at its first decorator
                found[min([child.lineno, *(d.lineno for d in child.decorator_list)])] = name.removesuffix(".")
            visit(child, name)

    visit(ast.parse((house.ROOT / file).read_text()), "")
    return found


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_names_functions_that_exist(name: str) -> None:
    parts = walk(name)
    steps = [step for steps in parts.values() for step in steps]
    assert 8 <= len(steps) <= 15 and all(steps), "each step names a function"
    numbers = re.findall(r"^(\d+)\. ", part(TEXT, "##", name), re.MULTILINE)
    assert numbers == [str(i + 1) for steps in parts.values() for i in range(len(steps))]
    for named in (named for step in steps for named in step):
        assert named.function in functions(named.file).values(), named
        assert named.condition in ("", *CONDITIONS), named


class Recorder:
    """Records the calls of functions, each as (file, function), by the part of the training in which they are made."""

    def __init__(self, wanted: set[tuple[str, str]]) -> None:
        self.calls: dict[str, list[tuple[str, str]]] = {}
        self._part = ""
        self._names = {
            (str(house.ROOT / file), line): (file, function)
            for file in {file for file, _ in wanted}
            for line, function in functions(file).items()
            if (file, function) in wanted
        }

    def begin(self, name: str) -> None:
        """Begin a part."""
        self._part = name
        self.calls.setdefault(name, [])

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls that are made inside."""
        before = sys.getprofile()
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and (found := self._names.get((code.co_filename, code.co_firstlineno))) is not None:
            if found[1] == f"{CompiledGraph.__name__}.__call__" and self._part == "compile":
                self.begin("step 1")
            self.calls[self._part].append(found)


def train(recorder: Recorder, lowering: str) -> None:
    """Train a layer for two steps, as one of two ranks; save its state, and load it into a new layer.

    Parts: "compile", until the compiled graph is called; "step 1"; "step 2"; "save"; "load".
    """

    def layer() -> tuple[nn.Module, Callable[..., Any]]:
        model = nn.Linear(64, 32)
        return model, compiled(model, recipe="delayed", lowering=lowering)

    model, run = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(16, 64, requires_grad=True)
    with recorder.recording():
        for name in ("compile", "step 2"):
            recorder.begin(name)
            run(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        recorder.begin("save")
        saved = fp8pass.state(model).state_dict()
        other, run = layer()
        recorder.begin("load")
        fp8pass.state(other).load_state_dict(saved)
        run(x)


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.variant)])
def test_the_walks_are_what_a_training_calls(lowering: str) -> None:
    """The walks name functions in the order of first calls, part by part."""
    walks = [walk(name) for name in WALKS]
    wanted = {(n.file, n.function) for of in walks for steps in of.values() for step in steps for n in step}
    calls = ("fp8pass/compiler/compiled_graph.py", "CompiledGraph.__call__")
    recorder = Recorder(wanted | {calls})
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        with without_caches():
            train(recorder, lowering)
    finally:
        dist.destroy_process_group()
    for of, headings in zip(walks, WALKS.values(), strict=True):
        for heading, steps in of.items():
            first = list(dict.fromkeys(recorder.calls[headings[heading]]))
            happens = [n for step in steps for n in step if CONDITIONS.get(n.condition, lowering) == lowering]
            expected = [(n.file, n.function) for n in happens]
            assert [call for call in first if call in expected] == list(dict.fromkeys(expected)), heading
