"""Bytes on the wire and predicted time of a training step of Llama on many GPUs: BF16 against FP8.

    python -m bench.comms [--models 8B 70B 405B] [--gpus 8 64 512 4096] [--nvlink 450] [--network 50] [--check]

Before it prints, it runs small models in small worlds and counts their collectives: where the formulas of
bench/collectives.py have others, it says which, and fails. `--check` does only that.

Times are predictions, not measurements:

    matmuls     fp8pass/roofline.py, with what quantizing costs; layers that are too small to pay, which fp8pass
                declines by default, are in BF16, and so travels what they read under tensor parallel
    attention   2 (forward) and 5 (backward) x tokens x length x width operations, causal, at 35% of the peak:
                FlashAttention-2 on an H100, by https://arxiv.org/abs/2407.08608
    the rest    bytes of norms, rotary positions, SwiGLU and residuals, of logits and of AdamW, over the bandwidth
    collectives bytes that a ring has a GPU send over the speed of its slowest link, without latency. GPUs of one node
                that are in one group have all their network cards at work for it, each a ring
    a step      FSDP's collectives run beside the rest: the longer of the two; those of tensor parallel take their time

Quantizing is charged alike, whatever travels: one kernel reads a weight and writes both of its layouts, inputs and
gradients are quantized where they are made, and what runs again in the backward is quantized once more, in the layout
of the forward. In truth FSDP keeps nothing of a weight for the backward, which without recomputing quantizes it again;
and where FP8 is gathered, each rank quantizes its part only. Weights take 0.2% to 2% of a step of 8192 tokens; of one
of few tokens more, but there FSDP's collectives take longer.

The defaults are an H100's in a DGX: NVLink has 900 GB/s in both directions together, ConnectX-7 400 Gb/s for each GPU
(data sheets of the H100 and the DGX H100).
"""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside this one, also with -m

from collectives import BF16, FP8, FP8_MATMULS, MODELS, Collective, Layout, Llama, Way, collectives, differences

from fp8pass.hardware import TARGETS, Target
from fp8pass.recipes import DelayedScaling
from fp8pass.roofline import call_seconds, memory_seconds, overhead_seconds, predicted_speedup

GPUS = (8, 64, 512, 4096)
STATE = 16
"""Bytes of a parameter in float32, its gradient and AdamW's two moments."""
UPDATE = 28
"""Bytes that AdamW reads and writes for each parameter: all four, and all but the gradient."""
ATTENTION_SHARE = 0.35
ROUNDED = 100
"""Tokens that hide FSDP are rounded up to multiples of it."""
FEW = 1024
"""Tokens of a GPU in the last column: few, as where a batch is divided among very many."""
WIDTH_BYTES, HIDDEN_BYTES = 76, 16
"""What a block reads and writes around matmuls and attention, for each token and element of width and of hidden. Of
hidden SwiGLU has 3 tensors in forward and 5 in backward; of width it is what else bench/traffic.py counts in a block of
8B. A third of all is the forward's."""
LOGIT_BYTES = 6
"""A cross entropy in one kernel each way: reads, reads and writes bfloat16."""


@dataclass(frozen=True)
class Cluster:
    """GPUs, `node` of them together; bytes per second that one sends over NVLink and over the network; its memory."""

    target: Target = TARGETS["h100"]
    nvlink: float = 450e9
    network: float = 50e9
    memory: float = 80e9
    node: int = 8

    def bandwidth(self, layout: Layout, group: str) -> float:
        """What a GPU sends in the rings of a group. Tensor parallel stays within a node."""
        if group == "tensor" or layout.ranks <= self.node:
            return self.nvlink
        neighbours = self.node // layout.tensor if group == "data" else self.node
        return min(self.nvlink, self.network * neighbours)


