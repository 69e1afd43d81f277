"""Plant a divergence in the demo's language model, and find it with `fp8pass.bisect`: from step 3 on, the input of one
layer is a million times larger, while its scale is still that of step 2."""

import torch

import fp8pass
from fp8pass.inspect import demo

demo.LAYERS, demo.WIDTH, demo.CONTEXT, demo.BATCH = 2, 64, 32, 4  # small, for a CPU
torch.manual_seed(0)
model, factor = demo.GPT(), torch.ones(())
model.blocks[1].down.register_forward_pre_hook(lambda module, args: (args[0] * factor,))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens, targets = demo.load_text(1 << 16).batch(torch.Generator().manual_seed(0), "cpu")
fp8 = torch.compile(model, backend="fp8pass")
start = {name: x.clone() for name, x in model.state_dict().items()}


def train(run):
    """Train four steps, and return their losses."""
    losses = []
    for i in range(4):
        factor.fill_(1e6 if i >= 3 else 1)
        loss = demo.loss_of(run, tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


expected = train(model)  # in BF16
model.load_state_dict(start)
optimizer.state.clear()


def step():
    """Train in FP8, which fails."""
    return train(fp8)


def check(losses):
    """Assert that the losses are those in BF16, to 0.03 nats."""
    gaps = [abs(a - b) for a, b in zip(losses, expected, strict=True)]
    assert max(gaps) < 0.03, f"loss is {max(gaps):.3f} away from BF16's in step {gaps.index(max(gaps))}"
    return True


print(fp8pass.bisect(step, check))
