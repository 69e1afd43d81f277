"""`fp8pass.rewrite`: run the passes over a graph that the user has traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass.base._torch import pytree
from fp8pass.base.errors import warn_once
from fp8pass.base.fields import nearest
from fp8pass.base.names import Names, module_path
from fp8pass.compiler.eager import rewrite_all
from fp8pass.compiler.joint_passes import JointPasses
from fp8pass.compiler.traced_passes import quantized, runs_anywhere
from fp8pass.dump.writer import Dump, name_of
from fp8pass.graph.annotation import MatmulChoice, copy_to_edit
from fp8pass.integrations.rewrite_aten import functional_aten
from fp8pass.integrations.rewrite_state import RewriteState
from fp8pass.options.config import Config, make_config
from fp8pass.options.machine import gpu_of, on_machine
from fp8pass.options.unmatched import patterns_of
from fp8pass.recipes import Calibration, Schedule
from fp8pass.report.report import Report

_OF_THE_COMPILER = {
    "weight_cache": "the caller keeps no FP8 copies of weights between calls",
    "save_fp8": "what the backward reads is the caller's choice",
    "optimizer_state": "the graph's update is not searched for moments",
    "update_rounding": "the graph's update is not searched for parameters",
    "skip_nonfinite": "the graph's update is not searched for gradients",
    "monitor": "the graph has no input for statistics",
    "monitor_interval": "the graph has no input for statistics",
    "monitor_steps": "the graph has no input for statistics",
    "amax_group": "the amaxes are outputs, which the caller reduces",
    "reduce_amax_interval": "the amaxes are outputs, which the caller reduces",
    "mode": "Inductor is not called",
    "lowering": "Inductor is not called",
    "compile_once": "the graph is not split into functions",
    "epilogues": "kernels are the caller's choice",
    "merge_siblings": "layers of a traced graph are not merged",
}
"""Options that have no meaning for a graph that another compiler compiles, with the reason."""


def rewrite(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: Config | Mapping[str, Any] | None = None,
    *,
    names: Mapping[str, str] | None = None,
) -> tuple[fx.GraphModule, RewriteState, Report]:
    """Rewrite the matmuls of a graph that the user has traced to FP8, with its state as inputs and outputs.

    In a graph of forward and backward (of `torch.autograd.grad` under `make_fx`, of `aot_export_joint_simple`), all
    three matmuls of a layer run in FP8, and delayed scaling records amaxes. A graph of a forward is for inference: it
    reads the scales and changes nothing, and can't be differentiated.

    Args:
        gm: A graph of ATen ops or of torch functions: of `make_fx`, `torch.export` or `torch.fx.symbolic_trace`. It is
            not changed. A graph of torch functions is traced to ATen ops with the sizes of the example inputs.
        example_inputs: What `gm` is called with: real or fake tensors, in any nesting of tuples, lists and dicts.
        config: A `Config`, or a dict of its fields; by default what `make_config()` returns.
        names: {name of an input of `gm`: path of the parameter}, such as the `inputs_to_parameters` of an exported
            program's signature. Without it, a parameter has the name of its attribute, or of its key in a dict of the
            example inputs, otherwise of the input. Filters, recipes by module and the state go by these names.

    Returns:
        (graph, state, report). The graph takes the leaves of the inputs, in order, and then `state.tensors`; it returns
        a tuple of the leaves of the outputs and then the new state. It writes into no input that `gm` does not write
        into. `state.run(graph, *inputs)` does all that. The report is as that of `fp8pass.explain`.

    Raises:
        Fp8Error: If `gm` does not take the example inputs, if it can't be traced to ATen ops, or under
            `Config(strict=True)` for a matmul that can't run in FP8.
        TypeError: If `gm` is not a GraphModule.
        ValueError: If the configuration has options that only a compiler has, or if `names` names no input.
    """
    _check_module(gm)
    leaves = pytree.tree_leaves(tuple(example_inputs))
    config = on_machine(_checked(config), gpu_of(leaves))
    flat = functional_aten(gm, leaves)
    paths = _paths(gm, example_inputs, names or {})
    cold = copy_to_edit(flat) if config.recipe is not None else flat  # for `make_first`: the passes edit `flat`
    dump = Dump.of(config, name_of(flat), "rewrite")
    context = quantized(flat, config, _TracedNames(flat, paths), False, dump)
    _check_patterns(config, flat, context.choices, paths)
    joint_passes = JointPasses(config, context.choices, dump)
    rewrite_all(flat, joint_passes)
    joint_passes.report.notes += context.notes
    for note in context.notes:
        warn_once(f"fp8pass: {note}")
    runs_anywhere(flat, config, dump)
    _finish(flat)

    def make_first() -> fx.GraphModule:
        first = copy_to_edit(cold)
        quantized(first, config, _TracedNames(first, paths), True, dump)
        return _finish(first)

    return flat, RewriteState(context.tables, _structure(gm), make_first), joint_passes.report


def _check_module(gm: Any) -> None:
    if not isinstance(gm, fx.GraphModule):
        inside = " (pass its .module())" if hasattr(gm, "graph_module") else ""
        raise TypeError(f"rewrite() takes a torch.fx.GraphModule, not {type(gm).__name__}{inside}")


def _checked(config: Config | Mapping[str, Any] | None) -> Config:
    if not isinstance(config, Config):
        config = make_config(config)
    # FP8PASS_* variables may be meant for other graphs of the process
    usual = make_config()
    given = {f.name for f in fields(Config) if getattr(config, f.name) not in (f.default, getattr(usual, f.name))}
    wrong = [f"{name}={getattr(config, name)!r} ({why})" for name, why in _OF_THE_COMPILER.items() if name in given]
    if isinstance(config.recipe, Schedule):
        wrong.append("a recipe by step (rewrite the graph for each phase, with config.at_step(step))")
    elif any(isinstance(recipe, Calibration) for recipe in config.recipes):
        wrong.append("a recipe that calibrates (call fp8pass.calibrate with the model)")
    if wrong:
        raise ValueError(f"rewrite() does not take {', and not '.join(wrong)}: drop it from the configuration")
    return config


def _finish(module: fx.GraphModule) -> fx.GraphModule:
    """Drop what the passes have left in the metadata for passes; return the module."""
    for node in module.graph.nodes:
        node.meta.pop("example_value", None)
    module.graph.lint()
    module.recompile()
    return module


def _structure(gm: fx.GraphModule) -> Callable[[Sequence[Any]], Any]:
    """Return a function that gives the leaves of the graph's results the form in which `gm` returns them."""
    (results,) = gm.graph.output_node().args
    info = getattr(gm.graph._codegen, "pytree_info", None)
    spec = None if info is None else info.out_spec
    spec = spec or pytree.tree_flatten(results)[1]
    return lambda leaves: pytree.tree_unflatten(list(leaves), spec)


