"""Formulas for the collectives of one training step of a Llama: their kinds, dtypes, sizes and groups of ranks.

A step is one forward, one backward and one optimizer step. The formulas cover

    FSDP2           each block and the rest are wrapped separately. Blocks are gathered in bfloat16 for the forward,
                    resharded after it, and gathered again for the backward; gradients are reduce-scattered
    DDP             without shards: gradients are averaged in float32 in buckets, which count as one here
    tensor parallel by DTensor, with sequence parallel between the divided layers and a loss over divided logits
    both            FSDP2 over one dimension of a mesh, tensor parallel over the other

bench/traced_collectives.py runs the same model and counts its collectives; the counts must be equal for each kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fp8pass.quant.wire import GradientFormat
from fp8pass.states.amax_reduction import HEADER

ITEMSIZE = {"uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "bfloat16": 2, "float32": 4, "int32": 4, "float64": 8}
OF_NORMS = "float32" if torch.__version__ >= "2.15" else "bfloat16"
"""The dtype of norms' gradients in all-reduces of tensor parallel: torch 2.15 and newer reduce before they cast."""
LINEARS = ("q", "k", "v", "gate", "up", "o", "down")
BY_INPUT = (("q", "k", "v"), ("gate", "up"), ("o",), ("down",))
"""The linear layers of a block, grouped by the tensor that they read."""


