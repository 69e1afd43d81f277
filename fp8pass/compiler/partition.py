"""The partition into forward and backward: by torch's partitioner, but it saves what it must.

These are the nodes that passes marked SAVED, and random numbers.

Torch's partitioner saves the tensors that cost the least memory, and assumes that elementwise ops on saved tensors are
free to recompute. It never keeps a node in the forward that only the backward reads, whatever its tags say. So while it
runs, marked nodes are outputs of the forward.

Under a memory budget of activations below 1 it draws random numbers again in the backward, which are then others: the
gradient of a dropout would be that of another mask (pytorch#190758).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fp8pass.base._torch import CustomPartitionerFn, cuts_fast, get_hash_for_files, min_cut_partition
from fp8pass.base.node_meta import SAVED
from fp8pass.compiler import memory_budget
from fp8pass.graph.builder import named_arguments

Partitioner = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


class Partition(CustomPartitionerFn):
    """The partitioner for Inductor's setting `custom_partitioner_fn`.

    configured: the partitioner that the user has set, if any. seen: called with the graphs of forward and backward.
    """

    def __init__(self, configured: Any = None, seen: Callable[[fx.Graph, fx.Graph], None] | None = None) -> None:
        self.configured = configured
        self.seen = seen

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the graphs of forward and backward; the backward reads nodes marked SAVED from the forward."""
        cut: Partitioner = self.configured or min_cut_partition
        saved = [n for n in gm.graph.nodes if SAVED in n.meta]
        end = kwargs.pop("num_fwd_outputs")
        if saved:
            _insert_outputs(gm.graph, end, saved)
        _mark_random(gm.graph)
        with cuts_fast(), memory_budget.saving(_is_marked):
            forward, backward = cut(gm, joint_inputs, num_fwd_outputs=end + len(saved), **kwargs)
        if saved:
            _remove_outputs(forward, end, len(saved))
        if self.seen is not None:
            self.seen(forward.graph, backward.graph)
        return forward, backward

    def __getstate__(self) -> dict[str, Any]:
        """Return the state that decides about the partition: AOTAutograd's cache pickles it for its key."""
        return {"configured": self.configured}  # without `seen`, which only observes the result

    def uuid(self) -> Any:
        """Return a key that changes with what decides here, and with the user's own partitioner.

        Inductor needs it to cache graphs that a custom partitioner cut.
        """
        files = get_hash_for_files((__file__, memory_budget.__file__))
        return files, self.configured.uuid() if self.configured is not None else None


def _mark_random(graph: fx.Graph) -> None:
    """Mark what draws random numbers to be saved, outside of checkpointed regions.

    In such a region torch itself restores the state of the generator. Inductor's random numbers are functions of seeds,
    which are saved instead.
    """
    for node in graph.nodes:
        if _draws(node):
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def _is_marked(node: fx.Node) -> bool:
    return node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE and _draws(node)


def _draws(node: fx.Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return named_arguments(node).get("dropout_p") != 0  # attention without dropout draws nothing


def _insert_outputs(graph: fx.Graph, position: int, nodes: list[fx.Node]) -> None:
    output = graph.output_node()
    values, descriptions = list(output.args[0]), output.meta.get("desc")  # type: ignore[arg-type]
    output.args = ((*values[:position], *nodes, *values[position:]),)
    if descriptions is not None:  # AOTAutograd has one for each output; those of inserted outputs are never read
        described = list(descriptions)
        output.meta["desc"] = [*described[:position], *described[:1] * len(nodes), *described[position:]]


def _remove_outputs(module: fx.GraphModule, position: int, count: int) -> None:
    output = module.graph.output_node()
    values: Any = output.args[0]
    output.args = ((*values[:position], *values[position + count :]),)
    # the partitioner gives the forward these lists, with an entry for each output
    for key in ("desc", "output_stack_traces"):
        if (described := output.meta.get(key)) is not None:
            output.meta[key] = [*described[:position], *described[position + count :]]
    module.recompile()
