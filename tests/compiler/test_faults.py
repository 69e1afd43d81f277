"""Test that training goes on without a pass or lowering that fails: each gets a fault, one at a time."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fp8pass
from fp8pass.base._torch import InductorError, inductor_config
from fp8pass.base.node_meta import MADE_BY
from fp8pass.compiler import faults, heuristics, order
from fp8pass.compiler.kernel_passes import KernelPasses
from fp8pass.graph.attempt import NEEDED
from fp8pass.inspect.cli import main
from fp8pass.options.config import Config
from fp8pass.options.overrides import Trial, trying
from fp8pass.passes.joint.scaled_mm import ScaledMM
from fp8pass.passes.joint.use_transposes import UseTransposes
from fp8pass.passes.kernels import combo_kernels
from fp8pass.passes.kernels.keep_strides import KeepStrides
from fp8pass.passes.kernels.materialize import Materialize
from fp8pass.quant import kernel_ops
from fp8pass.report.report import Report, collect
from tests.helpers.harness import compiled


def planted(*_: Any, **__: Any) -> Any:
    """Raise, instead of a function of fp8pass that this replaces."""
    raise ZeroDivisionError("planted")


LOWERINGS: dict[str, Any] = {
    "choices": (heuristics, "_waits_for_amax"),
    "combine": (combo_kernels, "groups"),
    "fold_quantizes": (kernel_ops, "fp8_max"),
}
"""The module and the name of the function that `planted` replaces, by the name of the pass that fails."""


def a_layer() -> tuple[nn.Module, Tensor]:
    return nn.Linear(32, 48), torch.randn(16, 32)


PASSES: list[Any] = [*order.JOINT, *order.KERNELS]


NAMES = [p.name for p in PASSES]


IDLE = ("quantize_collectives", "blockwise_mm", "grouped_mm", "expand_blocks", "split_foreach")
"""Passes that find nothing in these graphs. They are variants; canonicalize, which finds nothing either, is not."""


STEPS = 2
"""Steps of training. The first runs eagerly, for no slot has a scale."""


@pytest.fixture(autouse=True)
def _untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each fault be warned of again."""
    monkeypatch.setattr(faults, "_told", set())


def train(**options: Any) -> list[Tensor]:
    """Train a layer; return outputs and gradients of all steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, numbers = nn.Linear(32, 48), list[Tensor]()
    run = compiled(model, **{"on_fault": "warn", **options})
    for _ in range(STEPS):
        x = torch.randn(16, 32, requires_grad=True)
        y = run(x)
        y.square().mean().backward()
        numbers += [y.detach(), *(p.grad.clone() for p in (x, *model.parameters()) if p.grad is not None)]
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)  # type: ignore[operator]
        model.zero_grad()
    return numbers


def train_with_fault(**options: Any) -> tuple[list[Tensor], Report, list[str]]:
    """Train; return also the report, and the warnings."""
    with collect() as report, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        numbers = train(**options)
    return numbers, report, [str(w.message) for w in caught if "fp8pass" in str(w.message)]


def dump_of(warning: str) -> Path:
    """Return the file that reproduces a fault."""
    found = re.search(r"report it with (\S+)", warning)
    assert found is not None, warning
    return Path(found[1])


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(map(torch.equal, a, b))


@pytest.fixture(scope="module")
def in_fp8() -> list[Tensor]:
    """Return the numbers without a fault; op by op, no other passes change them than those that FP8 needs."""
    return train()


@pytest.fixture(scope="module")
def in_high_precision() -> list[Tensor]:
    """Return the numbers without FP8."""
    return train(recipe=None)


@pytest.mark.compiled
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.variant] * (n in IDLE)) for n in NAMES])
def test_training_goes_on_without_a_pass_that_fails(
    name: str, in_fp8: list[Tensor], in_high_precision: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If FP8 needs the pass, training goes on in high precision."""
    needed = name in NEEDED
    monkeypatch.setattr(faults, "_reproduce", lambda *_: None)
    monkeypatch.setattr(type(PASSES[NAMES.index(name)]), "run", planted)
    numbers, report, (warning,) = train_with_fault()
    expected = in_high_precision if needed else in_fp8
    if name == "emulate_matmuls":  # without it oneDNN multiplies, which on some CPUs adds in another order
        torch.testing.assert_close(numbers, expected, rtol=1e-3, atol=1e-5)
    else:
        assert equal(numbers, expected)
    assert f"fp8pass failed in its pass {name} on graph" in warning
    assert "(ZeroDivisionError: planted)" in warning
    assert report.faults and warning.startswith(report.faults[0])
    assert len(report.faults) == 1 and report.faults[0] in str(report)
    assert report.summary().endswith("; 1 fault of fp8pass")
    assert len(report.rewritten) == (0 if needed else 3)


@pytest.mark.compiled
@pytest.mark.variant
@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_those_of_a_trial_without_the_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in NEEDED:
        expected = train(recipe=None)
    else:
        with trying(Trial(passes=[n for n in NAMES if n != name])):
            expected = train()
    monkeypatch.setattr(type(PASSES[NAMES.index(name)]), "run", planted)
    numbers, _, (warning,) = train_with_fault()
    assert equal(numbers, expected)
    file = dump_of(warning)
    assert file.name.endswith(f".{name}.before.py") and file.exists()


