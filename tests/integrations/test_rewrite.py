"""Test `fp8pass.rewrite` against `torch.compile`, to the bit, on graphs of all of torch's tracers; and bad input."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._inductor import config as inductor_config
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import fp8pass
from fp8pass import Config, Fp8Error, recipes
from tests.helpers import oracle

pytestmark = pytest.mark.compiled


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64, bias=False)).to(dtype)


class QKV(nn.Module):
    """Three layers that read one tensor, which needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.q(x)) * self.k(x) + torch.relu(self.v(x))


class Twice(nn.Module):
    """A layer that is applied twice, and one that is applied to two tensors whose products are added up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.relu(self.a(x))) + self.b(x) + self.b(torch.relu(x))


def batches(count: int = 3, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(32, 64, dtype=dtype) * (i + 1), torch.randn(32, 64, dtype=dtype)) for i in range(count)]


def step_of(model: nn.Module) -> Any:
    def step(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Any:
        loss = F.mse_loss(functional_call(model, parameters, (x,)), y)
        return loss, dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))

    return step


def joint(model: nn.Module, **how: Any) -> tuple[fx.GraphModule, dict[str, Tensor]]:
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    return make_fx(step_of(model), **how)(parameters, *batches(1)[0]), parameters


def check_against_compiled(model: nn.Module, recipe: Any, steps: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Train both for some steps; compare losses, gradients and state to the bit."""
    parameters = dict(model.named_parameters())
    graph = make_fx(step_of(model))(parameters, *steps[0])
    graph, state, report = fp8pass.rewrite(graph, (parameters, *steps[0]), {"recipe": recipe, "strict": True})
    assert {gemm.status for gemm in report.gemms} == {"rewritten"}
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="fp8pass", options={"lowering": "eager", "recipe": recipe})
    # this pass sums gradients of biases in tiles, in another order
    with inductor_config.patch(disabled_passes="quantize_tiles"):
        for x, y in steps:
            loss, gradients = state.run(graph, parameters, x, y)
            expected = F.mse_loss(compiled(x), y)
            expected.backward()
            assert torch.equal(loss, expected)
            for name, p in other.named_parameters():
                assert torch.equal(gradients[name], p.grad), name
                p.grad = None
    ours, theirs = state.state_dict(), fp8pass.state(other).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


VARIANT = pytest.mark.variant


@pytest.mark.parametrize("recipe", ["delayed", *(pytest.param(r, marks=VARIANT) for r in ("dynamic", "rowwise"))])
def test_a_joint_graph_computes_what_torch_compile_does(recipe: str) -> None:
    check_against_compiled(mlp(), recipe, batches())


@VARIANT
def test_layers_that_share_tensors() -> None:
    check_against_compiled(Twice(), "delayed", batches())


@VARIANT
def test_recipes_by_module_of_layers_that_share_an_input() -> None:
    check_against_compiled(QKV(), {"q": "delayed", "k": "rowwise", "v": "dynamic"}, batches())


@VARIANT
def test_bfloat16() -> None:
    check_against_compiled(mlp(torch.bfloat16), "delayed", batches(dtype=torch.bfloat16))


def test_against_the_oracle() -> None:
    """The second step of delayed scaling, in float64: each tensor is scaled by its amax in the first."""
    torch.manual_seed(0)
    w = torch.randn(48, 64, requires_grad=True)
    (x, _), (x2, _) = batches(2)

    def step(w: Tensor, x: Tensor) -> Any:
        y = F.linear(x, w)
        loss = (y * y).sum()
        return y, *torch.autograd.grad(loss, w)

    graph, state, _ = fp8pass.rewrite(make_fx(step)(w, x), (w, x))
    y, _ = state.run(graph, w, x)
    y2, dw2 = state.run(graph, w, x2)
    scales = [oracle.scale_of(float(t.abs().max()), "e4m3") for t in (x, w.detach())]
    x_q, w_q = oracle.qdq(x2, scales[0], "e4m3"), oracle.qdq(w.detach(), scales[1], "e4m3")
    torch.testing.assert_close(y2.double(), x_q @ w_q.t(), rtol=1e-5, atol=1e-4)
    dy = oracle.qdq(2 * y2, oracle.scale_of(2 * float(y.abs().max()), "e5m2"), "e5m2")
    torch.testing.assert_close(dw2.double(), dy.t() @ x_q, rtol=1e-5, atol=1e-2)


def test_a_state_goes_from_torch_compile_to_a_graph() -> None:
    model, (first, second) = mlp(), batches(2)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="fp8pass", options={"lowering": "eager"})
    F.mse_loss(compiled(first[0]), first[1]).backward()
    graph, parameters = joint(model)
    graph, state, _ = fp8pass.rewrite(graph, (parameters, *second))
    state.load_state_dict(fp8pass.state(other).state_dict())
    assert not state.is_cold()
    loss, _ = state.run(graph, parameters, *second)
    assert torch.equal(loss, F.mse_loss(compiled(second[0]), second[1]))
    assert state.steps == 2


