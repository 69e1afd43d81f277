"""Test layers that are compiled once with Inductor: numbers, saved caches, and what is compiled."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._functorch._aot_autograd import graph_compile
from torch._inductor.graph import GraphLowering

import fp8pass
from fp8pass.compiler import lower
from fp8pass.compiler.through_inductor import lower_through_inductor
from fp8pass.report.report import collect
from tests.helpers import ROOT, forked
from tests.helpers.harness import train
from tests.helpers.models import Block, batches, make


def trained(by_block: bool) -> tuple[Any, dict[str, Any]]:
    """Train; return the numbers of each step, and the state."""
    torch._dynamo.reset()
    model = make(lambda: nn.Sequential(*(Block() for _ in range(3))))
    options = {"on_fault": "raise"}
    for block in model if by_block else ():
        block.compile(backend="fp8pass", options=options)
    run = model if by_block else torch.compile(model, backend="fp8pass", options=options)
    return list(train(model, run, batches(3, 16, 32))), fp8pass.state(model).state_dict()


def test_numbers_and_slots_are_those_of_compilation_block_by_block() -> None:
    before: list[float] = []
    backward = torch.Tensor.backward

    def timed(loss: torch.Tensor) -> None:
        before.append(sum(t.inductor for t in report.timings))
        backward(loss)

    with (
        mock.patch.object(lower, "lower_through_inductor", wraps=lower_through_inductor) as compile_one,
        mock.patch.object(torch.Tensor, "backward", timed),
        collect() as report,
    ):
        once = trained(by_block=False)
    assert compile_one.call_count == 2  # what begins the step, and the block
    # the first step runs op by op; the backward is compiled when it runs in the second, and counts from then on
    assert 0 < before[0] == before[1] < before[2] == sum(t.inductor for t in report.timings)
    torch.testing.assert_close(once, trained(by_block=True), rtol=0, atol=0)


PROGRAM = """
import os, sys, torch, fp8pass
from pathlib import Path
from torch import nn
from torch._dynamo.utils import counters

os.environ["TORCHINDUCTOR_CACHE_DIR"] = sys.argv[1]
saved = Path(sys.argv[2])
if saved.exists():
    torch.compiler.load_cache_artifacts(saved.read_bytes())
torch.manual_seed(0)
layers = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
model = nn.Sequential(*layers)
run = torch.compile(model, backend="fp8pass")
x = torch.randn(16, 32, requires_grad=True)
for _ in range(2):
    run(x).square().mean().backward()
found = counters["aot_autograd"]
print(found["autograd_cache_hit"], found["autograd_cache_miss"])
if not saved.exists():
    artifacts, _ = torch.compiler.save_cache_artifacts()
    saved.write_bytes(artifacts)
"""


def test_a_second_machine_starts_with_saved_caches(tmp_path: Path) -> None:
    """`torch.compiler.save_cache_artifacts`, loaded where the folder of caches is empty."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    folders = (str(tmp_path / name) for name in ("first", "second"))
    done = forked.run([forked.Program(file, [f, str(tmp_path / "saved")], root=ROOT) for f in folders], os.environ)
    assert [each.returncode for each in done] == [0, 0], done
    hits, misses = zip(*(each.stdout.split() for each in done), strict=True)
    assert misses == ("2", "0")  # what begins the step, and the layer
    assert hits == ("0", "2")


class Ending(nn.Module):
    """Layers and what comes after them, whose backward may overwrite other ones of its inputs than a layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 48, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)), torch.zeros(16, dtype=torch.long))


def test_a_backward_overwrites_what_its_own_graph_allows() -> None:
    """A layer's backward is compiled after the graphs that follow it, and must not go by what is known of those."""
    allowed, compiled = {}, {}
    collect_idxs, init = graph_compile.collect_bw_donated_buffer_idxs, GraphLowering.__init__

    def names(module: fx.GraphModule) -> tuple[str, ...]:
        return tuple(n.name for n in module.graph.find_nodes(op="placeholder"))

    def collected(forward: fx.GraphModule, backward: fx.GraphModule, *args: Any) -> Any:
        allowed[names(backward)] = found = collect_idxs(forward, backward, *args)
        return found

    def lowered(self: GraphLowering, module: fx.GraphModule, *args: Any, **kwargs: Any) -> None:
        init(self, module, *args, **kwargs)
        if kwargs.get("is_backward"):
            compiled[names(module)] = self.bw_donated_idxs

    with (
        mock.patch.object(graph_compile, "collect_bw_donated_buffer_idxs", collected),
        mock.patch.object(GraphLowering, "__init__", lowered),
        collect() as report,
    ):
        model = make(Ending)
        run = torch.compile(model, backend="fp8pass", options={"on_fault": "raise"})
        for x in batches(2, 16, 32):
            run(x).backward()
    assert len(report.timings) > 2  # a layer, and what is around the layers
    assert len(allowed) >= 2 and compiled == allowed