@pytest.mark.compiled
@pytest.mark.parametrize("name", [p.name for p in order.DYNAMO])
def test_training_goes_on_without_a_pass_on_dynamos_graph(
    name: str, in_fp8: list[Tensor], in_high_precision: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = name in NEEDED
    (found,) = (p for p in order.DYNAMO if p.name == name)
    monkeypatch.setattr(type(found), "run", planted)
    numbers, report, (warning,) = train_with_fault(monitor=True)
    assert equal(numbers, in_high_precision if needed else in_fp8)
    assert f"its pass {name} on graph" in warning
    assert report.rules() == ({"internal": 3} if needed else {})
    assert dump_of(warning).name.endswith(f".dynamo.{name}.before.py")


@pytest.mark.compiled
def test_declined_matmuls_have_their_names_and_the_reason() -> None:
    """A declined graph has no state; its reason names the first of two passes that fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScaledMM, "run", planted)
        patch.setattr(Materialize, "run", planted)
        model = nn.Sequential(nn.Linear(32, 48))
        with collect() as report, pytest.warns(UserWarning, match="fp8pass failed in its pass scaled_mm"):
            compiled(model, on_fault="warn")(torch.randn(16, 32)).sum().backward()
    assert {(g.name, g.rule, g.status) for g in report.gemms} == {("0", "internal", "declined")}
    assert re.match(
        r"a fault of fp8pass: fp8pass failed in its pass scaled_mm on graph \d+, Sequential \(ZeroDivisionError: "
        r"planted\); please report it with \S+scaled_mm.before.py$",
        report.gemms[0].reason,
    )
    assert (report.graphs, len(report.faults)) == (1, 1)
    assert not fp8pass.state(model).state_dict()


@pytest.mark.compiled
def test_an_illegal_graph_is_a_fault(in_fp8: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any, graph: fx.Graph, context: Any) -> int:
        node = next(n for n in graph.nodes if MADE_BY in n.meta and isinstance(n.meta["val"], Tensor))
        node.meta["val"] = node.meta["val"].double()
        return 1

    monkeypatch.setattr(UseTransposes, "run", wrong)
    numbers, _, (warning,) = train_with_fault()
    assert equal(numbers, in_fp8)
    assert "its pass use_transposes on graph" in warning and "and says it is" in warning


@pytest.mark.compiled
@pytest.mark.parametrize("options", [{"on_fault": "raise"}, {"strict": True}])
def test_a_fault_is_an_error_if_asked_for(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScaledMM, "run", planted)
    with pytest.raises(Exception, match="a fault of fp8pass in its pass scaled_mm: planted"):
        train(**options)
    with trying(Trial()), pytest.raises(Exception, match="a fault of fp8pass in its pass scaled_mm"):
        train()


@pytest.mark.compiled
def test_what_torch_can_not_compile_alone_is_torchs_error() -> None:
    """No report has a fault of fp8pass then."""
    with collect() as report, inductor_config.patch(post_grad_custom_post_pass=planted):
        for recipe in ("dynamic", None):
            with pytest.raises(InductorError, match=r"^ZeroDivisionError: planted"):
                train(lowering="inductor", recipe=recipe)
    assert not report.faults and not report.graphs


@pytest.mark.compiled
def test_errors_of_what_the_user_wrote_are_the_users() -> None:
    with pytest.raises(
        Exception, match=r"filter\('weight', 16, 32, 48\) raised ZeroDivisionError: planted\. Fix the function"
    ):
        train(filter=planted)
    with pytest.raises(Exception, match="amax_compute_algo raised ZeroDivisionError: planted"):
        train(recipe=fp8pass.recipes.DelayedScaling(amax_compute_algo=planted))


# ---------------------------------------------------------------------------------------------------------------------
# Backwards, which are compiled after the forward has run
def _is_backward(graph: fx.Graph) -> bool:
    return any(n.name.startswith("tangents") for n in graph.nodes if n.op == "placeholder")


@pytest.mark.compiled
def test_a_backward_is_compiled_without_what_fails(in_fp8: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    run = Materialize.run
    monkeypatch.setattr(faults, "_reproduce", lambda *_: None)
    monkeypatch.setattr(
        Materialize, "run", lambda self, graph, c: (planted if _is_backward(graph) else run)(self, graph, c)
    )
    numbers, _, (warning,) = train_with_fault()
    assert equal(numbers, in_fp8)
    assert "its backward was compiled again without materialize" in warning

    model = nn.Linear(32, 48)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @fp8pass.train_step(lowering="eager", on_fault="warn")
    def step(x: Tensor) -> None:
        loss = model(x).square().mean()
        torch._dynamo.graph_break()
        loss.backward()
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(STEPS):  # the first step runs eagerly
            step(torch.randn(16, 32))
    (told,) = step.report.faults
    assert "its backward was compiled again without materialize" in told


@pytest.mark.compiled
def test_a_backward_is_not_compiled_without_what_its_forward_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's backward reads strides that keep_strides has given to its forward, too."""

    def planted_there(self: Any, graph: fx.Graph, context: Any) -> int:
        return planted() if _is_backward(graph) else run(self, graph, context)

    run = KeepStrides.run
    monkeypatch.setattr(faults, "_reproduce", lambda *_: None)
    monkeypatch.setattr(KeepStrides, "run", planted_there)
    _, _, (warning,) = train_with_fault()
    assert "its backward ran op by op" in warning and "compiled again" not in warning


@pytest.mark.compiled
@pytest.mark.parametrize("alone", [False, True])
def test_a_backward_that_can_not_be_compiled(
    alone: bool, in_fp8: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward runs op by op, and its graph in high precision afterwards. alone: torch itself fails, too."""
    call = KernelPasses.__call__

    def fail(self: KernelPasses, graph: fx.Graph) -> None:
        if _is_backward(graph) and (alone or self.attempt.form == "fp8"):
            planted()
        call(self, graph)

    monkeypatch.setattr(faults, "_reproduce", lambda *_: None)
    monkeypatch.setattr(KernelPasses, "__call__", fail)
    if alone:
        with pytest.raises(ZeroDivisionError, match="planted"):
            train()
        return
    monkeypatch.setattr(sys.modules[__name__], "STEPS", 3)
    numbers, _, (warning,) = train_with_fault()
    assert equal(numbers[: len(in_fp8)], in_fp8)
    assert "its backward ran op by op, and from now on all its matmuls stay in high precision" in warning
    torch.manual_seed(0)
    model, *batches = nn.Linear(32, 48), *(torch.randn(16, 32) for _ in range(3))
    with torch.no_grad():
        for p, gradients in zip(model.parameters(), (numbers[2::4], numbers[3::4]), strict=True):
            for gradient in gradients[:2]:
                p.sub_(0.1 * gradient)
    assert equal([numbers[8]], [model(batches[2])])


@pytest.mark.compiled
@pytest.mark.variant
@pytest.mark.parametrize("name", LOWERINGS)
def test_training_goes_on_without_a_lowering_that_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(lowering="inductor")
    module, attribute = LOWERINGS[name]
    monkeypatch.setattr(module, attribute, planted)
    numbers, _, told = train_with_fault(lowering="inductor")
    assert equal(numbers, expected) and told


# ---------------------------------------------------------------------------------------------------------------------
# Updates, commands
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("name", "does", "options", "left_out"),
    [
        ("write_weights", "_write", {}, {"weight_cache": "off"}),
        pytest.param("skip_nonfinite", "_skip", {"skip_nonfinite": True}, {}, marks=pytest.mark.variant),
        pytest.param("read_moments", "_read", {"optimizer_state": "fp8"}, {}, marks=pytest.mark.variant),
        pytest.param("expand_foreach", "expand_symbolic", {}, {}, marks=pytest.mark.variant),
    ],
)
def test_an_update_goes_on_without_what_fails(
    name: str, does: str, options: dict[str, Any], left_out: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: Any = torch.optim.AdamW if "optimizer_state" in options else torch.optim.SGD

    def trained(**options: Any) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        optimizer = kind(model.parameters(), lr=0.01)

        @fp8pass.train_step(lowering="eager", on_fault="warn", **options)
        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return [*(step(torch.randn(32, 64)) for _ in range(3)), *(p.detach() for p in model.parameters())]

    expected = trained(**left_out)
    monkeypatch.setattr(faults, "_reproduce", lambda *_: None)
    monkeypatch.setattr(f"fp8pass.passes.update.{name}.{does}", planted)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        numbers = trained(**options)
    assert equal(numbers, expected)
    assert sum(bool(re.search("was (compiled without|left out)", str(w.message))) for w in caught) == 1


@pytest.mark.compiled
def test_the_command_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FP8PASS_ON_FAULT", "warn")
    assert main(["explain", "tests.compiler.test_faults:a_layer"]) == 0
    monkeypatch.setattr(ScaledMM, "run", planted)
    with pytest.warns(UserWarning, match="fp8pass failed in its pass scaled_mm"):
        assert main(["explain", "tests.compiler.test_faults:a_layer"]) == 1
    assert "fp8pass failed in its pass scaled_mm" in capsys.readouterr().out


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["choices", "fold_quantizes", pytest.param("combine", marks=pytest.mark.variant)])
def test_code_is_generated_without_what_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute = LOWERINGS[name]
    assert callable(getattr(module, attribute))
    monkeypatch.setattr(module, attribute, planted)
    model, x = nn.Linear(32, 48), torch.randn(16, 32)
    with pytest.warns(UserWarning, match=f"fp8pass failed in its pass {name}"):
        report = fp8pass.explain(model, x, kernels=True, config=Config(on_fault="warn"))
    assert len(report.rewritten) == 2 and len(report.faults) in (1, 2)
    assert [p.part for p in report.pictures] == ["before", "forward", "backward"]