# ---------------------------------------------------------------------------------------------------------------------
# Names.


def _paths(gm: fx.GraphModule, example_inputs: Sequence[Any], names: Mapping[str, str]) -> dict[str, str]:
    """Return {name of an input of the graph: path of the parameter}, for those that are known to be parameters."""
    inputs = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    for name in names:
        if name not in inputs:
            raise ValueError(f"names: the graph has no input {name!r}{nearest(name, inputs)}")
    paths: dict[str, str] = {}
    keyed, _ = pytree.tree_flatten_with_path(tuple(example_inputs))
    for name, (path, x) in zip(inputs, keyed, strict=False):
        key = next((str(p.key) for p in path[::-1] if isinstance(p, pytree.MappingKey)), "")
        if isinstance(x, Tensor) and (key or isinstance(x, torch.nn.Parameter)):
            paths[name] = key or name
    return {**paths, **names}


def _check_patterns(
    config: Config, module: fx.GraphModule, choices: Sequence[MatmulChoice], paths: Mapping[str, str]
) -> None:
    """Raise ValueError for a pattern of a recipe or filter that matches no name in the graph."""
    leaves = [*(str(n.target) for n in module.graph.find_nodes(op="get_attr")), *paths.values()]
    names = {c.name for c in choices}
    for path in leaves:
        steps = path.split(".")
        names |= {".".join(steps[:i]) for i in range(1, len(steps) + 1)}
    for pattern in patterns_of(config):
        if pattern.option in ("recipe", "filter") and not pattern.is_in(names):
            raise ValueError(f"{pattern.why(names, 'the graph')}. The inputs of the graph get names by names=")


class _TracedNames(Names):
    """The names in a traced graph. owned: parameters, by attribute or input; all inputs if none is known to be one."""

    def __init__(self, module: fx.GraphModule, paths: Mapping[str, str]) -> None:
        super().__init__([])
        inputs = module.graph.find_nodes(op="placeholder")
        self.owned = {n: str(n.target) for n in module.graph.find_nodes(op="get_attr")}
        self.owned |= {n: paths[n.name] for n in inputs if n.name in paths}
        if not self.owned:
            self.owned = {n: n.name for n in inputs if not n.name.startswith("tangents")}

    def _module(self, node: fx.Node, kind: type = torch.nn.Module) -> str:
        """Return the path of the node's innermost module; a `Linear` is named after its parameter, see `of`."""
        if kind is not torch.nn.Module:
            return ""
        path = list((node.meta.get("nn_module_stack") or {"": ("", None)}).values())[-1][0]
        return module_path(path) if path.startswith(("L[", "G[")) else path
