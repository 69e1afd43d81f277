"""Plant a fault in step 20, and print what the numerics monitor counted of it, in the graph, while no step stops."""

import torch
from torch import nn

import fp8pass


class Block(nn.Module):
    """A pre-norm MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        """x: f32[B, 128]; gain: f32[], 1 unless something is wrong."""
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.down(hidden * gain)  # the fault


torch.manual_seed(0)
model = nn.ModuleList(Block() for _ in range(2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


@fp8pass.train_step(monitor=True, min_speedup=0)
def step(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Do one optimizer step."""
    y = model[1](model[0](x, torch.ones(())), gain)
    loss = nn.functional.mse_loss(y, x.roll(1, dims=-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


for i in range(22):
    loss = step(torch.randn(256, 128), torch.tensor(1e6 if i == 20 else 1.0))
    if i >= 19:
        print(f"step {i}: loss {loss.item():.3g}")

stats = fp8pass.stats(model)
print(stats)
print("\nthe input of the layer after the fault:")
for row in stats.of("1.down.input")[-4:]:
    lost = f"{row.saturation:.0%} saturated, {row.underflow:.0%} became 0"
    print(f"step {row.step}: amax {row.amax:.3g}, scale {row.scale:.3g}, {lost}, {row.sqnr:.0f} dB")
