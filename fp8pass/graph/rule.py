"""The frame that the passes on the joint graph stand in: what a pass is, how it refuses, what it may know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import fx

from fp8pass.graph.builder import Builder, Computed
from fp8pass.graph.verdict import Gemm
from fp8pass.options.config import Config

MAX_BATCHES = 16
"""`_scaled_mm` has no batch dimension; a batched matmul becomes at most this many calls."""


class Reject(Exception):
    """A pass can't. May be raised from anywhere in a capture or a check.

    rule: the condition that failed, in a few words; reports count by it. message: one sentence with names and numbers.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule


class LeftOut(Reject):
    """The recipe, the filter or the prediction does not want this matmul in FP8. No error under `strict`."""


@dataclass
class Context:
    """What the passes over one joint graph share."""

    config: Config
    gemms: dict[fx.Node, Gemm] = field(default_factory=dict)
    """The verdict of every matmul node that the graph held at the start."""
    notes: list[str] = field(default_factory=list)
    """What a reader of the report should know that belongs to no matmul."""
    computed: Computed = field(default_factory=dict)
    """What `verify` need not compute again until it changes."""

    def builder(self, graph: fx.Graph, made_by: str) -> Builder:
        """Return what adds nodes to the graph, and remembers what it has computed. made_by: the name of the pass."""
        return Builder(graph, made_by, self.computed)


class Pass(Protocol):
    """One pass. `name` is its file's stem, the infix of its dumps and the suffix of its test file."""

    name: str

    def run(self, graph: fx.Graph, context: Context) -> int:
        """Rewrite the graph in place; return how often something was applied."""
        ...
