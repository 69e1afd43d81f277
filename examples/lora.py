"""Train LoRA adapters on a model whose weights are frozen in FP8, and count the bytes; then merge them."""

import inspect
import warnings

import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

import fp8pass


class LoRA(nn.Module):
    """Adds `up(down(x))`, of a small rank, to the result of a frozen linear layer."""

    def __init__(self, base: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return f[..., N] for `x` f[..., K]."""
        return self.base(x) + self.up(self.down(x))


def merged(layer: LoRA) -> nn.Linear:
    """Return the frozen layer with the adapter in its weight."""
    layer.base.weight.data += (layer.up.weight @ layer.down.weight).detach()
    return layer.base


torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip
model = transformers.LlamaForCausalLM(config).requires_grad_(False)
for name, layer in list(model.model.named_modules()):
    if isinstance(layer, nn.Linear):
        parent, _, key = name.rpartition(".")
        setattr(model.model.get_submodule(parent), key, LoRA(layer))

names = fp8pass.freeze(model, filter=["lm_head"])
count = sum(w.numel() for name, w in model.named_parameters() if name.endswith("base.weight"))
print(f"{len(names)} frozen weights: {count} bytes and scales; in float32 they were {4 * count} bytes")

compiled = torch.compile(model, backend="fp8pass", options={"recipe": "delayed"})
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
text = torch.tensor(list(inspect.getsource(transformers.Trainer).encode()[: 8 * 64])).view(8, 64)
for step in range(10):
    loss = compiled(input_ids=text, labels=text).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step in (0, 9):
        print(f"step {step + 1}: loss {loss:.2f}")
print(str(fp8pass.explain(model, input_ids=text, labels=text)).splitlines()[-1])

fp8pass.unfreeze(model)
expected = model(input_ids=text).logits
for name, layer in list(model.model.named_modules()):
    if isinstance(layer, LoRA):
        parent, _, key = name.rpartition(".")
        setattr(model.model.get_submodule(parent), key, merged(layer))
difference = (model(input_ids=text).logits - expected).abs().max() / expected.abs().max()
print(f"merged: logits differ by {'less' if difference < 1e-4 else 'more'} than 0.01%")
