"""Find the moments of an optimizer among the tensors that its update writes, and the kind of each.

Moments are found by what the update computes, not by name. The new value of a second moment is a polynomial of degree 2
in the update's inputs, its own old value and a gradient among them, and a root is taken of it. For a first moment it
has degree 1, and no root is taken. All other tensors stay as they are, also master copies that parameters are copied
from, and tensors that are computed from the updated parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass.base._torch import FakeTensor, FakeTensorMode
from fp8pass.base.names import source_name
from fp8pass.graph.annotation import copy_to_edit
from fp8pass.passes.common.foreach import expand_foreach
from fp8pass.passes.common.patterns import aten, prims, reach
from fp8pass.passes.update.written import example, refs
from fp8pass.quant.moments import MIN_ELEMENTS, Moments, moment_of
from fp8pass.quant.sharded import division_of, part_of
from fp8pass.weights.update_key import Moment, TensorRef


def moments_of(
    module: fx.GraphModule, written: Sequence[TensorRef], wanted: Moments, in_float32: bool = False
) -> list[Moment]:
    """Return the tensors that are moments, with their kinds, among those that an update writes.

    wanted: how to store those that are not stored yet. in_float32: True if the update computes in float32 with moments
    in bfloat16. Otherwise second moments in bfloat16 stay as they are: each op would round their small changes off.
    """
    stored = {ref: example(module, node) for node, ref in refs(module.graph).items()}
    moments = [
        Moment(p, x.stored_as, torch.float32 if in_float32 else x.dtype, division_of(stored[p]))
        for p in written
        if (x := moment_of(stored[p])) is not None
    ]
    if not any(_is_candidate(stored[p]) for p in written):
        return moments  # without tracing the update, which takes time
    graph, new = _in_aten(module, written)
    inputs = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    degrees = _PolynomialDegree()
    gradients = {n for name, n in inputs.items() if name.startswith("grad")}
    parameters = {value for ref, (_, value) in new.items() if stored[ref].requires_grad}
    copied = set(map(_copied, parameters))
    for ref, (old, value) in new.items():
        size = stored[ref]
        if not _is_candidate(size):
            continue
        made_of, degree = _above(value), degrees(value)
        # a moment is computed from its old value and from a gradient, and forgets
        if old in gradients or old not in made_of or not made_of & gradients or _only_grows(old, value):
            continue
        if made_of & parameters or value in copied:  # an average of parameters, or a master copy of them
            continue
        has_root = any(u.target in _ROOTS for u in _below(value))
        if degree == 1 and not has_root:
            dtype = torch.float32 if in_float32 else size.dtype
            moments.append(Moment(ref, wanted.format("first", size), dtype, division_of(size)))
        elif degree == 2 and has_root and (size.dtype == torch.float32 or (in_float32 and wanted.second != "float16")):
            moments.append(Moment(ref, wanted.format("second", size), torch.float32, division_of(size)))
    return moments


def _is_candidate(x: Tensor) -> bool:
    """Return whether `x` may become a moment in FP8. Its size on all ranks decides, so all ranks decide the same.

    A rank whose part is empty stores none of it.
    """
    if moment_of(x) is not None or x.requires_grad or not x.is_floating_point():
        return False
    return x.numel() >= MIN_ELEMENTS and part_of(x).numel() > 0


def _in_aten(
    module: fx.GraphModule, written: Sequence[TensorRef]
) -> tuple[fx.Graph, dict[TensorRef, tuple[fx.Node, fx.Node]]]:
    """Trace the update in functional ATen ops; return the graph, and each written tensor's old and new node."""
    module = copy_to_edit(module)
    expand_foreach(module.graph)
    module.recompile()
    values = {ref: example(module, node) for node, ref in refs(module.graph).items()}
    kinds = {ref: _kind(module, node) for node, ref in refs(module.graph).items()}
    tensor_values = {ref: x for ref, x in values.items() if isinstance(x, Tensor)}
    modes = [x.fake_mode for x in tensor_values.values() if isinstance(x, FakeTensor)]

    def update(**tensors: Tensor) -> list[Tensor]:
        given = dict(zip(tensor_values, tensors.values(), strict=True))
        _RunOnTensors(module, given).run(enable_io_processing=False)
        return [given[ref] for ref in written]

    with modes[0] if modes else FakeTensorMode(), torch.no_grad():
        fakes = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in tensor_values.values()
        ]
        names = [f"{kinds[ref]}_{i}" for i, ref in enumerate(tensor_values)]
        traced = make_fx(functionalize(lambda *xs: update(**dict(zip(names, xs, strict=True)))))(*fakes)
    inputs = [n for n in traced.graph.nodes if n.op == "placeholder"]
    for node, name in zip(inputs, names, strict=True):
        node.name = name  # make_fx names inputs by itself; `moments_of` tells gradients by these names
    input_of = dict(zip(tensor_values, inputs, strict=True))
    results: Any = traced.graph.output_node().args[0]
    return traced.graph, {ref: (input_of[ref], value) for ref, value in zip(written, results, strict=True)}


