"""Compute scales by formulas of your own: a function with TransformerEngine's signature, and a recipe with a name."""

from dataclasses import dataclass

import torch

import fp8pass
from fp8pass.recipes import DelayedScaling


def with_room(amax, old_scale, fp8_max, recipe):
    """Leave room for an amax that is half as large again. All arguments are float32 tensors of one shape."""
    return fp8_max / (1.5 * amax)


@fp8pass.register_recipe("smoothed")
@dataclass(frozen=True)
class SmoothedScaling(DelayedScaling):
    """Raise a scale by the geometric mean of old and new, so that one small amax does not raise it far."""

    def next_scale(self, amax_history, old_scale, fp8_max):
        """Return the scales of the next step."""
        new = fp8_max / amax_history[0]  # of the newest amaxes, f32[T] for T tensors
        return torch.minimum(old_scale.sqrt() * new.sqrt(), new)  # and at most `new`, with which nothing saturates


def largest(recipe):
    """Return how large the largest element is after scaling, from the second step on."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(64, 64), torch.randn(32, 64).clamp(-2, 2)
    compiled = torch.compile(model, backend="fp8pass", options={"recipe": recipe})
    for factor in FACTORS:
        compiled(factor * x).sum().backward()
        yield 2 * factor * float(fp8pass.state(model).state_dict()["weight.input.scale"])  # of the running step


FACTORS = (1, 1, 2, 0.02, 0.02, 0.02)
recipes = {
    "delayed, most recent": DelayedScaling(amax_compute_algo="most_recent"),
    "a function": DelayedScaling(amax_compute_algo="most_recent", scaling_factor_compute_algo=with_room),
    "smoothed": "smoothed",
}
print(f"{'largest element of the input':42}", *(f"{2 * factor:7.2f}" for factor in FACTORS[1:]))
for name, recipe in recipes.items():
    print(f"the same times scale, {name:20}", *(f"{value:7.1f}" for value in list(largest(recipe))[1:]))
print("e4m3 represents numbers up to 448; larger ones saturate")
