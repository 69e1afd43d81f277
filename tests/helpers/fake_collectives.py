"""Collectives among the ranks of `fake_ranks`, and graphs with them that one process runs for all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass.graph.pass_base import JointContext
from fp8pass.options.config import Config
from fp8pass.passes.joint.quantize_collectives import QuantizeCollectives
from tests.helpers.fake_ranks import GROUPS, RANKS, WORLD
from tests.helpers.harness import BF16, capture, run, text

c10d = torch.ops._c10d_functional


def gather(x: Tensor) -> Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, RANKS, GROUPS[WORLD]))  # type: ignore[no-any-return]


def exchange(x: Tensor) -> Tensor:
    parts = [len(x) // RANKS] * RANKS
    return c10d.wait_tensor(c10d.all_to_all_single(x, parts, parts, GROUPS[WORLD]))  # type: ignore[no-any-return]


def bring(x: Tensor) -> Tensor:
    return c10d.wait_tensor(c10d.broadcast(x, 1, GROUPS[WORLD]))  # type: ignore[no-any-return]


def gather_and_slice(x: Tensor) -> Tensor:
    """Gather as DTensors of torch 2.13 do, which slice all of more than 256 rows."""
    whole = gather(x)
    return whole.narrow(0, 0, len(whole))


MOVERS = {"all-gather": gather, "all-gather, sliced": gather_and_slice, "all-to-all": exchange, "broadcast": bring}


def on_ranks(module: fx.GraphModule, inputs: list[tuple[Any, ...]]) -> list[tuple[Tensor, ...]]:
    """Run the graph on all ranks, node by node, and return each rank's outputs. inputs: those of each rank."""
    module.recompile()
    env: dict[fx.Node, list[Any]] = {}
    feeds = iter(zip(*inputs, strict=True))
    for node in module.graph.nodes:
        ranks = range(len(inputs))
        args = [fx.map_arg((node.args, node.kwargs), lambda n, r=r: env[n][r]) for r in ranks]  # type: ignore[misc]
        if node.op == "placeholder":
            env[node] = list(next(feeds))
        elif node.op == "get_attr":
            env[node] = [getattr(module, node.target) for _ in ranks]
        elif node.op == "output":
            return [a[0][0] for a in args]
        elif str(node.target).startswith("_c10d_functional."):
            env[node] = collective(node.target, [a[0] for a in args])
        else:
            env[node] = [node.target(*a, **k) for a, k in args]
    raise AssertionError("no output")


def collective(target: Any, args: list[Any]) -> list[Tensor]:
    """Return the results of a collective on all ranks, given each rank's arguments."""
    xs = [a[0] for a in args]
    assert all(x.is_contiguous() for x in xs)
    if target is c10d.wait_tensor.default:
        return xs
    if target is c10d.all_gather_into_tensor.default:
        return [torch.cat(xs) for _ in xs]
    if target is c10d.all_to_all_single.default:
        parts = [x.split(a[2]) for x, a in zip(xs, args, strict=True)]
        return [torch.cat([p[r] for p in parts]) for r in range(len(xs))]
    if target is c10d.broadcast.default:
        return [xs[args[0][1]].clone() for _ in xs]
    assert target is c10d.all_reduce.default
    stack = torch.stack(xs)
    return [stack.amax(0) if args[0][1] == "max" else stack.sum(0) for _ in xs]


def data(*shape: int, dtype: torch.dtype = BF16) -> list[Tensor]:
    """Return a tensor for each rank, each with another range."""
    return [torch.randn(shape).mul(3**r).to(dtype) for r in range(RANKS)]


def same_bits(a: Any, b: Any) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
        assert torch.equal(x.float().nan_to_num(nan=1e30), y.float().nan_to_num(nan=1e30))


Function = Callable[..., tuple[Tensor, ...]]


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of the graph, because capturing it again takes longer."""
    return fx.GraphModule(module, copy.deepcopy(module.graph))


def rewritten(
    function: Function, *inputs: Tensor, times: int = 1
) -> tuple[fx.GraphModule, fx.GraphModule, JointContext]:
    """Rewrite `function`'s graph. Return the graph before and after, and the context.

    Check that `times` collectives are rewritten, and that a second run rewrites none.
    """
    before = capture(function, *inputs)
    after = copied(before)
    context = JointContext(Config(recipe=None))
    assert QuantizeCollectives().run(after.graph, context) == times, context.notes
    assert len(context.notes) == 1 and context.notes[0].startswith(f"{times} collectives send FP8, ")
    run(after)  # verifies the graph
    once = text(after)
    again = JointContext(Config(recipe=None))
    assert QuantizeCollectives().run(after.graph, again) == 0 and not again.notes
    assert text(after) == once
    return before, after, context


def sent(module: fx.GraphModule) -> list[str]:
    """Return the names of the collectives, with the dtypes that they send."""
    nodes = [n for n in module.graph.nodes if str(n.target).startswith("_c10d") and "wait" not in str(n.target)]
    return [f"{str(n.target).split('.')[1]} {str(n.meta['val'].dtype)[6:]}" for n in nodes]
