"""Test what torchtitan's Trainer gets: options, refused configs, and the state in its checkpoints.

torchtitan is not among the packages that tests install, for it requires 270 MB of others. `tests/integrations/test_torchtitan.py`
trains with it.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import fp8pass
from fp8pass import Fp8Error
from tests.helpers.torchrun import run

pytest.importorskip("torchtitan")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torchtitan's own imports warn of
    from tests.helpers.titan_runs import llama, on_cpu, parsed  # first: it makes torchtitan take the CPU

    # isort: split
    from torchtitan.components.checkpointer import BaseCheckpointManager
    from torchtitan.components.quantization import Float8LinearConverter
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    from fp8pass.integrations.torchtitan import KEY, Fp8CheckpointManager, Fp8Options, check, compiling, in_fp8


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")
def test_options_come_from_the_config_and_its_command_line() -> None:
    config = parsed("--fp8.recipe", "rowwise", "--fp8.strict", "true", "--fp8.filter", "lm_head,layers.0").fp8.config()
    assert isinstance(config.recipe, fp8pass.recipes.RowwiseScaling)
    assert (config.strict, config.filter, config.lowering) == (True, ("lm_head", "layers.0"), "eager")
    recipe = fp8pass.recipes.DelayedScaling(amax_history_len=4)
    given = in_fp8(on_cpu(), recipe=recipe, filter=lambda name, m, k, n: m > 8)
    assert given.fp8.config().recipe is recipe and callable(given.fp8.config().filter)
    assert json.dumps(given.to_dict()["fp8"]).startswith('{"recipe": "DelayedScaling(')


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")
def test_options_are_checked_and_have_the_defaults_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="did you mean 'recipe'"):
        in_fp8(on_cpu(), recipy="rowwise")
    with pytest.raises(ValueError, match="did you mean 'delayed'"):
        in_fp8(on_cpu(), recipe="delaid")
    monkeypatch.setenv("FP8PASS_RECIPE", "dynamic")
    assert isinstance(Fp8Options().config().recipe, fp8pass.recipes.DynamicScaling)


def off(config: Any) -> None:
    config.compile.enable = False


def loss_only(config: Any) -> None:
    config.compile.components = ["loss"]


def other_backend(config: Any) -> None:
    config.compile.backend = "aot_eager"


def own_fp8(config: Any) -> None:
    converters = [Float8LinearConverter.Config(emulate=True)]
    config.model_spec = model_registry("debugmodel", converters=converters)


def cuda_graphs(config: Any) -> None:
    config.training.disable_cuda_graphs = False


def other_manager(config: Any) -> None:
    config.checkpoint = BaseCheckpointManager.Config(enable=True)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (off, "set --compile.enable, with 'model' in --compile.components"),
        (loss_only, "set --compile.enable, with 'model' in --compile.components"),
        (other_backend, "leave --compile.backend out"),
        (own_fp8, "leave the converter out of model_registry"),
        (cuda_graphs, "set --training.disable_cuda_graphs, or a recipe without state"),
        (other_manager, r"write checkpoint=CheckpointManager.Config\(...\)"),
    ],
)
def test_refused_configs(change: Callable[[Any], None], said: str) -> None:
    config = llama()
    check(config)
    change(config)
    with pytest.raises(Fp8Error, match=said):
        check(config)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")
def test_a_model_of_which_torchtitan_compiles_nothing() -> None:
    model, single = nn.Linear(16, 16), SimpleNamespace(pp_enabled=False)
    parallelize = compiling(lambda model, parallel_dims: model, Fp8Options())
    with pytest.raises(Fp8Error, match="torchtitan compiles no module of a Linear: train it without in_fp8"):
        parallelize(model, parallel_dims=single)
    model.compile()
    assert parallelize(model, parallel_dims=single) is model


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")
def test_without_state_cuda_graphs_and_other_managers_are_allowed() -> None:
    config = in_fp8(on_cpu(), recipe="rowwise")
    cuda_graphs(config)
    other_manager(config)
    check(config)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")
def test_the_config_of_another_trainer() -> None:
    class OtherTrainer(Trainer):  # type: ignore[misc]  # torchtitan has no types
        @dataclass(kw_only=True, slots=True)
        class Config(Trainer.Config):  # type: ignore[misc]
            pass

    with pytest.raises(Fp8Error, match=r"not a .*OtherTrainer.Config, whose trainer runs its steps in another way"):
        in_fp8(OtherTrainer.Config())


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).relu()


def part(*layers: int) -> Any:
    """Return a stage of a pipeline that has these layers of the whole model, compiled one by one."""
    module = nn.Module()
    module.layers = nn.ModuleDict({str(index): Layer() for index in layers})
    for layer in module.layers.values():
        layer.compile(backend="fp8pass", options={"lowering": "eager"})
    return module


def trained(module: Any, steps: int = 2) -> Any:
    for step in range(steps):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        for layer in module.layers.values():
            x = layer(x)
        x.sum().backward()
    return module


def manager(folder: Path, *parts: nn.Module) -> Fp8CheckpointManager:
    given: dict[str, Any] = {"dataloader": None, "optimizers": None, "lr_schedulers": None, "sd_adapter": None}
    config = Fp8CheckpointManager.Config(enable=True, keep_latest_k=0, interval=1)
    manager = config.build(model_parts=list(parts), states={}, base_folder=str(folder), **given)
    for name in ("optimizer", "dataloader", "lr_scheduler"):
        del manager.states[name]
    return manager


def state_of(*parts: nn.Module) -> dict[str, torch.Tensor]:
    return {name: x for part in parts for name, x in fp8pass.state(part).state_dict().items()}


def are_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")
def test_the_state_of_all_parts_is_saved_and_restored_in_other_parts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, second = trained(part(0, 1)), trained(part(2, 3))
    manager(tmp_path, first, second).save(1)
    saved = state_of(first, second)
    assert {name.split(".")[1] for name in saved if "." in name} == {"0", "1", "2", "3"}
    whole, other = part(0, 1, 2, 3), part(1, 2)
    for parts in ([whole], [other, part(3), part(0)]):
        assert manager(tmp_path, *parts).load()
        assert are_equal(state_of(*parts), saved)
    trained(whole, 1)
    assert fp8pass.state(whole).steps == 3
    weight = first.layers["0"].up.weight
    assert torch.equal(whole.layers["0"].up.weight, weight) and fp8pass.state(other).steps == 2


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_without_a_state_begins_anew_with_a_warning(tmp_path: Path) -> None:
    torch.manual_seed(0)
    of_other_run = manager(tmp_path, part(0))
    del of_other_run.states[KEY]
    of_other_run.save(1)
    fresh = part(0)
    with pytest.warns(UserWarning, match="step-1 has no FP8 state, as it was saved without in_fp8"):
        assert manager(tmp_path, fresh).load()
    assert state_of(fresh) == {}
    excluded = manager(tmp_path, part(0))
    excluded.exclude_from_loading = [KEY]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "torch.distributed")
        assert excluded.load()


LAYOUTS = {
    "one": (1, "--training.global_batch_size=4"),
    "fsdp": (2, "--training.global_batch_size=8"),
    "ddp": (2, "--parallelism.data_parallel_shard_degree=1", "--parallelism.data_parallel_replicate_degree=2"),
    "tensor": (2, "--parallelism.tensor_parallel_degree=2", "--training.global_batch_size=4"),
    "pipeline": (2, "--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=1F1B"),
}
"""The number of ranks, and torchtitan's flags. Steps have two microbatches where a flag says how many sequences."""


