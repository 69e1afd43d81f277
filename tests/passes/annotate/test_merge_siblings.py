"""The merge_siblings pass: linear layers that read the same tensor become one layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8pass.base.names import merged_name, module_path, parts_of
from fp8pass.hardware import TARGETS
from fp8pass.recipes import DelayedScaling, DynamicScaling
from fp8pass.roofline import merged_seconds
from fp8pass.states.checkpoint import _together
from tests.helpers.harness import expect_graph
from tests.helpers.merge_siblings import Siblings, annotation, called, swiglu
from tests.helpers.models import Attention


def test_graph() -> None:
    a = annotation(Siblings(swiglu, bias=True), recipe=DynamicScaling())
    expect_graph(
        a.module,
        """\
L_x_: "f32[4, 8, 32]",
L_self_modules_layers_modules_0_parameters_weight_: "f32[48, 32]",
L_self_modules_layers_modules_0_parameters_bias_: "f32[48]",
L_self_modules_layers_modules_1_parameters_weight_: "f32[48, 32]",
L_self_modules_layers_modules_1_parameters_bias_: "f32[48]",
l_x_ = L_x_
l_self_modules_layers_modules_0_parameters_weight_ = L_self_modules_layers_modules_0_parameters_weight_
l_self_modules_layers_modules_0_parameters_bias_ = L_self_modules_layers_modules_0_parameters_bias_
l_self_modules_layers_modules_1_parameters_weight_ = L_self_modules_layers_modules_1_parameters_weight_
l_self_modules_layers_modules_1_parameters_bias_ = L_self_modules_layers_modules_1_parameters_bias_
cat: "f32[96, 32]" = torch.cat([l_self_modules_layers_modules_0_parameters_weight_, l_self_modules_layers_modules_1_parameters_weight_])
cat_1: "f32[96]" = torch.cat([l_self_modules_layers_modules_0_parameters_bias_, l_self_modules_layers_modules_1_parameters_bias_])
qdq_operand: "f32[4, 8, 32]" = fp8pass_quant_ops_qdq_operand(l_x_, Dynamic(recipe=DynamicScaling(), dtype=torch.float8_e4m3fn))
qdq_operand_1: "f32[96, 32]" = fp8pass_quant_ops_qdq_operand(cat, Dynamic(recipe=DynamicScaling(), dtype=torch.float8_e4m3fn))
linear_3: "f32[4, 8, 96]" = torch._C._nn.linear(qdq_operand, qdq_operand_1)
qdq_gradient: "f32[4, 8, 96]" = fp8pass_quant_ops_qdq_gradient(linear_3, Dynamic(recipe=DynamicScaling(), dtype=torch.float8_e5m2))
add_bias: "f32[4, 8, 96]" = fp8pass_quant_ops_add_bias(qdq_gradient, cat_1, torch.float32, 1)
split = add_bias.split([48, 48], -1)
getitem: "f32[4, 8, 48]" = split[0]
getitem_1: "f32[4, 8, 48]" = split[1]
silu: "f32[4, 8, 48]" = torch.nn.functional.silu(getitem)
mul: "f32[4, 8, 48]" = silu * getitem_1
return (mul,)
""",
    )


def test_the_module_of_a_merged_layer() -> None:
    """The merged layer has a module path of its parts' names, which `fp8pass inspect` prints for kernels."""
    a = annotation(nn.Sequential(Attention()), recipe=DelayedScaling())
    nodes = [n for n in a.module.graph.nodes if n.target in (torch.cat, torch._C._nn.linear)]
    innermost = [list(n.meta["nn_module_stack"].values())[-1][0] for n in nodes]
    assert list(map(module_path, innermost)) == ["0.q+k+v", "0.q+k+v", "0.o"]


