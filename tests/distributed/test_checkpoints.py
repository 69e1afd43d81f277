"""Test checkpoints of `torch.distributed.checkpoint`: a run saved on some number of ranks goes on on another number."""

from __future__ import annotations

import functools
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8pass
from fp8pass.recipes import DelayedScaling
from tests.helpers.models import Block, make
from tests.helpers.torchrun import before_launch, on_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]  # when one process saves

OPTIONS: dict[str, Any] = {"recipe": DelayedScaling(amax_history_len=4, margin=1), "lowering": "eager", "strict": True}
"""Gradients of a mean over a rank's part are larger on more ranks. With the margin, twice as large they still fit."""
AT, STEPS = 3, 5
"""The step after which a run is saved, and the one after which it ends."""
BATCH = 4
"""Rows of a global batch, of all ranks together."""
WAYS = ("ddp", "fsdp")
FOLDER = "FP8PASS_TEST_CHECKPOINTS"
"""The environment variable that says where ranks find the checkpoints of one process, and write their own."""
os.environ.setdefault(FOLDER, tempfile.mkdtemp())


class Run:
    """A model in training, on as many ranks as there are."""

    def __init__(self, way: str) -> None:
        self.model: nn.Sequential = make(lambda: nn.Sequential(Block()))
        self.forward: Any = self.model
        self.at = 0
        if way == "fsdp":
            for layer in self.model:
                if dist.is_initialized():
                    fully_shard(layer)
                layer.compile(backend="fp8pass", options=OPTIONS)
            if dist.is_initialized():
                fully_shard(self.model)
        else:
            self.forward = torch.compile(self.model, backend="fp8pass", options=OPTIONS)
            if dist.is_initialized():
                self.forward = DistributedDataParallel(self.forward)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)

    def go_on(self, until: int) -> list[float]:
        """Train up to a step; return the global losses."""
        losses = []
        while self.at < until:
            x = torch.randn(BATCH, 16, 32, generator=torch.Generator().manual_seed(self.at))
            if dist.is_initialized():
                x = x.chunk(dist.get_world_size())[dist.get_rank()]
            loss = F.mse_loss(self.forward(x), x * 0.5)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
            mean = loss.detach()
            if dist.is_initialized():
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            losses.append(mean.item())
            self.at += 1
        return losses

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        save({"model": model, "optimizer": optimizer, "fp8": fp8pass.state(self.model)}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Load into a run that has not begun: only the checkpoint knows the slots."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        reader = FileSystemReader(folder)
        fp8 = fp8pass.state(self.model).as_saved(reader.read_metadata())
        load({"model": model, "optimizer": optimizer, "fp8": fp8}, storage_reader=reader)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.at = fp8pass.state(self.model).steps

    def results(self, until: int) -> dict[str, Any]:
        """Return the present state, and the losses of the steps that follow."""
        state = fp8pass.state(self.model).state_dict()
        return {"at": self.at, "state": state, "losses": self.go_on(until)}


def saved() -> Any:
    """Train and save a run for each way of being parallel; return what was saved, and how each run goes on."""
    found = {}
    for way in WAYS:
        torch._dynamo.reset()
        run = Run(way)
        before = run.go_on(AT)
        run.save(Path(os.environ[FOLDER]) / f"{way}_on_{ranks()}")
        found[way] = {"before": before, **run.results(STEPS)}
    return found


def resumed(saved_on: int) -> Any:
    """Load the saved runs on as many ranks as there are; return how they go on."""
    found = {}
    for way in WAYS:
        torch._dynamo.reset()
        run = Run(way)
        run.load(Path(os.environ[FOLDER]) / f"{way}_on_{saved_on}")
        found[way] = run.results(STEPS)
    return found


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@before_launch(2)
@functools.cache
def saved_on_one() -> Any:
    with warnings.catch_warnings():  # as in `pytestmark`, for tests of other files that start the ranks
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        return saved()


@on_ranks(2)
def saved_on_two() -> Any:
    return saved()


@on_ranks(2)
def resumed_on_two() -> Any:
    return resumed(saved_on=1)


@pytest.fixture
def folder(on_one: Any) -> Path:
    return Path(os.environ[FOLDER])


@pytest.fixture
def on_one() -> Any:
    """Return what one process has saved, before ranks are started that go on with it."""
    return saved_on_one()


def goes_on_alike(run: dict[str, Any], reference: dict[str, Any]) -> None:
    """Check that the FP8 state is the saved one, to the bit, and losses are close: their sums differ in order, as in
    `test_ddp.like_alone`.
    """
    assert run["at"] == reference["at"] == AT
    assert run["state"].keys() == reference["state"].keys() and len(run["state"]) == 2 * 3 * 3 + 2
    for key, value in reference["state"].items():
        assert torch.equal(run["state"][key], value), key
    torch.testing.assert_close(run["losses"][0], reference["losses"][0], rtol=1e-5, atol=0)
    torch.testing.assert_close(run["losses"], reference["losses"], rtol=3e-3, atol=0)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_of_one_process_goes_on_on_two_ranks(way: str, on_one: Any) -> None:
    first, second = resumed_on_two()
    goes_on_alike(first[way], on_one[way])
    assert first[way]["losses"] == second[way]["losses"]


def test_a_run_on_two_ranks_goes_on_in_one_process(on_one: Any) -> None:
    first, _ = saved_on_two()
    for way, run in resumed(saved_on=2).items():
        goes_on_alike(run, first[way])


@pytest.mark.parametrize("way", WAYS)
def test_the_losses_fall(way: str, on_one: Any) -> None:
    """They fall by much more than runs may differ; otherwise `goes_on_alike` would say little."""
    for run in (*saved_on_two(), on_one):
        losses = run[way]["before"] + run[way]["losses"]
        assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("way", WAYS)
def test_the_state_is_written_once(way: str, folder: Path, on_one: Any) -> None:
    """Two ranks have the same plain tensors; their files hold one copy of them, and nothing else."""
    first, second = (rank[way]["state"] for rank in saved_on_two())
    metadata = FileSystemReader(folder / f"{way}_on_2").read_metadata()
    sizes = {k.removeprefix("fp8."): v for k, v in metadata.state_dict_metadata.items() if k.startswith("fp8.")}
    assert sizes.keys() == first.keys() == second.keys()
    for key, size in sizes.items():
        assert isinstance(size, TensorStorageMetadata)
        assert len(size.chunks) == 1 and size.size == first[key].shape, key
        assert torch.equal(first[key], second[key]), key
    files = {file.name: file.stat().st_size for file in (folder / f"{way}_on_2").glob("*.distcp")}
    written = dict.fromkeys(files, 0)
    for place in metadata.storage_data.values():
        written[place.relative_path] += place.length
    assert files == written and len(files) == 2


def test_a_checkpoint_without_the_state_is_an_error(folder: Path, on_one: Any) -> None:
    metadata = FileSystemReader(folder / "ddp_on_1").read_metadata()
    with pytest.raises(fp8pass.Fp8Error, match=r"has no FP8 state under 'app\.fp8'; pass the key"):
        fp8pass.state(Block()).as_saved(metadata, key="app.fp8")


def test_histories_may_have_another_length(folder: Path, on_one: Any) -> None:
    """The model may have been called before: the tensors that are filled have the sizes that were saved."""
    model = nn.Sequential(Block())
    options = OPTIONS | {"recipe": DelayedScaling(amax_history_len=2)}
    run = torch.compile(model, backend="fp8pass", options=options)
    run(torch.randn(BATCH, 16, 32)).sum().backward()
    reader = FileSystemReader(folder / "ddp_on_1")
    load({"fp8": fp8pass.state(model).as_saved(reader.read_metadata(), strict=False)}, storage_reader=reader)
    key = "0.down.weight.amax_history"
    assert torch.equal(fp8pass.state(model).state_dict()[key], on_one["ddp"]["state"][key][:2])
