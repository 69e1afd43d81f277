"""Find name patterns of options that match nothing: an error with the nearest names, or a warning.

A pattern is compared with the names of all modules, parameters and matmuls of a whole model, not of one graph, since a
model may have several graphs, compiled one after another. The whole model is the outermost module that holds the module
whose forward Dynamo compiles; so a block or a DDP bucket may lack names that the model has. If a function or a pipeline
stage is compiled, the rest of the model is unknown, and an unmatched pattern gives only a warning.
"""

from __future__ import annotations

import gc
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import CellType
from typing import Any

from torch import fx, nn

from fp8pass.base._torch import compiled_scope, pipeline_call
from fp8pass.base.errors import warn_once
from fp8pass.base.fields import nearest
from fp8pass.base.module_tensors import unwrapped
from fp8pass.base.names import MATMULS, Names, parts_of, without_wrappers
from fp8pass.options.config import Config
from fp8pass.recipes import FACTORS, ByModule, Schedule, StaticScaling, matches

ROLES = {*(role for factors in FACTORS.values() for role in factors), "saved"}
# "_1" ends the name of a slot of a module's second use in a graph, "~1" that of a second slot of the same name.
_NUMBER = re.compile(r"(_\d+)?(~\d+)?$")
FILTER, MONITOR, SAVE, SMOOTH, STATIC = "filter", "monitor", "save_fp8", "smooth_swiglu", "StaticScaling"


@dataclass(frozen=True)
class Pattern:
    """A name pattern of an option.

    option: name of the option. text: the pattern. earlier: the patterns before it in the same dict of recipes, of which
    the first match counts.
    """

    option: str
    text: str
    earlier: tuple[str, ...] = ()

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches the module or matmul of this name, one of its slots, or a part of it."""
        if self.option == MONITOR or (self.option == STATIC and StaticScaling.is_pattern(self.text)):
            text = _NUMBER.sub("", self.text)
            return any(matches(f"{name}.{role}", each) for role in ROLES for each in (self.text, text))
        if self.option == STATIC:
            layers = [part.rpartition(".")[0] for part in parts_of(self.text)]
            return any(layer == name or layer.endswith(f".{name}") for layer in layers)
        return matches(name, self.text)

    def is_reached(self, name: str) -> bool:
        """Return whether the pattern matches this name, and no earlier pattern does."""
        return self.matches(name) and not any(matches(name, text) for text in self.earlier)

    def is_in(self, names: Set[str]) -> bool:
        """Return whether any of these names reaches the pattern, see `is_reached`."""
        return (self.stem in names and self.is_reached(self.stem)) or any(map(self.is_reached, names))

    @property
    def stem(self) -> str:
        """The pattern without the role at the end of a slot's name."""
        stem, _, last = self.text.rpartition(".")
        return stem if stem and _NUMBER.sub("", last) in ROLES else self.text

    def why(self, names: Set[str], owner: str) -> str:
        """Return the message for a pattern that no name reaches. owner: of the names, for the message."""
        if hidden := [name for name in sorted(names) if self.matches(name)]:
            first = next(text for text in self.earlier if matches(hidden[0], text))
            return (
                f"{self.option}: {self.text!r} has no effect in {owner}, because {first!r} comes before it and matches "
                f"{hidden[0]!r} too: write {self.text!r} first"
            )
        nothing = "belongs to" if self.option == STATIC else "matches"
        slots = {f"*.{role}" for role in ROLES} if self.option == MONITOR else set()
        near = nearest(self.stem, sorted(_like(names) | slots), n=3)
        return f"{self.option}: {self.text!r} {nothing} no module or matmul of {owner}{near}"