def test_the_graph_is_functional_and_the_callers_graph_stays() -> None:
    traced, parameters = joint(mlp())
    before = traced.code
    graph, state, _ = fp8pass.rewrite(traced, (parameters, *batches(1)[0]))
    assert traced.code == before
    assert all(
        n.target._namespace in ("aten", "prims", "fp8pass")
        for n in graph.graph.nodes
        if n.op == "call_function" and hasattr(n.target, "_namespace")
    )
    inputs = [*parameters.values(), *batches(1)[0], *state.tensors]
    kept = [x.detach().clone() for x in inputs]
    with torch.no_grad():
        results = graph(*inputs)
    assert all(map(torch.equal, inputs, kept))
    assert len(results) == 4 + len(state.names)
    assert state.names == ["scale", "amax_history", "amax"]
    state.tensors = results[4:]
    assert not state.is_cold(), "the next step has scales"
    assert not any(x.requires_grad for x in state.tensors)


def test_symbolic_sizes() -> None:
    traced, parameters = joint(mlp(), tracing_mode="symbolic")
    graph, state, report = fp8pass.rewrite(traced, (parameters, *batches(1)[0]))
    assert len(report.rewritten) == len(report.gemms) == 5
    for size in (32, 48):
        x, y = torch.randn(size, 64), torch.randn(size, 64)
        loss, _ = state.run(graph, parameters, x, y)
        torch.testing.assert_close(loss, step_of(mlp())(parameters, x, y)[0].detach(), rtol=0.05, atol=0.05)


def test_aot_export_joint_simple() -> None:
    model, (x, y) = mlp(), batches(1)[0]
    parameters = dict(model.named_parameters())

    def loss(*primals: Tensor) -> tuple[Tensor]:
        return (
            F.mse_loss(
                functional_call(model, dict(zip(parameters, primals, strict=False)), (primals[-2],)), primals[-1]
            ),
        )

    primals, tangents = [*parameters.values(), x, y], [torch.ones(())]
    traced = aot_export_joint_simple(loss, tuple(primals), trace_joint=True)
    assert isinstance(traced, fx.GraphModule)
    names = {f"primals_{i + 1}": name for i, name in enumerate(parameters)}
    graph, state, report = fp8pass.rewrite(traced, (primals, tangents), names=names)
    assert len(report.rewritten) == len(report.gemms) == 5
    (loss_,), gradients = state.run(graph, primals, tangents)
    assert [g is not None for g in gradients] == [True, True, True, False, False]
    assert state.slots == ["0.input", "0.weight", "2.input", "2.weight", "0.grad_output", "2.grad_output"]
    with torch.no_grad():
        torch.testing.assert_close(loss_, F.mse_loss(model(x), y), rtol=0.05, atol=0.05)


def test_a_plain_symbolic_trace_is_for_inference() -> None:
    model, (x, _) = mlp(), batches(1)[0]
    traced = fx.symbolic_trace(model)
    before = traced.code
    graph, state, report = fp8pass.rewrite(traced, (x,), {"recipe": "dynamic"})
    with torch.no_grad():
        expected = torch.compile(model, backend="fp8pass", options={"lowering": "eager", "recipe": "dynamic"})(x)
    assert torch.equal(state.run(graph, x), expected)
    assert traced.code == before
    assert [gemm.name for gemm in report.gemms] == ["0", "2"]
    # some CPUs multiply in bfloat16 and cast the product: torch then refuses at the cast
    with pytest.raises(RuntimeError, match=r"derivative|no autograd formula"):
        graph(x)[0].sum().backward()


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=VARIANT), True])
def test_torch_export(dynamic: bool) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"y": self.net(x)}

    model, (x, _) = Named(), batches(1)[0]
    sizes = {"x": {0: torch.export.Dim("rows", min=2, max=512)}} if dynamic else None
    program = torch.export.export(model, (x,), dynamic_shapes=sizes)
    graph, state, report = fp8pass.rewrite(program.module(), (x,), {"recipe": "rowwise"})
    assert [(g.name, g.status) for g in report.gemms] == [("net.0", "rewritten"), ("net.2", "rewritten")]
    names = program.graph_signature.inputs_to_parameters
    flat, other, _ = fp8pass.rewrite(program.graph_module, (*model.parameters(), x), {"recipe": "rowwise"}, names=names)
    inputs = (x, torch.randn(80, 64)) if dynamic else (x,)
    for x in inputs:
        with torch.no_grad():
            expected = torch.compile(model, backend="fp8pass", options={"lowering": "eager", "recipe": "rowwise"})(x)
        assert torch.equal(state.run(graph, x)["y"], expected["y"])
        assert torch.equal(other.run(flat, *model.parameters(), x)[0], expected["y"])


