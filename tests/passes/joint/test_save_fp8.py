"""Test `save_fp8`: gradients at the quantized tensors, against an oracle; what is saved; and what is not, and why."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from blocks import GPT2MLP, LlamaBlock, LlamaMLP
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.base._torch import functorch_config
from fp8pass.base.scaling import E4M3
from fp8pass.graph.verdict import SavedTensor
from fp8pass.options.overrides import Trial, trying
from fp8pass.passes.dynamo import save_fp8
from fp8pass.recipes import DelayedScaling, DynamicScaling, RowwiseScaling
from tests.helpers.harness import annotated, compiled, sqnr, train, verdicts

pytestmark = pytest.mark.compiled


def layers() -> nn.Sequential:
    return nn.Sequential(*(LlamaBlock(64, 128, heads=4, kv_heads=2, length=32) for _ in range(2)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gated": lambda: LlamaMLP(64, 128),
    "gelu": lambda: GPT2MLP(64, 128),
    "layers": layers,
}


def batches(steps: int = 3) -> list[Tensor]:
    return [torch.randn(1, 32, 64) for _ in range(steps)]


def saved_by(y: Tensor, x: Tensor) -> int:
    """Return the bytes that autograd saves for a compiled result, without parameters and the input."""
    saved: Any = y.grad_fn
    kept = (t for t in saved.saved_tensors if not isinstance(t, nn.Parameter) and t is not x)
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in kept}.values())


def report_of(function: Any, *inputs: Tensor, **options: Any) -> list[SavedTensor]:
    with verdicts() as report:
        compiled(function, save_fp8=True, **options)(*inputs)
    assert not report.faults
    return report.saved


CASES = [("gated", DelayedScaling()), ("gated", DynamicScaling()), ("gated", RowwiseScaling())]
CASES += [("gelu", DelayedScaling()), ("layers", DelayedScaling())]


@pytest.mark.parametrize(("name", "recipe"), CASES, ids=lambda case: case if isinstance(case, str) else case.name)
def test_the_passes_keep_the_numbers_of_the_annotated_graph(name: str, recipe: Any) -> None:
    model = MODELS[name]()
    twin = MODELS[name]()
    twin.load_state_dict(model.state_dict())
    given = batches()
    expected = train(twin, annotated(twin, recipe=recipe, save_fp8=True), given)
    with verdicts() as report:
        for wanted, got in zip(
            expected, train(model, compiled(model, recipe=recipe, save_fp8=True), given), strict=True
        ):
            assert wanted.keys() == got.keys()
            for key, tensor in wanted.items():
                # torch's own GELU and RMSNorm round otherwise than what Inductor decomposes them into
                alike = torch.equal(got[key], tensor) if name == "gated" else sqnr(tensor, got[key]) > 50
                assert alike, (key, sqnr(tensor, got[key]))
    assert {tensor.status for tensor in report.saved} == {"in FP8"} and not report.faults


def test_values_do_not_change() -> None:
    model, (x,) = MODELS["gated"](), batches(1)
    assert torch.equal(compiled(model, recipe="dynamic")(x), compiled(model, recipe="dynamic", save_fp8=True)(x))


def quantized(x: Tensor, like: Tensor | None = None, rows: bool = False) -> Tensor:
    """Quantize and dequantize in float64, by torch's own conversion to FP8; the gradient passes straight through."""
    of = x if like is None else like
    amax = of.detach().abs().amax(-1, keepdim=True) if rows else of.detach().abs().amax()
    scale = (448 / amax.float()).double()
    return x + ((x * scale).detach().to(torch.float32).to(E4M3).double() / scale - x).detach()


def test_gradients_are_those_at_the_quantized_tensors() -> None:
    """The MLP in float64, where `gate` and `up` are read by the backward alone as FP8 holds them."""
    model, x = LlamaMLP(64, 128), torch.randn(32, 64)
    recipe = DynamicScaling(fp8_format="e4m3", high_precision=("grad_input", "grad_weight"))
    compiled(model, recipe=recipe, save_fp8=True)(x).square().sum().backward()
    twin = LlamaMLP(64, 128).double()
    twin.load_state_dict(model.state_dict())
    y = twin.norm(x.double())
    gate, up = (F.linear(quantized(y), quantized(w.weight)) for w in (twin.gate, twin.up))
    result = x.double() + F.linear(quantized(F.silu(gate) * up), quantized(twin.down.weight))
    # in high precision, gradients are those of the unquantized operands
    gate, up = F.linear(y, twin.gate.weight), F.linear(y, twin.up.weight)
    gate_q, up_q = (
        quantized(F.linear(quantized(y.detach()), quantized(w.weight.detach()))) for w in (twin.gate, twin.up)
    )
    hidden = F.silu(gate + (gate_q - gate).detach()) * (up + (up_q - up).detach())
    F.linear(hidden, twin.down.weight).backward(2 * result.detach())
    for name in ("gate", "up"):
        got, wanted = getattr(model, name).weight.grad.double(), getattr(twin, name).weight.grad
        assert float((got - wanted).norm() / wanted.norm()) < 1e-5, name


