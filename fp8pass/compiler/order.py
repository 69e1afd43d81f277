"""The order of the passes over each graph, with the reasons for it. No other file knows the order."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from fp8pass.graph.pass_base import DynamoContext, JointContext, KernelsContext, Pass
from fp8pass.passes.dynamo.annotate import Annotate
from fp8pass.passes.dynamo.convolutions_as_matmuls import ConvolutionsAsMatmuls
from fp8pass.passes.dynamo.find_layers import FindLayers
from fp8pass.passes.dynamo.inline_composites import InlineComposites
from fp8pass.passes.dynamo.inline_regions import InlineRegions
from fp8pass.passes.dynamo.insert_monitors import InsertMonitors
from fp8pass.passes.dynamo.lift_scale_states import LiftScaleStates
from fp8pass.passes.dynamo.merge_siblings import MergeSiblings
from fp8pass.passes.dynamo.outline_layers import OutlineLayers
from fp8pass.passes.dynamo.smooth_swiglu import SmoothSwiglu
from fp8pass.passes.dynamo.split_sizes import SplitSizes
from fp8pass.passes.dynamo.write_matmuls import WriteMatmuls
from fp8pass.passes.joint.align_arguments import AlignArguments
from fp8pass.passes.joint.batch_records import BatchRecords
from fp8pass.passes.joint.blockwise_mm import BlockwiseMM
from fp8pass.passes.joint.canonicalize import Canonicalize
from fp8pass.passes.joint.expand_blocks import ExpandBlocks
from fp8pass.passes.joint.expand_quantizers import ExpandQuantizers
from fp8pass.passes.joint.grouped_mm import GroupedMM
from fp8pass.passes.joint.list_matmuls import ListMatmuls
from fp8pass.passes.joint.quantize_collectives import QuantizeCollectives
from fp8pass.passes.joint.read_copies import ReadCopies
from fp8pass.passes.joint.save_scales import SaveScales
from fp8pass.passes.joint.save_sums import SaveSums
from fp8pass.passes.joint.save_transposes import SaveTransposes
from fp8pass.passes.joint.scaled_mm import ScaledMM
from fp8pass.passes.joint.use_transposes import UseTransposes
from fp8pass.passes.kernels.add_gradients import AddGradients
from fp8pass.passes.kernels.add_products import AddProducts
from fp8pass.passes.kernels.batch_amaxes import BatchAmaxes
from fp8pass.passes.kernels.emulate_matmuls import EmulateMatmuls
from fp8pass.passes.kernels.fold_quantizes import FoldQuantizes
from fp8pass.passes.kernels.fuse_matmuls import FuseMatmuls
from fp8pass.passes.kernels.keep_strides import KeepStrides
from fp8pass.passes.kernels.materialize import Materialize
from fp8pass.passes.kernels.quantize_kernels import QuantizeKernels
from fp8pass.passes.kernels.quantize_tiles import QuantizeTiles
from fp8pass.passes.kernels.requantize_saturated import RequantizeSaturated
from fp8pass.passes.kernels.split_foreach import SplitForeach
from fp8pass.passes.kernels.update_tiles import UpdateTiles

if TYPE_CHECKING:
    from fp8pass.passes.traced.quantize_traced import TracedContext
    from fp8pass.passes.update.context import UpdateContext

DYNAMO: tuple[Pass[DynamoContext], ...] = (
    InlineRegions(),  # first: the other passes, and torch's autograd, expect the graph in one piece
    InlineComposites(),  # before passes that look for matmuls, which composites contain
    WriteMatmuls(),  # likewise; after InlineComposites, since composites contain einsums
    ConvolutionsAsMatmuls(),  # likewise
    SmoothSwiglu(),  # after the passes that write matmuls; before FindLayers, since it adds nodes
    FindLayers(),  # before MergeSiblings and Annotate, which keep layers apart; after the passes that write matmuls
    MergeSiblings(),  # before Annotate, which gives merged weights one scale
    SplitSizes(),  # after MergeSiblings, whose matmuls pay from other sizes on; before Annotate, which declines by them
    Annotate(),
    LiftScaleStates(),  # after Annotate, whose state inputs come first
    InsertMonitors(),  # after the passes that quantize: it monitors their tensors
    OutlineLayers(),  # last: then layers with different verdicts differ
)
"""The passes over Dynamo's graph, before autograd. They select what runs in FP8, by the user's functions and names."""


JOINT: tuple[Pass[JointContext], ...] = (
    ExpandQuantizers(),  # first: the other passes look for ATen ops
    Canonicalize(),  # before the others, which know one spelling of quantize and dequantize
    ListMatmuls(),  # before any rewrite, so that every matmul of the user has a verdict
    ReadCopies(),  # before the rewrites, which remove the dequantizes that it lets the backward read
    QuantizeCollectives(),  # before the rewrites, which look for tensors that are dequantized after a collective
    BlockwiseMM(),  # before ExpandBlocks: it finds blocks by their op
    GroupedMM(),  # likewise; and before ScaledMM, which would make a matmul of each group
    ExpandBlocks(),
    ScaledMM(),  # before partitioning, so that tensors saved for the backward are FP8
    AlignArguments(),  # after ScaledMM, which decides on the scales of a matmul
    UseTransposes(),  # after ScaledMM, which lays operands out
    SaveTransposes(),  # likewise; after UseTransposes, which removes copies that need not be saved
    SaveScales(),  # likewise
    SaveSums(),  # after the rewrites: it looks for sums of scaled matmuls
    BatchRecords(),  # last: the rewrites have removed the records of dead quantizes
)
"""The passes over forward and backward in one graph. They change numerics, and what is saved for the backward."""


KERNELS: tuple[Pass[KernelsContext], ...] = (
    SplitForeach(),  # first: the tensors that it splits off are quantized by ops that FoldQuantizes folds
    FoldQuantizes(),  # before passes that look for a quantize as one node
    FuseMatmuls(),  # before passes that write kernels for the tensors that it quantizes
    RequantizeSaturated(),  # after FuseMatmuls, which may not fuse such a quantize, and before passes that tile it
    QuantizeKernels(),  # after these two, which have their own kernels; before the next two, which tile the others
    UpdateTiles(),  # before QuantizeTiles, which tiles the kernels that are left
    QuantizeTiles(),  # before BatchAmaxes, which joins the amaxes that these two make
    BatchAmaxes(),
    Materialize(),  # after the passes that change which nodes read a tensor
    KeepStrides(),  # likewise
    AddGradients(),  # after the passes that look for `_scaled_mm`
    AddProducts(),  # likewise
    EmulateMatmuls(),  # last: the other passes look for `_scaled_mm`
)
"""The passes over forward, backward and update as separate graphs. They change kernels, and numbers only in that sums
are rounded later."""


ONLY_WITH = {
    "recipe": (
        "inline_composites", "write_matmuls", "convolutions_as_matmuls", "smooth_swiglu", "find_layers",
        "merge_siblings", "split_sizes", "annotate", "outline_layers",
    ),
    "monitor": ("insert_monitors",),
}  # fmt: skip
"""{option: names of the passes of `DYNAMO` that have nothing to do without it}."""


OF_UPDATE_MATMULS = ("write_matmuls", "annotate")
"""Names of the passes of `DYNAMO` that run over an update too, with `update_matmuls`: after those of `UPDATE`, which
know the ops of optimizers."""


def __getattr__(name: str) -> Any:
    """Return `UPDATE`, `UPDATE_LAST` or `TRACED`, whose passes are loaded here: training a plain model needs none."""
    lists = {"UPDATE": _update, "UPDATE_LAST": _update_last, "TRACED": _traced}
    if name in lists:
        return lists[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _update() -> tuple[Pass[UpdateContext], ...]:
    """Return `UPDATE`: the passes over Dynamo's graph of an optimizer's update."""
    from fp8pass.passes.update.expand_foreach import ExpandForeach
    from fp8pass.passes.update.lift_bfloat16 import LiftBfloat16
    from fp8pass.passes.update.read_moments import ReadMoments
    from fp8pass.passes.update.round_bfloat16 import RoundBfloat16
    from fp8pass.passes.update.skip_nonfinite import SkipNonfinite
    from fp8pass.passes.update.take_states import TakeStates
    from fp8pass.passes.update.write_moments import WriteMoments
    from fp8pass.passes.update.write_weights import WriteWeights

    return (
        ExpandForeach(),  # first: the other passes look for ops on single tensors
        TakeStates(),  # before passes that read or write state
        LiftBfloat16(),
        ReadMoments(),
        SkipNonfinite(),  # after these two: it restores tensors as they were read
        WriteMoments(),  # after SkipNonfinite, which decides whether moments are written
        RoundBfloat16(),  # likewise
        WriteWeights(),  # last: it reads parameters as the update leaves them, restored or not
    )


@cache
def _update_last() -> tuple[Pass[UpdateContext], ...]:
    """Return `UPDATE_LAST`: the passes over an update's graph after those of `OF_UPDATE_MATMULS`."""
    from fp8pass.passes.update.outline_strands import OutlineStrands

    return (OutlineStrands(),)


@cache
def _traced() -> tuple[Pass[TracedContext], ...]:
    """Return `TRACED`: the passes over a graph of ATen ops from a tracer other than Dynamo, before those of `JOINT`."""
    from fp8pass.passes.traced.quantize_traced import QuantizeTraced

    return (QuantizeTraced(),)
