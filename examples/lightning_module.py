"""Train in FP8 with Lightning, with accumulation; then resume from a checkpoint."""

import inspect
import logging
import tempfile

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from fp8pass.integrations.lightning import Fp8Callback

text = torch.tensor(list(inspect.getsource(lightning.Trainer).encode()[: 16 * 64])).view(-1, 16)
loader = DataLoader(text, batch_size=8)


class Network(nn.Module):
    """Predicts the last byte of a row from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(256, 32), nn.Linear(480, 512), nn.Linear(512, 256)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return logits f32[B, 256] for rows of bytes: int64[B, 16]."""
        return self.head(self.hidden(self.embedding(rows[:, :-1]).flatten(1)).relu())


class Module(lightning.LightningModule):
    """Compiles its network, not itself: Dynamo can't trace Lightning's `log`."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network()
        self.network.compile(backend="fp8pass", options={"recipe": "delayed"})

    def training_step(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = nn.functional.cross_entropy(self.network(rows), rows[:, -1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(folder: str, checkpoint: str | None = None) -> Module:
    """Train for 8 steps of two batches each, which are two epochs; save a checkpoint after each."""
    torch.manual_seed(0)
    module = Module()
    saving = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    trainer = lightning.Trainer(
        max_epochs=2, accumulate_grad_batches=2, callbacks=[saving, Fp8Callback()], accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader, ckpt_path=checkpoint)
    print(f"loss after {trainer.global_step} steps: {trainer.callback_metrics['loss']:.2f}")
    return module


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
with tempfile.TemporaryDirectory() as folder:
    whole = train(folder)
    resumed = train(folder, f"{folder}/epoch=0.ckpt")
pairs = zip(whole.parameters(), resumed.parameters(), strict=True)
print("equal, to the bit, after resuming at epoch 1:", all(torch.equal(a, b) for a, b in pairs))
