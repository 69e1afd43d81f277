"""Test the loops of Accelerate, transformers and Lightning on two ranks, and the scripts that launchers start."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import fp8pass
from tests.helpers.harness import verdicts
from tests.helpers.models import Block, make
from tests.helpers.torchrun import collectives, on_ranks, run

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what the framework's own imports warn of
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from transformers import Trainer, TrainingArguments

    from fp8pass.integrations.accelerate import Accumulation, Fp8Plugin

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::SyntaxWarning"),
]  # from other packages
OPTIONS = {"recipe": "delayed", "lowering": "eager"}
STEPS, SAVED = 4, 2
"""Steps of two microbatches each, and the step after which the first run saves a checkpoint."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16, 24) for _ in range(2))
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def data() -> Tensor:
    """Return 2 ranks' microbatches of 4 rows."""
    return torch.randn(2 * STEPS * 2 * 4, 16, generator=torch.Generator().manual_seed(1))


def loss_of(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - x.flip(1)).square().mean()
    return loss


def found(model: nn.Module, steps: Sequence[int], **more: Any) -> dict[str, Any]:
    """Return what two runs, and two ranks, must have in common."""
    weights = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }
    return {"state": fp8pass.state(model).state_dict(), "weights": weights, "steps": list(steps), **more}


def same(first: dict[str, Any], second: dict[str, Any]) -> None:
    for part in "state", "weights":
        assert first[part].keys() == second[part].keys() and first[part]
        for key, value in first[part].items():
            assert torch.equal(value, second[part][key]), key


def resumes(runs: Sequence[dict[str, dict[str, Any]]]) -> None:
    """Check that on each rank a resumed run ends as the whole one does, and on all ranks alike."""
    for of_rank in runs:
        same(of_rank["whole"], of_rank["resumed"])
        same(of_rank["whole"], runs[0]["whole"])
        assert of_rank["resumed"]["steps"] == list(range(SAVED + 1, STEPS + 1))
        assert of_rank["whole"]["steps"] == list(range(1, STEPS + 1))


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """Make a folder that all ranks use, and remove it when all have left."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    try:
        yield folder[0]
    finally:
        dist.barrier()
        shutil.rmtree(folder[0], ignore_errors=True)


def with_accelerate(folder: str, regional: bool, resume: bool) -> dict[str, Any]:
    """Train by Accelerate under DDP; save after step SAVED, or resume there."""
    torch._dynamo.reset()
    plugin = Fp8Plugin(OPTIONS, use_regional_compilation=regional)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dynamo_plugin=plugin)
    network = make(Model)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(network, optimizer, DataLoader(data(), batch_size=4))
    state = fp8pass.state(network)
    accelerator.register_for_checkpointing(state)
    microbatch, steps, counts = Accumulation(accelerator, model), [], []
    if resume:
        accelerator.load_state(folder)
        loader = accelerator.skip_first_batches(loader, 2 * SAVED)
    with verdicts() as report:
        for x in loader:
            before = collectives()
            with microbatch:
                accelerator.backward(loss_of(model, x))
                optimizer.step()
                optimizer.zero_grad()
            counts.append(collectives() - before)
            if accelerator.sync_gradients:
                steps.append(state.steps)
                if state.steps == SAVED and not resume:
                    accelerator.save_state(folder)
    parts = sum(type(part).__name__ == "OptimizedModule" for part in model.modules())
    return found(network, steps, counts=counts, parts=parts, declined=len(report.declined))


def whole_and_resumed(regional: bool) -> dict[str, dict[str, Any]]:
    with shared_folder() as folder:
        return {name: with_accelerate(folder, regional, name == "resumed") for name in ("whole", "resumed")}


class WithLoss(Model):
    """The model as transformers' Trainer takes it: its forward names the columns, and returns the loss."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return {"loss": (super().forward(x) - x.flip(1)).square().mean()}


