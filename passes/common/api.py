"""Export the names that a pass needs: graphs, contexts, refusals, patterns and FP8 formats.

The contexts of updates and of graphs of other tracers are in `passes/update/context.py` and `passes/traced`.
"""

from __future__ import annotations

from fp8pass.base._torch import select_decomp_table
from fp8pass.base.scaling import E4M3, E5M2, FP8_DTYPES, fp8_max
from fp8pass.graph.builder import Builder, is_tensor, val
from fp8pass.graph.pass_base import DynamoContext, JointContext, KernelsContext
from fp8pass.graph.refusal import LeftOut, Reject
from fp8pass.graph.verdict import Gemm
from fp8pass.graph.verify import verify
from fp8pass.options.config import Config
from fp8pass.passes.common.patterns import (
    ADDING,
    ALL_MATMULS,
    CASTS,
    COPIES,
    DIVIDING,
    GATHERS,
    JOINS,
    MATMULS,
    MOVEMENT,
    MULTIPLYING,
    RESHAPES,
    SPLITS,
    VIEWS,
    WIDE,
    as_node,
    at,
    aten,
    constant,
    dtype_name,
    dtype_of,
    first,
    has_one_element,
    is_wide_cast,
    prims,
    reach,
    readers,
    same_value,
    sources,
    through,
)
from fp8pass.quant.kernel_ops import QUANTIZE
from fp8pass.quant.ops import DEQUANTIZE_BLOCKS
