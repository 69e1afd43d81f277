"""Quantize the operands of an optimizer's matmuls, as Muon's, if the user asks for that.

before   gram: bf16[N, N] = x @ x.T
after    x_               = qdq_no_grad(x, by rows);  gram = x_ @ x_.T
changes  values, to those of FP8

An optimizer's matmuls stay in high precision unless `update_matmuls` is set. The pass runs the passes of a forward
that write and annotate matmuls, for one recipe: a scale for each row, by its own amax, and not rounded. Muon iterates
towards an orthogonal matrix. The largest elements of its Gram matrix are on the diagonal: scaled so, they are exact.
With one scale for the tensor, or scales of powers of two, they are off by up to 6%, and on small matrices it diverges.

Runs last: the other passes know the ops of optimizers.
"""

from __future__ import annotations

from torch import fx

from fp8pass.base.names import Names
from fp8pass.graph.annotation import Annotation, SingleProduct
from fp8pass.graph.pass_base import DynamoContext
from fp8pass.options.config import Config
from fp8pass.passes.common.matmul_calls import signature_of
from fp8pass.passes.dynamo.annotate import Annotate
from fp8pass.passes.dynamo.write_matmuls import WriteMatmuls
from fp8pass.passes.update.context import UpdateContext
from fp8pass.recipes import RowwiseScaling


class QuantizeProducts:
    """The pass over Dynamo's graph of an update."""

    name = "quantize_products"

    def run(self, graph: fx.Graph, context: UpdateContext) -> int:
        """Annotate the graph's matmuls, and put the verdicts into the context; return the number of annotated ones."""
        if context.config.update_matmuls == "off":
            return 0
        module = graph.owning_module
        assert module is not None
        annotation = Annotation(module, [], [])
        names = Names(graph.find_nodes(op="placeholder"))
        of_update = DynamoContext(_config(context.config), annotation=annotation, names=names)
        WriteMatmuls().run(graph, of_update)
        of_update.products = {n: _PRODUCT for n in graph.nodes if signature_of(n) is not None}
        annotated = Annotate().run(graph, of_update)
        assert not annotation.inputs, "a recipe without state adds no inputs"
        context.choices += annotation.choices
        return annotated


_PRODUCT = SingleProduct("output", ("input", "weight"), late=False)
"""What a matmul of an update is: no call of a layer. So a tensor and its transpose are quantized once."""


def _config(config: Config) -> Config:
    """Return the options for the matmuls: the others are about those of the model."""
    kept = {name: getattr(config, name) for name in ("min_speedup", "target", "strict")}
    return Config(recipe=RowwiseScaling(power_of_2=False), **kept)
