"""Predict the bytes on the wire and the time of a training step of Llama on many GPUs, in BF16 and in FP8.

    python -m bench.comms [--models 8B 70B 405B] [--gpus 8 64 512 4096] [--nvlink 450] [--network 50] [--check]

Before it prints, it runs small models in small worlds and counts their collectives. If the formulas of
bench/collectives.py have other numbers, it prints the differences and fails. `--check` does only that.

Times are predictions, not measurements:

    matmuls     by fp8pass/roofline.py, with the cost of quantizing. Layers that are too small to pay, which fp8pass
                declines by default, run in BF16, and tensor parallel transfers the tensors that they read in BF16
    attention   2 (forward) and 5 (backward) x tokens x length x width operations, causal, at 35% of the peak:
                FlashAttention-2 on an H100, by https://arxiv.org/abs/2407.08608
    the rest    the bytes of norms, rotary positions, SwiGLU and residuals, of logits and of AdamW, divided by the
                memory bandwidth
    collectives the bytes that a GPU sends in a ring, divided by the speed of its slowest link, without latency. If
                several GPUs of a node are in one group, each of their network cards carries one ring of the group. In
                an all-to-all, what a GPU sends to other nodes passes its own network card
    a step      FSDP's collectives run beside the rest, so the longer of the two counts; the collectives of tensor
                parallel run alone, and are added to the rest

The cost of quantizing does not depend on the dtype on the wire: one kernel reads a weight and writes both of its
layouts, inputs and gradients are quantized by the kernels that compute them, and a forward that runs again in the
backward quantizes once more, in the layout of the forward. FSDP differs from this: it keeps no copy of a weight for the
backward, so that without recomputing the backward quantizes it again; and if FP8 is gathered, each rank quantizes only
its part. Quantizing weights takes 0.2% to 2% of a step of 8192 tokens, and more of a step of few tokens, in which
FSDP's collectives take longer than the rest.

The defaults are those of an H100 in a DGX: NVLink has 900 GB/s in both directions together, ConnectX-7 has 400 Gb/s for
each GPU (data sheets of the H100 and the DGX H100).
"""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # to import the other modules of bench, also with -m

from collectives import (
    BF16,
    FP8,
    FP8_GRADIENTS,
    FP8_MATMULS,
    MODELS,
    Collective,
    Layout,
    Llama,
    Way,
    collectives,
    differences,
)

from fp8pass.hardware import TARGETS, Target
from fp8pass.recipes import KINDS, DelayedScaling
from fp8pass.roofline import call_seconds, memory_seconds, overhead_seconds, predicted_speedup

GPUS = (8, 64, 512, 4096)
STATE = 16
"""Bytes per parameter of the parameter, its gradient and AdamW's two moments, all in float32."""
UPDATE = 28
"""Bytes per parameter that AdamW reads (all four) and writes (all but the gradient)."""
ATTENTION_SHARE = 0.35
ROUNDED = 100
"""The number of tokens that hide FSDP is rounded up to a multiple of this."""
FEW = 1024
"""Tokens per GPU in the last column: few, as when very many GPUs share a batch."""
WIDTH_BYTES, HIDDEN_BYTES = 76, 16
"""Bytes that a block reads and writes around matmuls and attention, per token and element of `width`, of `hidden`.

SwiGLU has 3 tensors of size `hidden` in the forward and 5 in the backward. The bytes for `width` are the other bytes
that bench/traffic.py counts in a block of 8B. The forward has a third of all."""
LOGIT_BYTES = 6
"""Bytes per logit of a cross-entropy in bfloat16: the forward kernel reads, the backward kernel reads and writes."""


