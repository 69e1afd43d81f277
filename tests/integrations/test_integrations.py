"""Test what training loops of frameworks get: refused flags, steps of several microbatches, states, and figures in logs.

tests/integrations/test_trainers.py runs them on two ranks.
"""

from __future__ import annotations

import importlib
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
from fp8pass.graph.verdict import Gemm
from fp8pass.report.report import Timing
from fp8pass.states import steps as steps_module
from tests.helpers.harness import verdicts

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what the frameworks' own imports warn of
    from accelerate import Accelerator
    from accelerate.commands.launch import launch_command_parser
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
    from accelerate.state import AcceleratorState
    from accelerate.utils import DynamoBackend, TorchDynamoPlugin
    from lightning.fabric import Fabric
    from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PrinterCallback,
        Trainer,
        TrainerControl,
        TrainerState,
        TrainingArguments,
        set_seed,
    )

    from fp8pass.integrations import lightning as for_lightning
    from fp8pass.integrations import transformers as for_transformers
    from fp8pass.integrations.accelerate import Accumulation, Fp8Plugin, accept_backend, check
    from fp8pass.integrations.checks import check_autocast, importing
    from fp8pass.integrations.figures import Figures

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::SyntaxWarning"),
]  # from other packages


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


def test_accelerates_environment_and_not_its_launcher_takes_the_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/launch.md says this; if the launcher takes it one day, say so there."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "fp8pass")
    assert TorchDynamoPlugin().to_kwargs()["backend"] == "fp8pass"
    with pytest.raises(SystemExit):
        launch_command_parser().parse_args(["--dynamo_backend", "fp8pass", "script.py"])
    assert "invalid choice: 'fp8pass'" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(torch.compiler, "set_default_backend"), reason="torch has no default backend yet")
def test_the_default_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8PASS_LOWERING", "eager")
    torch.compiler.set_default_backend("fp8pass")
    try:
        model = Layer()
        model.compile()
        with verdicts() as report:
            model(torch.randn(16, 32)).sum().backward()
    finally:
        torch.compiler.set_default_backend(None)
    assert len(report.rewritten) == 2


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
    assert state.steps == 4 and steps_module._accumulations
    del microbatch  # within a step: it ends with the loop that opened it
    assert not steps_module._accumulations


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


def test_the_plugin_checks_accelerates_flags_when_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = Fp8Plugin()
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    assert plugin.to_kwargs()["backend"] == "fp8pass"
    monkeypatch.setitem(AcceleratorState._shared_state, "_mixed_precision", "fp8")
    with pytest.raises(Fp8Error, match='write mixed_precision="bf16"'):
        accelerator.prepare(Layer())
    monkeypatch.setitem(AcceleratorState._shared_state, "_mixed_precision", "fp16")
    with pytest.raises(Fp8Error, match='mixed_precision="fp16" computes in float16'):
        Accumulation(accelerator, Layer().bfloat16())


class Layers(nn.Module):
    """A model with layers that Accelerate compiles one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)[..., :32]
        return x


@pytest.mark.parametrize("hooked", [False, True])
def test_a_hook_that_calls_what_is_not_compiled(hooked: bool) -> None:
    """accelerate#4253: a hook on a model whose regions are compiled calls the layers that are not, without a word."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, dynamo_plugin=Fp8Plugin({"lowering": "eager"}, use_regional_compilation=True))
    model = Layers()
    if hooked:
        add_hook_to_module(model, ModelHook())
    prepared = accelerator.prepare(model)
    if hooked:
        with pytest.raises(Fp8Error, match="on Layers calls the module as it was before its regions were compiled"):
            check(accelerator, prepared)
        prepared = accelerator.prepare(remove_hook_from_module(model))
    check(accelerator, prepared)
    with verdicts() as report:
        accelerator.backward(prepared(torch.randn(16, 32)).sum())
    assert report.rewritten


