"""Copy a part of a graph, to compile it alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from fp8pass.passes.common.patterns import reach


def alone(inputs: Collection[fx.Node], results: Sequence[fx.Node]) -> fx.GraphModule:
    """Return a copy of the part that computes the results from the inputs. Nodes keep their order, names and metadata.

    All that the results depend on must be computed from the inputs.
    """
    needed = reach(results, lambda n: n.all_input_nodes, lambda n: n not in inputs)
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in sorted(n for n in needed if n in inputs):
        made[node] = graph.placeholder(node.name)
        made[node].meta = dict(node.meta)
    for node in sorted(n for n in needed if n not in inputs):
        assert node.op == "call_function", f"{node} is not computed from the inputs"
        made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[r] for r in results))
    return fx.GraphModule({}, graph)
