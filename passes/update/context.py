"""What the passes over Dynamo's graph of an update share."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from fp8pass.graph.pass_base import Context
from fp8pass.runtime.update_key import UpdateKey


@dataclass
class UpdateContext(Context):
    """key: what the graph is compiled for. Inputs that passes add come after all that are there by then.

    states: the inputs of each state of the key, by their names in `SlotTensors`. moments: the nodes that stand for
    those of the key, once they are read. skipped: b8[], whether the update is to leave everything as it was, if known.
    """

    key: UpdateKey = field(kw_only=True)
    states: list[dict[str, fx.Node]] = field(default_factory=list)
    moments: list[fx.Node] = field(default_factory=list)
    skipped: fx.Node | None = None
