"""Write convolutions that read each element once as linear layers, where the recipe and the filter select them.

before   y: bf16[B, O, H/4, W/4] = conv2d(x: bf16[B, C, H, W], w: bf16[O, C, 4, 4], b, stride=4)
after    a: bf16[B, H/4, W/4, C*16] = x.unflatten(3, [-1, 4]).unflatten(2, [-1, 4]).permute(0, 2, 4, 1, 3, 5).flatten(3)
         y_: bf16[B, H/4, W/4, O] = linear(a, w.flatten(1), b)
         y                        = y_.permute(0, 3, 1, 2).contiguous()
changes  nothing but the order in which sums are rounded; y has the strides of the convolution's result

Along each dimension the kernel is 1, or equals the stride or the size, without padding; there is one group. A
transposed convolution qualifies if its kernel equals its stride. The columns of `a` are in the order of the weight's
memory, so that its view [O, K] needs no copy: channels first, or last for a weight in channels_last.

Runs on Dynamo's graph, before the annotate pass, which quantizes the linear layer. A convolution that stays in high
precision is not touched; `context.refused` gets the reason.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.base._torch import MODE_CHANGES, is_traceable_wrapper_subclass
from fp8pass.base.names import Names
from fp8pass.graph.builder import laid_out_alike
from fp8pass.graph.pass_base import DynamoContext
from fp8pass.graph.refusal import LeftOut, Reject
from fp8pass.options.config import Config
from fp8pass.options.setting import within
from fp8pass.passes.common.checkpoint_regions import Part, in_its_modes, parts
from fp8pass.passes.common.matmul_calls import LINEAR, argument, mutates
from fp8pass.passes.common.transforms import Transform
from fp8pass.passes.common.write_calls import CallWriter
from fp8pass.passes.dynamo.check_matmul import check, check_speedup, for_instance
from fp8pass.passes.dynamo.quantizers import quantizers
from fp8pass.passes.dynamo.write_matmuls import CONVOLUTIONS, name_of, why_convolution
from fp8pass.recipes import KINDS, Role

LIMITS = {
    "declined": {
        "convolution": (
            "it is a convolution that is more than one matmul: its kernel is neither 1 nor equal to its stride, or it"
            " has padding, dilation or groups. Its row has the sizes of the matmul that does as many operations, for "
            "each group; it does not count as a matmul",
            "nothing; a [kernel that equals the stride](recipes.md#convolutions) runs in FP8",
        ),
    },
}
"""Lines of docs/limits.md: see `Reject`."""

Sizes = tuple[int, ...]


class ConvolutionsAsMatmuls:
    """The pass over Dynamo's graph and its checkpointed regions."""

    name = "convolutions_as_matmuls"

    def run(self, graph: fx.Graph, context: DynamoContext) -> int:
        """Rewrite each convolution that is to run in FP8; return how many were rewritten."""
        return sum(_rewrite_all(part, context) for part in parts(context.annotation.module, context.names))


def _rewrite_all(part: Part, context: DynamoContext) -> int:
    graph, operands, applied, stretch = part.module.graph, dict[Hashable, fx.Node](), 0, 0
    for node in in_its_modes(graph):
        # after a write, or in another grad or autocast mode, an input that was rearranged before can't be read again
        stretch += mutates(node) or node.target in MODE_CHANGES
        conv = match(node)
        if conv is None:
            continue
        try:
            layout = check_convolution(conv)
            _check_wanted(conv, context.names, within(node, context.config), part.inside.get(node, ()))
        except Reject as reject:
            context.refused[node] = reject
            continue
        rewrite(graph, conv, layout, context.names, _Operands(operands, stretch))
        applied += 1
    return applied


# ---------------------------------------------------------------------------------------------------------------------
# Pattern.


@dataclass(frozen=True)
class Convolution:
    """A call of a convolution, with its arguments for each spatial dimension."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    stride: Sizes
    padding: Sizes | str
    dilation: Sizes
    output_padding: Sizes
    groups: int
    transposed: bool

    @property
    def kernel(self) -> Sizes:
        """The kernel's size along each spatial dimension."""
        return tuple(_value(self.weight).shape[2:])

    @property
    def batch_dims(self) -> int:
        """The number of batch dimensions: 1, or 0 for an input without one."""
        return _value(self.x).dim() - len(self.kernel) - 1

    @property
    def columns(self) -> int:
        """The number of columns of its matmul's second operand: the size of the result."""
        shape = _value(self.weight).shape
        return math.prod(shape[1:]) if self.transposed else int(shape[0])

    @property
    def summed(self) -> int:
        """The number of products that its matmul sums up."""
        shape = _value(self.weight).shape
        return int(shape[0]) if self.transposed else math.prod(shape[1:])