@on_ranks(2)
def given_a_compiled_model() -> Any:
    """Train by the Trainer a model that is compiled in place, and the module that `torch.compile` returns."""
    results = {}
    rows = [{"x": x, "other": torch.zeros(())} for x in data()]
    for how in ("in place", "returned"):
        with shared_folder() as folder:
            model = make(WithLoss)
            if how == "in place":
                model.compile(backend="fp8pass", options=OPTIONS)
            given = model if how == "in place" else torch.compile(model, backend="fp8pass", options=OPTIONS)
            arguments = TrainingArguments(
                folder, max_steps=STEPS, per_device_train_batch_size=4, use_cpu=True, report_to=[], save_strategy="no",
                disable_tqdm=True, logging_strategy="no",
            )  # fmt: skip
            trainer = Trainer(given, arguments, train_dataset=rows)
            trainer.train()
            results[how] = found(model, [], wrapper=type(trainer.model_wrapped).__name__)
    return results


@on_ranks(2, variant=True)
def accelerate_by_regions() -> Any:
    return whole_and_resumed(regional=True)


@on_ranks(2, variant=True)
def accelerate_as_a_whole() -> Any:
    return whole_and_resumed(regional=False)


@pytest.mark.variant  # training on ranks is tested every day, and so is each integration on one
@pytest.mark.parametrize(
    ("runs", "parts"), [(accelerate_by_regions, 3), (accelerate_as_a_whole, 1)], ids=["regions", "whole"]
)
def test_accelerate_under_ddp_resumes_to_the_bit(runs: Any, parts: int) -> None:
    """Regions, each compiled by itself, are the two blocks and the head."""
    resumes(runs())
    for of_rank in runs():
        run = of_rank["whole"]
        assert (run["parts"], run["declined"]) == (parts, 0)
        assert sorted({key.partition(".")[0] for key in run["state"]}) == [
            "blocks",
            "head",
            "recipe",
            "steps",
            "target",
        ]
        # under no_sync none, then DDP's bucket and the amaxes; in the second step DDP also orders its buckets anew
        assert run["counts"][4:] == [0, 2] * (STEPS - 2)


@on_ranks(2, variant=True)
def accelerate_with_fully_shard() -> Any:
    """Train a model that FSDP2 shards, which Accelerate compiles and does not wrap; resume with new objects."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    runs: dict[str, Any] = {}
    saved: Any = None
    for name in "whole", "resumed":
        torch._dynamo.reset()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dynamo_plugin=Fp8Plugin(OPTIONS))
        network = make(Model)
        for part in (*network.blocks, network):
            fully_shard(part)
        sharded = torch.optim.AdamW(network.parameters(), lr=1e-2)
        model = accelerator.prepare_model(network, device_placement=False, evaluation_mode=True)
        optimizer, loader = accelerator.prepare(sharded, DataLoader(data(), batch_size=4))
        state, microbatch, steps = fp8pass.state(network), Accumulation(accelerator, model), []
        if saved is not None:
            set_state_dict(network, sharded, model_state_dict=saved[0], optim_state_dict=saved[1])
            state.load_state_dict(saved[2])
            loader = accelerator.skip_first_batches(loader, 2 * SAVED)
        for x in loader:
            with microbatch:
                accelerator.backward(loss_of(model, x))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                steps.append(state.steps)
                if state.steps == SAVED and saved is None:
                    saved = copy.deepcopy((*get_state_dict(network, sharded), state.state_dict()))
        runs[name] = found(network, steps)
    return runs


@pytest.mark.variant
def test_accelerate_compiles_what_fully_shard_has_sharded() -> None:
    resumes(accelerate_with_fully_shard())


@on_ranks(2)
def accelerate_ignores_fsdp_on_cpus() -> Any:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    return str(accelerator.distributed_type), type(accelerator.prepare(make(Model))).__name__


def test_accelerate_makes_ddp_of_fsdp_on_cpus() -> None:
    """If this fails, Accelerate has learned FSDP2 on CPUs: then docs/accelerate.md can show it."""
    assert accelerate_ignores_fsdp_on_cpus() == [("DistributedType.MULTI_CPU", "DistributedDataParallel")] * 2


def with_transformers(folder: str, checkpoint: str | None = None, sharded: bool = False) -> dict[str, Any]:
    """Train a small Llama by the Trainer: under DDP, or sharded by transformers with FSDP2."""
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
    from transformers.distributed.configuration_utils import DistributedConfig

    from fp8pass.integrations.transformers import Fp8Callback

    steps: list[int] = []

    class Counts(TrainerCallback):
        def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
            steps.append(fp8pass.state(model).steps)

    torch._dynamo.reset()
    set_seed(0)
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(64 * 16).remainder(97).view(64, 16)]
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    arguments = TrainingArguments(
        folder, max_steps=STEPS, gradient_accumulation_steps=2, save_strategy="no" if sharded else "steps", save_steps=2,
        logging_steps=1, per_device_train_batch_size=4, report_to=[], disable_tqdm=True, use_cpu=True,
        lr_scheduler_type="constant", torch_compile_backend="fp8pass",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if sharded:
        if dist.get_rank() == 0:
            model.save_pretrained(f"{folder}/model")
        dist.barrier()
        model = LlamaForCausalLM.from_pretrained(
            f"{folder}/model", distributed_config=DistributedConfig(fsdp_size=dist.get_world_size())
        )
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[Fp8Callback(), Counts()])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=checkpoint)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return found(model, steps, logs=logs, is_sharded=isinstance(next(model.parameters()), DTensor))


@on_ranks(2, variant=True)
def trainer_under_ddp() -> Any:
    with lowered_eagerly(), shared_folder() as folder:
        return {
            name: with_transformers(folder, f"{folder}/checkpoint-{SAVED}" if name == "resumed" else None)
            for name in ("whole", "resumed")
        }


@on_ranks(2, variant=True)
def trainer_with_fsdp() -> Any:
    with lowered_eagerly(), shared_folder() as folder:
        return with_transformers(folder, sharded=True)


@contextlib.contextmanager
def lowered_eagerly() -> Iterator[None]:
    """Set options by the environment, as TrainingArguments take none for a backend."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FP8PASS_LOWERING", "eager")
        patch.setenv("FP8PASS_MONITOR", "1")
        yield


