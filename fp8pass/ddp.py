"""DistributedDataParallel that sends gradients in FP8: a quarter of the bytes of float32.

    model = DistributedDataParallel(model)
    fp8pass.ddp.fp8_gradients(model)

DDP calls a communication hook for each bucket of gradients as soon as the backward has computed it. This hook quantizes
the bucket, sends each rank its part of it in FP8, lets each rank sum its part in float32, and gathers the sums in FP8:
see `fp8pass.quant.wire`. The backward goes on meanwhile.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fp8pass.base._torch import timeout_of
from fp8pass.base.errors import Fp8Error
from fp8pass.quant.wire import GradientExchange, GradientFormat, groups_of


def fp8_gradients(
    model: DistributedDataParallel,
    *,
    dtype: str = "e4m3",
    scale: str = "own",
    block: int = 1024,
    margin: int = 1,
    node: int | None = None,
) -> GradientExchange:
    """Let a model in DistributedDataParallel send its gradients in FP8. All ranks of its group call it.

    Each of W ranks has gradients g_r; DDP's result is their mean m. With FP8 it differs for each element by at most

        (1 + u) / W * sum over ranks of max(u |g_r|, f_r)  +  max(u |m|, f)        and W float32 roundings of the sum

    where u is 2**-4 for e4m3 and 2**-3 for e5m2, half the distance of neighbours relative to their size; and f_r, f are
    half of the least FP8 number at the scale of rank r, and of the mean: at most 2**-17.8 for e4m3, and 2**-31.8 for
    e5m2, of the largest gradient with the same scale. All ranks get the same bits, and the same again if the step runs
    again.

    Where a gradient is infinite or NaN, all gradients with the same scale become NaN, on all ranks: GradScaler and
    `skip_nonfinite` see it.

    Args:
        model: A `DistributedDataParallel`, before its first backward.
        dtype: "e4m3" or "e5m2".
        scale: Which gradients share a scale, a power of two. "own": each `block` of consecutive gradients of a bucket
            and rank, by its amax; "common": a whole bucket, by the largest amax of all ranks, for which a MAX
            all-reduce of one number comes before the exchange; "delayed": a whole bucket, by the largest amax of all
            ranks in the last step, lowered by `margin`. Where a rank's gradients have outgrown that, or in the first
            step, this rank uses its own amax, so that nothing saturates. The means always have the scales of "own", or
            one scale for each rank's part.
        block: Number of gradients that share a scale with "own". Each scale takes 4 bytes.
        margin: Powers of two by which gradients may grow with "delayed".
        node: The number of ranks of a node, which come one after the other: they exchange first, and then different
            nodes exchange the sums of nodes. This rounds once more: in the bound, each node adds a term of its sum, as
            m does. None: one exchange among all ranks.

    Returns:
        The exchange; its `grown()` says how often a gradient has outgrown a delayed scale.

    Raises:
        Fp8Error: If `node` does not divide the ranks; if a gradient is sparse, in the backward.
        RuntimeError: From torch, if the model has a communication hook already.
        TypeError: If `model` is not a DistributedDataParallel.
        ValueError: For invalid options.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"fp8_gradients() takes a DistributedDataParallel, not {type(model).__name__}: wrap it first")
    exchange = GradientExchange(GradientFormat(dtype, scale, block, margin, node))
    if model.process_group.size() > 1:
        device = next(p.device for p in model.parameters() if p.requires_grad)
        model.register_comm_hook(_Hook(exchange, model.process_group, device), _start)
    return exchange


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _start(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = state.start(bucket)
    return future


# DDP compares the annotations with these types themselves, not with their names
_TYPES = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}  # type: ignore[attr-defined]
inspect.unwrap(_start).__annotations__ |= _TYPES


class _Hook:
    """Runs the exchanges of one model, one after the other in the order of its buckets.

    On a GPU they run on a separate stream, so that the host goes on. On a CPU, collectives block the host, so a thread
    runs them; in a separate group, because another thread's collectives in the same group, such as the all-reduce of
    amaxes, would interleave with them in a different order on each rank.
    """

    def __init__(self, exchange: GradientExchange, group: dist.ProcessGroup, device: torch.device) -> None:
        self.exchange = exchange
        if device.type == "cpu":
            ranks, timeout = dist.get_process_group_ranks(group), timeout_of(group, device)
            # local synchronization: ranks outside of `group` need not take part
            group = dist.new_group(ranks, timeout, use_local_synchronization=True)
            self.run: Callable[..., Any] = ThreadPoolExecutor(1, "fp8pass gradients").submit
        else:
            self.run = functools.partial(_on_stream, torch.get_device_module(device).Stream(device), device)
        self.groups = groups_of(group, exchange.how.node, device)

    def start(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Start to exchange a bucket; return the future of its mean gradients."""
        x = bucket.buffer()
        if x.layout != torch.strided:
            raise Fp8Error("fp8_gradients: a gradient is sparse, and FP8 is for dense ones: use sparse=False")
        # with devices, whoever waits for the future makes its stream wait for ours; the host does not wait
        devices = [] if x.device.type == "cpu" else [x.device]
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        self.run(self._complete, future, x, bucket.index())
        return future

    def _complete(self, future: torch.futures.Future[Tensor], x: Tensor, index: int) -> None:
        """Exchange the gradients `x` of a bucket, in place, and complete its future."""
        try:
            self._exchange(x, index)
        except Exception as error:  # noqa: BLE001  # DDP raises it in the thread of the backward
            future.set_exception(error)  # type: ignore[arg-type]  # torch says Tensor, and takes exceptions
        else:
            future.set_result(x)

    @torch.no_grad()
    def _exchange(self, x: Tensor, index: int) -> None:
        ranks = self.groups.whole.size()
        count = -(-len(x) // ranks)
        # equal parts for all ranks: the zeros at the end raise no amax
        parts = F.pad(x, (0, ranks * count - len(x))).view(ranks, count)
        mean = self.exchange.reduce_scatter(parts, self.groups, index) / ranks
        x.copy_(self.exchange.all_gather(mean, self.groups).flatten()[: len(x)])


def _on_stream(stream: Any, device: torch.device, function: Callable[..., None], *args: Any) -> None:
    """Call a function on a stream, after what the current stream has begun."""
    module = torch.get_device_module(device)
    stream.wait_stream(module.current_stream(device))  # which computes the gradients
    with module.stream(stream):
        function(*args)
