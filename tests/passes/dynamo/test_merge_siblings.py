"""Test the merge_siblings pass: linear layers that read one tensor become one, in numbers, names and state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.base.errors import Fp8Error
from fp8pass.base.names import merged_name, module_path, parts_of
from fp8pass.compiler.dynamo_passes import annotated as annotate
from fp8pass.graph.annotation import Annotation
from fp8pass.hardware import TARGETS
from fp8pass.options.config import Config
from fp8pass.recipes import DelayedScaling, DynamicScaling
from fp8pass.roofline import merged_seconds
from fp8pass.states.checkpoint import _together
from tests.helpers.harness import annotated, compiled, expect_graph, sqnr, train
from tests.helpers.models import Attention, Transformer


class Siblings(nn.Module):
    """Linear layers that read the same input; `read` is called with their results."""

    def __init__(self, read: Callable[..., Any], widths: tuple[int, ...] = (48, 48), bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, n, bias=bias) for n in widths)
        self.read = read

    def forward(self, x: Tensor) -> Any:
        return self.read(*(layer(x) for layer in self.layers))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def annotation(model: nn.Module, *inputs: Tensor, **options: Any) -> Annotation:
    """Return the annotation of the only graph of a model, with `merge_siblings` on unless options say otherwise."""
    made: list[Annotation] = []

    def backend(module: Any, _: Any) -> Any:
        made.append(annotate(module, Config(**{"merge_siblings": True, **options})))
        return module.forward

    torch.compile(model, backend=backend, fullgraph=True)(*(inputs or (torch.randn(4, 8, 32),)))
    (only,) = made
    return only


def called(a: Annotation) -> list[str]:
    """Return the names of all matmul calls."""
    return [choice.name for choice in a.choices]


@pytest.mark.passes
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


@pytest.mark.passes
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


@pytest.mark.passes
@pytest.mark.parametrize("how", SEPARATE)
def test_different_layers_stay_separate(how: str) -> None:
    assert not any("+" in name for name in called(annotation(Different(how), recipe=DynamicScaling())))


@pytest.mark.passes
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


@pytest.mark.passes
@pytest.mark.parametrize("case", OTHERS)
def test_options_that_keep_them_separate(case: str) -> None:
    assert called(annotation(Siblings(swiglu), **OTHERS[case])) == ["layers.0", "layers.1"]


@pytest.mark.passes
def test_under_a_transform_nothing_is_merged() -> None:
    model = Siblings(swiglu)
    a = annotation(lambda x: torch.func.vmap(lambda y: model(y))(x))  # type: ignore[arg-type]
    assert called(a) == ["layers.0", "layers.1"]


@pytest.mark.passes
def test_a_layer_that_the_filter_leaves_out_is_not_merged() -> None:
    a = annotation(Siblings(lambda a, b, c: a.sin() + b.sin() + c.sin(), (48, 48, 48)), recipe="delayed", filter="*.1")
    assert called(a) == ["layers.0+2", "layers.1"]
    assert a.choices[1].rule == "filter"


@pytest.mark.passes
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


@pytest.mark.passes
@pytest.mark.parametrize("frozen", [False, True])
def test_what_stays_in_high_precision_is_not_merged(frozen: bool) -> None:
    """Without weight gradients FP8 saves too little: joining the weights would only be a copy of them."""
    x = torch.randn(768, 3072, dtype=torch.bfloat16, requires_grad=True)
    model = Siblings(lambda *results: torch.cat([r.sin() for r in results], -1), ())
    model.layers = nn.ModuleList(nn.Linear(3072, 3072, bias=False) for _ in range(3))
    model.bfloat16().requires_grad_(not frozen)
    a = annotation(model, x, recipe="delayed", target="h100", merge_siblings=None)
    merged, alone = [("layers.0+1+2", "")], [(f"layers.{i}", "min_speedup") for i in range(3)]
    assert [(c.name, c.rule) for c in a.choices] == (alone if frozen else merged)


@pytest.mark.passes
def test_prediction() -> None:
    """Two layers save at least one launch of each of three matmuls, and one read of the input's gradient."""
    h100, recipe = TARGETS["h100"], DelayedScaling(fast_accum=("output", "grad_input", "grad_weight"))
    m, k, n = 8192, 4096, 14336
    apart, merged = merged_seconds(h100, m, k, [n, n], recipe, 2)
    least = 3 * h100.gemm_start + m * k * 2 / (h100.bandwidth * h100.memory_share)
    assert least * 0.999 <= apart - merged < 1.5 * least
    alone, same = merged_seconds(h100, m, k, [n], recipe, 2)
    assert alone == pytest.approx(same, abs=1e-12)