def patterns_of(config: Config) -> Iterator[Pattern]:
    """Yield all patterns of a configuration."""
    if isinstance(config.filter, Sequence):
        yield from (Pattern(FILTER, text) for text in config.filter)
    if not isinstance(config.monitor, bool):
        yield from (Pattern(MONITOR, text) for text in config.monitor)
    if not isinstance(config.save_fp8, bool):
        yield from (Pattern(SAVE, text) for text in config.save_fp8)
    if not isinstance(config.smooth_swiglu, bool):
        yield from (Pattern(SMOOTH, text) for text in config.smooth_swiglu)
    recipe = config.recipe
    for plan in [plan for _, plan in recipe.phases] if isinstance(recipe, Schedule) else [recipe]:
        rules = plan.rules if isinstance(plan, ByModule) else ()
        texts = tuple(text for text, _ in rules)
        yield from (Pattern("recipe", text, texts[:i]) for i, text in enumerate(texts))
        for each in (plan, *(recipe for _, recipe in rules)):
            if isinstance(each, StaticScaling):
                yield from (Pattern(STATIC, slot) for slot in each.scales)


def check_compiled(config: Config, graph: fx.Graph, models_checked: bool = False) -> None:
    """Raise ValueError for a pattern that matches nothing in the model whose frame Dynamo compiles now.

    Warns once of patterns that may match something that is not seen from there, and of patterns that have no effect in
    this graph because its names are relative to another module. models_checked: True if `check_models` has checked the
    patterns, so that only the latter are looked for.
    """
    patterns = list(patterns_of(config))
    if not patterns:
        return
    graph_names = Names([n for n in graph.nodes if n.op == "placeholder"])
    roots = graph_names.roots
    locals_with_roots = {root.partition(".")[0] for root in roots}
    scope = {name: value for name, value in compiled_scope().items() if name in {*locals_with_roots, "self"}}
    modules = _modules_in(scope)
    here = {name for prefix, m in modules for name in _named(_path_in(graph_names, prefix), m)}
    missing = [pattern for pattern in patterns if not pattern.is_in(here)]
    if not modules or not missing:
        return
    # in a function of several modules, only a method's `self` can be the root
    root_module = modules[0][1] if len(modules) == 1 else dict(modules).get("self")
    holders = _holders(root_module) if root_module is not None else []
    other = {name for prefix, m in modules for path in ("", prefix) for name in _named(path, m)}
    if root_module is not None:
        other.update(name for holder in holders for name in _of_parts_like(root_module, holder))
    everything = here.union(other, *map(names_of, holders))
    if not models_checked:
        is_whole = isinstance(scope.get("self"), nn.Module) and pipeline_call() is None
        owner = type(unwrapped((root_module, *holders)[-1])).__name__ if is_whole else "what is compiled"
        _report_missing(missing, everything, owner, _refuse if is_whole else _warn)
    for pattern in missing:
        if pattern.option != STATIC and pattern.is_in(other):
            modules_of_it = (name for name in here if name.rpartition(".")[2] not in MATMULS)
            like = sorted(modules_of_it, key=lambda name: (len(name), name))[:3]
            owner = type(root_module).__name__ if root_module is not None else " and ".join(sorted(roots))
            warn_once(
                f"fp8pass: {pattern.option}: {pattern.text!r} has no effect in a graph of {owner}, where names are "
                f"like {', '.join(map(repr, like))}"
            )


def check_models(config: Config, models: Iterable[nn.Module], scope: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for a pattern that matches nothing in these models.

    scope: {name: value} of the variables that the function that calls the models sees; in a graph of several models,
    names begin with those of the variables. where: the owner of the names, for the message.
    """
    patterns = list(patterns_of(config))
    modules = [*(("", model) for model in models), *_modules_in(scope)] if patterns else []
    names = {name for prefix, m in modules for name in _named(prefix, m)}
    _report_missing(patterns, names, where, _refuse)


def scope_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return {name: value} of a function's arguments in this call, its closure, and the globals that it names."""
    plain = inspect.unwrap(getattr(function, "__func__", function))
    scope: dict[str, Any] = {}
    if inspect.isfunction(plain):
        scope = {name: plain.__globals__[name] for name in plain.__code__.co_names if name in plain.__globals__}
        cells = zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True)
        # The cell of a name that is not yet assigned is empty, and raises ValueError when read.
        scope |= {name: cell.cell_contents for name, cell in cells if cell != CellType()}
    return {**scope, **inspect.signature(function).bind(*args, **kwargs).arguments}


