"""Train a small model in FP8, and print what became of its matmuls."""

import torch

import fp8pass

model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 10))
compiled = torch.compile(model, backend="fp8pass")
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.randn(512, 256), torch.randint(10, (512,))
for _ in range(20):
    loss = torch.nn.functional.cross_entropy(compiled(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(fp8pass.explain(model, x), f"loss after 20 steps: {loss:.3f}", sep="\n\n")