@pytest.mark.passes
def test_the_smallest_of_several_scales_saturates_nothing() -> None:
    """The merged scale is the smallest one, except for 0, the scale of a layer without history."""
    scales, history = [4.0, 0.5, 0.0], torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 0.0]])
    found = _together(
        [{"scale": torch.tensor(s), "amax_history": h, "amax": h[0]} for s, h in zip(scales, history, strict=True)]
    )
    assert float(found["scale"]) == 0.5 and float(found["amax"]) == 3.0
    assert found["amax_history"].tolist() == [3.0, 2.0]


@pytest.mark.passes
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


RECIPES = (DelayedScaling(amax_history_len=4), DynamicScaling())


class Fused(nn.Module):
    """The layers of `Siblings` as one layer, as a user would write it."""

    def __init__(self, siblings: Siblings) -> None:
        super().__init__()
        self.read, self.widths = siblings.read, [layer.out_features for layer in siblings.layers]
        self.layer = nn.Linear(32, sum(self.widths), bias=siblings.layers[0].bias is not None)
        for name, parameter in self.layer.named_parameters():
            parameter.data = torch.cat([getattr(layer, name) for layer in siblings.layers]).detach()

    def forward(self, x: Tensor) -> Any:
        return self.read(*self.layer(x).split(self.widths, -1))


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.unflatten(-1, (-1, 8)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("recipe", "bias", "dtype"),
    [
        (RECIPES[0], False, F32),
        (RECIPES[0], True, BF16),
        (RECIPES[1], True, F32),
        (RECIPES[1], False, BF16),
        pytest.param(RECIPES[0], True, F32, marks=pytest.mark.variant),
        pytest.param(RECIPES[0], False, BF16, marks=pytest.mark.variant),
        pytest.param(RECIPES[1], False, F32, marks=pytest.mark.variant),
        pytest.param(RECIPES[1], True, BF16, marks=pytest.mark.variant),
    ],
    ids=repr,
)
def test_the_numbers_are_those_of_one_layer(recipe: Any, bias: bool, dtype: torch.dtype) -> None:
    """They are the same to the bit in every step, and so are the gradients of each layer's parameters."""
    torch.manual_seed(0)
    siblings = Siblings(swiglu, bias=bias).to(dtype)
    fused = Fused(siblings)
    data = [torch.randn(4, 8, 32, dtype=dtype) * 3**i for i in range(4)]
    merged = train(siblings, annotated(siblings, recipe=recipe, merge_siblings=True), data)
    one = train(fused, annotated(fused, recipe=recipe), data)
    for got, wanted in zip(merged, one, strict=True):
        assert torch.equal(got["output"], wanted["output"])
        assert torch.equal(got["input"], wanted["input"])
        for name in ("weight", "bias")[: 1 + bias]:
            parts = [got[f"layers.{i}.{name}"] for i in range(2)]
            assert torch.equal(torch.cat(parts), wanted[f"layer.{name}"])


class Within(nn.Module):
    """A model in a region of activation checkpointing, or under autocast."""

    def __init__(self, model: nn.Module, how: str) -> None:
        super().__init__()
        self.model, self.how = model, how

    def forward(self, x: Tensor) -> Any:
        if self.how == "checkpoint":
            return checkpoint(self.model, x, use_reentrant=False)
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x)


