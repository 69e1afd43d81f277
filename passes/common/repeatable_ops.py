"""Find the ops of Dynamo's graph that a backward may compute again: elementwise ops, norms, and reductions of rows.

They are found by the ATen ops that they call, on fake tensors, so that no list of torch's functions is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.base._torch import FakeTensor, OpOverload, TorchDispatchMode
from fp8pass.graph.sizes import depends_on_data
from fp8pass.graph.wanted import HIGH_PRECISION
from fp8pass.passes.common.matmul_calls import mutates
from fp8pass.passes.common.patterns import aten


@dataclass(frozen=True)
class RepeatableOp:
    """Describe a node that can be computed again: an elementwise op, a norm, or a reduction of rows.

    linear: its gradient reads no tensor that is computed from a parameter or an activation. moves: it only changes the
    shape, or the order of elements. reduces: it reduces rows.
    """

    linear: bool
    moves: bool
    reduces: bool


def op_of(node: fx.Node) -> RepeatableOp | None:
    """Return what is known of a node; None if it cannot be computed again: by its ATen ops, run on fake tensors."""
    if not _can_be_called(node):
        return None
    called = _aten_calls(node)
    if not called:  # a cast to the dtype that a tensor has returns the tensor
        return RepeatableOp(linear=True, moves=False, reduces=False) if float_inputs(node) else None
    if not all(map(_is_repeatable, called)):
        return None
    packets = {call.packet for call in called if not call.op.is_view}
    graded = [n for n in float_inputs(node) if value_of(n).requires_grad]
    # a product is linear in its only factor that has a gradient (not x * x), and a quotient is in its numerator
    scales = packets <= _LINEAR | _SCALING and len(graded) == 1 and node.args.count(graded[0]) == 1
    linear = packets <= _LINEAR or (scales and not (aten.div in packets and node.args[0] is not graded[0]))
    return RepeatableOp(linear, packets <= {aten.clone, aten._unsafe_view}, any(map(_reduces, called)))


def _can_be_called(node: fx.Node) -> bool:
    """Return whether the node's function is torch's, and can be called once more on Dynamo's examples."""
    value = node.meta.get("example_value")
    if not is_plain(value) or not value.requires_grad or any(map(depends_on_data, value.shape)):
        return False  # a size that depends on data would get another symbol
    has_values = all("example_value" in n.meta for n in node.all_input_nodes)
    return has_values and not mutates(node) and _is_torchs(node)


def _is_torchs(node: fx.Node) -> bool:
    module = getattr(node.target, "__module__", None) or ""
    return node.op == "call_method" or (
        node.op == "call_function"
        and (module.split(".")[0] in ("torch", "_operator") or isinstance(node.target, OpOverload))
    )


@dataclass(frozen=True)
class _RepeatableCall:
    op: OpOverload
    args: tuple[Any, ...]

    @property
    def packet(self) -> Any:
        """The op without its overload; of an in-place op, which writes into a tensor that the function made, `add`."""
        name = self.op.overloadpacket.__name__
        return getattr(aten, name.removesuffix("_"))


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the ATen ops that a function calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_RepeatableCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":  # not "prim", which asks a tensor for its device
            self.calls.append(_RepeatableCall(func, args))
        return func(*args, **(kwargs or {}))


def _aten_calls(node: fx.Node) -> list[_RepeatableCall]:
    recorder = _Calls()
    with torch.no_grad(), recorder:
        _called(node)
    return recorder.calls


def _called(node: fx.Node) -> Any:
    """Return the result of the node's function on Dynamo's examples."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["example_value"])
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def keeps_its_result(node: fx.Node) -> bool:
    """Return whether the backward of an op of torch's reads the op's own result, as that of attention or softmax."""
    if not _can_be_called(node):
        return False
    with torch.enable_grad():
        result = _called(node)
    if not is_plain(result) or result.grad_fn is None:
        return False
    # autograd's nodes have what they save as attributes
    saved = (getattr(result.grad_fn, name) for name in dir(result.grad_fn) if name.startswith("_saved_"))
    # each call wraps the storage in another Python object, so the C++ object is compared
    storage = result.untyped_storage()._cdata
    return any(isinstance(x, Tensor) and x.untyped_storage()._cdata == storage for x in saved)


_LINEAR = {aten.add, aten.sub, aten.rsub, aten.neg, aten.sum, aten.mean, aten._to_copy, aten.clone, aten._unsafe_view}
_SCALING = {aten.mul, aten.div}
_NORMS = {aten.native_layer_norm, aten._fused_rms_norm}


def _is_repeatable(call: _RepeatableCall) -> bool:
    """Return whether an op is elementwise, a view, a norm or a reduction of rows, and draws no random numbers."""
    tags = call.op.tags
    if torch.Tag.nondeterministic_seeded in tags:
        return False
    elementwise = torch.Tag.pointwise in tags or call.op.is_view or call.packet in _LINEAR - {aten.sum, aten.mean}
    return elementwise or _reduces(call)


def _reduces(call: _RepeatableCall) -> bool:
    if call.packet in _NORMS:
        return True
    if torch.Tag.reduction not in call.op.tags or len(call.args) < 2:
        return False
    dims = call.args[1] if isinstance(call.args[1], (list, tuple)) else [call.args[1]]
    return all(isinstance(d, int) and d in (-1, call.args[0].dim() - 1) for d in dims)


def value_of(node: fx.Node) -> Tensor:
    """Return Dynamo's example of a node's tensor."""
    value = node.meta["example_value"]
    assert isinstance(value, Tensor), node
    return value


def float_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the floating tensors that a node reads."""
    values = ((n, n.meta.get("example_value")) for n in node.all_input_nodes)
    return [n for n, value in values if isinstance(value, Tensor) and value.is_floating_point()]


def is_plain(value: object) -> TypeGuard[FakeTensor]:
    """Return whether a value is a plain tensor, in high precision."""
    return isinstance(value, FakeTensor) and value.dtype in HIGH_PRECISION and value.layout is torch.strided


def is_as_large(one: fx.Node, other: fx.Node) -> bool:
    """Return whether a node's tensor is known to have as many elements as another's, or more; adds no guard."""
    return bool(statically_known_true(value_of(one).numel() >= value_of(other).numel()))
