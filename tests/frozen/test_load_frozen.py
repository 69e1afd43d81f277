"""Test FP8 checkpoints as frozen weights: those that fp8pass exports, and files written here as others write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fp8pass
from fp8pass.base.errors import Fp8Error
from fp8pass.frozen.weight import FrozenWeight
from tests.helpers.harness import E4M3

pytestmark = pytest.mark.compiled


def make(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(128, 256, bias=False), nn.GELU(), nn.Linear(256, 128))


def write(folder: Path, tensors: dict[str, Tensor], method: str = "fp8") -> Path:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
    return folder


def in_fp8(model: nn.Module, name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the tensors of one layer as others write them, with scales of random size."""
    key = "weight_scale_inv" if len(shape) == 2 and shape[1] != 1 else "weight_scale"
    weight = model.get_submodule(name).weight
    assert isinstance(weight, Tensor)
    return {f"{name}.weight": (weight.detach() * 100).to(E4M3), f"{name}.{key}": 0.01 + torch.rand(shape) / 100}


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "dynamic"])
@pytest.mark.filterwarnings("ignore:fp8pass. blockwise kernels exist on sm_90:UserWarning")
def test_an_exported_model_is_the_base_of_another(recipe: str, tmp_path: Path) -> None:
    trained, model = make(), make(seed=1)
    fp8pass.export_fp8(trained, tmp_path / "out", recipe=recipe)
    assert fp8pass.load_frozen(model, tmp_path / "out") == ["0", "2"]
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name in "0", "2":
        weight: Any = model.get_submodule(name).weight
        assert isinstance(weight, FrozenWeight) and not weight.requires_grad
        assert torch.equal(weight._x_q.view(torch.uint8), written[f"{name}.weight"].view(torch.uint8))
    torch.testing.assert_close(model[2].bias, trained[2].bias)
    x = torch.randn(64, 128)
    torch.testing.assert_close(model(x), trained(x), rtol=0.2, atol=0.05)


@pytest.mark.parametrize("scales", ["block", "row", "tensor"])
def test_frozen_weights_are_exported_as_they_are(scales: Any, tmp_path: Path) -> None:
    """Also with scales that are no powers of 2, and by a recipe that has others; a layer that is kept is dequantized."""
    model, other = make(), make(seed=1)
    model.requires_grad_(False)
    fp8pass.freeze(model, scales)
    first: Any = model[0].weight
    first._scale_inv.mul_(1.1)
    fp8pass.export_fp8(model, tmp_path / "out", recipe="dynamic", leave_out=["2"])
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["0.weight"].view(torch.uint8), first._x_q.view(torch.uint8))
    assert torch.equal(written["2.weight"], model[2].weight.dequantized())
    assert fp8pass.load_frozen(other, tmp_path / "out") == ["0"]
    again: Any = other[0].weight
    assert torch.equal(again.dequantized(), first.dequantized())


@pytest.mark.parametrize(
    ("shape", "method", "scales"),
    [((2, 1), "fp8", "block"), ((), "fp8", "tensor"), ((1,), "compressed-tensors", "tensor"),
     ((256, 1), "compressed-tensors", "row")],
)  # fmt: skip
def test_scales_of_others(shape: tuple[int, ...], method: str, scales: str, tmp_path: Path) -> None:
    model = make()
    tensors = in_fp8(model, "0", shape)
    if scales == "block":
        tensors["0.weight_scale_inv"] = tensors.pop("0.weight_scale")
    (scale,) = (x for name, x in tensors.items() if "scale" in name)
    rest = {name: x.detach().clone() for name, x in model.state_dict().items() if not name.startswith("0.")}
    write(tmp_path, {**tensors, **rest, "0.input_scale": torch.ones(1)}, method)
    assert fp8pass.load_frozen(model, tmp_path) == ["0"]
    weight: Any = model[0].weight
    spread = scale.repeat_interleave(128, 0) if scales == "block" else scale
    assert weight.scales == scales
    assert torch.equal(weight.dequantized(), tensors["0.weight"].float() * spread)


def test_incomplete_blocks_are_dequantized(tmp_path: Path) -> None:
    model = nn.Linear(192, 128, bias=False)
    tensors = in_fp8(nn.Sequential(model), "0", (1, 2))
    renamed = {name.removeprefix("0."): x for name, x in tensors.items()}
    holder = nn.ModuleDict({"a": model})
    assert fp8pass.load_frozen(holder, write(tmp_path, {f"a.{name}": x for name, x in renamed.items()})) == []
    scale = renamed["weight_scale_inv"].repeat_interleave(128, 1)[:, :192]
    assert torch.equal(model.weight, renamed["weight"].float() * scale)


def test_what_is_not_such_a_checkpoint(tmp_path: Path) -> None:
    model, tensors = make(), {}
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        fp8pass.load_frozen(model, tmp_path)
    with pytest.raises(Fp8Error, match=r"quant_method is 'gptq'; load_frozen reads 'fp8' and 'compressed-tensors'"):
        fp8pass.load_frozen(model, write(tmp_path, {"x": torch.ones(1)}, "gptq"))
    tensors = {**in_fp8(model, "0", (1,)), "2.weight": model[2].weight.detach()}
    with pytest.raises(Fp8Error, match=r"it lacks \['2\.bias'\]"):
        fp8pass.load_frozen(model, write(tmp_path, tensors))
    with pytest.raises(Fp8Error, match=r"is \[7\]: a weight \[256, 128\] has one scale, 256 of rows, or \[2, 1\]"):
        fp8pass.load_frozen(model, write(tmp_path, {**tensors, "0.weight_scale": torch.ones(7)}))
    with pytest.raises(
        Fp8Error, match=r"0\.weight is \[128, 128\] in the checkpoint, and the model has a parameter \[256"
    ):
        fp8pass.load_frozen(model, write(tmp_path, {**tensors, "0.weight": torch.ones(128, 128).to(E4M3)}))
    with pytest.raises(Fp8Error, match=r"0\.weight is torch\.float32, and 0\.weight_scale is its scale"):
        fp8pass.load_frozen(model, write(tmp_path, {**tensors, "0.weight": torch.ones(256, 128)}))