def _kind(module: fx.GraphModule, node: fx.Node) -> str:
    if node.op == "placeholder" and source_name(node).endswith(".grad"):
        return "grad"
    return "other"


class _RunOnTensors(fx.Interpreter):
    """An interpreter that runs a graph on given tensors."""

    def __init__(self, module: fx.GraphModule, given: Mapping[TensorRef, Tensor]) -> None:
        super().__init__(module)
        self.given = given
        self.refs = refs(module.graph)

    def run_node(self, n: fx.Node) -> Any:
        """Return the given tensor of an input or attribute; run other nodes. Symbolic numbers become 1.0."""
        if n in self.refs:
            return self.given.get(self.refs[n], example(self.module, n))
        traced_value = n.meta.get("example_value")
        return 1.0 if isinstance(traced_value, (torch.SymFloat, torch.SymInt)) else super().run_node(n)


_ROOTS = {aten.sqrt.default, aten.rsqrt.default}
_SUMS = {aten.add.Tensor, aten.sub.Tensor, aten.maximum.default, aten.where.self}
_PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar}
_SAME = {aten.neg.default, aten._to_copy.default, aten.clone.default, aten.add.Scalar}
_CONSTANTS = {aten.full_like.default, aten.ones_like.default, aten.zeros_like.default}


class _PolynomialDegree:
    """The polynomial degree of each node in the update's inputs: 0 constant, 1 linear, 2 quadratic, inf for others."""

    def __init__(self) -> None:
        self.known: dict[fx.Node, float] = {}

    def __call__(self, x: object) -> float:
        """Return the degree of a node. Numbers, and tensors of one number, are constants of degree 0."""
        if not isinstance(x, fx.Node) or _is_number(x) or x.target in _CONSTANTS:
            return 0
        if x not in self.known:
            self.known[x] = 1 if x.op == "placeholder" else self._of_op(x)
        return self.known[x]

    def _of_op(self, x: fx.Node) -> float:
        degrees = [self(a) for a in x.args]
        if x.target in _SUMS or x.target in _SAME:
            return max(degrees)
        if x.target in _PRODUCTS:
            return sum(degrees)
        if x.target is aten.pow.Tensor_Scalar and x.args[1] == 2:
            return 2 * degrees[0]
        if x.target is aten.addcmul.default:
            return max(degrees[0], degrees[1] + degrees[2])
        if x.target is prims.fma.default:
            return max(degrees[0] + degrees[1], degrees[2])
        if x.target is aten.copy.default:
            return degrees[1]
        if x.target in (aten.lerp.Scalar, aten.lerp.Tensor):
            return max(degrees[:2]) + (degrees[2] if len(degrees) > 2 else 0)
        if x.target is aten.div.Tensor and degrees[1] == 0:
            return degrees[0]
        return math.inf if any(map(self, x.all_input_nodes)) else 0


def _only_grows(old: fx.Node, value: fx.Node) -> bool:
    """Return whether a tensor only has terms added to it, as Adagrad's sum: 16 bits would soon round them away."""
    if value.target is aten.copy.default and isinstance(value.args[1], fx.Node):
        value = value.args[1]
    if value.target not in (aten.add.Tensor, aten.addcmul.default, prims.fma.default):
        return False
    # fma(a, b, c) is a * b + c: what is added to comes last
    first, *rest = reversed(value.args) if value.target is prims.fma.default else value.args
    return first is old and not any(old in _above(n) for n in rest if isinstance(n, fx.Node))


def _is_number(x: fx.Node) -> bool:
    """Return whether the node's value is a tensor of one number. The value of an op on lists is a list."""
    return isinstance(x.meta["val"], Tensor) and x.meta["val"].dim() == 0


def _copied(value: fx.Node) -> fx.Node:
    """Return the node that `value` is copied or cast from; `value` itself if it is neither."""
    while value.target in (aten.copy.default, aten._to_copy.default, aten.clone.default):
        # copy(self, src) has the value of src
        value = value.args[value.target is aten.copy.default]  # type: ignore[assignment]
    return value


def _above(node: fx.Node) -> set[fx.Node]:
    return set(reach([node], lambda n: (i for i in n.all_input_nodes if not _is_number(i))))


def _below(node: fx.Node, steps: int = 3) -> set[fx.Node]:
    """Return nodes that read `node` within `steps` ops: a root follows soon, after a maximum or a bias correction."""
    below, near = set(), {node}
    for _ in range(steps):
        near = {u for n in near for u in n.users if u.op == "call_function"}
        below |= near
    return below
