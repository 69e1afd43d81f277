"""Trace a training step with torch's own tracers, rewrite it to FP8, and train with the graph."""

import inspect

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import fp8pass

torch.manual_seed(0)
text = torch.tensor(list(inspect.getsource(nn.Module).encode()[:1040]))
rows = text.view(-1, 65)  # 16 rows of 65 bytes
model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256))
exported = torch.export.export(model, (rows[:, :-1],)).module()
parameters = {name: p.detach().clone().requires_grad_() for name, p in exported.named_parameters()}


def step(parameters: dict[str, torch.Tensor], rows: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the loss and its gradients: forward and backward in one graph."""
    logits = functional_call(exported, parameters, (rows[:, :-1],))
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    return loss, list(torch.autograd.grad(loss, list(parameters.values())))


graph = make_fx(step)(parameters, rows)
graph, state, report = fp8pass.rewrite(graph, (parameters, rows), {"recipe": "delayed", "strict": True})
print(report)

optimizer = torch.optim.AdamW(parameters.values(), lr=3e-3)
for number in range(20):
    loss, gradients = state.run(graph, parameters, rows)
    for p, gradient in zip(parameters.values(), gradients, strict=True):
        p.grad = gradient
    optimizer.step()
    if number in (0, 19):
        print(f"step {number}: loss {loss:.2f}")
print(f"{len(state.slots)} slots in {', '.join(state.names)}")