def test_writes_into_inputs_stay() -> None:
    """An update in the graph, and a batch norm's buffers: the writes come last, and the state is not written."""
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Linear(64, 64))
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    own = step_of(model)

    def step(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        loss, gradients = own({name: p.detach().requires_grad_() for name, p in parameters.items()}, x, y)
        for name, p in parameters.items():
            p.sub_(gradients[name], alpha=0.5)
        return loss  # type: ignore[no-any-return]

    x, y = batches(1)[0]
    graph, state, report = fp8pass.rewrite(make_fx(step)(parameters, x, y), (parameters, x, y))
    assert len(report.rewritten) == len(report.gemms) == 5
    losses = [float(state.run(graph, parameters, x, y)) for _ in range(4)]
    assert losses == sorted(losses, reverse=True) and losses[3] < losses[0]


def test_static_scales() -> None:
    model, (x, _) = mlp(), batches(1)[0]
    recipe = recipes.StaticScaling(fp8pass.calibrate(model, [x]))
    options: dict[str, Any] = {"recipe": recipe}
    graph, state, _ = fp8pass.rewrite(fx.symbolic_trace(model), (x,), options)
    with torch.no_grad():
        expected = torch.compile(model, backend="fp8pass", options={"lowering": "eager", **options})(x)
    assert torch.equal(state.run(graph, x), expected)
    assert state.names == ["scales"]


def test_users_own_quantization_without_a_recipe() -> None:
    def product(x: Tensor, w: Tensor) -> Tensor:
        return fp8pass.qdq(x, 2.0, torch.float8_e4m3fn) @ fp8pass.qdq(w, 4.0, torch.float8_e4m3fn)

    traced = make_fx(product)(torch.randn(32, 64), torch.randn(64, 32))
    _, state, report = fp8pass.rewrite(traced, (torch.randn(32, 64), torch.randn(64, 32)), {"recipe": None})
    assert [(g.status, g.scaling) for g in report.gemms] == [("rewritten", "user")]
    assert state.tensors == []


# ---------------------------------------------------------------------------------------------------------------------
# Bad input.


def test_strict_raises_for_a_matmul_that_cannot_be_decided() -> None:
    def step(w: Tensor) -> Any:
        loss = (w @ w.t()).sum()
        return loss, *torch.autograd.grad(loss, w)

    w = torch.randn(32, 32, requires_grad=True)
    with pytest.raises(Fp8Error, match=r"strict: .* can't be decided: no matmul of the forward reads"):
        fp8pass.rewrite(make_fx(step)(w), (w,), {"strict": True})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"weight_cache": "fp8"}, "weight_cache='fp8' .*drop it"),
        ({"monitor": True}, "monitor=True"),
        ({"merge_siblings": True}, "merge_siblings=True"),
        ({"mode": "max-autotune"}, "mode='max-autotune'"),
        ({"recipe": recipes.Schedule({0: None, 10: "delayed"})}, r"config\.at_step"),
        ({"recipe": {"head": "delayed"}}, "'head' matches no module or matmul of the graph"),
        ({"filter": ["0", "hed"]}, "'hed' matches no module"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        fp8pass.rewrite(fx.symbolic_trace(mlp()), (torch.randn(32, 64),), Config(**options))


def test_inputs_of_another_graph() -> None:
    traced, parameters = joint(mlp())
    x, y = batches(1)[0]
    with pytest.raises(Fp8Error, match="hold 4 values, and the graph takes 5: parameters_1, parameters_2"):
        fp8pass.rewrite(traced, (parameters, x))
    with pytest.raises(Fp8Error, match=r"traced with x_1 = torch.float32\[32, 64\] on cpu, .* torch.float32\[16, 64\]"):
        fp8pass.rewrite(traced, (parameters, x[:16], y))
    with pytest.raises(ValueError, match=r"names: the graph has no input 'parameter_1'.*parameters_1"):
        fp8pass.rewrite(traced, (parameters, x, y), names={"parameter_1": "fc.weight"})
    with pytest.raises(TypeError, match=r"takes a torch\.fx\.GraphModule, not Sequential"):
        fp8pass.rewrite(mlp(), (x,))  # type: ignore[arg-type]
    with pytest.raises(Fp8Error, match=r"can't be traced to ATen ops with these inputs: .*"):
        fp8pass.rewrite(fx.symbolic_trace(mlp()), (torch.randn(32, 65),))


def test_states_that_do_not_fit() -> None:
    traced, parameters = joint(mlp())
    _, state, _ = fp8pass.rewrite(traced, (parameters, *batches(1)[0]))
    saved = state.state_dict()
    with pytest.raises(Fp8Error, match=r"lacks slots of the graph: 0\.input"):
        state.load_state_dict({k: v for k, v in saved.items() if not k.startswith("0.input")})
    with pytest.raises(Fp8Error, match=r"slots that the graph lacks: 3\.input"):
        state.load_state_dict({**saved, **{k.replace("2.input", "3.input"): v for k, v in saved.items()}})
    with_margin = {"recipe": recipes.DelayedScaling(margin=1)}
    _, other, _ = fp8pass.rewrite(traced, (parameters, *batches(1)[0]), with_margin)
    with pytest.raises(Fp8Error, match="saved under"):
        other.load_state_dict(saved)
    with pytest.raises(Fp8Error, match="has 3 state tensors, scale, amax_history, amax; got 1"):
        state.tensors = [torch.zeros(6)]
