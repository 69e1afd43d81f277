"""The annotate pass: the graphs it makes, the matmuls it declines, and its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fp8pass.compiler.dynamo_passes import annotated as annotate
from fp8pass.graph.annotation import Annotation
from fp8pass.options.config import Config
from fp8pass.quant import ops
from fp8pass.recipes import DelayedScaling, DynamicScaling
from tests.helpers import oracle
from tests.helpers.annotate import annotation
from tests.helpers.harness import annotated, expect_graph, sqnr
from tests.helpers.models import Attention, Block, Decorated, make


@torch.library.custom_op("fp8pass_test::bump", mutates_args={"x"})
def bump(x: Tensor) -> None:
    """Multiply `x` by 3 in place."""
    x.mul_(3)


@bump.register_fake
def _(x: Tensor) -> None:
    return None


def names(a: Annotation) -> list[str]:
    (table,) = a.tables
    return list(table.names)


@pytest.mark.passes
def test_inputs_may_come_after_calls() -> None:
    """A graph of torch 2.11 may have an input after calls, if a hook reads it."""
    made: list[Annotation] = []

    def backend(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        *_, last = module.graph.find_nodes(op="placeholder")
        module.graph.output_node().prepend(last)
        for reader in last.users:
            last.append(reader)
        made.append(annotate(module, Config()))
        return module.forward

    torch.compile(lambda x, y, w: (x @ y.sin()).relu() @ w, backend=backend)(*(torch.randn(32, 32) for _ in range(3)))
    ops_of = [node.op for node in made[0].module.graph.nodes]
    assert ops_of == sorted(ops_of, key=lambda op: op != "placeholder")
    assert len(made[0].choices) == 2


@pytest.mark.passes
def test_graph_of_delayed_scaling() -> None:
    a = annotation(make(), torch.randn(16, 32), recipe=DelayedScaling(amax_history_len=16))
    expect_graph(
        a.module,
        """\
L_self_modules_norm_parameters_weight_: "f32[32]",
L_x_: "f32[16, 32]",
L_self_modules_up_parameters_weight_: "f32[56, 32]",
L_self_modules_up_parameters_bias_: "f32[56]",
L_self_modules_down_parameters_weight_: "f32[32, 56]",
fp8pass_scale,
fp8pass_amax_history,
fp8pass_amax_forward,
fp8pass_amax_backward,
fp8pass_held,
fp8pass_amax_backward_late,
l_self_modules_norm_parameters_weight_ = L_self_modules_norm_parameters_weight_
l_x_ = L_x_
l_self_modules_up_parameters_weight_ = L_self_modules_up_parameters_weight_
l_self_modules_up_parameters_bias_ = L_self_modules_up_parameters_bias_
l_self_modules_down_parameters_weight_ = L_self_modules_down_parameters_weight_
begin_step = fp8pass_quant_ops_begin_step(DelayedScaling(amax_history_len=16), fp8pass_scale, fp8pass_amax_history, fp8pass_amax_forward, fp8pass_amax_backward, fp8pass_held)
scales_or_one = fp8pass_quant_ops_scales_or_one(begin_step)
rms_norm: "f32[16, 32]" = torch.rms_norm(l_x_, (32,), l_self_modules_norm_parameters_weight_, None)
qdq_operand: "f32[16, 32]" = fp8pass_quant_ops_qdq_operand(rms_norm, Delayed(recipe=DelayedScaling(amax_history_len=16), dtype=torch.float8_e4m3fn, slot=0, index=0, bootstrap=False, record=True), scales_or_one, fp8pass_amax_forward)
qdq_operand_1: "f32[56, 32]" = fp8pass_quant_ops_qdq_operand(l_self_modules_up_parameters_weight_, Delayed(recipe=DelayedScaling(amax_history_len=16), dtype=torch.float8_e4m3fn, slot=1, index=1, bootstrap=False, record=True), scales_or_one, fp8pass_amax_forward)
linear_1: "f32[16, 56]" = torch._C._nn.linear(qdq_operand, qdq_operand_1)
qdq_gradient: "f32[16, 56]" = fp8pass_quant_ops_qdq_gradient(linear_1, Delayed(recipe=DelayedScaling(amax_history_len=16), dtype=torch.float8_e5m2, slot=4, index=0, bootstrap=False, record=True), scales_or_one, fp8pass_amax_backward_late)
add_bias: "f32[16, 56]" = fp8pass_quant_ops_add_bias(qdq_gradient, l_self_modules_up_parameters_bias_, torch.float32, 1)
gelu: "f32[16, 56]" = torch._C._nn.gelu(add_bias)
qdq_operand_2: "f32[16, 56]" = fp8pass_quant_ops_qdq_operand(gelu, Delayed(recipe=DelayedScaling(amax_history_len=16), dtype=torch.float8_e4m3fn, slot=2, index=2, bootstrap=False, record=True), scales_or_one, fp8pass_amax_forward)
qdq_operand_3: "f32[32, 56]" = fp8pass_quant_ops_qdq_operand(l_self_modules_down_parameters_weight_, Delayed(recipe=DelayedScaling(amax_history_len=16), dtype=torch.float8_e4m3fn, slot=3, index=3, bootstrap=False, record=True), scales_or_one, fp8pass_amax_forward)
hidden_1: "f32[16, 32]" = torch._C._nn.linear(qdq_operand_2, qdq_operand_3, None)
qdq_gradient_1: "f32[16, 32]" = fp8pass_quant_ops_qdq_gradient(hidden_1, Delayed(recipe=DelayedScaling(amax_history_len=16), dtype=torch.float8_e5m2, slot=5, index=1, bootstrap=False, record=True), scales_or_one, fp8pass_amax_backward_late)
add: "f32[16, 32]" = l_x_ + qdq_gradient_1
return (add,)
""",
    )


@pytest.mark.passes
def test_graph_of_dynamic_scaling() -> None:
    a = annotation(nn.Linear(32, 48), torch.randn(16, 32), recipe="dynamic")
    assert not a.tables
    expect_graph(
        a.module,
        """\
