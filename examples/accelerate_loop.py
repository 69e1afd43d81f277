"""Train in FP8 with Accelerate: a loop with accumulation, and a checkpoint that holds the FP8 state."""

import inspect
import tempfile

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import fp8pass
from fp8pass.integrations.accelerate import Accumulation, Fp8Plugin

text = torch.tensor(list(inspect.getsource(Accelerator).encode()[: 64 * 64])).view(-1, 64)


class Model(nn.Module):
    """Predicts the next byte from the last 16."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(256, 16), nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of rows of bytes: int64[B, 64]."""
        contexts = self.embedding(rows.unfold(1, 16, 1)[:, :-1]).flatten(2)
        return nn.functional.cross_entropy(
            self.head(self.hidden(contexts).relu()).flatten(0, 1), rows[:, 16:].flatten()
        )


torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dynamo_plugin=Fp8Plugin({"recipe": "delayed"}))
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(text, batch_size=8))
state = fp8pass.state(model)
accelerator.register_for_checkpointing(state)
microbatch = Accumulation(accelerator, model)
for epoch in range(4):
    for rows in loader:
        with microbatch:  # instead of accelerator.accumulate(model)
            loss = model(rows)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    print(f"epoch {epoch}: loss {loss:.2f}, {state.steps} steps of delayed scaling")
with tempfile.TemporaryDirectory() as folder:
    accelerator.save_state(folder)
    accelerator.load_state(folder)
print(f"{len(state.state_dict())} tensors of FP8 state saved and loaded")
