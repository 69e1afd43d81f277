"""Train with the whole step compiled: the optimizer's kernel writes the FP8 weights of the next step."""

import torch
from torch import nn

import fp8pass

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 10))
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)


@fp8pass.train_step(skip_nonfinite=True)
def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Do one optimizer step, in ordinary eager code."""
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


x, y = torch.randn(512, 256), torch.randint(10, (512,))
losses = [step(x, y).item() for _ in range(20)]
print(step.report)
print(f"\nloss after {len(losses)} steps: {losses[-1]:.3f}; skipped: {step.skipped}")
