"""Test what training loops of frameworks get: refused flags, steps of several microbatches, and the state in checkpoints."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fp8pass
from fp8pass import Fp8Error

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what the frameworks' own imports warn of
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DynamoBackend, TorchDynamoPlugin
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from fp8pass.integrations import lightning as for_lightning
    from fp8pass.integrations import transformers as for_transformers
    from fp8pass.integrations.accelerate import Accumulation, Fp8Plugin, accept_backend, check
    from fp8pass.integrations.step import OpenStep

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::SyntaxWarning")  # from other packages


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def arguments_in(folder: Path) -> TrainingArguments:
    """Return a Trainer's arguments, with Accelerate set up as the Trainer sets it up after them."""
    arguments = TrainingArguments(str(folder), use_cpu=True, report_to=[])
    AcceleratorState._reset_state(reset_partial_state=True)
    Accelerator(cpu=True)
    return arguments


def compiled() -> Layer:
    """Return a layer that has been trained for a step."""
    torch.manual_seed(0)
    model = Layer()
    model.compile(backend="fp8pass", options={"lowering": "eager"})
    model(torch.randn(16, 32)).sum().backward()
    return model


def test_accelerate_takes_the_name_of_the_backend() -> None:
    accept_backend()
    accept_backend()
    assert TorchDynamoPlugin(backend="fp8pass").to_kwargs()["backend"] == "fp8pass"
    assert DynamoBackend("INDUCTOR") is DynamoBackend.INDUCTOR
    with pytest.raises(ValueError, match="'FP9PASS' is not a valid DynamoBackend"):
        TorchDynamoPlugin(backend="fp9pass")


def test_the_plugin_checks_options() -> None:
    with pytest.raises(ValueError, match="recipe"):
        Fp8Plugin({"recipe": "delaid"})
    given = Fp8Plugin({"recipe": "rowwise"}, use_regional_compilation=True)
    assert given.use_regional_compilation
    assert given.to_kwargs() == {"backend": "fp8pass", "options": {"recipe": "rowwise"}}


def test_microbatches_of_accelerate_are_one_step() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = compiled()
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    microbatch, state = Accumulation(accelerator, model), fp8pass.state(model)
    steps = []
    for _ in range(6):
        with microbatch:
            accelerator.backward(model(torch.randn(16, 32)).sum())
            optimizer.step()
        steps.append(state.steps)
    assert steps == [2, 2, 2, 3, 3, 3]
    with pytest.raises(RuntimeError, match="planted"), microbatch:
        raise RuntimeError("planted")
    with microbatch:
        model(torch.randn(16, 32)).sum().backward()
    assert state.steps == 4


@pytest.mark.parametrize(
    ("accelerator", "said"),
    [
        ({"mixed_precision": "fp8", "distributed_type": "NO"}, 'write mixed_precision="bf16", or drop fp8pass'),
        ({"mixed_precision": "bf16", "distributed_type": "DEEPSPEED"}, "use DDP or FSDP2 with fp8pass"),
    ],
)
def test_accelerate_may_not_do_the_same(accelerator: dict[str, str], said: str) -> None:
    with pytest.raises(Fp8Error, match=said):
        check(SimpleNamespace(**accelerator))


@pytest.mark.parametrize("name", ["bf16_full_eval", "fp16_full_eval"])
def test_the_trainers_arguments_that_convert_parameters(name: str, tmp_path: Path) -> None:
    arguments = arguments_in(tmp_path)
    setattr(arguments, name, True)
    with pytest.raises(Fp8Error, match=f"drop {name}"):
        for_transformers.check_arguments(arguments)


def test_the_trainers_checkpoint_is_json_and_restores_the_state(tmp_path: Path) -> None:
    arguments = arguments_in(tmp_path)
    model, control = compiled(), TrainerControl()
    trained = for_transformers.Fp8Callback()
    trained.on_train_begin(arguments, TrainerState(), control, model=model)
    saved = json.loads(json.dumps({"Fp8Callback": trained.state()}))
    trained.on_train_end(arguments, TrainerState(), control)
    fresh, resumed = Layer(), for_transformers.Fp8Callback()
    resumed.on_train_begin(arguments, TrainerState(global_step=1, stateful_callbacks=saved), control, model=fresh)
    resumed.on_train_end(arguments, TrainerState(), control)
    before, after = (fp8pass.state(m).state_dict() for m in (model, fresh))
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize("framework", ["transformers", "lightning"])
def test_a_checkpoint_without_a_state_begins_anew_with_a_warning(framework: str, tmp_path: Path) -> None:
    model: Any = Layer()

    def resume() -> None:
        if framework == "lightning":
            for_lightning.Fp8Callback().on_load_checkpoint(SimpleNamespace(), model, {})
            return
        arguments = arguments_in(tmp_path)
        callback = for_transformers.Fp8Callback()
        callback.on_train_begin(arguments, TrainerState(global_step=7), TrainerControl(), model=model)
        callback.on_train_end(arguments, TrainerState(), TrainerControl())

    with pytest.warns(UserWarning, match="has no FP8 state"):
        resume()


def test_lightnings_checkpoint_holds_the_state() -> None:
    model: Any = compiled()
    checkpoint: dict[str, Any] = {}
    for_lightning.Fp8Callback().on_save_checkpoint(SimpleNamespace(), model, checkpoint)
    fresh: Any = Layer()
    for_lightning.Fp8Callback().on_load_checkpoint(SimpleNamespace(), fresh, checkpoint)
    assert fp8pass.state(fresh).steps == fp8pass.state(model).steps == 1


def test_lightnings_own_fp8_is_refused() -> None:
    with pytest.raises(Fp8Error, match='write precision="bf16-mixed", or drop fp8pass'):
        for_lightning.Fp8Callback().on_fit_start(SimpleNamespace(precision="transformer-engine"), SimpleNamespace())


def test_a_step_that_an_error_left_open_ends_when_another_loop_begins_one() -> None:
    model = compiled()
    left, begun = OpenStep(), OpenStep()
    left.begin(model)
    begun.begin(model)
    assert not left.is_open
    for _ in range(2):
        begun.begin(model)
        model(torch.randn(16, 32)).sum().backward()
        begun.end()
    assert fp8pass.state(model).steps == 3