@dataclass(frozen=True)
class Cluster:
    """GPUs in nodes of `node`.

    nvlink, network: bytes per second that a GPU sends to GPUs in its node, to GPUs in others. memory: bytes of a GPU.
    """

    target: Target = TARGETS["h100"]
    nvlink: float = 450e9
    network: float = 50e9
    memory: float = 80e9
    node: int = 8

    def bandwidth(self, layout: Layout, group: str) -> float:
        """Return the bytes per second that a GPU sends in the rings of a group.

        A group of tensor parallel stays within a node.
        """
        if group == "tensor" or layout.ranks <= self.node:
            return self.nvlink
        return min(self.nvlink, self.network * self.neighbours(layout, group))

    def neighbours(self, layout: Layout, group: str) -> int:
        """Return how many GPUs of a group are in one node."""
        return min(layout.size(group), self.node // layout.tensor if group == "data" else self.node)

    def seconds(self, collective: Collective, layout: Layout) -> float:
        """Return the time of one call of a collective.

        In an all-to-all each GPU sends to all others by itself: what goes to other nodes passes its own network card.
        """
        if collective.kind != "all_to_all":
            return collective.sent(layout) / self.bandwidth(layout, collective.group)
        ranks, near = layout.size(collective.group), self.neighbours(layout, collective.group)
        part = collective.bytes / ranks
        return max(part * (near - 1) / self.nvlink, part * (ranks - near) / self.network)

    def in_two_stages(self, collective: Collective, layout: Layout) -> float:
        """Return the time of an all-to-all within each node, and then of one between nodes of the sums of nodes."""
        ranks, near = layout.size(collective.group), self.neighbours(layout, collective.group)
        nodes, of_all = ranks // near, collective.bytes
        return of_all * (near - 1) / near / self.nvlink + of_all / near * (nodes - 1) / nodes / self.network


@dataclass(frozen=True)
class Step:
    """A training step of a model with `sequences` sequences of `length` tokens for each GPU."""

    model: Llama
    layout: Layout
    sequences: int = 1
    length: int = 8192
    reduce_dtype: str = "float32"

    @property
    def batch(self) -> int:
        """Return the number of sequences of one group of tensor parallel: `sequences` for each of its GPUs."""
        return self.sequences * self.layout.tensor

    @property
    def tokens(self) -> int:
        """Return the number of tokens of one group of tensor parallel."""
        return self.batch * self.length

    def collectives(self, way: Way) -> Counter[Collective]:
        """Return how often each rank calls each collective, by the formulas of bench/collectives.py."""
        return collectives(self.model, self.layout, way, self.batch, self.length, self.reduce_dtype)

    def sent(self, way: Way, *groups: str) -> float:
        """Return the bytes that a GPU sends in these groups."""
        return sum(n * c.sent(self.layout) for c, n in self.collectives(way).items() if c.group in groups)

    def taken(self, way: Way, target: Target) -> Way:
        """Return the way with the layers left out that `min_speedup` declines."""
        shapes, recipe = self.model.linears(self.layout.tensor).items(), DelayedScaling()
        gains = {name: predicted_speedup(target, self.tokens, k, n, recipe) for name, (n, k) in shapes}
        return replace(way, left_out=tuple(name for name, gain in gains.items() if gain is None or gain < 1))

    def memory(self) -> float:
        """Return the bytes that a GPU needs: state, gathered parameters, saved activations, logits."""
        model, ranks = self.model, self.layout.tensor
        inside = self.tokens * 2 * (6 * model.width + 2 * model.linears()["k"][0] + 3 * model.hidden) / ranks
        blocks = model.layers * self.tokens * 2 * model.width / ranks + inside if self.layout.recompute else 0
        # in memory at once: two gathered blocks in bfloat16, one block's gradients in float32, and, until the end of
        # the step, embedding and head with their gradients
        gathered = ((2 * 2 + 4) * model.in_block + (2 + 4) * model.in_root) / ranks if self.layout.data > 1 else 0
        logits = 2 * 2 * self.tokens * model.vocab / ranks
        state = STATE * model.parameters / self.layout.ranks
        return state + gathered + (blocks or model.layers * inside) + logits


def compute_seconds(step: Step, target: Target, way: Way) -> float:
    """Return the seconds of a step without its collectives."""
    model, layout, tokens = step.model, step.layout, step.tokens
    block = 0.0
    for name, (rows, columns) in model.linears(layout.tensor).items():
        recipe = DelayedScaling() if name in way.taken else None
        block += call_seconds(target, tokens, columns, rows, recipe, 2, KINDS)
        if recipe is not None:
            block += overhead_seconds(target, tokens, columns, rows, recipe, 2, KINDS, fused=True)
        if layout.recompute:
            block += call_seconds(target, tokens, columns, rows, recipe, 2, KINDS[:1])
            if recipe is not None:
                block += overhead_seconds(target, tokens, columns, rows, recipe, 2, KINDS[:1], fused=True)
    operations = (2 * (1 + layout.recompute) + 5) * tokens * step.length * model.width / layout.tensor
    block += operations / (target.bf16_peak * ATTENTION_SHARE)
    moved = tokens * (WIDTH_BYTES * model.width + HIDDEN_BYTES * model.hidden) / layout.tensor
    block += memory_seconds(target, moved * (1 + layout.recompute / 3))
    head = call_seconds(target, tokens, model.width, model.vocab // layout.tensor, None, 2, KINDS)
    logits = memory_seconds(target, LOGIT_BYTES * tokens * model.vocab / layout.tensor)
    update = memory_seconds(target, UPDATE * model.parameters / layout.ranks)
    return float(model.layers * block + head + logits + update)


def seconds(step: Step, cluster: Cluster, way: Way) -> tuple[float, float]:
    """Return two times of a step: of computing and of tensor parallel's collectives, and of all other collectives.

    The others, which are FSDP's and the amax reduction, run beside the first.
    """
    beside = exposed = 0.0
    for collective, count in step.collectives(way).items():
        time = count * cluster.seconds(collective, step.layout)
        if collective.group == "tensor":
            exposed += time
        else:
            beside += time
    return compute_seconds(step, cluster.target, way) + exposed, beside


def hiding(step: Step, cluster: Cluster, way: Way) -> int:
    """Return the least tokens, of one sequence per GPU, with which the rest of a step hides FSDP's collectives.

    The number is rounded up to a multiple of `ROUNDED`.
    """

    def hidden(length: int) -> bool:
        short = replace(step, sequences=1, length=length)
        rest, beside = seconds(short, cluster, short.taken(way, cluster.target))
        return beside <= rest

    lengths = range(ROUNDED, 10**9, ROUNDED)
    return lengths[bisect_left(lengths, True, key=hidden)]


def layouts(gpus: int, node: int) -> Iterator[tuple[str, Layout]]:
    """Yield the layouts of so many GPUs, by name: FSDP alone, and tensor parallel within each node."""
    yield "FSDP", Layout(gpus)
    yield ("TP" if gpus == node else "FSDP x TP"), Layout(gpus // node, node)


def fitting(step: Step, memory: float) -> Step | None:
    """Return the step if it fits into a GPU, or with blocks that run again in the backward; None if neither fits."""
    again = replace(step, layout=replace(step.layout, recompute=True))
    return next((s for s in (step, again) if s.memory() <= memory), None)


HEAD = (
    "| Llama | GPUs | layout | FSDP GB | TP GB | BF16 | FP8 matmuls | FP8 on the wire, too | tokens that hide FSDP "
    "| with {} tokens |\n|---|---:|---|---:|---:|---:|---:|---:|---:|---:|"
)


def report(models: list[str], gpus: list[int], cluster: Cluster, sequences: int, length: int, reduce_dtype: str) -> str:
    """Return a table in Markdown, and a sentence about the models that are not in it."""
    lines, left_out = [HEAD.format(FEW)], []
    for name in models:
        for count in gpus:
            for kind, layout in layouts(count, cluster.node):
                step = Step(MODELS[name], layout, sequences, length, reduce_dtype)
                if (fit := fitting(step, cluster.memory)) is None:
                    smallest = replace(step, layout=replace(layout, recompute=True)).memory()
                    left_out.append(f"{name} by {kind} on {count} ({smallest / 1e9:.0f} GB)")
                else:
                    lines.append(row(name, kind, fit, cluster))
    if left_out:
        lines += [
            "",
            f"Left out, because a GPU of {cluster.memory / 1e9:.0f} GB does not hold its part: {', '.join(left_out)}.",
        ]
    return "\n".join(lines)


def row(name: str, kind: str, step: Step, cluster: Cluster) -> str:
    """Return one line of the table: BF16, FP8 matmuls with BF16 on the wire, and FP8 in both."""
    all_ways = BF16, FP8_MATMULS, FP8
    ways = [step.taken(way, cluster.target) for way in all_ways]
    sizes = [[step.sent(way, *groups) / 1e9 for way in ways] for groups in (("data", "all"), ("tensor",))]
    times, short = [max(seconds(step, cluster, way)) for way in ways], replace(step, sequences=1, length=FEW)
    few = [max(seconds(short, cluster, short.taken(way, cluster.target))) for way in all_ways]
    cells = [name, str(step.layout.ranks), kind + ", recompute" * step.layout.recompute]
    cells += [f"{wide:.1f} -> {narrow:.1f}" if wide > 0.05 else "" for wide, _, narrow in sizes]
    cells += [f"{times[0]:.2f} s", *(f"{t:.2f} s, {times[0] / t:.2f}x" for t in times[1:])]
    cells += [", ".join(str(hiding(step, cluster, way)) for way in all_ways) if step.layout.data > 1 else ""]
    cells += [", ".join(f"{few[0] / t:.2f}x" for t in few[1:])]
    return f"| {' | '.join(cells)} |"


HEAD_OF_GRADIENTS = (
    "| Llama | GPUs | layout | GB of gradients: float32, bfloat16, FP8 | seconds on the links "
    "| FP8 within nodes first |"
    "\n|---|---:|---|---:|---:|---:|"
)


def gradients(models: list[str], gpus: list[int], cluster: Cluster) -> str:
    """Return a table of what one GPU sends in FSDP's reductions of gradients, and how long that takes."""
    lines = [HEAD_OF_GRADIENTS]
    for name in models:
        for count in gpus:
            for kind, layout in layouts(count, cluster.node):
                step = Step(MODELS[name], layout)
                if layout.data > 1 and fitting(step, cluster.memory) is not None:
                    lines.append(row_of_gradients(name, kind, step, cluster))
    return "\n".join(lines)


def row_of_gradients(name: str, kind: str, step: Step, cluster: Cluster) -> str:
    """Return one line of the table of gradients."""
    sent, times, layout = [], [], step.layout
    for way, dtype in ((FP8, "float32"), (FP8, "bfloat16"), (FP8_GRADIENTS, "float32")):
        of_way = replace(step, reduce_dtype=dtype).collectives(way)
        found = {c: n for c, n in of_way.items() if c.kind in ("reduce_scatter", "all_to_all") and c.group == "data"}
        sent.append(sum(n * c.sent(layout) for c, n in found.items()) / 1e9)
        times.append(sum(n * cluster.seconds(c, layout) for c, n in found.items()))
    cells = [name, str(layout.ranks), kind, ", ".join(f"{x:.1f}" for x in sent), ", ".join(f"{x:.3f}" for x in times)]
    within = sum(n * cluster.in_two_stages(c, layout) for c, n in found.items())
    cells.append(f"{within:.3f}" if 1 < cluster.neighbours(layout, "data") < layout.data else "")
    return f"| {' | '.join(cells)} |"


SMALL = Llama(layers=2, width=64, hidden=176, heads=4, kv_heads=2, vocab=96)
"""A model of which three ranks cannot divide any block's weight evenly, so that FSDP pads all of them."""
WORLDS = (
    (Layout(data=3), FP8),
    (Layout(tensor=2, recompute=True), FP8),
    (Layout(data=3, recompute=True), BF16),
    (Layout(data=2, tensor=2, recompute=True), BF16),
    (Layout(data=4, tensor=2), Way(fp8=True, fp8_wire=True, left_out=("k", "v"))),
    (Layout(data=3), FP8_GRADIENTS),
    (Layout(data=3, whole=True), FP8_GRADIENTS),
)


def check(worlds: Sequence[tuple[Layout, Way]], reduce_dtype: str) -> list[str]:
    """Run a small model in each of the worlds; return a line for each number that the formulas have wrong."""
    from traced_collectives import traced

    batch, length, wrong = 2, 16, []
    for layout, way in worlds:
        trace = traced(SMALL, layout, way, batch, length, reduce_dtype)
        found = differences(collectives(SMALL, layout, way, batch, length, reduce_dtype), trace)
        wrong += [f"{layout}, {way}: {line}" for line in found]
    return wrong


def main() -> None:
    """Compare the formulas with what runs, and print the predictions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="models (default: all)")
    parser.add_argument("--gpus", nargs="+", type=int, default=list(GPUS), help="multiples of 8 (default: %(default)s)")
    parser.add_argument("--target", choices=TARGETS, default="h100", help="the GPU (default: %(default)s)")
    parser.add_argument(
        "--nvlink", type=float, default=450, help="GB/s that a GPU sends within its node (default: %(default)s)"
    )
    parser.add_argument(
        "--network", type=float, default=50, help="GB/s that a GPU sends to other nodes (default: %(default)s)"
    )
    parser.add_argument("--memory", type=float, default=80, help="memory of a GPU in GB (default: %(default)s)")
    parser.add_argument("--sequences", type=int, default=1, help="sequences per GPU (default: %(default)s)")
    parser.add_argument("--length", type=int, default=8192, help="tokens per sequence (default: %(default)s)")
    parser.add_argument(
        "--reduce-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="the dtype in which FSDP reduces gradients (default: %(default)s)",
    )
    parser.add_argument("--check", action="store_true", help="only compare the formulas with what runs")
    parser.add_argument(
        "--worlds", type=int, default=len(WORLDS), help="number of small worlds to run (default: %(default)s)"
    )
    args = parser.parse_args()
    if any(gpus % Cluster.node or gpus < 1 for gpus in args.gpus):
        parser.error(f"--gpus: each must be a positive multiple of {Cluster.node}, the GPUs of a node")
    worlds = WORLDS[: args.worlds]
    if wrong := check(worlds, args.reduce_dtype):
        sys.exit("the formulas differ from what ran:\n" + "\n".join(wrong))
    print(f"In {len(worlds)} small worlds the collectives that ran are those of the formulas.\n")
    if not args.check:
        cluster = Cluster(TARGETS[args.target], args.nvlink * 1e9, args.network * 1e9, args.memory * 1e9)
        print(report(args.models, args.gpus, cluster, args.sequences, args.length, args.reduce_dtype), "\n")
        print(gradients(args.models, args.gpus, cluster))


if __name__ == "__main__":
    main()