def match(node: fx.Node) -> Convolution | None:
    """Return the convolution that the node calls; None for any other node, and for arguments that vary."""
    name = name_of(node)
    if name not in CONVOLUTIONS:
        return None
    transposed, dims = "transpose" in name, int(name[-2])
    order = ["stride", "padding", *(("output_padding", "groups", "dilation") if transposed else ("dilation", "groups"))]
    at = {key: argument(node, (i, key)) for i, key in enumerate(["input", "weight", "bias", *order])}
    defaults = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0, "groups": 1}
    x, weight, bias = at["input"], at["weight"], at["bias"]
    if not (_is_tensor(x) and _is_tensor(weight) and (bias is None or _is_tensor(bias))):
        return None
    arguments = {key: _each(default if at.get(key) is None else at[key], dims) for key, default in defaults.items()}
    if any(
        isinstance(v, tuple) and not all(isinstance(n, int) for n in v)
        for v in (*arguments.values(), _value(weight).shape)
    ):
        return None
    return Convolution(
        node, x, weight, bias, arguments["stride"], arguments["padding"], arguments["dilation"],
        arguments["output_padding"], arguments["groups"][0], transposed,
    )  # fmt: skip


def _each(value: Any, dims: int) -> Any:
    """Return an argument for each dimension; "same" and "valid" unchanged."""
    if isinstance(value, str):
        return value
    value = tuple(value) if isinstance(value, (list, tuple, torch.Size)) else (value,)
    return value * dims if len(value) == 1 else value


def _is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("example_value"), Tensor)


def _value(node: fx.Node) -> Tensor:
    value = node.meta["example_value"]
    assert isinstance(value, Tensor), node
    return value


# ---------------------------------------------------------------------------------------------------------------------
# Check: only refuses.


@dataclass(frozen=True)
class ConvolutionLayout:
    """How the operands and the result are laid out.

    weight_last, result_last: True if the channels of the weight, or of the result, are last in memory.
    """

    weight_last: bool
    result_last: bool


def check_convolution(conv: Convolution) -> ConvolutionLayout:
    """Raise LeftOut unless the convolution is one matmul of its input, cut into patches, and its weight."""
    operands = [n for n in (conv.x, conv.weight, conv.bias) if n is not None]
    if any(is_traceable_wrapper_subclass(_value(n)) for n in operands):
        raise LeftOut("convolution", f"an operand is a {type(_value(conv.weight)).__name__}, not a plain tensor")
    sizes = _value(conv.x).shape[-len(conv.kernel) :]
    by_dim = zip(conv.kernel, conv.stride, conv.dilation, sizes, strict=True)
    reads_once = all(_reads_once(k, s, d, size, conv.transposed) for k, s, d, size in by_dim)
    if conv.groups != 1 or _pads(conv) or not reads_once:
        raise why_convolution(conv.kernel, conv.stride, conv.padding, conv.dilation, conv.groups, conv.output_padding)
    weight, result = _value(conv.weight), _value(conv.node)
    return ConvolutionLayout(
        not weight.is_contiguous() and _channels_last(weight, 1).is_contiguous(), _is_last(conv, result)
    )


def _reads_once(kernel: int, stride: int, dilation: int, size: Any, transposed: bool) -> bool:
    """Return whether at most one kernel position multiplies each element along a dimension."""
    if transposed:
        return kernel == stride and (kernel == 1 or dilation == 1)
    if kernel == 1:
        return True
    is_whole = isinstance(size, int) and size == kernel
    return dilation == 1 and (kernel == stride or is_whole)


def _pads(conv: Convolution) -> bool:
    """Return whether zeros are added at the sides."""
    if isinstance(conv.padding, str):
        return conv.padding == "same" and any(k != 1 for k in conv.kernel)
    return any(conv.padding) or (conv.transposed and any(conv.output_padding))