def test_autocast_and_parameters_of_two_types_of_16_bits() -> None:
    mixed = Layer()
    mixed.linear.bias = nn.Parameter(mixed.linear.bias.half())
    for model, dtype in [(Layer(), torch.float16), (Layer().half(), torch.float16), (Layer().half(), None)]:
        check_autocast(model, dtype, "a flag")
    for model in Layer().half(), mixed:
        with pytest.raises(Fp8Error, match=r"float16, linear\.\w+ first.*Load the model in float32, or drop bf16"):
            check_autocast(model, torch.bfloat16, "bf16")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_each_framework_checks_autocast(precision: str, tmp_path: Path) -> None:
    model = Layer().half() if precision == "bf16" else Layer().bfloat16()
    plugin = SimpleNamespace(precision={"bf16": "bf16-mixed", "fp16": "16-mixed"}[precision])
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(precision_plugin=plugin))
    with pytest.raises(Fp8Error, match=f'precision="{plugin.precision}" computes in'):
        for_lightning.check(trainer, model)
    arguments = arguments_in(tmp_path)
    AcceleratorState._shared_state["_mixed_precision"] = precision
    with pytest.raises(Fp8Error, match=f'mixed_precision="{precision}" computes in'):
        for_transformers.check_arguments(arguments, model)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_the_trainers_dataparallel_is_refused(tmp_path: Path) -> None:
    arguments = arguments_in(tmp_path)
    arguments._n_gpu = 2
    with pytest.raises(Fp8Error, match=r"nn\.DataParallel.*torchrun --nproc-per-node=gpu"):
        for_transformers.check_arguments(arguments)


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


def test_lightnings_own_fp8_and_deepspeed_are_refused() -> None:
    module: Any = Layer()
    strategy = SimpleNamespace(precision_plugin=SimpleNamespace(precision="transformer-engine-float16"))
    trainer: Any = SimpleNamespace(strategy=strategy)
    with pytest.raises(Fp8Error, match='write precision="bf16-mixed", or drop fp8pass'):
        for_lightning.Fp8Callback().on_fit_start(trainer, module)
    trainer.strategy = DeepSpeedStrategy.__new__(DeepSpeedStrategy)
    trainer.strategy.precision_plugin = SimpleNamespace(precision="bf16-mixed")
    with pytest.raises(Fp8Error, match="use DDP or FSDP2 with fp8pass"):
        for_lightning.check(trainer)


def test_fabric_trains_by_hand_and_resumes(tmp_path: Path) -> None:
    """As docs/lightning.md does it; tests/integrations/test_trainers.py compares to the bit."""
    states = []
    for resumed in (False, True):
        fabric, network = Fabric(accelerator="cpu", devices=1), Layer()
        for_lightning.check(fabric, network)
        network.compile(backend="fp8pass", options={"lowering": "eager"})
        model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.1))
        state = fp8pass.state(network)
        saved: dict[str, Any] = {"model": model, "optimizer": optimizer, "fp8": {}}
        if resumed:
            fabric.load(tmp_path / "checkpoint", saved)
            state.load_state_dict(saved["fp8"])
        else:
            with fp8pass.accumulate(model):
                for is_first in (True, False):
                    with fabric.no_backward_sync(model, enabled=is_first):
                        fabric.backward(model(torch.randn(16, 32)).sum())
            fabric.save(tmp_path / "checkpoint", {**saved, "fp8": state.state_dict()})
        states.append(state.state_dict())
        assert state.steps == 1
    before, after = states
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert "linear.weight.scale" in after


def test_figures_of_a_monitored_model() -> None:
    model, figures = Layer(), Figures()
    model.compile(backend="fp8pass", options={"lowering": "eager", "monitor": True})
    figures.begin(model)
    for scale in (1, 1000):  # the second saturates: its scale is that of the first
        model(scale * torch.randn(16, 32)).sum().backward()
    found = figures.read()
    figures.end()
    assert found["fp8_share"] == 1 and found["fp8_saturation"] > 0.5 and 0 <= found["fp8_underflow"] < 0.5
    assert 2 < found["fp8_kurtosis"] < 4  # of random numbers with a normal distribution