@pytest.mark.variant
def test_the_trainer_under_ddp_resumes_to_the_bit() -> None:
    runs = trainer_under_ddp()
    resumes(runs)
    for of_rank in runs:
        for log in of_rank["whole"]["logs"]:
            assert log["fp8_share"] == 1 and 0 <= log["fp8_saturation"] <= 1 and 0 <= log["fp8_underflow"] <= 1


@pytest.mark.variant
def test_the_trainer_trains_what_transformers_has_sharded() -> None:
    first, second = trainer_with_fsdp()
    same(first, second)
    assert first["is_sharded"] and first["steps"] == list(range(1, STEPS + 1))
    assert all(log["fp8_share"] == 1 for log in first["logs"])


def with_fabric(folder: str, strategy: Any, resume: bool) -> dict[str, Any]:
    """Train by Lightning's Fabric, as docs/lightning.md does it."""
    from lightning.fabric import Fabric

    from fp8pass.integrations.lightning import check

    torch._dynamo.reset()
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    check(fabric)
    network = make(Model)
    network.compile(backend="fp8pass", options=OPTIONS)
    model = fabric.setup_module(network)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    state, steps = fp8pass.state(network), []
    saved: dict[str, Any] = {"model": model, "optimizer": optimizer, "fp8": {}}
    if resume:
        fabric.load(f"{folder}/checkpoint", saved)
        state.load_state_dict(saved["fp8"])
    batches = list(fabric.setup_dataloaders(DataLoader(data(), batch_size=4)))
    for i in range(state.steps, STEPS):
        with fp8pass.accumulate(model):
            for is_first, x in zip((True, False), batches[2 * i :], strict=False):
                with fabric.no_backward_sync(model, enabled=is_first):
                    fabric.backward(loss_of(model, x))
        optimizer.step()
        optimizer.zero_grad()
        steps.append(state.steps)
        if state.steps == SAVED and not resume:
            fabric.save(f"{folder}/checkpoint", {**saved, "fp8": state.state_dict()})
    return found(network, steps, is_sharded=isinstance(next(network.parameters()), DTensor))


@on_ranks(2, variant=True)
def fabric() -> Any:
    """Train under DDP, and with FSDP2, whose loading calls `load_state_dict` of no object but model and optimizer."""
    from lightning.fabric.strategies.model_parallel import ModelParallelStrategy

    def shard(model: Any, mesh: Any) -> Any:
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh["data_parallel"])
        return model

    runs: dict[str, Any] = {}
    for name in "ddp", "fsdp":
        with shared_folder() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runs[name] = {
                of: with_fabric(folder, "ddp" if name == "ddp" else ModelParallelStrategy(shard), of == "resumed")
                for of in ("whole", "resumed")
            }
    return runs


