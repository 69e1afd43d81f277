"""Train with Lightning: `Trainer(callbacks=[Fp8Callback()]).fit(torch.compile(module, backend="fp8pass"), ...)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fp8pass.errors import Fp8Error, warn_once
from fp8pass.integrations.step import OpenStep
from fp8pass.states.checkpoint import state as state_of

KEY = "fp8pass"
"""The key of a checkpoint that holds the state, as plain tensors."""


class Fp8Callback(Callback):
    """A callback that makes one step of the batches of `accumulate_grad_batches`, and puts the state in checkpoints.

    Without it each batch is a step of delayed scaling, and a resumed run begins with new amax histories.

    Raises:
        Fp8Error: When training begins, if a precision plugin of the Trainer replaces layers by those of another FP8
            library; when a checkpoint is loaded, if its state does not fit the module.
    """

    def __init__(self) -> None:
        self._step = OpenStep()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the Trainer's precision."""
        if trainer.precision.startswith("transformer-engine"):
            raise Fp8Error(
                f'precision="{trainer.precision}" replaces layers by TransformerEngine\'s: write '
                'precision="bf16-mixed", or drop fp8pass'
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a step of delayed scaling with the first of its batches."""
        self._step.begin(pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """End the step: all its backwards have run."""
        self._step.end()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End a step whose batches did not fill it."""
        self._step.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the step under way."""
        self._step.end()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the state into a checkpoint."""
        checkpoint[KEY] = state_of(pl_module).state_dict()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint, or warn that it has none."""
        saved: Mapping[str, Tensor] = checkpoint.get(KEY, {})
        if saved:
            state_of(pl_module).load_state_dict(saved)
        else:
            warn_once(
                "fp8pass: the checkpoint has no FP8 state, as it was saved without Fp8Callback: amax histories begin "
                "anew, and the first step is scaled dynamically"
            )
