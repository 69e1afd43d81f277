"""Train with Lightning: `Trainer(callbacks=[Fp8Callback()]).fit(module, ...)`, or with Fabric, after `check`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass.base.errors import Fp8Error, warn_once
from fp8pass.integrations.checks import check_autocast, importing
from fp8pass.integrations.figures import Figures
from fp8pass.integrations.step import OpenStep
from fp8pass.states.model_state import state as state_of

with importing("lightning", "2.6"):
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import Precision
    from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy as FabricDeepSpeedStrategy
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DeepSpeedStrategy

KEY = "fp8pass"
"""The key of a checkpoint that holds the state, as plain tensors."""
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class Fp8Callback(Callback):
    """A callback that makes one step of the batches of `accumulate_grad_batches`, saves the state, and logs.

    Without it each batch is a step of delayed scaling, and a resumed run begins with new amax histories. It logs
    `fp8_share`, the share of matmul FLOPs in FP8, and where the monitor is on `fp8_saturation` and `fp8_underflow`, the
    largest shares of a tensor in the latest step watched, in one of `log_every_n_steps` steps.

    Raises:
        Fp8Error: When training begins, if the Trainer's flags contradict fp8pass, see `check`; when a checkpoint is
            loaded, if its state does not fit the module.
    """

    def __init__(self) -> None:
        self._step, self._figures = OpenStep(), Figures()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the Trainer's flags."""
        check(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to collect verdicts."""
        self._figures.begin(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a step of delayed scaling with the first of its batches."""
        self._step.begin(pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """End the step: all its backwards have run."""
        self._step.end()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the figures of FP8 after a step."""
        interval: int = getattr(trainer, "log_every_n_steps", 1) or 1  # which the class does not declare
        if not self._step.is_open and trainer.global_step % interval == 0:
            pl_module.log_dict(self._figures.read())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End a step whose batches did not fill it, and stop collecting verdicts."""
        self._step.end()
        self._figures.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the step under way, and stop collecting verdicts."""
        self._step.end()
        self._figures.end()

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


def check(loop: Trainer | Fabric, model: nn.Module | None = None) -> None:
    """Check that no flag of a Trainer or a Fabric contradicts fp8pass.

    Args:
        loop: The Trainer or the Fabric.
        model: The module that is trained, whose parameters' types are checked too.

    Raises:
        Fp8Error: If its precision replaces layers by those of another FP8 library, or its strategy is DeepSpeed, which
            compiles models by itself; or if autocast computes in another type of 16 bits than the parameters have.
    """
    strategy: Any = loop.strategy
    plugin: Precision = strategy.precision if isinstance(loop, Fabric) else strategy.precision_plugin
    precision = plugin.precision
    if precision.startswith("transformer-engine"):
        raise Fp8Error(
            f'precision="{precision}" replaces layers by TransformerEngine\'s: write '
            'precision="bf16-mixed", or drop fp8pass'
        )
    if isinstance(strategy, (DeepSpeedStrategy, FabricDeepSpeedStrategy)):
        raise Fp8Error("DeepSpeed compiles and shards models by itself: use DDP or FSDP2 with fp8pass, or drop fp8pass")
    if model is not None:
        check_autocast(model, AUTOCAST.get(precision), f'precision="{precision}"')
