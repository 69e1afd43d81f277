"""Test `fp8pass.export_fp8` of models that FSDP2 has sharded, against the export of a whole model."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import fp8pass
from fp8pass.fsdp import enable_fp8_all_gather
from tests.helpers.models import Block, make
from tests.helpers.torchrun import on_ranks

pytestmark = pytest.mark.ranks


class Model(nn.Module):
    """Two blocks, of which the second has rows that two ranks can't share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32, h) for h in (48, 51))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def trained(recipe: str, **policies: Any) -> Any:
    """Shard a model, and train it for two steps on different data on each rank."""
    model = make(Model)
    if policies.pop("gathers_fp8", False):
        enable_fp8_all_gather(model)
    for block in model.blocks:
        block.compile(backend="fp8pass", options={"recipe": recipe, "lowering": "eager"})
        fully_shard(block, **policies)
    fully_shard(model, **policies)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        model(torch.randn(8, 32, generator=generator)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def folder() -> Path:
    """Return an empty folder, the same on all ranks."""
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    return Path(box[0])


def both(out: Path, model: Any, recipe: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Export a model, and a whole one with the same weights; return the layers, and on rank 0 the tensors of both."""
    done = fp8pass.export_fp8(model, out / "sharded")
    weights = {k: x.full_tensor() if isinstance(x, DTensor) else x for k, x in model.state_dict().items()}
    state = fp8pass.state(model).state_dict()
    if dist.get_rank() != 0:
        return list(done.layers)
    whole = Model()
    whole.load_state_dict(weights)
    if state:
        fp8pass.state(whole).load_state_dict(state)
    fp8pass.export_fp8(whole.to(dtype), out / "whole", recipe=recipe)
    return list(done.layers), *(load_file(out / name / "model.safetensors") for name in ("sharded", "whole"))


@on_ranks(2)
def delayed() -> Any:
    """Export a model; return the error of exporting it again, too."""
    out, model = folder(), trained("delayed")
    result = both(out, model, None)
    with pytest.raises((FileExistsError, fp8pass.Fp8Error), match="exists") as error:
        fp8pass.export_fp8(model, out / "sharded")
    return result, f"{error.type.__name__}: {error.value}"


@on_ranks(2, variant=True)
def in_bfloat16() -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return both(folder(), trained("rowwise", mp_policy=policy), "rowwise", torch.bfloat16)


@on_ranks(2, variant=True)
def gathered_in_fp8() -> Any:
    return both(folder(), trained("delayed", gathers_fp8=True), "dynamic")


def check(results: list[Any], casts: bool = False) -> None:
    (layers, sharded, whole), elsewhere = results
    assert layers == elsewhere and len(layers) == 4
    assert sharded.keys() == whole.keys()
    for name, x in whole.items():
        fp8 = name.endswith("weight_scale") or x.dtype is torch.float8_e4m3fn
        mine = sharded[name].to(x.dtype) if casts and not fp8 else sharded[name]
        assert mine.dtype is x.dtype and mine.shape == x.shape, name
        assert torch.equal(mine.view(torch.uint8), x.view(torch.uint8)), name


def test_weights_are_gathered_and_errors_are_raised_on_all_ranks() -> None:
    results, (first, second) = zip(*delayed(), strict=True)
    check(list(results))
    assert first.startswith("FileExistsError: ") and "exists: pass another directory" in first
    assert second.startswith("Fp8Error: rank 0: ") and "exists: pass another directory" in second


@pytest.mark.variant
def test_weights_are_cast_as_their_forward_reads_them() -> None:
    check(in_bfloat16(), casts=True)


@pytest.mark.variant
def test_weights_that_travel_in_fp8_have_the_scales_of_their_travel() -> None:
    check(gathered_in_fp8())