@pytest.mark.variant
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_fabric_resumes_to_the_bit(strategy: str) -> None:
    runs = [of_rank[strategy] for of_rank in fabric()]
    resumes(runs)
    assert runs[0]["whole"]["is_sharded"] == (strategy == "fsdp")
    assert all(not key.startswith("_forward_module") for key in runs[0]["whole"]["state"])


@on_ranks(2, variant=True)
def lightning_trainer() -> Any:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from fp8pass.integrations.lightning import Fp8Callback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = make(Model)
            self.network.compile(backend="fp8pass", options={**OPTIONS, "monitor": True})
            self.steps: list[int] = []

        def training_step(self, x: Tensor, index: int) -> Tensor:
            return loss_of(self.network, x)

        def on_before_zero_grad(self, _: Any) -> None:
            self.steps.append(fp8pass.state(self).steps)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    runs: dict[str, Any] = {}
    with shared_folder() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in "whole", "resumed":
            torch._dynamo.reset()
            module = Module()
            saving = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
            trainer = lightning.Trainer(
                max_epochs=2, accumulate_grad_batches=2, callbacks=[saving, Fp8Callback()], accelerator="cpu",
                devices=2, strategy="ddp", logger=False, log_every_n_steps=1, enable_progress_bar=False,
                enable_model_summary=False,
            )  # fmt: skip
            loader: DataLoader[Any] = DataLoader(
                data()[: len(data()) // 2], batch_size=4
            )  # SAVED steps, for Lightning resumes epochs
            trainer.fit(module, loader, ckpt_path=f"{folder}/epoch=0.ckpt" if name == "resumed" else None)
            runs[name] = found(module, sorted(set(module.steps) - {0}), logged=dict(trainer.callback_metrics))
    return runs


@pytest.mark.variant
def test_lightnings_trainer_under_ddp_resumes_to_the_bit() -> None:
    for of_rank in (runs := lightning_trainer()):
        for name in "whole", "resumed":
            assert of_rank[name]["logged"]["fp8_share"] == 1
            assert 0 <= of_rank[name]["logged"]["fp8_saturation"] <= 1
        same(of_rank["whole"], of_rank["resumed"])
        same(of_rank["whole"], runs[0]["whole"])
        assert max(of_rank["whole"]["steps"]) == STEPS


PLAIN = """
import torch
import torch.distributed as dist
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 32)

    def forward(self, x):
        return self.down(self.up(x).relu())

dist.init_process_group("gloo")
compiled = torch.compile(nn.parallel.DistributedDataParallel(Model()), backend="fp8pass")
compiled(torch.randn(32, 64)).square().mean().backward()
dist.destroy_process_group()
"""
ACCELERATE_LAUNCH = (
    "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no",
    "--dynamo_backend=no",
)  # fmt: skip
"""`accelerate launch` starts several processes without MPI only with --multi_gpu, which starts torchrun."""


@pytest.mark.variant
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate launch"])
def test_the_environment_chooses_the_recipe_of_a_plain_script(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    environment = {"FP8PASS_RECIPE": "rowwise", "FP8PASS_LOWERING": "eager", "FP8PASS_DUMP": str(tmp_path / "dump")}
    if launcher == "torchrun":
        done = run(2, str(script), **environment)
    else:
        from tests.helpers.torchrun import _python

        done = _python(
            *ACCELERATE_LAUNCH, f"--main_process_port={29500 + os.getpid() % 1000}", str(script), **environment
        )
    assert done.returncode == 0, done.stderr
    reports = [file.read_text() for file in (tmp_path / "dump").rglob("report*")]
    assert len(reports) == 2
    for report in reports:
        assert report.count("rowwise") == 5 and "5 of 5 matmuls in FP8" in report


def test_the_trainer_trains_what_torch_compile_returns() -> None:
    """It gives it the columns that the model's forward names, and DDP, without an import of fp8pass."""
    first, second = given_a_compiled_model()
    for run_of_rank in (first, second):
        same(run_of_rank["returned"], first["in place"])
        assert run_of_rank["returned"]["wrapper"] == "DistributedDataParallel"