@pytest.mark.compiled
@pytest.mark.parametrize("how", ["checkpoint", "autocast"])
def test_within_a_region(how: str) -> None:
    """The annotated model has the numbers of one layer there, too; the compiled one has those of the annotated one."""
    torch.manual_seed(0)
    siblings = Siblings(swiglu, bias=True)
    models = [Within(m, how) for m in (siblings, Fused(siblings), copy.deepcopy(siblings))]
    data = [torch.randn(4, 8, 32) * 3**i for i in range(3)]
    options = {"recipe": DelayedScaling(amax_history_len=4)}
    merged = annotated(models[0], merge_siblings=True, **options)
    one, run = annotated(models[1], **options), compiled(models[2], merge_siblings=True, strict=True, **options)
    steps = (train(m, f, data) for m, f in zip(models, (merged, one, run), strict=True))
    for got, wanted, from_compiled in zip(*steps, strict=True):
        assert torch.equal(got["output"], wanted["output"])
        assert torch.equal(got["input"], wanted["input"])
        assert min(sqnr(got[name], from_compiled[name]) for name in got) > 30


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("recipe", "lowering"),
    [
        (RECIPES[0], "eager"),
        pytest.param(RECIPES[1], "eager", marks=pytest.mark.variant),
        pytest.param(RECIPES[0], "inductor", marks=pytest.mark.variant),
    ],
    ids=repr,
)
def test_compiled_as_annotated(recipe: Any, lowering: str) -> None:
    """Inductor, which takes long, compiles one family: to it a merged layer is one of a cat and of its parts."""
    torch.manual_seed(0)
    families = [Siblings(swiglu), nn.Linear(48, 32), Siblings(attention, (32, 16, 16))]
    model = nn.Sequential(*families[0 if lowering == "eager" else 2 :])
    twin = copy.deepcopy(model)
    data = [torch.randn(4, 16, 32) for _ in range(3)]
    run = compiled(model, recipe=recipe, merge_siblings=True, lowering=lowering, strict=True)
    reference = train(twin, annotated(twin, recipe=recipe, merge_siblings=True), data)
    for got, wanted in zip(train(model, run, data), reference, strict=True):
        assert min(sqnr(wanted[name], got[name]) for name in wanted) > 30


@pytest.mark.compiled
def test_compiled_step_has_one_matmul_of_each_kind() -> None:
    x = torch.randn(4, 16, 32, requires_grad=True)
    report = fp8pass.explain(Siblings(swiglu), x, config=Config(merge_siblings=True))
    assert [(g.name, g.kind, g.status, (g.M, g.K, g.N)) for g in report.gemms] == [
        ("layers.0+1", "output", "rewritten", (64, 32, 96)),
        ("layers.0+1", "grad_weight", "rewritten", (96, 64, 32)),
        ("layers.0+1", "grad_input", "rewritten", (64, 96, 32)),
    ]


@pytest.mark.compiled
def test_names() -> None:
    recipe = DelayedScaling()
    a = annotation(nn.Sequential(Attention()), recipe=recipe)
    assert called(a) == ["0.q+k+v", "0.scaled_dot_product_attention", "0.o"]
    (table,) = a.tables
    assert {n for n in table.names if "+" in n} == {"0.q+k+v.input", "0.q+k+v.weight", "0.q+k+v.grad_output"}
    model = Transformer(layers=1)
    compiled(model, recipe=recipe, merge_siblings=True)(torch.randn(4, 16, 32)).sum().backward()
    assert "layers.0.0.q+k+v.weight" in fp8pass.state(model).slots


def _weighted(x: Tensor) -> Tensor:
    return x @ torch.ones(x.shape[-1], 16)


READERS: dict[str, tuple[Callable[..., Any], tuple[int, ...], list[int]]] = {
    "elementwise": (swiglu, (48, 48), []),
    "views and elementwise": (lambda a, b: a.unflatten(-1, (2, -1)).transpose(1, 2).exp(), (48, 48), []),
    "halves": (lambda a, b: torch.cat([-a.chunk(2, -1)[1], b[..., :24]], -1), (48, 48), []),
    "attention to all": (attention, (32, 16, 16), []),
    "attention to one": (lambda q, k, v: attention(q.sin(), k.cos(), v), (32, 16, 16), [2]),
    "a matmul": (lambda a, b: _weighted(a) + b.mean(), (48, 48), [0, 1]),
    "the caller": (lambda a, b: (a, b.sin()), (48, 48), [0]),
    "the caller, of a view": (lambda a, b: (a.transpose(0, 1), b.sin()), (48, 48), [0]),
    "a view of all its elements": (lambda a, b: a.view(-1).sin() + b.sin().view(-1), (48, 48), [0]),
    "a write": (lambda a, b: a.mul_(2).sin() + b.sin(), (48, 48), [0]),
    "a sum": (lambda a, b: a.sum(-1) + b.sin().sum(-1), (48, 48), [0]),
    "nothing": (lambda a, b: b.sin(), (48, 48), []),
}