@dataclass(frozen=True)
class Llama:
    """Sizes of a model: an embedding, blocks as in bench/blocks.py, a norm, and a head that is not tied."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocab: int

    def linears(self, ranks: int = 1) -> dict[str, tuple[int, int]]:
        """Return the rows and columns of a block's weights on one of `ranks` ranks of tensor parallel."""
        kv = self.width // self.heads * self.kv_heads
        by_rows = {"q": self.width, "k": kv, "v": kv, "gate": self.hidden, "up": self.hidden}
        by_columns = {"o": self.width, "down": self.hidden}
        return {name: (n // ranks, self.width) for name, n in by_rows.items()} | {
            name: (self.width, n // ranks) for name, n in by_columns.items()
        }

    @property
    def in_block(self) -> int:
        """Return the number of parameters of a block."""
        return sum(rows * columns for rows, columns in self.linears().values()) + 2 * self.width

    @property
    def in_root(self) -> int:
        """Return the number of parameters outside of blocks: embedding, norm and head."""
        return 2 * self.vocab * self.width + self.width

    @property
    def parameters(self) -> int:
        """Return the number of all parameters."""
        return self.layers * self.in_block + self.in_root


# Table 3 of https://arxiv.org/abs/2407.21783, with the vocabulary size of the released models.
MODELS = {
    "8B": Llama(32, 4096, 14336, 32, 8, 128256),
    "70B": Llama(80, 8192, 28672, 64, 8, 128256),
    "405B": Llama(126, 16384, 53248, 128, 8, 128256),
}


@dataclass(frozen=True)
class Layout:
    """Number of ranks in each dimension of the mesh.

    recompute: blocks save only their input, and the backward runs their forward again (activation checkpointing).
    whole: each rank has all parameters, in DDP.
    """

    data: int = 1
    tensor: int = 1
    recompute: bool = False
    whole: bool = False

    @property
    def ranks(self) -> int:
        """Return the number of all ranks."""
        return self.data * self.tensor

    @property
    def everyone(self) -> str:
        """Return the name of the group of all ranks: the dimension's name if only one dimension has several ranks."""
        return "all" if self.data > 1 and self.tensor > 1 else "data" if self.data > 1 else "tensor"

    def size(self, group: str) -> int:
        """Return the number of ranks in the group "data", "tensor" or "all"."""
        return {"data": self.data, "tensor": self.tensor, "all": self.ranks}[group]


@dataclass(frozen=True)
class Way:
    """The choice of what runs in FP8. The head stays in BF16, as usual.

    fp8: the matmuls of blocks run in FP8. fp8_wire: collectives transfer the operands of these matmuls in FP8.
    left_out: linear layers of blocks that stay in BF16, because fp8pass declines layers that are too small to pay.
    fp8_gradients: FSDP's reduce-scatter, or DDP's all-reduce, exchanges gradients in FP8.
    """

    fp8: bool
    fp8_wire: bool = False
    left_out: tuple[str, ...] = ()
    fp8_gradients: bool = False

    @property
    def taken(self) -> tuple[str, ...]:
        """Return the linear layers of a block that run in FP8."""
        return tuple(name for name in LINEARS if self.fp8 and name not in self.left_out)

    def gathers_weights(self, layout: Layout) -> bool:
        """Return whether FSDP gathers weights in FP8 (`enable_fp8_all_gather`)."""
        return self.fp8_wire and layout.data > 1 and not layout.whole


BF16, FP8_MATMULS, FP8 = Way(fp8=False), Way(fp8=True), Way(fp8=True, fp8_wire=True)
FP8_GRADIENTS = Way(fp8=True, fp8_wire=True, fp8_gradients=True)


class Collective(NamedTuple):
    """One kind of collective. elements: of the whole tensor, after an all-gather or before a reduce-scatter."""

    kind: str
    dtype: str
    elements: int
    group: str

    @property
    def bytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return self.elements * ITEMSIZE[self.dtype]

    def sent(self, layout: Layout) -> float:
        """Return the bytes that each rank sends in a ring: (n - 1) / n of the whole; twice that for an all-reduce."""
        ranks = layout.size(self.group)
        return (2 if self.kind == "all_reduce" else 1) * (ranks - 1) / ranks * self.bytes


def collectives(
    model: Llama, layout: Layout, way: Way, batch: int, length: int, reduce_dtype: str = "float32"
) -> Counter[Collective]:
    """Return how often each rank calls each collective in one step.

    batch, length: the shape of the input of one group of tensor parallel.
    """
    found: Counter[Collective] = Counter()
    for collective, count in (
        *(_whole(model, layout, way) if layout.whole else _fully_sharded(model, layout, way, reduce_dtype)),
        *_tensor_parallel(model, layout, way, batch, length),
        *_scales(model, layout, way),
    ):
        if layout.size(collective.group) > 1:
            found[collective] += count
    return found


def _fully_sharded(model: Llama, layout: Layout, way: Way, reduce_dtype: str) -> Iterable[tuple[Collective, int]]:
    """Yield the collectives of FSDP, and their numbers.

    A shard has whole rows, and all shards have one size, so that the gathered tensor has rows of padding.
    """

    def padded(rows: int, columns: int) -> int:
        return -(-rows // layout.data) * layout.data * columns

    linears = {name: padded(*shape) for name, shape in model.linears(layout.tensor).items()}
    block = sum(linears.values()) + 2 * padded(model.width, 1)
    root = 2 * padded(model.vocab // layout.tensor, model.width) + padded(model.width, 1)
    gathered = Collective("all_gather", "bfloat16", block, "data")
    if way.gathers_weights(layout):  # FSDP gathers one uint8 buffer, with the bytes of bfloat16 parameters too
        gathered = Collective("all_gather", "uint8", 2 * block - sum(linears[name] for name in way.taken), "data")
    yield gathered, 2 * model.layers
    yield Collective("all_gather", "bfloat16", root, "data"), 1
    for elements, times in ((block, model.layers), (root, 1)):
        if way.fp8_gradients:
            yield Collective("all_to_all", "uint8", _in_messages(elements, layout), "data"), times
        else:
            yield Collective("reduce_scatter", reduce_dtype, elements, "data"), times


def _in_messages(gradients: int, layout: Layout) -> int:
    """Return the bytes of gradients in FP8 with their scales, in one part for each rank."""
    return layout.data * GradientFormat().message(-(-gradients // layout.data))


def _whole(model: Llama, layout: Layout, way: Way) -> Iterable[tuple[Collective, int]]:
    """Yield the collectives of DDP, and their numbers."""
    if way.fp8_gradients:
        sent = _in_messages(model.parameters, layout)
        yield Collective("all_to_all", "uint8", sent, "data"), 1
        yield Collective("all_gather", "uint8", sent, "data"), 1
    else:
        yield Collective("all_reduce", "float32", model.parameters, "data"), 1


def _tensor_parallel(
    model: Llama, layout: Layout, way: Way, batch: int, length: int
) -> Iterable[tuple[Collective, int]]:
    """Yield the collectives of tensor parallel, and their numbers.

    Attention and MLP gather their input and scatter their output. In the backward they gather the gradient of their
    output and scatter that of their input. A gathered tensor is transferred in BF16 if at least one layer reads it in
    BF16. The embedding scatters its output, and the head gathers its input. Gradients of norms are summed over the
    parts of the sequence. The loss needs three numbers for each token: its largest logit, its sum of exponentials, and
    the logit of its target.
    """
    activations = batch * length * model.width
    forwards = 1 + layout.recompute
    for readers in BY_INPUT:
        dtype = "uint8" if way.fp8_wire and set(readers) <= set(way.taken) else "bfloat16"
        # for o and down this is the gradient of the output, which only the backward gathers
        times = 1 if readers in (("o",), ("down",)) else forwards
        yield Collective("all_gather", dtype, activations, "tensor"), times * model.layers
    yield Collective("all_gather", "bfloat16", activations, "tensor"), 2
    yield Collective("reduce_scatter", "bfloat16", activations, "tensor"), (2 * forwards + 2) * model.layers + 2
    yield Collective("all_reduce", OF_NORMS, model.width, "tensor"), 2 * model.layers + 1
    yield Collective("all_reduce", "float32", batch * length, "tensor"), 3


def _scales(model: Llama, layout: Layout, way: Way) -> Iterable[tuple[Collective, int]]:
    """Yield the collectives that delayed scaling adds, and their numbers.

    These are one all-reduce of the amaxes of all slots, and, if weights are gathered in FP8, one of the weights'
    amaxes. Layers that `merge_siblings` merges have fewer slots.
    """
    if not way.fp8:
        return
    inputs = sum(not set(readers).isdisjoint(way.taken) for readers in BY_INPUT)
    taken, gathered = len(way.taken), way.gathers_weights(layout)
    slots = inputs + taken + (0 if gathered else taken)  # slots of inputs, of gradients, of weights
    yield Collective("all_reduce", "int32", HEADER + model.layers * slots, layout.everyone), 1
    if gathered:
        yield Collective("all_reduce", "int32", model.layers * taken, "data"), 1


def differences(formula: Counter[Collective], trace: Counter[Collective]) -> list[str]:
    """Return a line for each kind of collective whose number is not the same in both."""
    return [
        f"{c.kind} of {c.dtype}[{c.elements}] among {c.group} ranks: {formula[c]} by formula, {trace[c]} ran"
        for c in sorted(formula.keys() | trace.keys())
        if formula[c] != trace[c]
    ]
