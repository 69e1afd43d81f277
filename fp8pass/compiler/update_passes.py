"""Run the passes over Dynamo's graph of an optimizer's update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from fp8pass.base.names import Names
from fp8pass.compiler import order
from fp8pass.compiler.run_passes import linter, run_all
from fp8pass.dump.writer import Dump
from fp8pass.graph.annotation import Annotation, MatmulChoice, copy_to_edit
from fp8pass.graph.attempt import FIRST, Attempt
from fp8pass.graph.inputs import examples_of
from fp8pass.graph.pass_base import DynamoContext, Pass
from fp8pass.options.config import Config
from fp8pass.recipes import RowwiseScaling

if TYPE_CHECKING:
    from fp8pass.passes.update.context import UpdateContext
    from fp8pass.weights.update_inputs import UpdateCall
    from fp8pass.weights.update_key import UpdateKey


def annotated_update(
    module: fx.GraphModule,
    key: UpdateKey,
    config: Config,
    attempt: Attempt = FIRST,
    dump: Dump | None = None,
    args: Sequence[Any] = (),
    call: UpdateCall | None = None,
) -> Annotation:
    """Return a copy of Dynamo's graph of an update that also writes FP8 copies of weights, and moments in FP8.

    args, call: Dynamo's inputs, and what the others are read from, for dumps.
    """
    if attempt.form == "plain":
        return Annotation(module, [], [], is_update=True)
    from fp8pass.passes.update.context import UpdateContext

    dump = dump or Dump()
    module = copy_to_edit(module)

    def of_now() -> Sequence[Any]:
        return [*args, *(examples_of(context.inputs, call, args) if call is not None else ())]

    context = UpdateContext(config, key=key, tensors=of_now)

    def run(passes: Sequence[Pass[UpdateContext]]) -> None:
        todo = [p for p in passes if attempt.runs(p.name)]
        run_all(todo, module.graph, context, dump, "dynamo", linter(module), of_now)

    run(order.UPDATE)
    if config.update_matmuls != "off":
        context.choices = _annotated(module, config, attempt, dump, of_now)
    if call is not None:  # otherwise the passes are only tried, for no call
        run(order.UPDATE_LAST)
    module = copy_to_edit(module)  # drops attributes that no node reads any more
    module.recompile()
    return Annotation(module, context.choices, [], inputs=[*context.inputs], is_update=True, bodies=context.bodies)


OF_UPDATES = RowwiseScaling(power_of_2=False)
"""The recipe of matmuls of updates. Muon iterates towards an orthogonal matrix, and multiplies errors on its way: with
one scale for the tensor, or scales of powers of two, it diverged on small matrices where it was tried."""


def _annotated(
    module: fx.GraphModule, config: Config, attempt: Attempt, dump: Dump, examples: Callable[[], Sequence[Any]]
) -> list[MatmulChoice]:
    """Annotate the matmuls of an update's graph; return what is decided about each. examples: of its inputs."""
    kept = {name: getattr(config, name) for name in ("min_speedup", "target", "strict")}
    annotation, names = Annotation(module, [], []), Names(module.graph.find_nodes(op="placeholder"))
    context = DynamoContext(
        Config(recipe=OF_UPDATES, **kept), annotation=annotation, declined=attempt.reason, names=names, is_update=True
    )
    todo = [p for p in order.DYNAMO if p.name in order.OF_UPDATE_MATMULS and attempt.runs(p.name)]
    run_all(todo, module.graph, context, dump, "dynamo", linter(module), examples)
    assert not annotation.inputs, "a recipe without state adds no inputs"
    return annotation.choices