@dataclass(frozen=True)
class Step:
    """What is trained: sequences of `length` tokens, `sequences` for each GPU."""

    model: Llama
    layout: Layout
    sequences: int = 1
    length: int = 8192
    reduce_dtype: str = "float32"

    @property
    def batch(self) -> int:
        """Sequences of a group of tensor parallel: as many for each GPU, whatever the layout."""
        return self.sequences * self.layout.tensor

    @property
    def tokens(self) -> int:
        """Of a group of tensor parallel."""
        return self.batch * self.length

    def collectives(self, way: Way) -> Counter[Collective]:
        """See bench/collectives.py."""
        return collectives(self.model, self.layout, way, self.batch, self.length, self.reduce_dtype)

    def sent(self, way: Way, *groups: str) -> float:
        """Bytes that a GPU sends in these groups."""
        return sum(n * c.sent(self.layout) for c, n in self.collectives(way).items() if c.group in groups)

    def taken(self, way: Way, target: Target) -> Way:
        """The way without layers that `min_speedup` declines."""
        shapes, recipe = self.model.linears(self.layout.tensor).items(), DelayedScaling()
        gains = {name: predicted_speedup(target, self.tokens, k, n, recipe) for name, (n, k) in shapes}
        return replace(way, left_out=tuple(name for name, gain in gains.items() if gain is None or gain < 1))

    def memory(self) -> float:
        """Bytes of a GPU that are taken: state, what FSDP has gathered, what the backward needs, logits."""
        model, ranks = self.model, self.layout.tensor
        inside = self.tokens * 2 * (6 * model.width + 2 * model.linears()["k"][0] + 3 * model.hidden) / ranks
        blocks = model.layers * self.tokens * 2 * model.width / ranks + inside if self.layout.recompute else 0
        # two blocks gathered in bfloat16, the gradients of one in float32; those of embedding and head till the end
        gathered = ((2 * 2 + 4) * model.in_block + (2 + 4) * model.in_root) / ranks if self.layout.data > 1 else 0
        logits = 2 * 2 * self.tokens * model.vocab / ranks
        state = STATE * model.parameters / self.layout.ranks
        return state + gathered + (blocks or model.layers * inside) + logits