def test_there_is_no_share_of_graphs_without_verdicts() -> None:
    figures = Figures()
    figures.begin(Layer())
    assert figures.read() == {}
    figures.report.gemms.append(Gemm("output", "a", 16, 16, 16, ("e4m3", "e4m3", "f32"), "a.py:1", status="rewritten"))
    figures.report.timings += [Timing("graph 0", passes=0.1), Timing("graph 1")]
    with pytest.warns(UserWarning, match="no fp8_share, as torch's caches had 1 of 2 graphs"):
        assert figures.read() == {}
    del figures.report.timings[1]
    assert figures.read() == {"fp8_share": 1}
    figures.end()


def test_lightning_logs_the_figures_after_a_step() -> None:
    logged: list[dict[str, float]] = []
    module: Any = compiled()
    module.log_dict = logged.append
    trainer: Any = SimpleNamespace(global_step=4, log_every_n_steps=2)
    callback = for_lightning.Fp8Callback()
    callback.on_train_start(trainer, module)
    callback.on_train_batch_start(trainer, module, None, 0)
    callback.on_train_batch_end(trainer, module, None, None, 0)  # of two batches
    callback.on_before_optimizer_step(trainer, module, None)
    callback.on_train_batch_end(trainer, module, None, None, 1)
    trainer.global_step = 5
    callback.on_train_batch_end(trainer, module, None, None, 2)
    callback.on_train_end(trainer, module)
    assert logged == [{}]


def test_a_framework_that_lacks_a_name() -> None:
    said = r"'Nothing'.*tested with accelerate 9\.9, and 1\.15\.0 is.*accelerate==9\.9\.\*"
    with pytest.raises(ImportError, match=said), importing("accelerate", "9.9"):
        from accelerate import Nothing  # noqa: F401
    with pytest.raises(ImportError, match="none is installed"), importing("no_such_framework", "1"):
        importlib.import_module("no_such_framework")


@pytest.mark.variant
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_trainer_with_gradient_checkpointing(
    reentrant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variant of the example for transformers. Weights and states are those of training without checkpointing."""
    monkeypatch.setenv("FP8PASS_LOWERING", "eager")
    plain = trained_llama(tmp_path / "plain")
    flags = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    whole = trained_llama(tmp_path / "whole", **flags)
    resumed = trained_llama(tmp_path / "whole", tmp_path / "whole/checkpoint-1", **flags)
    assert whole.log_of_first["fp8_share"] == 1 and whole.recomputed > plain.recomputed == 0
    for run in whole, resumed:
        assert run.tensors.keys() == plain.tensors.keys()
        assert all(torch.equal(run.tensors[name], x) for name, x in plain.tensors.items())


def trained_llama(folder: Path, checkpoint: Path | None = None, **flags: Any) -> Any:
    """Train for two steps of two microbatches, with a checkpoint after the first; return weights and FP8 state."""
    torch._dynamo.reset()
    set_seed(0)
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(32 * 16).remainder(97).view(32, 16)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers renames gradient_checkpointing
        arguments = TrainingArguments(
            str(folder), max_steps=2, gradient_accumulation_steps=2, save_steps=1, logging_steps=1, report_to=[],
            per_device_train_batch_size=4, disable_tqdm=True, use_cpu=True, torch_compile_backend="fp8pass", **flags,
        )  # fmt: skip
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
            )
        )
        callback = for_transformers.Fp8Callback()
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[callback])
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    tensors = {**fp8pass.state(model).state_dict(), **{name: p.detach() for name, p in model.named_parameters()}}
    recomputed = sum(gemm.recomputed for gemm in callback.figures.report.gemms)
    return SimpleNamespace(tensors=tensors, log_of_first=trainer.state.log_history[0], recomputed=recomputed)
