"""The cut between forward and backward: torch's own, with some tensors saved that it would compute again.

Torch's partitioner saves what costs the least memory, and takes what is computed elementwise from saved tensors for
free. It keeps no node that only the backward reads in the forward, whatever its tags say. So while it cuts, such nodes
pose as outputs of the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fp8pass._torch import CustomPartitionerFn, cuts_fast, get_hash_for_files, min_cut_partition
from fp8pass.node_meta import SAVED

Partitioner = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


class Partition(CustomPartitionerFn):
    """Inductor's `custom_partitioner_fn`. own: the one that the user has configured, if any.

    seen: called with the graphs of forward and backward.
    """

    def __init__(self, own: Any = None, seen: Callable[[fx.Graph, fx.Graph], None] | None = None) -> None:
        self.own = own
        self.seen = seen

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The graphs of forward and backward; nodes marked SAVED are in the former, and read by the latter."""
        cut: Partitioner = self.own or min_cut_partition
        saved = [n for n in gm.graph.nodes if SAVED in n.meta]
        end = kwargs.pop("num_fwd_outputs")
        _insert_outputs(gm.graph, end, saved)
        with cuts_fast():
            forward, backward = cut(gm, joint_inputs, num_fwd_outputs=end + len(saved), **kwargs)
        _remove_outputs(forward, end, len(saved))
        if self.seen is not None:
            self.seen(forward.graph, backward.graph)
        return forward, backward

    def __getstate__(self) -> dict[str, Any]:
        """Return what decides about the cut: AOTAutograd's cache pickles this for its key."""
        return {"own": self.own}

    def uuid(self) -> Any:
        """Changes with this file, and with the user's own partitioner."""
        return get_hash_for_files((__file__,)), self.own.uuid() if self.own is not None else None


def _insert_outputs(graph: fx.Graph, position: int, nodes: list[fx.Node]) -> None:
    output = graph.output_node()
    values, descriptions = list(output.args[0]), output.meta.get("desc")  # type: ignore[arg-type]
    output.args = ((*values[:position], *nodes, *values[position:]),)
    if descriptions is not None:  # one for each output; what they say of these is read by nobody
        described = list(descriptions)
        output.meta["desc"] = [*described[:position], *described[:1] * len(nodes), *described[position:]]


def _remove_outputs(module: fx.GraphModule, position: int, count: int) -> None:
    if not count:
        return
    output = module.graph.output_node()
    values: Any = output.args[0]
    output.args = ((*values[:position], *values[position + count :]),)
    for key in ("desc", "output_stack_traces"):
        if (described := output.meta.get(key)) is not None:
            output.meta[key] = [*described[:position], *described[position + count :]]
    module.recompile()