L_fn_parameters_weight_: "f32[48, 32]",
L_fn_parameters_bias_: "f32[48]",
L_args_0_: "f32[16, 32]",
l_fn_parameters_weight_ = L_fn_parameters_weight_
l_fn_parameters_bias_ = L_fn_parameters_bias_
l_args_0_ = L_args_0_
qdq_operand: "f32[16, 32]" = fp8pass_quant_ops_qdq_operand(l_args_0_, Dynamic(recipe=DynamicScaling(), dtype=torch.float8_e4m3fn))
qdq_operand_1: "f32[48, 32]" = fp8pass_quant_ops_qdq_operand(l_fn_parameters_weight_, Dynamic(recipe=DynamicScaling(), dtype=torch.float8_e4m3fn))
linear_1: "f32[16, 48]" = torch._C._nn.linear(qdq_operand, qdq_operand_1)
qdq_gradient: "f32[16, 48]" = fp8pass_quant_ops_qdq_gradient(linear_1, Dynamic(recipe=DynamicScaling(), dtype=torch.float8_e5m2))
add_bias: "f32[16, 48]" = fp8pass_quant_ops_add_bias(qdq_gradient, l_fn_parameters_bias_, torch.float32, 1)
return (add_bias,)
""",
    )


@pytest.mark.passes
def test_slots_are_named_by_module_and_role() -> None:
    a = annotation(make(), torch.randn(16, 32))
    assert names(a) == [
        "up.input", "up.weight", "down.input", "down.weight", "up.grad_output", "down.grad_output",
    ]  # fmt: skip
    (table,) = a.tables
    assert table.n_forward == 4
    assert table.fp8_max == (448.0,) * 4 + (57344.0,) * 2
    assert table.owned == ("norm.weight", "up.weight", "up.bias", "down.weight")
    assert table.anchors == (1, 1, 3, 3, 1, 3)


@pytest.mark.passes
def test_names_without_modules() -> None:
    class Attend(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.transpose(-1, -2)).softmax(-1) @ x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = Attend()
            self.w = nn.Parameter(torch.randn(32, 32))

        def forward(self, x: Tensor) -> Tensor:
            return self.attend(x) @ self.w

    found = names(annotation(Outer(), torch.randn(2, 16, 32), training=False))
    assert found == [
        "attend.matmul.input", "attend.matmul.weight", "attend.matmul.input_1", "w.input", "w.weight",
    ]  # fmt: skip


@pytest.mark.passes
def test_two_models_in_one_function_keep_their_names_apart() -> None:
    def distill(teacher: nn.Module, student: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = teacher(x)
        out: Tensor = (student(x) - y).square().sum()
        return out

    a = annotation(distill, nn.Linear(32, 32), nn.Linear(32, 32), torch.randn(8, 32))
    assert names(a) == [
        "teacher.input", "teacher.weight", "student.input", "student.weight", "student.grad_output",
    ]  # fmt: skip


@pytest.mark.passes
def test_a_decorated_forward_has_the_names_of_the_model() -> None:
    a = annotation(Decorated(), torch.randn(32, 32), training=False)
    assert names(a) == ["layers.0.input", "layers.0.weight", "matmul.input", "matmul.weight"]


@pytest.mark.passes
def test_models_in_one_tuple_keep_their_names_apart() -> None:
    def both(*args: Any) -> Tensor:
        return cast(Tensor, args[0](args[2]) + args[1](args[2]))

    a = annotation(both, nn.Linear(32, 32), nn.Linear(32, 32), torch.randn(8, 32), training=False)
    assert names(a) == ["0.input", "0.weight", "1.weight"]


@pytest.mark.passes
def test_an_evaluation_graph_records_nothing() -> None:
    a = annotation(make(), torch.randn(16, 32), training=False)
    assert [n for n in a.module.graph.nodes if n.target is ops.begin_step] == []
    quantizers = [n.args[1] for n in a.module.graph.nodes if n.target is ops.qdq_operand]
    assert [(q.record, q.bootstrap) for q in quantizers] == [(False, True)] * 4
    assert not [n for n in a.module.graph.nodes if n.target is ops.qdq_gradient]


@pytest.mark.passes
def test_dynamos_own_graph_is_not_touched() -> None:
    before: list[str] = []

    def backend(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        before.append(str(module.graph))
        annotate(module, Config())
        assert str(module.graph) == before[0]
        return module.forward

    torch.compile(make(), backend=backend)(torch.randn(16, 32))
    assert before


# DECLINED in tests/compiler/test_backend.py has the reasons that users meet; here nothing may be inserted.
@pytest.mark.passes
@pytest.mark.parametrize(
    ("function", "inputs", "reason"),
    [
        (lambda a, b: torch.einsum("i,j->ij", a, b), ((8,), (8,)), "an operand is a vector of 8 elements"),
        (lambda a, b: torch.einsum("ij,kl->ijkl", a, b), ((8, 8), (8, 8)), "contracts nothing"),
        (lambda a, b: torch.matmul(a, b), ((8, 8), (8,)), "an operand is a vector of 8 elements"),
        (lambda a, b: torch.linalg.multi_dot([a, b], out=torch.empty(8, 8)), ((8, 8), (8, 8)), "writes into out="),
        (
            lambda a, b: F.scaled_dot_product_attention(a, b, b),
            ((1, 2, 8, 8), (1, 2, 8, 8)),
            "attention stays in high precision",
        ),
        (lambda a, b: torch.bmm(a, b), ((17, 8, 8), (17, 8, 8)), "17 products of"),
    ],
)
def test_refusals(function: Callable[..., Any], inputs: tuple[tuple[int, ...], ...], reason: str) -> None:
    a = annotation(function, *map(torch.randn, inputs), training=False)
    (choice,) = a.choices
    assert reason in choice.reason
    assert choice.source.startswith("test_annotate.py:")
    assert not a.tables
    assert not [n for n in a.module.graph.nodes if n.target is ops.qdq_operand]


@pytest.mark.passes
def test_power_of_2_scales() -> None:
    x = torch.randn(16, 32)
    y = annotated(lambda a, b: a @ b, recipe=DynamicScaling(power_of_2=True))(x, torch.eye(32))
    scale = 2.0 ** torch.floor(torch.log2(448 / x.abs().max())).item()
    torch.testing.assert_close(y.double(), oracle.qdq(x, scale, "e4m3"), rtol=0, atol=0)


@pytest.mark.passes
@pytest.mark.parametrize("kind", [Block, Attention])
def test_without_quantizers_nothing_changes(kind: type[nn.Module]) -> None:
    """With all matmuls left out, the annotated graph computes the same bits as the model."""
    model, x = make(kind), torch.randn(2, 8, 32)
    assert torch.equal(annotated(model, filter=lambda *_: False)(x), model(x))


@pytest.mark.passes
def test_a_graph_without_parameters_or_buffers_is_scaled_dynamically() -> None:
    """Two modules without parameters or buffers may share code, so there is no instance to keep state for."""
    a = annotation(lambda a, b: a @ b, torch.randn(8, 8), torch.randn(8, 8))
    assert not a.tables
    assert [c.scaling for c in a.choices] == ["dynamic"]


@pytest.mark.passes
def test_buffers_tell_instances_apart_where_there_are_no_parameters() -> None:
    class Projection(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("basis", torch.randn(32, 32))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = x @ self.basis
            return y

    assert names(annotation(Projection(), torch.randn(8, 32))) == ["basis.input", "basis.weight"]


@pytest.mark.passes
def test_paths_with_numbers() -> None:
    class Attend(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x.mT

    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(Attend()))
    assert names(annotation(model, torch.randn(4, 8)))[2:4] == ["1.0.matmul.input", "1.0.matmul.weight"]


@pytest.mark.passes
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.mul_(2),
        lambda x: F.relu(x, True),
        lambda x: F.dropout(x, 0.5, True, True),
        lambda x: F.hardtanh(x, -0.1, 0.1, True),
        lambda x: F.silu(x, inplace=True),
        lambda x: torch.relu_(x),
        lambda x: x.__setitem__(0, 0.0),
        lambda x: torch.add(x, 1, out=x),
        lambda x: x.__iadd__(30),
        lambda x: torch.Tensor.__imul__(x, -3),
        lambda x: torch.ops.fp8pass_test.bump(x),
        lambda x: F.embedding(torch.arange(8), x, max_norm=0.5),
        lambda x: F.embedding(torch.arange(8), x, None, 0.5),
        lambda x: F.embedding_bag(torch.arange(8).view(4, 2), x, max_norm=0.5),
    ],
)
def test_a_tensor_is_quantized_again_after_an_in_place_change(change: Callable[[Tensor], Any]) -> None:
    weight = torch.randn(32, 32)

    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        first = x @ weight
        change(x)
        return first, x @ weight

    x = torch.randn(8, 32)
    with torch.no_grad():
        torch.manual_seed(0)
        expected = twice(x.clone())
        torch.manual_seed(0)
        actual = annotated(twice)(x.clone())
    assert all(sqnr(e, a) > 25 for e, a in zip(expected, actual, strict=True))


@pytest.mark.compiled
@pytest.mark.parametrize("recipe", ["dynamic", "delayed"])
@pytest.mark.parametrize("fp8_format", ["hybrid", "e4m3"])
def test_a_linear_layer_against_the_float64_oracle(recipe: str, fp8_format: str) -> None:
    """Every scale of a first step is that of the tensor's own amax: the oracle quantizes by these, in float64."""
    layer = nn.Linear(32, 48)
    x, g = torch.randn(16, 32, requires_grad=True), torch.randn(16, 48) * 1e-6
    kind = {"dynamic": DynamicScaling, "delayed": DelayedScaling}[recipe]
    y = annotated(layer, recipe=kind(fp8_format=fp8_format))(x)
    y.backward(g)

    def own(t: Tensor, fmt: str) -> Tensor:
        t = t.detach()
        return oracle.qdq(t, oracle.scale_of(float(t.abs().max()), fmt), fmt)

    gradients = "e5m2" if fp8_format == "hybrid" else "e4m3"
    xq, wq, gq = own(x, "e4m3"), own(layer.weight, "e4m3"), own(g, gradients)
    assert x.grad is not None
    for actual, expected in (
        (y, xq @ wq.t() + layer.bias.double()),
        (x.grad, gq @ wq),
        (layer.weight.grad, gq.t() @ xq),
        (layer.bias.grad, g.double().sum(0)),  # made from the unquantized gradient
    ):
        assert sqnr(expected, actual) > 110


@pytest.mark.compiled
def test_multi_head_attention_is_opened() -> None:
    attention = nn.MultiheadAttention(32, 2, batch_first=True)
    x = torch.randn(2, 8, 32)
    a = annotation(lambda x: attention(x, x, x)[0], x)
    assert [c.reason for c in a.choices] == [""] * 4
    assert {"in_proj_weight", "out_proj"} <= {c.name for c in a.choices}
    actual, expected = annotated(lambda x: attention(x, x, x)[0])(x), attention(x, x, x)[0]
    assert sqnr(expected, actual) > 22
