"""Train a small model in FP8, and see what became of its matmuls."""

import torch
from torch import nn

import fp8pass

model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 10))
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.randn(512, 256), torch.randint(10, (512,))

print(fp8pass.explain(model, x))
compiled = torch.compile(model, backend="fp8pass")
for _ in range(20):
    loss = nn.functional.cross_entropy(compiled(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"\nloss after 20 steps: {loss:.3f}")