class Different(nn.Module):
    """Two layers of one input that differ in one respect, `how`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.a = nn.Linear(32, 48, bias=how == "bias")
        self.b = nn.Linear(32, 40 if how == "width" else 48, bias=False)
        self.b.requires_grad_(how != "frozen")
        if how == "dtype":
            self.b.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        how, x = self.how, x.sin()
        a = self.a(x)
        if how == "written":
            x.mul_(2)
        if how == "dtype":
            return a + self.b(x.bfloat16())
        if how == "grad mode":
            with torch.no_grad():
                return a + self.b(x)
        if how == "one weight":
            return a.sin() + self.a(x).cos()
        if how == "read elsewhere":
            return a.sin() + self.b(x).cos() + self.b.weight.sum()
        b = self.b(x.sin() if how == "input" else x)
        return a.sin()[..., : b.shape[-1]] + b.cos()


SEPARATE = ["bias", "width", "frozen", "dtype", "written", "grad mode", "one weight", "read elsewhere", "input"]


@pytest.mark.parametrize("how", SEPARATE)
def test_different_layers_stay_separate(how: str) -> None:
    assert not any("+" in name for name in called(annotation(Different(how), recipe=DynamicScaling())))


def test_equal_layers_are_merged() -> None:
    """Without a difference the layers are merged, so that the test above can fail."""
    assert called(annotation(Different(""), recipe=DynamicScaling())) == ["a+b"]


OTHERS: dict[str, dict[str, Any]] = {
    "rowwise": {"recipe": "rowwise"},
    "two recipes": {"recipe": {"layers.0": "delayed", "*": "dynamic"}},
    "off": {"recipe": "delayed", "merge_siblings": False},
    "on a CPU": {"recipe": "delayed", "merge_siblings": None},
    "none in FP8": {"recipe": "delayed", "target": "h100"},  # too small to pay, alone or merged
}


@pytest.mark.parametrize("case", OTHERS)
def test_options_that_keep_them_separate(case: str) -> None:
    assert called(annotation(Siblings(swiglu), **OTHERS[case])) == ["layers.0", "layers.1"]


def test_under_a_transform_nothing_is_merged() -> None:
    model = Siblings(swiglu)
    a = annotation(lambda x: torch.func.vmap(lambda y: model(y))(x))  # type: ignore[arg-type]
    assert called(a) == ["layers.0", "layers.1"]


def test_a_layer_that_the_filter_leaves_out_is_not_merged() -> None:
    a = annotation(Siblings(lambda a, b, c: a.sin() + b.sin() + c.sin(), (48, 48, 48)), recipe="delayed", filter="*.1")
    assert called(a) == ["layers.0+2", "layers.1"]
    assert a.choices[1].rule == "filter"


def test_merged_layers_pay() -> None:
    """Merged with q, the layers k and v of width 256 run in FP8; alone they would be too slow in it."""
    x = torch.randn(4096, 2048, dtype=torch.bfloat16, requires_grad=True)
    model = nn.Sequential(nn.Linear(2048, 2048, bias=False)).bfloat16()
    for name in ("q", "k", "v"):
        model.add_module(name, nn.Linear(2048, 2048 if name == "q" else 256, bias=False).bfloat16())
    model.forward = lambda x: torch.cat([model.q(x).sin(), model.k(x).sin(), model.v(x).sin()], -1)  # type: ignore[method-assign]
    options: dict[str, Any] = {"recipe": "delayed", "target": "h100", "merge_siblings": None}
    assert called(annotation(model, x, **options)) == ["q+k+v"]
    apart = annotation(model, x, **{**options, "merge_siblings": False})
    assert [(c.name, c.rule) for c in apart.choices] == [("q", ""), ("k", "min_speedup"), ("v", "min_speedup")]


def test_prediction() -> None:
    """Two layers save at least one launch of each of three matmuls, and one read of the input's gradient."""
    h100, recipe = TARGETS["h100"], DelayedScaling(fast_accum=("output", "grad_input", "grad_weight"))
    m, k, n = 8192, 4096, 14336
    apart, merged = merged_seconds(h100, m, k, [n, n], recipe, 2)
    least = 3 * h100.gemm_start + m * k * 2 / (h100.bandwidth * h100.memory_share)
    assert least * 0.999 <= apart - merged < 1.5 * least
    alone, same = merged_seconds(h100, m, k, [n], recipe, 2)
    assert alone == pytest.approx(same, abs=1e-12)


def test_the_smallest_of_several_scales_saturates_nothing() -> None:
    """The merged scale is the smallest one, except for 0, the scale of a layer without history."""
    scales, history = [4.0, 0.5, 0.0], torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 0.0]])
    found = _together(
        [{"scale": torch.tensor(s), "amax_history": h, "amax": h[0]} for s, h in zip(scales, history, strict=True)]
    )
    assert float(found["scale"]) == 0.5 and float(found["amax"]) == 3.0
    assert found["amax_history"].tolist() == [3.0, 2.0]


@pytest.mark.parametrize(
    ("names", "merged"),
    [
        (("a.q", "a.k", "a.v"), "a.q+k+v"),
        (("q", "k"), "q+k"),
        (("a.b.q", "a.c.k"), "a.b.q+a.c.k"),
    ],
)
def test_names_of_merged_layers_can_be_read(names: tuple[str, ...], merged: str) -> None:
    assert merged_name(names) == merged
    assert parts_of(f"{merged}.weight") == [f"{name}.weight" for name in names]
    assert parts_of(f"{names[0]}.weight") == [f"{names[0]}.weight"]
