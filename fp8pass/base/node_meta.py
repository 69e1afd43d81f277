"""Keys under which passes and the builder leave notes in `node.meta`."""

from __future__ import annotations

from dataclasses import dataclass

MADE_BY = "fp8pass"
"""On a node that a pass made; the value is the pass's name."""
KIND = "fp8pass_kind"
"""On a matmul of a graph that another tracer made: which product of its layer it is, see `recipes.Kind`."""
IN_FORWARD, IN_BACKWARD = "fp8pass_in_forward", "fp8pass_in_backward"
"""In `node.meta["custom"]`: on a matmul of the forward, or the backward, of a `torch.autograd.Function`: the index of
its choice, and which product of its layer it is. AOTAutograd gives nodes of the backward the notes of a node of the
forward, too: so the backward has a key of its own."""
IS_STATE = "fp8pass_is_state"
"""On an input that a pass has added, and on parts of it: they hold state, the user's code does not know them."""
QUANTIZED = "fp8pass_quantized"
"""On a quantizing node of the annotated graph: what each quantizer in its arguments quantizes: `QuantizedTensor`."""
PIECE = "fp8pass_piece"
"""On the nodes of Dynamo's graph: the number of the part, such as a layer, that is compiled as a separate function."""
SAVED = "fp8pass_saved"
"""On a node that the forward computes and only the backward reads: see `partition.py`."""
GATHERED = "fp8pass_gathered"
"""In `node.meta["custom"]`: on a node computed from a parameter that FSDP frees between forward and backward."""
SAVED_FP8 = "fp8pass_saved_fp8"
"""In `node.meta["custom"]`: on a tensor in FP8 that the backward reads: see `save_fp8.py`."""
SAVED_RESULT = "fp8pass_saved_result"
"""In `node.meta["custom"]`: "op" on an op whose backward reads its own result, "quantize" on the quantize for a matmul
of that result, from which the op's backward gets it: see `save_fp8.py`."""
STRIDES = "fp8pass_strides"
"""On an op that another library runs, if a pass has replaced one of its arguments: the strides that each tensor among
them is to have in generated code, None for any; see `keep_strides.py`."""
RECORDED = "fp8pass_recorded"
"""On the amaxes of the step after each amax of the graph was merged into them once; the value is `on_nonfinite`."""
ONE_STAGE = "fp8pass_one_stage"
"""On a reduction that must stay one launch, without a split for more parallelism: see `heuristics.py`."""
WITH_AMAX = "fp8pass_with_amax"
"""On a node to be fused into one kernel with the amax of the tensor that it quantizes: see `heuristics.py`."""
TILED = "fp8pass_tiled"
"""On a node whose kernel needs fixed tiles; the value is "columns" or "rows", the dimension that is reduced: see
`heuristics.py`."""

GEMM = "fp8pass_gemm"
"""On the nodes that replaced a matmul; the value is the matmul's name in the joint graph."""
ENABLED = "fp8pass_enabled"
"""In `node.meta["custom"]`, on nodes of Dynamo's graph within `fp8pass.autocast`: whether FP8 is enabled there."""
RECIPE = "fp8pass_recipe"
"""In `node.meta["custom"]`, next to `ENABLED`: the recipe that holds there, if one was given."""


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor that a quantizer quantizes. name: of its slot; role: in its matmul; source: the matmul's source line."""

    name: str
    role: str
    source: str
