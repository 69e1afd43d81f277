"""Gather a model's tensors on the rank that writes, and let all ranks fail together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fp8pass.base._torch import gathered_parameters
from fp8pass.base.errors import Fp8Error
from fp8pass.base.names import without_wrappers
from fp8pass.fsdp import Fp8Shard
from fp8pass.quant.sharded import part_of

Result = TypeVar("Result")


class Ranks:
    """The ranks that hold a model. Where ranks hold parts of tensors, all must make the same calls."""

    def __init__(self, module: nn.Module) -> None:
        self._is_sharded = any(isinstance(p, DTensor) for p in module.parameters())
        self.writes = not dist.is_initialized() or dist.get_rank() == 0
        """True on the rank that writes."""

    def on_writer(self, do: Callable[[], Result]) -> Result | None:
        """Return what `do` returns on the rank that writes; None on others. Raises its error on all ranks."""
        if not self.writes:
            told = self._broadcast(None)
            if told is not None:
                raise Fp8Error(told)
            return None
        try:
            result = do()
        except Exception as error:
            self._broadcast(f"rank 0: {error}")
            raise
        self._broadcast(None)
        return result

    def _broadcast(self, told: str | None) -> str | None:
        """Return what the rank that writes has sent, if the model is sharded; otherwise None."""
        box = [told]
        if self._is_sharded:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    @torch.no_grad()
    def gathered(self, module: nn.Module) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
        """Return the state dict of whole tensors on CPU, by names without wrappers; and {id of a parameter: tensor}.

        Both are empty on ranks that do not write. The second dict has a weight as its forward reads it: FSDP's mixed
        precision casts it. Names that share a parameter share the tensor.
        """
        by_name: dict[str, Tensor] = {}
        by_id: dict[int, Tensor] = {}
        # keep_vars: otherwise each name of a shared parameter gets another tensor
        for name, x in module.state_dict(keep_vars=True).items():
            if not isinstance(x, Tensor):
                continue
            if id(x) not in by_id:
                whole = _whole(x.detach())
                # an entry on other ranks too: all ranks must skip the gathering of a further name of this tensor
                by_id[id(x)] = whole.cpu() if self.writes else whole.new_empty(0)
            by_name[without_wrappers(name)] = by_id[id(x)]
        if not self.writes:
            return {}, {}
        read = gathered_parameters(module)
        return by_name, {key: x.to(read[key].dtype) if key in read else x for key, x in by_id.items()}


def _whole(x: Tensor) -> Tensor:
    """Return the whole tensor. A collective if ranks hold parts of it."""
    part = part_of(x)
    if not isinstance(x, DTensor):
        return part._tensor if isinstance(part, Fp8Shard) else part
    if isinstance(part, Fp8Shard):
        x = DTensor.from_local(
            part._tensor, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
        )
    return x.full_tensor()
