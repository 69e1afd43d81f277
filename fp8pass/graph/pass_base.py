"""Define a pass, and for each kind of graph the context that its passes share."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from sympy import Expr
from torch import fx

from fp8pass.base.names import Names
from fp8pass.graph.annotation import Annotation, MatmulChoice
from fp8pass.graph.builder import Builder, Computed
from fp8pass.graph.refusal import Reject
from fp8pass.graph.verdict import Gemm
from fp8pass.options.config import Config
from fp8pass.recipes import Recipe


@dataclass
class Context:
    """Hold what the passes over one graph share, whichever graph it is."""

    config: Config
    notes: list[str] = field(default_factory=list)
    """Sentences for the report that belong to the graph, not to one matmul."""
    computed: Computed = field(default_factory=dict)
    """Nodes whose values `verify` has computed, and skips until something that they depend on changes."""

    def builder(self, graph: fx.Graph, made_by: str) -> Builder:
        """Return a builder for the graph, which records new nodes in `computed`. made_by: the name of the pass."""
        return Builder(graph, made_by, self.computed)


@dataclass
class DynamoContext(Context):
    """Hold what the passes over Dynamo's graph share.

    annotation: the annotated graph, which the passes change in place. declined: the reason why all matmuls are
    declined, if fp8pass has failed on the graph before; otherwise "". merged: recipes of calls that were merged.
    layers: paths of the layers that are compiled as functions, by the number of the piece that a layer is.
    quantized_in: for each tensor that matmuls of several pieces read, the number of the piece that quantizes it.
    splits: see `split_sizes`. refused: for each convolution that stays one, the reason. smoothed: calls whose operands
    `smooth_swiglu` has scaled. is_update: True if the graph updates parameters.
    """

    annotation: Annotation = field(kw_only=True)
    declined: str = ""
    names: Names = field(kw_only=True)
    merged: dict[fx.Node, Recipe] = field(default_factory=dict)
    layers: dict[int, str] = field(default_factory=dict)
    quantized_in: dict[fx.Node, int] = field(default_factory=dict)
    refused: dict[fx.Node, Reject] = field(default_factory=dict)
    smoothed: set[fx.Node] = field(default_factory=set)
    is_update: bool = False
    splits: dict[Expr, dict[int, bool | None]] = field(default_factory=dict)


@dataclass
class JointContext(Context):
    """Hold what the passes over forward and backward in one graph share.

    choices: the annotate pass's choice for each matmul call. declined: as in `DynamoContext`. is_update: True if the
    graph updates parameters.
    """

    choices: Sequence[MatmulChoice] = ()
    declined: str = ""
    is_update: bool = False
    gemms: dict[fx.Node, Gemm] = field(default_factory=dict)
    """The verdict of every matmul node that the graph held at the start."""


@dataclass(frozen=True)
class GradientOf:
    """The input of a forward that a result of its backward is the gradient of.

    position: among the tensors that the forward is called with. count: number of these.
    """

    position: int
    count: int


@dataclass
class KernelsContext(Context):
    """Hold what the passes over forward, backward and update as separate graphs share."""

    gradients: list[GradientOf | None] = field(default_factory=list)
    """For each output of a backward, what it is the gradient of; [] unless microbatches accumulate."""
    of_weights: Set[str] = frozenset()
    """The names of the matmuls that compute gradients of weights, as in `meta[GEMM]`."""

    fused: dict[str, str] = field(default_factory=dict)
    """{name of a matmul, as in `meta[GEMM]`: a sentence about what its kernel computes too}."""
    seconds_of: Callable[[fx.GraphModule], float] | None = None
    """Times a graph on the GPU, compiled by Inductor with all passes but fuse_matmuls; None where nothing is timed."""


C = TypeVar("C", bound=Context, contravariant=True)


class Pass(Protocol[C]):
    """One pass. `name` is its file's stem, the infix of its dumps and the suffix of its test file."""

    name: str

    def run(self, graph: fx.Graph, context: C) -> int:
        """Rewrite the graph in place; return the number of changes."""
        ...
