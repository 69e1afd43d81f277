"""Run the passes over Dynamo's graph of an optimizer's update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from fp8pass.compiler import order
from fp8pass.compiler.run_passes import linter, run_all
from fp8pass.dump.writer import Dump
from fp8pass.graph.annotation import Annotation, copy_to_edit
from fp8pass.graph.attempt import FIRST, Attempt
from fp8pass.graph.inputs import examples_of
from fp8pass.options.config import Config

if TYPE_CHECKING:
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

    module = copy_to_edit(module)
    todo, context = [p for p in order.UPDATE if attempt.runs(p.name)], UpdateContext(config, key=key)

    def of_now() -> Sequence[Any]:
        return [*args, *(examples_of(context.inputs, call, args) if call is not None else ())]

    run_all(todo, module.graph, context, dump or Dump(), "dynamo", linter(module), of_now)
    module = copy_to_edit(module)  # drops attributes that no node reads any more
    module.recompile()
    return Annotation(module, context.choices, [], inputs=[*context.inputs], is_update=True)
