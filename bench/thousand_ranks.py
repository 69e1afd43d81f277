"""Play one of 1,024 ranks that train a 70B Llama, and count what the rank plans, compiles, keeps and sends.

    python bench/thousand_ranks.py [--ranks 64 512 1024]

The mesh has 4 pipeline stages of 20 layers, FSDP2 over data ranks, and tensor parallel over 8 ranks with sequence
parallel. The process is a rank of the second stage. The group is torch's fake one: no other rank exists, collectives
end at once, and received tensors are random. A step is 1F1B over 8 microbatches, each a sequence of 8192 tokens.

    the plan        is that of the true sizes: `fp8pass.explain` traces the stage on fake tensors
    collectives     ran with all 20 layers, at a 32nd of the width, and with one layer of the true width; both in few
                    tokens. The script fails unless their kinds, dtypes, sizes and numbers are those of formulas, and
                    prints the formulas at the true sizes
    compile time    CPU seconds of this process in the first three steps less those of three later ones, op by op: of
                    Dynamo, AOTAutograd and the passes, without Inductor

Bytes are those that a rank sends in rings. torchao converts all linear layers, with `enable_fsdp_float8_all_gather`,
`precompute_float8_dynamic_scale_for_fsdp`, `Float8ColwiseParallel` and `Float8RowwiseParallel`, and casts what a norm
returns before it is gathered, as `PrepareFloat8ModuleInput` does. Its matmuls are emulated, which changes no
collective. torchao is missing from the tables if it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))  # to import the other modules of bench, also with -m

import torch
import torch.distributed as dist
from blocks import LlamaBlock
from collectives import (
    BF16,
    FP8,
    FP8_GRADIENTS,
    LINEARS,
    MODELS,
    Collective,
    Layout,
    Llama,
    collectives,
    differences,
)
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleOutput
from torch.testing._internal.distributed.fake_pg import FakeStore
from traced_collectives import Counting, divide_block

import fp8pass
from fp8pass.fsdp import enable_fp8_all_gather, enable_fp8_reduce_scatter
from fp8pass.states import amax_reduction
from fp8pass.states.amax_reduction import Reducer, tell_all
from fp8pass.states.slots import registry

STAGES, TENSOR, MICROBATCHES, LENGTH = 4, 8, 8, 8192
STAGE = replace(MODELS["70B"], layers=MODELS["70B"].layers // STAGES)
"""A stage of the middle: it has neither the embedding nor the head."""
NARROW = replace(STAGE, width=STAGE.width // 32, hidden=STAGE.hidden // 32)
ONE_LAYER = replace(STAGE, layers=1)
TOKENS = 512
"""Tokens of the sequences that run: more than 256, above which DTensors of torch 2.13 gather otherwise."""
COLD, WARM = 3, 3
"""Steps that compile, and later ones."""
RANKS = (64, 512, 1024)
LEFT_OUT = ("k", "v")
"""fp8pass declines these layers on an H100 at the true sizes; `plan` checks it."""
WAYS = {
    "BF16": BF16,
    "torchao": replace(FP8, fp8_wire=True),
    "fp8pass": replace(FP8, left_out=LEFT_OUT),
    "fp8pass, gradients too": replace(FP8_GRADIENTS, left_out=LEFT_OUT),
}


@dataclass
class Found:
    """Hold what a rank has counted. found: the collectives of a step, as lists. state: bytes of scales and amaxes.

    compiled: CPU seconds. reducing: CPU seconds of a step in which this rank reduces amaxes.
    """

    found: list[list[Any]]
    compiled: float
    reducing: float
    slots: int
    state: int

    @property
    def collectives(self) -> Counter[Collective]:
        """The collectives, with their numbers."""
        return Counter({Collective(*c): n for *c, n in self.found})


class Stage(nn.Module):
    """The blocks of a pipeline stage."""

    def __init__(self, sizes: Llama, length: int) -> None:
        super().__init__()
        shape = sizes.width, sizes.hidden, sizes.heads, sizes.kv_heads, length
        self.blocks = nn.ModuleList(LlamaBlock(*shape) for _ in range(sizes.layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map x [batch, length / ranks, width], the rank's part of sequences, to the same shape."""
        for block in self.blocks:
            x = block(x)
        return x


