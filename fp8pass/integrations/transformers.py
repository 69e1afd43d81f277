"""Train with Hugging Face transformers: `Trainer(model, TrainingArguments(...), callbacks=[Fp8Callback()])`.

Importing this module lets `TrainingArguments(torch_compile_backend="fp8pass")` take that name.
"""

from __future__ import annotations

import base64
from contextlib import ExitStack
from typing import Any

from accelerate.state import AcceleratorState
from safetensors.torch import load, save
from torch import nn
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState

from fp8pass.debug.statistics import is_watched, stats
from fp8pass.errors import Fp8Error, warn_once
from fp8pass.integrations.accelerate import accept_backend, check
from fp8pass.integrations.step import OpenStep
from fp8pass.report.report import Report, collect
from fp8pass.states.checkpoint import state as state_of

accept_backend()

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
        self._training, self._step = ExitStack(), OpenStep()
        self._report = Report()

    def state(self) -> dict[str, Any]:
        """Return what goes into a checkpoint: see `ExportableState`."""
        tensors = state_of(self._model).state_dict() if self._model is not None else {}
        found = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
        text = base64.b64encode(save(found)).decode() if found else ""
        return {"args": {}, "attributes": {STATE: text}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Check the arguments, restore the state if training resumes, and begin to collect verdicts."""
        check_arguments(args)
        self._training.close()  # an error may have ended the training before
        self._model = model
        self._restore(state)
        self._report = self._training.enter_context(collect())

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
        figures = self._figures()
        logs.update(figures)
        state.log_history[-1].update(figures)

    def _figures(self) -> dict[str, float]:
        flops = self._report.flops
        found = {"fp8_share": self._report.fp8_flops / flops} if flops else {}
        if is_watched(self._model) and (watched := stats(self._model).latest):
            found["fp8_saturation"] = max(row.saturation for row in watched)
            found["fp8_underflow"] = max(row.underflow for row in watched)
        return found

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop collecting verdicts."""
        self._step.end()
        self._training.close()


def check_arguments(args: TrainingArguments) -> None:
    """Check that nothing in the Trainer's arguments contradicts fp8pass.

    Raises:
        Fp8Error: If it does; the message says what to drop.
    """
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name, False):
            raise Fp8Error(
                f"{name}=True converts the model's parameters for evaluation, and training would go on with them: "
                f"drop {name}; bf16=True evaluates in bfloat16 too"
            )
    check(AcceleratorState())