def names_of(module: nn.Module) -> set[str]:
    """Return the names in graphs of the modules, parameters and matmuls of a module."""
    # with duplicates, because a module that two others contain has two names
    paths = {without_wrappers(name) for name, _ in module.named_modules(remove_duplicate=False)}
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    parameters = {without_wrappers(name).removesuffix(".weight") for name, _ in tensors}
    products = {name for path in paths for name in _under(path, MATMULS)}
    return (paths | parameters | products) - {""}


def _report_missing(patterns: Sequence[Pattern], names: Set[str], owner: str, report: Callable[[str], None]) -> None:
    """Call `report` with a message if some of the patterns match none of the names. owner: of the names."""
    missing = [pattern for pattern in patterns if not pattern.is_in(names)]
    if missing:
        report(". ".join(pattern.why(names, owner) for pattern in missing[:3]))


def _refuse(what: str) -> None:
    raise ValueError(what)


def _warn(what: str) -> None:
    warn_once(f"fp8pass: {what}; there may be more modules than fp8pass can see here")


def _holders(module: nn.Module) -> list[nn.Module]:
    """Return the modules that contain a module, from the inside out.

    Searches all objects that Python's garbage collector tracks, since modules do not know their parents.
    """
    holders: dict[int, list[nn.Module]] = {}
    for holder in gc.get_objects():
        if issubclass(type(holder), nn.Module):  # isinstance raises ReferenceError for dead weak proxies
            for held in vars(holder).get("_modules", {}).values():
                holders.setdefault(id(held), []).append(holder)
    seen = {id(module): module}
    for each in (todo := [module]):  # `todo` grows while the loop goes through it
        new = {id(holder): holder for holder in holders.get(id(each), ()) if id(holder) not in seen}
        seen.update(new)
        todo += new.values()
    return todo[1:]


def _of_parts_like(part: nn.Module, holder: nn.Module) -> Iterator[str]:
    """Yield the names within a holder of the contents of a part, and of all modules of its type.

    Modules of one type share the code that is compiled.
    """
    for path, module in holder.named_modules(remove_duplicate=False):
        if type(module) is type(part):
            yield from _named(without_wrappers(path), part)


def _modules_in(scope: Mapping[str, Any]) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of the modules among named values, and of the modules that these values hold directly."""
    held = [(name, _held(value)) for name, value in scope.items()]
    return [
        *((name, value) for name, value in scope.items() if isinstance(value, nn.Module)),
        *((f"{name}.{key}", x) for name, values in held for key, x in values.items() if isinstance(x, nn.Module)),
    ]


def _held(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, nn.Module):
        return {}
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    return value if isinstance(value, dict) else getattr(value, "__dict__", {})


def _named(path: str, module: nn.Module) -> set[str]:
    """Return the names of a module with this path and of its contents; path "" for the root."""
    return {*_under(path, names_of(module)), path} - {""}


def _path_in(names: Names, variable: str) -> str:
    """Return the name in a graph of a module that the graph's frame has as "model", "args.0" or "block.up"."""
    root = variable if variable in names.roots else variable.partition(".")[0]
    path = variable.removeprefix(root).removeprefix(".")
    return ".".join(part for part in (names.relative(root), path) if part)


def _under(prefix: str, names: Iterable[str]) -> Iterator[str]:
    """Prefix names with a path; "" leaves them as they are."""
    return (f"{prefix}.{name}" if prefix else name for name in names)


def _like(names: Set[str]) -> Set[str]:
    """Return candidates for suggestions: the names, the names with "*" for numbers, and "*.up" for "layers.0.up"."""
    names = {name for name in names if name.rpartition(".")[2] not in MATMULS}
    numbered = {re.sub(r"\b\d+\b", "*", name) for name in names}
    return names | numbered | {f"*.{name.rpartition('.')[2]}" for name in names if "." in name}