def saved(folder: Path) -> dict[str, Any]:
    """Return all that a checkpoint holds, but the position in the data, by name."""
    dcp_to_torch_save(folder, folder / "all.pt")
    tree = torch.load(folder / "all.pt", weights_only=False)
    tree.pop("dataloader")
    found = {}
    for name, value in tree.items():
        found.update({f"{name}.{key}": x for key, x in value.items()} if isinstance(value, dict) else {name: value})
    return found


def is_equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.ranks
@pytest.mark.variant
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_is_equal_to_the_bit(layout: str, tmp_path: Path) -> None:
    ranks, *flags = LAYOUTS[layout]
    if ranks > 1 and not hasattr(dist, "set_timeout"):
        pytest.skip("torchtitan 0.3 on several ranks needs a torch newer than 2.13")
    command = ("-m", "tests.helpers.titan_runs", str(tmp_path), *flags)
    done = run(ranks, *command)
    assert done.returncode == 0, done.stderr[-4000:]
    whole = saved(tmp_path / "checkpoint" / "step-4")
    shutil.rmtree(tmp_path / "checkpoint" / "step-4")
    done = run(ranks, *command, "--checkpoint.load_step=2")
    assert done.returncode == 0, done.stderr[-4000:]
    resumed = saved(tmp_path / "checkpoint" / "step-4")
    assert whole["fp8.steps"] == 4  # whatever the number of microbatches
    assert sum(name.startswith("fp8.layers") for name in whole) == 84
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if not is_equal(whole[name], resumed[name])] == []
