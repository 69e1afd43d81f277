"""Count what lies between the files of fp8pass: imports between folders, what is loaded, features, and a graph's path.

    python bench/house.py

A room is a folder of `fp8pass/` or `passes/`, or a file at their top; an arrow leads from a room to one that it
imports, within functions and for type checkers too. A file knows a feature if its text matches the feature's pattern.
The path of a graph is the functions outside of `passes/` that get a graph while `compile_graph` compiles one, in the
order of their calls.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import networkx

ROOT = Path(__file__).parent.parent
FEATURES = {
    "weight cache": r"[Cc]ached_?[Ww]eight|weight_cache|fp8_weight|\.cached\b",
    "monitor": r"[Mm]onitor|[Ww]atch(Table|_operand|_cached|_gradient)|\b(WATCHED|Watched)\b",
    "moments": r"[Mm]oment",
    "amax reduction": r"amax_reduction|[Rr]educer|\.reduc(es|tion)\b",
    "save_fp8": r"save_fp8|SaveFp8",
    "compile once": r"compile_once|[Oo]utline|bodies",
}
"""The pattern of each feature. Who renames what a pattern finds adds the new name to it."""

BARE = "import fp8pass"
STEP = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
optimizer = torch.optim.AdamW(model.parameters())
step = torch.compile(model, backend="fp8pass")
step(torch.randn(32, 64)).square().mean().backward()
optimizer.step()
"""
"""The first training step of a plain model."""
LOADED = """
import json, sys
print(json.dumps([m.__file__ for n, m in sorted(sys.modules.items()) if n.partition(".")[0] == "fp8pass"]))
"""


def modules() -> dict[str, Path]:
    """Return {name of a module, like "fp8pass.graph.builder": its file}."""
    found = {}
    for top, package in (("fp8pass", "fp8pass"), ("passes", "fp8pass.passes")):
        for file in sorted((ROOT / top).rglob("*.py")):
            parts = file.relative_to(ROOT / top).with_suffix("").parts
            if top == "passes" or parts[0] != "passes":  # some checkouts have a link fp8pass/passes
                found[".".join((package, *parts)).removesuffix(".__init__")] = file
    return found


def room_of(module: str) -> str:
    """Return the room of a module: "graph" for "fp8pass.graph.builder", "passes.joint", "fp8pass" for the package."""
    parts = module.split(".")[1:]
    depth = 2 if parts[:1] == ["passes"] else 1
    return ".".join(parts[:depth]) or "fp8pass"


def between_rooms() -> networkx.DiGraph:
    """Return the graph of rooms: an edge leads from a room to one that it imports."""
    files = modules()
    graph = networkx.DiGraph()
    graph.add_nodes_from(map(room_of, files))
    for name, file in files.items():
        rooms = {room_of(imported) for imported in _imports(ast.parse(file.read_text()), files)}
        graph.add_edges_from((room_of(name), room) for room in rooms - {room_of(name)})
    return graph


def _imports(tree: ast.AST, files: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            wholes = (f"{node.module}.{alias.name}" for alias in node.names)
            named = [whole if whole in files else str(node.module) for whole in wholes]
        else:
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (name for name in named if name in files)


def lines(files: Iterable[Path]) -> int:
    """Return the number of lines of files."""
    return sum(len(file.read_text().splitlines()) for file in files)


def loaded(code: str) -> list[Path]:
    """Return the files of fp8pass that a new process has loaded after `code`."""
    result = subprocess.run([sys.executable, "-c", code + LOADED], capture_output=True, text=True, check=True)
    return [Path(file) for file in json.loads(result.stdout.splitlines()[-1])]


def share_loaded(code: str) -> str:
    """Return how much of the product a new process has loaded after `code`, in words."""
    files, all_files = loaded(code), modules().values()
    share = lines(files) / lines(all_files)
    return f"{len(files)} of {len(all_files)} files, {share:.0%} of {lines(all_files):,} lines"


def files_that_know(feature: str) -> dict[str, Path]:
    """Return {module: file} of the files whose text matches the pattern of a feature."""
    return {name: file for name, file in modules().items() if re.search(FEATURES[feature], file.read_text())}


def path_of_graph() -> list[tuple[str, str]]:
    """Return (module, function) for each function that gets a graph while a plain model is compiled, at its first call.

    A function that is called again, in a loop for example, is listed once. Functions of `passes/` are not listed.
    """
    import torch
    from torch import fx, nn

    from fp8pass.backend import fp8pass
    from fp8pass.graph.annotation import Annotation

    names = {str(file): name for name, file in modules().items() if not name.startswith("fp8pass.passes.")}
    path: dict[tuple[str, str], None] = {}

    def holds_graph(value: Any) -> bool:
        graphs = (fx.GraphModule, fx.Graph, Annotation)
        return isinstance(value, graphs) or isinstance(getattr(value, "__dict__", {}).get("module"), graphs)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        name = names.get(code.co_filename)
        if event == "call" and name is not None and not code.co_name.startswith("<"):
            arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if any(holds_graph(frame.f_locals.get(a)) for a in arguments):
                path[name, code.co_qualname if sys.version_info >= (3, 11) else code.co_name] = None

    def traced(module: fx.GraphModule, inputs: Any) -> Any:
        sys.setprofile(profile)
        try:
            return fp8pass(module, inputs)
        finally:
            sys.setprofile(None)

    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        torch.compile(model, backend=traced)(torch.randn(32, 64))
    return list(path)


def returns(rooms: Iterable[str]) -> int:
    """Return how often a path enters a room, or a file, that it has left before."""
    stays = [room for room, _ in groupby(rooms)]
    return len(stays) - len(set(stays))


def _report() -> Iterator[str]:
    arrows = between_rooms()
    circles = [circle for circle in networkx.strongly_connected_components(arrows) if len(circle) > 1]
    yield f"rooms: {len(arrows)}, arrows: {arrows.number_of_edges()}, circles: {len(circles)}"
    yield f"import fp8pass loads {share_loaded(BARE)}"
    yield f"the first training step of a plain model loads {share_loaded(STEP)}"
    for feature in FEATURES:
        found = files_that_know(feature)
        yield f"{feature}: {len(found)} files in {len(set(map(room_of, found)))} rooms"
    path = path_of_graph()
    files = [name for name, _ in path]
    yield (
        f"the path of a graph: {len(path)} functions, {returns(map(room_of, files))} returns to a room, "
        f"{returns(files)} to a file"
    )
    yield from (f"    {name.removeprefix('fp8pass.')}: {function}" for name, function in path)


if __name__ == "__main__":
    for line in _report():
        print(line)