def _is_last(conv: Convolution, result: Tensor) -> bool:
    """Return whether the channels of the result are last in memory. Raises LeftOut for an unusual layout."""
    last = torch.empty_like(_channels_last(result, conv.batch_dims), memory_format=torch.contiguous_format)
    if laid_out_alike(_channels_first(last, conv.batch_dims), result):
        return True
    if not laid_out_alike(torch.empty_like(result, memory_format=torch.contiguous_format), result):
        raise LeftOut("convolution", f"its result has strides {list(result.stride())}, which no matmul writes")
    return False


def _channels_last(x: Tensor, before: int) -> Tensor:
    """Move dimension `before`, the channels, to the end."""
    return x.movedim(before, -1)


def _channels_first(x: Tensor, before: int) -> Tensor:
    return x.movedim(-1, before)


def _check_wanted(conv: Convolution, names: Names, config: Config, inside: Sequence[Transform]) -> None:
    """Raise Reject if the equivalent linear layer would stay in high precision as a whole."""
    linear = _as_linear(conv)
    name, _ = names.of(conv.node, name_of(conv.node), [conv.weight, conv.x])
    trains = _value(conv.node).requires_grad
    call = check(linear, LINEAR, name, config, trains, inside=inside)
    check_speedup(call, _value(conv.x).device, config)
    recipe = for_instance(call.recipe, name, bool(names.owned))
    tensors: dict[Role, Tensor] = {"grad_output": _value(linear)}
    tensors["input"], tensors["weight"] = (_value(n) for n in linear.all_input_nodes)
    kinds = KINDS if trains else KINDS[:1]
    outcomes = [quantizers(recipe, kind, call.dims, tensors, torch.is_grad_enabled()) for kind in kinds]
    refused = [pair for pair in outcomes if isinstance(pair, Reject)]
    if len(refused) == len(outcomes):
        raise refused[0]


@torch.no_grad()
def _as_linear(conv: Convolution) -> fx.Node:
    """Return the equivalent linear layer, in another graph, for checks."""
    graph, rows_of = fx.Graph(), conv.x if conv.transposed else conv.node
    rows = _channels_last(_value(rows_of), conv.batch_dims).shape[:-1]
    shapes = {"x": (conv.x, (*rows, conv.summed)), "weight": (conv.weight, (conv.columns, conv.summed))}
    operands = []
    for name, (source, shape) in shapes.items():
        operands.append(graph.placeholder(name))
        operands[-1].meta["example_value"] = _value(source).new_empty(shape)
    node = graph.call_function(F.linear, tuple(operands))
    node.meta["example_value"] = _value(conv.node).new_empty((*rows, conv.columns))
    return node


# ---------------------------------------------------------------------------------------------------------------------
# Rewrite: only builds.


@dataclass(frozen=True)
class _Operands:
    """The inputs of convolutions as matmul operands, shared until a write or a change of mode."""

    rows: dict[Hashable, fx.Node]
    stretch: int

    def of(self, write: CallWriter, conv: Convolution, layout: ConvolutionLayout) -> fx.Node:
        """Return the input of a convolution as rows [..., K]."""
        key = self.stretch, conv.x, conv.kernel, conv.stride, conv.transposed, layout.weight_last
        if key not in self.rows:
            self.rows[key] = _rows(write, conv, layout.weight_last)
        return self.rows[key]


def rewrite(graph: fx.Graph, conv: Convolution, layout: ConvolutionLayout, names: Names, operands: _Operands) -> None:
    """Replace the convolution with a linear layer."""
    with graph.inserting_before(conv.node):
        write = CallWriter(graph, conv.node)
        rows, weight = operands.of(write, conv, layout), _matrix(write, conv, layout.weight_last)
        names.view(weight, conv.weight)
        y = write(F.linear, rows, weight, _bias(write, conv, layout.weight_last))
        if conv.transposed:
            y = _side_by_side(write, conv, layout, y)
        y = _with_channels_first(write, conv, y)
        if not layout.result_last and not laid_out_alike(_value(y), _value(conv.node)):
            y = write(torch.Tensor.contiguous, y)
        write.replace(y)


