"""Keys of torch's caches: the sources of fp8pass, and the functions of fp8pass that a graph calls."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path

from torch import fx

from fp8pass.base._torch import get_hash_for_files
from fp8pass.graph.annotation import graphs_of
from fp8pass.passes import __file__ as passes_file
from fp8pass.recipes import Recipe
from fp8pass.states.scale_state import recipe_of


def known_to_caches(module: fx.GraphModule) -> dict[str, str] | None:
    """Return {function of fp8pass that an annotated graph calls: hash}, with which AOTAutograd may cache the graph.

    Sorted, since the order is part of the cache's key. None if a recipe has code of the user's: the graph's text, which
    is part of the key too, contains only the name of the function or class, so the graph must not be cached.
    """
    parts = (part.graph.nodes for part in graphs_of(module))
    calls = [n for nodes in parts for n in nodes if n.op == "call_function" and _is_ours(n.target)]
    recipes = (recipe_of(a) for n in calls for a in n.args)
    if any(isinstance(r, Recipe) and r.has_own_code for r in recipes):
        return None
    names = {f"{n.target.__module__}.{n.target.__name__}" for n in calls}
    return dict.fromkeys(sorted(names), sources_hash().hex())


def _is_ours(target: object) -> bool:
    return inspect.isfunction(target) and target.__module__.split(".")[0] == "fp8pass"


@functools.cache
def sources_hash() -> bytes:
    """Return a hash of all files of fp8pass."""
    package, passes = Path(__file__).parent.parent, Path(passes_file).parent
    # passes/ is within fp8pass/ only where the package is installed: left out here, and added from its own path
    files = [f for f in sorted(package.rglob("*.py")) if package / "passes" not in f.parents]
    return get_hash_for_files(tuple(map(str, [*files, *sorted(passes.rglob("*.py"))])))