def compute_seconds(step: Step, target: Target, way: Way) -> float:
    """All but collectives."""
    model, layout, tokens = step.model, step.layout, step.tokens
    block = 0.0
    for name, (rows, columns) in model.linears(layout.tensor).items():
        recipe = DelayedScaling() if name in way.taken else None
        block += call_seconds(target, tokens, columns, rows, recipe, 2, training=True)
        if recipe is not None:
            block += overhead_seconds(target, tokens, columns, rows, recipe, 2, training=True, fused=True)
        if layout.recompute:
            block += call_seconds(target, tokens, columns, rows, recipe, 2, training=False)
            if recipe is not None:
                block += overhead_seconds(target, tokens, columns, rows, recipe, 2, training=False, fused=True)
    operations = (2 * (1 + layout.recompute) + 5) * tokens * step.length * model.width / layout.tensor
    block += operations / (target.bf16_peak * ATTENTION_SHARE)
    moved = tokens * (WIDTH_BYTES * model.width + HIDDEN_BYTES * model.hidden) / layout.tensor
    block += memory_seconds(target, moved * (1 + layout.recompute / 3))
    head = call_seconds(target, tokens, model.width, model.vocab // layout.tensor, None, 2, training=True)
    logits = memory_seconds(target, LOGIT_BYTES * tokens * model.vocab / layout.tensor)
    update = memory_seconds(target, UPDATE * model.parameters / layout.ranks)
    return model.layers * block + head + logits + update


def seconds(step: Step, cluster: Cluster, way: Way) -> tuple[float, float]:
    """Of a step: what FSDP hides its collectives behind, and these collectives."""
    beside = exposed = 0.0
    for collective, count in step.collectives(way).items():
        time = count * collective.sent(step.layout) / cluster.bandwidth(step.layout, collective.group)
        if collective.group == "tensor":
            exposed += time
        else:
            beside += time
    return compute_seconds(step, cluster.target, way) + exposed, beside


def hiding(step: Step, cluster: Cluster, way: Way) -> int:
    """Tokens of one sequence for each GPU from which on FSDP's collectives are hidden, rounded up."""

    def hidden(length: int) -> bool:
        short = replace(step, sequences=1, length=length)
        rest, beside = seconds(short, cluster, short.taken(way, cluster.target))
        return beside <= rest

    lengths = range(ROUNDED, 10**9, ROUNDED)
    return lengths[bisect_left(lengths, True, key=hidden)]


def layouts(gpus: int, node: int) -> Iterator[tuple[str, Layout]]:
    """FSDP alone, and with tensor parallel within a node."""
    yield "FSDP", Layout(gpus)
    yield ("TP" if gpus == node else "FSDP x TP"), Layout(gpus // node, node)


def fitting(step: Step, memory: float) -> Step | None:
    """The step as it fits into a GPU: with blocks that run again in the backward if need be. None if not even so."""
    again = replace(step, layout=replace(step.layout, recompute=True))
    return next((s for s in (step, again) if s.memory() <= memory), None)


HEAD = (
    "| Llama | GPUs | layout | FSDP GB | TP GB | BF16 | FP8 matmuls | FP8 on the wire, too | tokens that hide FSDP "
    "| with {} tokens |\n|---|---:|---|---:|---:|---:|---:|---:|---:|---:|"
)


def report(models: list[str], gpus: list[int], cluster: Cluster, sequences: int, length: int, reduce_dtype: str) -> str:
    """As Markdown: a table, and what is not in it."""
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
            f"Left out, for a GPU of {cluster.memory / 1e9:.0f} GB does not hold its part: {', '.join(left_out)}.",
        ]
    return "\n".join(lines)


def row(name: str, kind: str, step: Step, cluster: Cluster) -> str:
    """One line of the table: BF16, FP8 matmuls with BF16 on the wire, and FP8 in both."""
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


SMALL = Llama(layers=2, width=64, hidden=176, heads=4, kv_heads=2, vocab=96)
"""Three ranks can't share any weight of its blocks evenly."""
WORLDS = (
    (Layout(data=3), FP8),
    (Layout(tensor=2, recompute=True), FP8),
    (Layout(data=3, recompute=True), BF16),
    (Layout(data=2, tensor=2, recompute=True), BF16),
    (Layout(data=4, tensor=2), Way(fp8=True, fp8_wire=True, left_out=("k", "v"))),
)


def check(worlds: Sequence[tuple[Layout, Way]], reduce_dtype: str) -> list[str]:
    """Run a small model in each of the worlds. What is wrong with the formulas."""
    from traced_collectives import traced

    batch, length, wrong = 2, 16, []
    for layout, way in worlds:
        trace = traced(SMALL, layout, way, batch, length, reduce_dtype)
        found = differences(collectives(SMALL, layout, way, batch, length, reduce_dtype), trace)
        wrong += [f"{layout}, {way}: {line}" for line in found]
    return wrong


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: all)")
    parser.add_argument("--gpus", nargs="+", type=int, default=list(GPUS), help="whole nodes of 8 (%(default)s)")
    parser.add_argument("--target", choices=TARGETS, default="h100", help="the GPU (default: %(default)s)")
    parser.add_argument("--nvlink", type=float, default=450, help="GB/s that a GPU sends in its node (%(default)s)")
    parser.add_argument("--network", type=float, default=50, help="GB/s that a GPU sends to others (%(default)s)")
    parser.add_argument("--memory", type=float, default=80, help="GB of a GPU (default: %(default)s)")
    parser.add_argument("--sequences", type=int, default=1, help="for each GPU (default: %(default)s)")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence (%(default)s)")
    parser.add_argument("--reduce-dtype", choices=("float32", "bfloat16"), default="float32", help="of gradients")
    parser.add_argument("--check", action="store_true", help="only compare formulas with what runs")
    parser.add_argument("--worlds", type=int, default=len(WORLDS), help="so many small ones run (default: %(default)s)")
    args = parser.parse_args()
    if any(gpus % Cluster.node or gpus < 1 for gpus in args.gpus):
        parser.error(f"--gpus: whole nodes of {Cluster.node}")
    worlds = WORLDS[: args.worlds]
    if wrong := check(worlds, args.reduce_dtype):
        sys.exit("formulas and what ran differ:\n" + "\n".join(wrong))
    print(f"{len(worlds)} small worlds ran the collectives that the formulas have, one by one.\n")
    if not args.check:
        cluster = Cluster(TARGETS[args.target], args.nvlink * 1e9, args.network * 1e9, args.memory * 1e9)
        print(report(args.models, args.gpus, cluster, args.sequences, args.length, args.reduce_dtype))


if __name__ == "__main__":
    main()