def layout_of(ranks: int) -> Layout:
    """Return the data and tensor parallel ranks of a stage."""
    return Layout(ranks // STAGES // TENSOR, TENSOR)


# ---------------------------------------------------------------------------------------------------------------------
# Formulas


def formulas(name: str, sizes: Llama, layout: Layout, length: int) -> Counter[Collective]:
    """Return how often a rank of a middle stage calls each collective in a step; those of blocks of `collectives`.

    FSDP gathers once in a step, and keeps weights until its end. Tensor parallel communicates for each microbatch,
    except that gradients of norms are summed at the end, in the dtype in which FSDP adds those of microbatches.
    """
    way, found = WAYS[name], Counter[Collective]()
    of_blocks = collectives(sizes, layout, way, 1, length)
    of_blocks -= collectives(replace(sizes, layers=0), layout, way, 1, length)
    for collective, count in of_blocks.items():
        match collective.kind, collective.group:
            case "all_gather", "data":
                found[collective] = count // 2
            case "all_reduce", "tensor":
                found[collective._replace(dtype="float32")] = count
            case _, "tensor":
                found[collective] = count * MICROBATCHES
            case _:
                found[collective] = count
    activations = length * sizes.width // layout.tensor
    for kind in ("send", "recv_"):  # of activations and of their gradients
        found[Collective(kind, "bfloat16", activations, "pipeline")] = 2 * MICROBATCHES
    return _of_torchao(found, sizes) if name == "torchao" else found


def _of_torchao(found: Counter[Collective], sizes: Llama) -> Counter[Collective]:
    """Return the collectives of torchao, given those of fp8pass: other dtypes, and other reductions of amaxes.

    Each cast of a part of a tensor reduces its amax at once.
    """
    other = Counter({c: n for c, n in found.items() if c.dtype != "int32"})
    each = MICROBATCHES * sizes.layers
    (whole,) = (c for c in other if c.kind == "all_gather" and c.group == "tensor")
    del other[whole]
    other[whole._replace(dtype="float8_e4m3fn")] = other[whole._replace(dtype="float8_e5m2")] = 2 * each
    other[Collective("all_reduce", "float32", sizes.layers * len(LINEARS), "all")] = 1
    other[Collective("all_reduce", "float64", 1, "tensor")] = CASTS * each
    return other


CASTS = 11
"""Tensors of a block that are divided when torchao casts them."""


# ---------------------------------------------------------------------------------------------------------------------
# What runs


def mesh_of(ranks: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Start a fake group, in which this process is the first rank of the second stage; return mesh and stage's mesh."""
    data = layout_of(ranks).data
    dist.init_process_group("fake", rank=data * TENSOR, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (STAGES, data, TENSOR), mesh_dim_names=("pipeline", "data", "tensor"))
    return mesh, mesh["data", "tensor"]._flatten()


class _CastsAndGathers(PrepareModuleOutput):
    """Casts the output of a norm to FP8 before it is gathered, as torchao's `PrepareFloat8ModuleInput` does.

    like: a linear layer, of which it takes how to multiply.
    """

    like: Any

    def _prepare_out_fn(self, outputs: Any, mesh: DeviceMesh) -> Any:
        from torchao.float8.float8_tensor_parallel import PrepareFloat8ModuleInput

        cast = PrepareFloat8ModuleInput()
        cast.linear_mm_config = self.like.linear_mm_config
        return cast._prepare_input_arg(outputs, mesh, Shard(1), Replicate())


def _converted(stage: Stage, mesh: DeviceMesh) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

    convert_to_float8_training(stage, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True))

    def whole(**layouts: Any) -> _CastsAndGathers:
        style = _CastsAndGathers(**layouts)
        style.like = stage.blocks[0].q
        return style

    for block in stage.blocks:
        divide_block(block, mesh, Float8ColwiseParallel, Float8RowwiseParallel, whole)


def made(name: str, sizes: Llama, length: int, mesh: DeviceMesh, of_stage: DeviceMesh) -> Stage:
    """Return a stage that is divided, compiled block by block and sharded; only the rank's shards take memory."""
    way = WAYS[name]
    with torch.device("meta"):
        stage = Stage(sizes, length)
    if name == "torchao":
        _converted(stage, mesh["tensor"])
    else:
        for block in stage.blocks:
            divide_block(block, mesh["tensor"])
    is_ours = name.startswith("fp8pass")
    if is_ours:
        enable_fp8_all_gather(stage, filter=[f"blocks.*.{layer}" for layer in way.left_out])
    # min_speedup: else the matmuls of few tokens would be declined
    options = {"amax_group": of_stage, "min_speedup": 0, "filter": list(way.left_out), "lowering": "eager"}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard = partial(fully_shard, mesh=mesh["data"], mp_policy=policy, reshard_after_forward=False)
    for block in stage.blocks:
        block.compile(backend="fp8pass", options=options) if is_ours else block.compile(backend="aot_eager")
        shard(block)
    shard(stage)
    if way.fp8_gradients:
        enable_fp8_reduce_scatter(stage)
    stage.to_empty(device="cpu")
    like = LlamaBlock(sizes.width // sizes.heads, 1, 1, 1, length)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.to_local().normal_(std=0.02) if isinstance(parameter, DTensor) else parameter.normal_(std=0.02)
        for block in stage.blocks:
            for name, table in like.named_buffers():
                block.get_buffer(name).copy_(table)
    return stage


def played(name: str, ranks: int, sizes: Llama, warm: int = WARM) -> Found:
    """Run the steps of one rank in this process, `warm` of them after those that compile."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # else CPU seconds have those of threads that wait
    mesh, of_stage = mesh_of(ranks)
    stage = made(name, sizes, TOKENS, mesh, of_stage)
    x = torch.empty(1, TOKENS // TENSOR, sizes.width, dtype=torch.bfloat16, requires_grad=True)
    run = PipelineStage(
        stage, 1, STAGES, torch.device("cpu"), input_args=(x,), output_args=(x,), group=mesh.get_group("pipeline")
    )
    schedule = Schedule1F1B(run, MICROBATCHES, loss_fn=lambda y, _: y.sum())  # the last stage calls it
    optimizer = torch.optim.AdamW(stage.parameters(), foreach=False)
    names = {tuple(dist.get_process_group_ranks(mesh.get_group(n))): n for n in mesh.mesh_dim_names or ()}
    names[tuple(dist.get_process_group_ranks(of_stage.get_group()))] = "all"
    seconds, reducing = [], [0.0]
    with mock.patch.object(Reducer, "launch", _timed(Reducer.launch, reducing)):
        for _ in range(COLD + warm):
            began, reducing[0] = time.process_time(), 0.0
            with Counting(names) as counting:
                schedule.step()
                optimizer.step()
                optimizer.zero_grad()
                if name == "torchao":
                    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

                    precompute_float8_dynamic_scale_for_fsdp(stage)
            seconds.append(time.process_time() - began)
    compiled = sum(seconds[:COLD]) - COLD * sum(seconds[COLD:]) / warm
    states = list(registry.states())
    size = sum(x.nbytes for state in states for x in state.tensors)
    slots = sum(len(state.table.names) for state in states)
    return Found([[*c, n] for c, n in counting.found.items()], compiled, reducing[0], slots, size)


def _timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        began = time.process_time()
        result = function(*args)
        seconds[0] += time.process_time() - began
        return result

    return timed


def in_process(name: str, ranks: int, sizes: Llama, warm: int = WARM) -> Found:
    """Return what `played` does, in a new process. Raises ValueError if the formulas have other collectives."""
    asked = json.dumps([name, ranks, asdict(sizes), warm])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--play", asked], stdout=subprocess.PIPE, text=True, check=True
    )
    found = Found(**json.loads(done.stdout.splitlines()[-1]))
    if wrong := differences(formulas(name, sizes, layout_of(ranks), TOKENS), found.collectives):
        raise ValueError(f"{name} on {ranks} ranks: " + "\n".join(wrong))
    return found


def plan(ranks: int) -> str:
    """Return the verdicts on the matmuls of a stage of the true sizes on an H100. Raises ValueError if it declines
    other layers than `LEFT_OUT`."""
    mesh, of_stage = mesh_of(ranks)
    with FakeTensorMode():
        stage = Stage(STAGE, LENGTH)
        for parameter in stage.parameters():
            parameter.data = parameter.data.bfloat16()
        for block in stage.blocks:
            divide_block(block, mesh["tensor"])
        x = torch.randn(1, LENGTH // TENSOR, STAGE.width, dtype=torch.bfloat16, requires_grad=True)
        # undivided: the functions of equal layers are traced in a fake mode of their own
        config = fp8pass.Config(target="h100", amax_group=of_stage)
        report = fp8pass.explain(stage, x, config=config)
    declined = {g.name.rpartition(".")[2] for g in report.gemms if g.status == "declined"}
    if declined != set(LEFT_OUT):
        raise ValueError(f"declined: {declined}")
    return report.summary()


class _Client:
    """A rank of a group that asks the store, as `tell_all` sees it. requests: how often it asked."""

    def __init__(self, rank: int, ranks: int, store: Any) -> None:
        self.rank, self.size, self.requests = lambda: rank, lambda: ranks, 0
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*args: Any) -> Any:
            self.requests += 1
            return getattr(self._store, name)(*args)

        return ask


def requests(ranks: int) -> int:
    """Return how often a rank at most asks the store until all ranks know that they have the same slots."""
    clients = [_Client(rank, ranks, store) for store in [HashStore()] for rank in range(ranks)]
    with mock.patch.object(amax_reduction, "store_of", lambda client, _: client), ThreadPoolExecutor(ranks) as threads:
        list(threads.map(lambda client: tell_all(client, "", ["slots"], timedelta(minutes=1)), clients))
    return max(client.requests for client in clients)


# ---------------------------------------------------------------------------------------------------------------------
# Tables

GATHERS = "FSDP gathers weights"
ROWS: dict[str, Callable[[Collective], bool]] = {
    GATHERS: lambda c: c.group == "data" and c.kind == "all_gather",
    "FSDP scatters gradients": lambda c: c.group == "data" and c.kind in ("reduce_scatter", "all_to_all"),
    "TP gathers activations and gradients": lambda c: c.group == "tensor" and c.kind == "all_gather",
    "TP scatters sums": lambda c: c.group == "tensor" and c.kind == "reduce_scatter",
    "TP sums gradients of norms": lambda c: c.group == "tensor" and c.kind == "all_reduce" and c.elements > 1,
    "PP sends": lambda c: c.kind == "send",
    "amaxes": lambda c: c.kind == "all_reduce" and (c.dtype == "int32" or c.elements == 1 or c.group == "all"),
}


def sent(found: Counter[Collective], layout: Layout, takes: Callable[[Collective], bool]) -> tuple[int, float]:
    """Return the number of the collectives of a row, and the bytes that a rank sends in them."""
    chosen = {c: n for c, n in found.items() if takes(c)}
    return sum(chosen.values()), sum(
        n * (c.bytes if c.group == "pipeline" else c.sent(layout)) for c, n in chosen.items()
    )


def told(size: float) -> str:
    """Return a number of bytes with a unit."""
    unit, name = next((u, n) for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"), (1, "bytes")) if size >= u or u == 1)
    return f"{size / unit:.3g} {name}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, whose first column is text."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def of_collectives(ranks: int) -> str:
    """Return the table of the collectives of one step at the true sizes."""
    layout, names = layout_of(ranks), ways()
    by_way = [formulas(name, STAGE, layout, LENGTH) for name in names]
    rows = []
    for row, takes in {**ROWS, "all": lambda c: c.kind != "recv_"}.items():
        cells = [sent(found, layout, takes) for found in by_way]
        rows.append([row, *(f"{count:,}: {told(size)}" if count else "" for count, size in cells)])
    return table([f"collectives of a step, {ranks:,} ranks", *names], rows)


def of_ranks(found: dict[int, dict[str, Found]]) -> str:
    """Return the table of what a rank does among few and many ranks."""
    rows: dict[str, list[str]] = {}
    for ranks, by_way in found.items():
        layout, ours = layout_of(ranks), by_way["fp8pass"]
        rows.setdefault("FSDP x TP x PP", []).append(f"{layout.data} x {layout.tensor} x {STAGES}")
        for name in by_way:
            gathered = Counter({c: n for c, n in formulas(name, STAGE, layout, LENGTH).items() if ROWS[GATHERS](c)})
            kept = sum(n * c.bytes for c, n in gathered.items())
            rows.setdefault(f"gathered weights, {name}", []).append(told(kept))
        for name in by_way:
            fsdp = sent(formulas(name, STAGE, layout, LENGTH), layout, lambda c: c.group == "data")[1]
            rows.setdefault(f"FSDP's bytes, {name}", []).append(told(fsdp))
        for name, one in by_way.items():
            rows.setdefault(f"compile, CPU s, {name}", []).append(f"{one.compiled:.1f}")
        rows.setdefault("scales: slots", []).append(str(ours.slots))
        rows.setdefault("scales: state", []).append(told(ours.state))
        (vector,) = (c for c in ours.collectives if (c.dtype, c.group) == ("int32", "all"))
        rows.setdefault("amaxes: the vector of a step", []).append(told(vector.bytes))
        rows.setdefault("amaxes: ranks that reduce it", []).append(str(layout.ranks))
        rows.setdefault("amaxes: CPU ms of a step", []).append(f"{1e3 * ours.reducing:.1f}")
        rows.setdefault("first step: requests to the store", []).append(str(requests(layout.ranks)))
    return table(["ranks", *(f"{n:,}" for n in found)], [[name, *cells] for name, cells in rows.items()])


def ways() -> list[str]:
    """Return the names of the ways that can run here."""
    there = importlib.util.find_spec("torchao") is not None
    return [name for name in WAYS if there or name != "torchao"]


def main() -> None:
    """Print the plan and the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS, help="multiples of 32 (default: %(default)s)")
    parser.add_argument("--play", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.play:
        name, ranks, sizes, warm = json.loads(args.play)
        print(json.dumps(asdict(played(name, ranks, Llama(**sizes), warm))))
        return
    found = {ranks: {name: in_process(name, ranks, NARROW) for name in ways()} for ranks in args.ranks}
    in_process("fp8pass", args.ranks[-1], ONE_LAYER, warm=1)
    print(f"The plan of a rank: {plan(args.ranks[-1])}.\n")
    print(of_collectives(args.ranks[-1]), "\n")
    print(of_ranks(found))


if __name__ == "__main__":
    main()