def _rows(write: CallWriter, conv: Convolution, last: bool) -> fx.Node:
    """Return the input as [B, positions..., K]. last: True if the channels are last in K."""
    x, lead, n = conv.x, conv.batch_dims, len(conv.kernel)
    if conv.transposed:
        return write(torch.permute, x, [*range(lead), *range(lead + 1, lead + 1 + n), lead])
    cut = [k > 1 for k in conv.kernel]
    for i in reversed(range(n)):  # from the last on: a cut moves the dimensions after it
        x = _along(write, x, lead + 1 + i, conv.kernel[i], conv.stride[i])
    # the number of positions along each dimension; then, where a dimension is cut, the size of the kernel
    starts = [lead + 1 + i + sum(cut[:i]) for i in range(n)]
    kernel_dims = [start + 1 for start, is_cut in zip(starts, cut, strict=True) if is_cut]
    x = write(torch.permute, x, [*range(lead), *starts, *((*kernel_dims, lead) if last else (lead, *kernel_dims))])
    return write(torch.flatten, x, lead + n) if kernel_dims else x


def _along(write: CallWriter, x: fx.Node, dim: int, kernel: int, stride: int) -> fx.Node:
    """Cut one dimension into chunks of the kernel's size, without the remainder."""
    size: Any = _value(x).shape[dim]
    if kernel == 1:
        every = (*[slice(None)] * dim, slice(None, None, stride))
        return x if stride == 1 else write(operator.getitem, x, every)
    if not statically_known_true(size % kernel == 0):
        whole: Any = size - size % kernel
        if not isinstance(size, int):
            # computed in the graph, for a number would fix the size
            whole = write(operator.mul, write(operator.floordiv, write(torch.Tensor.size, x, dim), kernel), kernel)
        x = write(torch.narrow, x, dim, 0, whole)
    return write(torch.unflatten, x, dim, (-1, kernel))


def _matrix(write: CallWriter, conv: Convolution, last: bool) -> fx.Node:
    """Return the weight as [N, K]: a view, unless it is laid out in an unusual way."""
    weight, dims = conv.weight, len(conv.kernel)
    if last:
        weight = write(torch.permute, weight, [0, *range(2, 2 + dims), 1])
    weight = write(torch.flatten, weight, 1)
    return write(torch.t, weight) if conv.transposed else weight


def _bias(write: CallWriter, conv: Convolution, last: bool) -> fx.Node | None:
    """Return the bias, repeated for each position of a transposed convolution's kernel."""
    places = math.prod(conv.kernel)
    if conv.bias is None or not conv.transposed or places == 1:
        return conv.bias
    each = write(torch.unsqueeze, conv.bias, 0 if last else 1)
    return write(torch.flatten, write(torch.Tensor.expand, each, (places, -1) if last else (-1, places)))


def _side_by_side(write: CallWriter, conv: Convolution, layout: ConvolutionLayout, y: fx.Node) -> fx.Node:
    """Return [B, positions..., kernel * O] as [B, sizes..., O]: each position becomes a block of the kernel's size."""
    cut, lead, n = [k for k in conv.kernel if k > 1], conv.batch_dims, len(conv.kernel)
    if not cut:
        return y
    y = write(torch.unflatten, y, -1, (*cut, -1) if layout.weight_last else (-1, *cut))
    last = y.meta["example_value"].dim() - 1
    channel, first_place = (last, lead + n) if layout.weight_last else (lead + n, lead + n + 1)
    places = itertools.count(first_place)
    pairs = [(lead + i, next(places)) if k > 1 else (lead + i,) for i, k in enumerate(conv.kernel)]
    order = [d for pair in pairs for d in pair]
    # the copy is made in the order of the result
    order = [*order, channel] if layout.result_last else [channel, *order]
    y = write(torch.permute, y, [*range(lead), *order])
    for i, pair in enumerate(pairs):
        if len(pair) == 2:
            at = lead + i + (not layout.result_last)
            y = write(torch.flatten, y, at, at + 1)
    return y if layout.result_last else write(torch.movedim, y, lead, -1)


def _with_channels_first(write: CallWriter, conv: Convolution, y: fx.Node) -> fx.Node:
    lead, n = conv.batch_dims, len(conv.kernel)
    return write(torch.permute, y, [*range(lead), lead + n, *range(lead, lead + n)])