def test_as_much_less_is_saved_as_the_report_says() -> None:
    model, (x,) = MODELS["layers"](), batches(1)
    options: Any = {"recipe": "dynamic", "compile_once": False}
    before = saved_by(compiled(model, **options)(x), x)
    with verdicts() as report:
        after = saved_by(compiled(model, save_fp8=True, **options)(x), x)
    scales = 4 * sum(1 if tensor.scaling == "dynamic" else x.shape[1] for tensor in report.saved)
    assert before - after == pytest.approx(sum(tensor.bytes for tensor in report.saved), abs=scales)


def test_a_tensor_that_a_matmul_reads_is_not_quantized_once_more() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.gate, self.last = (nn.Linear(64, 64, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            result: Tensor = self.last(y * torch.sigmoid(self.gate(y)))
            return result

    model = Gate()
    with verdicts() as report:
        run = compiled(model, save_fp8=True, monitor=True)
        for _ in range(2):
            run(torch.randn(32, 64)).sum().backward()
    slots = {row.slot for row in fp8pass.stats(model).rows}
    assert [tensor.name for tensor in report.saved] == ["gate", "first"]
    assert "gate.saved" in slots and "first.saved" not in slots
    assert [tensor.bytes for tensor in report.saved] == [32 * 64 * 3, 32 * 64 * 4]


class Activated(nn.Module):
    """function(self.first(x)), and a second layer."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(64, 64) for _ in range(2))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        y = self.function(self.first(x))
        return (self.second(y[0]), *y[1:]) if isinstance(y, tuple) else self.second(y)


REASONS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "returned": (lambda x: (F.gelu(x), x), "the graph returns it"),
    "another reader": (lambda x: F.gelu(x) + x.softmax(-1), "softmax (test_save_fp8.py"),
    "a view with another reader": (lambda x: F.gelu(x) + x.view(4, 8, 64).cumsum(1).view(32, 64), "cumsum"),
}


@pytest.mark.parametrize("name", REASONS)
def test_a_tensor_that_is_saved_anyway_stays_as_it_is(name: str) -> None:
    function, why = REASONS[name]
    (tensor, *others) = report_of(Activated(function), torch.randn(32, 64, requires_grad=True))
    assert (tensor.status, tensor.scaling, tensor.bytes) == ("as it is", "", 0)
    assert why in tensor.reason and not others


def test_dropout_is_not_repeated() -> None:
    """Another draw would give a gradient of other elements."""
    model = Activated(lambda x: F.dropout(F.gelu(x), 0.5))
    (tensor,) = report_of(model, torch.randn(32, 64, requires_grad=True))
    assert tensor.name == "first" and tensor.status == "in FP8"
    run, x = compiled(model, save_fp8=True, recipe="dynamic"), torch.randn(32, 64)
    run(x).sum().backward()
    zero = model.second.weight.grad.abs().sum(0) == 0
    assert not zero.all()


def test_names_select() -> None:
    model, x = layers(), torch.randn(1, 32, 64)
    with verdicts() as report:
        compiled(model, save_fp8=["*.gate"])(x)
    assert [tensor.name for tensor in report.saved] == ["0.mlp.gate", "1.mlp.gate"]
    with pytest.raises(Exception, match=r"save_fp8: '\*\.gatte' matches no module"):
        compiled(model, save_fp8=["*.gatte"])(x)


def test_a_module_without_a_recipe_is_left_alone() -> None:
    recipe = {"gate": None, "*": "delayed"}
    found = report_of(LlamaMLP(64, 128), torch.randn(32, 64, requires_grad=True), recipe=recipe)
    assert [(tensor.name, tensor.rule) for tensor in found] == [("gate", "recipe"), ("up", "")]


def test_symbolic_sizes() -> None:
    model = LlamaMLP(64, 128)
    with verdicts() as report:
        run = compiled(model, save_fp8=True, dynamic=True, recipe="dynamic")
        for rows in (32, 48):
            run(torch.randn(rows, 64)).sum().backward()
    assert report.graphs == 1 and {tensor.status for tensor in report.saved} == {"in FP8"}


def test_nothing_is_saved_without_gradients_or_in_checkpointed_regions() -> None:
    model, x = LlamaMLP(64, 128), torch.randn(32, 64)
    with torch.no_grad():
        assert report_of(model, x) == []

    def run(x: Tensor) -> Tensor:
        result: Tensor = checkpoint(model, x, use_reentrant=False)
        return result

    assert report_of(run, x.requires_grad_()) == []


def test_the_monitor_counts_what_is_saved() -> None:
    model = LlamaMLP(64, 128)
    run = compiled(model, save_fp8=True, monitor=["*.saved"])
    for x in batches():
        run(x).sum().backward()
    stats = {row.slot: row for row in fp8pass.stats(model).rows}
    assert set(stats) == {"gate.saved", "up.saved"}
    assert all(row.sqnr is not None and row.sqnr > 20 for row in stats.values())


def test_a_trial_of_bisect_leaves_tensors_as_they_are() -> None:
    model, x = LlamaMLP(64, 128), torch.randn(32, 64)

    def gradient(trial: Trial | None, **options: Any) -> Tensor:
        model.zero_grad()
        with trying(trial) if trial is not None else contextlib.nullcontext(), verdicts():
            compiled(model, recipe="dynamic", **options)(x).sum().backward()
        assert model.gate.weight.grad is not None
        return model.gate.weight.grad

    every = Trial()
    in_fp8 = gradient(every, save_fp8=True)
    saved = {unit for unit in every.seen if unit.kind == "saved"}
    assert {unit.name for unit in saved} == {"gate", "up"} and len(every.seen) == 3 * 3 + 2
    without = gradient(Trial(units=set(every.seen) - saved), save_fp8=True)
    assert torch.equal(without, gradient(None)) and not torch.equal(without, in_fp8)


def test_under_autocast_and_with_sizes_that_depend_on_data() -> None:
    model, x = MODELS["gated"](), torch.randn(32, 64)

    def chosen(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = model(x)
        return y[y[:, 0] > 0].exp().sum() + y.sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = report_of(chosen, x)
    assert {(tensor.name, tensor.status) for tensor in found} >= {("gate", "in FP8"), ("up", "in FP8")}


def test_a_fault_costs_only_what_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("planted")

    monkeypatch.setattr(save_fp8, "match", fails)
    with pytest.warns(UserWarning, match="in its pass save_fp8"), verdicts() as report:
        compiled(MODELS["gated"](), save_fp8=True, on_fault="warn")(torch.randn(32, 64)).sum().backward()
    assert len(report.rewritten) == 9 and not report.saved and len(report.faults) == 1


def test_with_a_memory_budget() -> None:
    """Torch's partitioner then computes more again, and less is saved; the gradients stay those of the reference."""
    model, (x,) = MODELS["gated"](), [torch.randn(2048, 64)]
    options: Any = {"recipe": "dynamic", "save_fp8": True}
    annotated(model, **options)(x).sum().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    sizes = []
    for budget in (1.0, 0.1):
        model.zero_grad()
        with verdicts() as report, functorch_config.patch(activation_memory_budget=budget):
            y = compiled(model, **options)(x)
            sizes.append(saved_by(y, x))
            y.sum().backward()
        assert not report.faults and all(
            sqnr(wanted[name], p.grad) > 100 for name, p in model.named_parameters() if p.grad is not None
        )
    assert sizes[1] < sizes[0] / 2


@pytest.mark.filterwarnings("ignore:fp8pass. blockwise kernels exist on sm_90")
def test_blocks_that_do_not_fit() -> None:
    """The recipe's blocks of 128 do not divide the rows of 64: the tensor stays as it is, with a reason."""
    model = Activated(F.gelu)
    recipe = {"first": "blockwise", "second": "rowwise"}
    (tensor,) = report_of(model, torch.randn(32, 64), recipe=recipe)
    assert (tensor.status, tensor.rule) == ("as it is", "block size") and "64" in tensor.reason


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION], ids=["flash", "cudnn"])
def test_gradients_on_a_gpu_after_an_eager_step(kernel: SDPBackend) -> None:
    """The eager step comes first: torch keeps cuDNN's plan for the backward that it makes then.

    q, k and v have errors as without save_fp8, which the plan of another layout of the result increased to 6 dB.
    """
    torch.manual_seed(0)
    model = LlamaBlock(512, 1024, heads=8, kv_heads=8, length=256).cuda().bfloat16()
    x = torch.randn(4, 256, 512, device="cuda", dtype=torch.bfloat16)

    def gradients(run: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        model.zero_grad()
        with sdpa_kernel(kernel):
            run(x).float().square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    eager = gradients(model)
    found = {}
    for save in (False, True):
        run = compiled(model, lowering="inductor", recipe="dynamic", save_fp8=save, min_speedup=0)
        for _ in range(3):
            found[save] = {name: sqnr(eager[name], grad) for name, grad in gradients(run).items()}
        torch._dynamo.reset()
    for name in ("q.weight", "k.weight", "v.weight", "o.weight", "norm.weight"):
        assert found[False][name] > 14, (name, found[False][name])
        assert found[True][name] > found[False][name] - 2, (name, found[False][name], found[True][name])
