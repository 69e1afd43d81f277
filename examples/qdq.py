"""Write quantize-dequantize by hand, and print which matmuls run in FP8 and why others do not."""

import torch

import fp8pass

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def mlp(x, up, up_scale, down, down_scales):
    """Compute two layers, with activations and weights in FP8."""
    x_q = fp8pass.quantize(x, 32.0, E4M3)
    hidden = (x_q.to(BF16) / 32) @ (up.to(BF16) * up_scale).t()
    hidden_q = fp8pass.quantize(hidden.relu(), 8.0, E4M3)
    hidden = torch.cat([hidden_q.to(BF16), hidden_q.to(BF16)], dim=-1) * 0.125
    return hidden @ (down.to(BF16) * down_scales)


x = torch.randn(512, 256, dtype=BF16)
up, down = (torch.randn(1024, 256) * 8).to(E4M3), (torch.randn(2048, 256) * 8).to(E4M3)
one_scale, one_per_column = torch.tensor(1 / 128), torch.rand(256, dtype=BF16)
one_per_row = torch.rand(2048, 1, dtype=BF16)  # the matmul sums over the rows of `down`

config = fp8pass.Config(recipe=None)
for scales in one_scale, one_per_column, one_per_row:
    print(fp8pass.explain(mlp, x, up, one_scale, down, scales, config=config), end="\n\n")