SISTERS = {
    "views and elementwise": "halves",
    "attention to all": "attention to one",
    "the caller, of a view": "the caller",
}
"""Variants, and what reads the layers in the same way."""


@pytest.mark.compiled
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.variant] * (case in SISTERS)) for case in READERS]
)
def test_what_may_depend_on_strides_reads_a_copy(case: str) -> None:
    read, widths, copied = READERS[case]
    model = Siblings(read, widths)
    a = annotation(model, recipe=DynamicScaling())
    clones = [n for n in a.module.graph.nodes if n.target == "clone"]
    assert [n.args[0].args[1] for n in clones] == copied
    x = torch.randn(4, 8, 32)
    got, wanted = compiled(model, recipe="dynamic", merge_siblings=True)(x), model(x)
    for ours, eager in zip(*(y if isinstance(y, tuple) else (y,) for y in (got, wanted)), strict=True):
        assert (ours.shape, ours.stride()) == (eager.shape, eager.stride())
        assert sqnr(eager, ours) > 20


@pytest.mark.compiled
def test_evaluation_reads_the_scales_of_training() -> None:
    model = Siblings(swiglu)
    run = compiled(model, recipe="delayed", merge_siblings=True)
    x = torch.randn(4, 8, 32)
    run(x).sum().backward()
    slots = fp8pass.state(model).slots
    with torch.no_grad():
        y = run(x)
    assert fp8pass.state(model).slots == slots
    assert sqnr(model(x), y) > 20


def state_of(model: nn.Module, merged: bool, saved: dict[str, Tensor] | None = None, late: bool = False) -> Any:
    """Return the state after a step of `model`, which loads `saved` before or after its first call."""
    run = compiled(model, recipe=DelayedScaling(amax_history_len=4), merge_siblings=merged)
    state = fp8pass.state(model)
    if saved is not None and not late:
        state.load_state_dict(saved)
    run(torch.randn(4, 8, 32)).sum().backward()
    if saved is not None and late:
        state.load_state_dict(saved)
    return state.state_dict()


@pytest.mark.compiled
def test_state_of_separate_layers_is_loaded_into_merged_ones(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Siblings(swiglu)
    for larger in model.layers[1].parameters():
        larger.data.mul_(10)
    saved = state_of(model, merged=False)
    for late in (False, True):
        caplog.clear()
        got = state_of(Siblings(swiglu), True, saved, late)
        slots = {name.rpartition(".")[0] for name in got} - {""}
        assert slots == {f"layers.0+1.{role}" for role in ("input", "weight", "grad_output")}
        for role in ("weight", "grad_output"):
            parts = [saved[f"layers.{i}.{role}.amax"] for i in range(2)]
            newest = got[f"layers.0+1.{role}.amax"] if late else got[f"layers.0+1.{role}.amax_history"][0]
            assert newest == max(parts)
        assert "layers.0+1.weight begin with that" in caplog.text


@pytest.mark.compiled
@pytest.mark.shares_code
def test_state_that_lacks_a_part_does_not_fit() -> None:
    saved = state_of(Siblings(swiglu), merged=False)
    lacking = {name: x for name, x in saved.items() if not name.startswith("layers.1.weight")}
    with pytest.raises(Fp8Error, match=r"Missing slots: \['layers.0\+1.weight'\]"):
        state_of(Siblings(swiglu), True, lacking, late=True)


@pytest.mark.compiled
@pytest.mark.shares_code
@pytest.mark.parametrize("late", [False, True])
def test_state_of_merged_layers_is_loaded_into_separate_ones(late: bool) -> None:
    saved = state_of(Siblings(swiglu), merged=True)
    got = state_of(Siblings(swiglu), False, saved, late)
    for slot in ("0.weight", "1.weight", "0.grad_output", "1.grad_output", "0.input"):
        newest = got[f"layers.{slot}.amax"] if late else got[f"layers.{slot}.amax_history"][0]
        assert newest == saved[f"layers.0+1.{slot.partition('.')[2]}.amax"]
