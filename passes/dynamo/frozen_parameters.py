"""Find the parameters that `frozen="fp8"` keeps in FP8 alone: frozen weights that the recipe selects."""

from __future__ import annotations

from torch import fx, nn

from fp8pass.base.names import Names
from fp8pass.graph.refusal import Reject
from fp8pass.options.config import Config
from fp8pass.options.setting import within
from fp8pass.passes.common.matmul_calls import LINEAR, argument, signature_of
from fp8pass.passes.dynamo.check_matmul import check
from fp8pass.quant.wrapper_tensor import Scales
from fp8pass.recipes import BlockwiseScaling, StaticScaling


def frozen_parameters(module: fx.GraphModule, config: Config) -> dict[int, Scales]:
    """Return the positions of such parameters among the inputs of Dynamo's graph, with the scales that they get."""
    inputs = module.graph.find_nodes(op="placeholder")
    positions, names = {node: i for i, node in enumerate(inputs)}, Names(inputs)
    scales_of: dict[int, Scales] = {}
    for node in module.graph.nodes:
        if signature_of(node) is not LINEAR:
            continue
        weight = argument(node, LINEAR.b)
        if not isinstance(weight, fx.Node) or weight not in positions or not _is_frozen(weight):
            continue
        name, _ = names.of(node, LINEAR.name, [weight])
        try:
            call = check(node, LINEAR, name, within(node, config), training=node.meta["example_value"].requires_grad)
        except Reject:
            continue  # the annotate pass says why
        if not isinstance(call.recipe, StaticScaling):
            scales_of[positions[weight]] = "block" if isinstance(call.recipe, BlockwiseScaling) else "tensor"
    return scales_of


def _is_frozen(weight: fx.Node) -> bool:
    """Return whether a plain parameter requires no gradient, and only linear layers read it."""
    value = weight.meta.get("example_value")
    reads = all(signature_of(user) is LINEAR and argument(user, LINEAR.b) is weight for user in weight.users)
    # the example of a subclass is a subclass too
    return isinstance(value, nn.Parameter) and not value.requires_grad and reads
