"""Lower an annotated graph to run op by op: with the same passes, and without generated code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass.base._torch import FORCE_STRIDE_ORDER, aot_autograd, make_boxed_func, select_decomp_table
from fp8pass.compiler.faults import Later
from fp8pass.compiler.joint_passes import JointPasses
from fp8pass.compiler.kernel_passes import KernelPasses
from fp8pass.compiler.partition import Partition
from fp8pass.graph.annotation import graphs_of
from fp8pass.graph.attempt import Attempt
from fp8pass.quant.kernel_ops import FORMULAS, LAID_OUT


def through_aot(
    forward: Callable[[fx.GraphModule, Any], Any],
    backward: Callable[[fx.GraphModule, Any], Any] | None,
    inference: Callable[[fx.GraphModule, Any], Any],
    partition: Callable[..., Any],
) -> Callable[..., Any]:
    """Set AOTAutograd up as Inductor does, with other compilers. backward: None to use that of the forward."""
    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )


def lower_eager(
    module: fx.GraphModule, inputs: list[Any], joint_passes: JointPasses, later: Later | None
) -> Callable[..., Any]:
    """Lower a graph as `lower_through_inductor` does, with the same passes, to graphs that run op by op."""
    kernel_passes = KernelPasses(joint_passes.config, joint_passes.dump, joint_passes.timing, joint_passes)

    def boxed(graph_module: fx.GraphModule, attempt: Attempt) -> Any:
        kernel_passes.attempt = attempt
        kernel_passes(graph_module.graph)
        _call_directly(graph_module)
        return op_by_op(graph_module)

    def forward(graph_module: fx.GraphModule, _: Any) -> Any:
        return boxed(graph_module, joint_passes.attempt)

    def backward(graph_module: fx.GraphModule, inputs: Any) -> Any:
        return forward(graph_module, inputs) if later is None else later.lower(graph_module, boxed, op_by_op)

    def inference(graph_module: fx.GraphModule, fake_inputs: Any) -> Any:
        # without gradients nothing is partitioned: the joint passes run over the forward alone
        rewrite_all(graph_module, joint_passes)
        return forward(graph_module, fake_inputs)

    def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        rewrite_all(joint, joint_passes)
        return Partition(seen=joint_passes.partitioned)(joint, joint_inputs, **kwargs)

    compiled: Callable[..., Any] = through_aot(forward, backward, inference, partition)(module, inputs)
    return compiled


def rewrite_all(module: fx.GraphModule, joint_passes: JointPasses) -> None:
    """Run the passes over a joint graph and the graphs in it: branches and loop bodies first, as Inductor does it."""
    for part in reversed(list(graphs_of(module))):
        joint_passes(part.graph)
        part.recompile()


def op_by_op(module: fx.GraphModule) -> Any:
    """Return the graph itself, wrapped as the compiled graph that AOTAutograd expects."""
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    replaced = {placeholders.index(n.args[0]) for n in module.graph.nodes if _replaces_input(n)}
    # AOTAutograd calls compiled graphs with one list of inputs
    return make_boxed_func(functools.partial(_run_unseen, module.forward, replaced))


def _call_directly(graph_module: fx.GraphModule) -> None:
    """Replace ops that kernel passes insert for Inductor by plain functions.

    Run op by op, `FORCE_STRIDE_ORDER` always copies, because it compares a tuple of strides with a list
    (`eager_force_stride` in torch's inductor_prims.py), and custom ops take several times as long as their formulas, as
    a cast by `prims` does.
    """
    cast = torch.ops.prims.convert_element_type.default
    for op, function in {**FORMULAS, FORCE_STRIDE_ORDER: _laid_out, LAID_OUT: _laid_out, cast: Tensor.to}.items():
        for node in graph_module.graph.find_nodes(op="call_function", target=op):
            node.target = function
    graph_module.recompile()


def _laid_out(x: Tensor, strides: Sequence[int]) -> Tensor:
    """Return `x` with these strides: itself if it has them, otherwise a copy."""
    if x.stride() == tuple(strides):
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _replaces_input(node: fx.Node) -> bool:
    """Return whether a node replaces the storage of an input's tensor object: `input.data = ...`."""
    source = node.args[0] if node.args else None
    replaces = str(node.target).startswith(("aten.set_.", "aten.shallow_copy_data_."))  # the latter from torch 2.15 on
    return replaces and isinstance(source, fx.Node) and source.op == "placeholder"


def _run_unseen(forward: Callable[..., Any], replaced: set[int], *args: Any) -> Any:
    """Run a graph that writes into its inputs without increasing their version counters, as compiled code does.

    With increased counters autograd would refuse to use inputs that it has saved. replaced: indices of inputs that get
    another storage; they are not replaced by aliases, which would get it instead.
    """

    # `.data` is an alias with a separate version counter
    def unseen(i: int, x: Any) -> Any:
        return x.data if isinstance(x, Tensor) and not x.requires_grad and i not in replaced else x

    return forward(*(unseen(i, x) for i, x in enumerate(args)))
