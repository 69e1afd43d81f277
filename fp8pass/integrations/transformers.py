"""Train with Hugging Face transformers: `Trainer(model, TrainingArguments(...), callbacks=[Fp8Callback()])`.

Importing this module lets `TrainingArguments(torch_compile_backend="fp8pass")` take that name.
"""

from __future__ import annotations

import base64
from typing import Any

from torch import nn

from fp8pass.base.errors import Fp8Error, warn_once
from fp8pass.integrations.accelerate import check
from fp8pass.integrations.checks import importing
from fp8pass.integrations.figures import Figures
from fp8pass.integrations.step import OpenStep
from fp8pass.states.model_state import state as state_of

with importing("transformers", "5.24"):
    from accelerate.state import AcceleratorState
    from safetensors.torch import load, save
    from transformers import TrainerCallback, TrainingArguments
    from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState

STATE = "fp8_state"
"""The attribute of the callback in a checkpoint's trainer_state.json: the state as safetensors, in base64."""


class Fp8Callback(TrainerCallback, ExportableState):
    """A callback that makes a step of delayed scaling of a step of the Trainer, saves its state, and logs.

    The microbatches of `gradient_accumulation_steps` are one step. The state is in every checkpoint of the Trainer, and
    `train(resume_from_checkpoint=...)` restores it. Logs get `fp8_share`, the share of matmul FLOPs in FP8, and where
    the monitor is on `fp8_saturation` and `fp8_underflow`, the largest shares of a tensor in the latest step watched.

    Raises:
        Fp8Error: When training begins, if the Trainer's arguments contradict fp8pass, or if the model's layers do not
            have the slots of the checkpoint's state.
    """

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._step, self.figures = OpenStep(), Figures()

    def state(self) -> dict[str, Any]:
        """Return what goes into a checkpoint: see `ExportableState`."""
        tensors = state_of(self._model).state_dict() if self._model is not None else {}
        on_cpu = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
        text = base64.b64encode(save(on_cpu)).decode() if on_cpu else ""
        return {"args": {}, "attributes": {STATE: text}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Check the arguments, restore the state if training resumes, and begin to collect verdicts."""
        check_arguments(args, model)
        self._model = model
        self._restore(state)
        self.figures.begin(model)

    def _restore(self, state: TrainerState) -> None:
        callbacks: Any = state.stateful_callbacks  # a dict, unlike the class says
        if text := callbacks.get(type(self).__name__, {}).get("attributes", {}).get(STATE):
            state_of(self._model).load_state_dict(load(base64.b64decode(text)))
        elif state.global_step:
            warn_once(
                f"fp8pass: the checkpoint of step {state.global_step} has no FP8 state, as it was saved without "
                "Fp8Callback: amax histories begin anew, and the first step is scaled dynamically"
            )

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin a step of delayed scaling."""
        self._step.end()  # an error may have ended the one before
        self._step.begin(self._model)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """End the step of delayed scaling: all its backwards have run."""
        self._step.end()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Add the figures of FP8 to the logs."""
        if self._model is None or logs is None or "loss" not in logs:
            return
        figures = self.figures.read()
        logs.update(figures)
        state.log_history[-1].update(figures)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop collecting verdicts."""
        self._step.end()
        self.figures.end()


def check_arguments(args: TrainingArguments, model: nn.Module | None = None) -> None:
    """Check that nothing in the Trainer's arguments contradicts fp8pass.

    Args:
        args: The arguments.
        model: The model that is trained, whose parameters' types are checked too.

    Raises:
        Fp8Error: If it does; the message says what to drop.
    """
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name, False):
            raise Fp8Error(
                f"{name}=True converts the model's parameters for evaluation, and training would go on with them: "
                f"drop {name}; bf16=True evaluates in bfloat16 too"
            )
    if args.n_gpu > 1:
        raise Fp8Error(
            f"one process with {args.n_gpu} GPUs trains by nn.DataParallel, whose copies of the model have no FP8 "
            "state: start a process for each GPU, torchrun --nproc-per-node=gpu, or set CUDA_VISIBLE_DEVICES=0"
        )
    check(AcceleratorState(), model)
