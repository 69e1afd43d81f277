"""Test what is around the passes: order, dumps, caches, verification."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from fp8pass.base._torch import FORCE_STRIDE_ORDER, TAKES_LISTS_OF_PASSES, CustomGraphPass, FakeTensorMode
from fp8pass.base.errors import Fp8Error
from fp8pass.base.node_meta import MADE_BY
from fp8pass.base.scaling import quantize
from fp8pass.compiler.joint_passes import JointPasses
from fp8pass.compiler.kernel_passes import KernelPasses
from fp8pass.compiler.order import DYNAMO, JOINT, KERNELS, TRACED, UPDATE, UPDATE_LAST
from fp8pass.compiler.run_passes import verifier
from fp8pass.compiler.through_inductor import _Both, append_pass
from fp8pass.graph.builder import Builder, Computed, compute, compute_val, erase_unused
from fp8pass.graph.pass_base import KernelsContext
from fp8pass.graph.verify import verify
from fp8pass.options.config import Config
from fp8pass.quant.kernel_ops import QUANTIZE
from tests.helpers import ROOT
from tests.helpers.harness import aten, capture, compiled, verdicts
from tests.helpers.models import make

pytestmark = pytest.mark.tools


def layer() -> nn.Module:
    return nn.Linear(32, 48, bias=False)


def pipeline(**options: Any) -> JointPasses:
    return JointPasses(Config(**options), [])


PARTS = {
    "dynamo": {
        "check_matmul",
        "frozen_parameters",
        "product_roles",
        "quantize_call",
        "quantizers",
        "save_fp8",
        "slow_matmuls",
    },
    "joint": {
        "batches",
        "check_shared_scales",
        "collective_chains",
        "collective_rows",
        "epilogue",
        "operand_layout",
        "operands",
        "collective_rewriter",
        "row_scales",
    },
    "kernels": {
        "combo_kernels",
        "element_addresses",
        "fast_functions",
        "fused_matmul",
        "fused_plan",
        "kernel_candidates",
        "matmul_source",
        "quantize_groups",
        "requantize_kernel",
        "tile_sizes",
        "tiles_source",
        "trial_compile",
        "triton_epilogue",
        "triton_functions",
        "when_to_fuse",
    },
    "traced": {"matmuls_of_layers"},
    "update": {"context", "find_moments", "strands", "written"},
}
"""The files of each folder that are not passes, but parts of passes."""
LISTS: dict[str, Any] = {
    "dynamo": DYNAMO,
    "joint": JOINT,
    "kernels": KERNELS,
    "traced": TRACED,
    "update": (*UPDATE, *UPDATE_LAST),
}
"""The list that has the passes of a folder."""


@pytest.mark.parametrize("folder", sorted(LISTS))
def test_every_pass_of_a_folder_is_in_its_list(folder: str) -> None:
    """A pass is a class whose `name` is the stem of its file."""
    stems = {f.stem for f in (ROOT / "passes" / folder).glob("*.py")} - {"__init__"}
    listed = {p.name for p in LISTS[folder] if type(p).__module__.startswith(f"fp8pass.passes.{folder}.")}
    assert stems - PARTS.get(folder, set()) == listed
    for p in LISTS[folder]:
        assert type(p).__module__.endswith(f".{p.name}") and callable(p.run)


TOGETHER = {
    "test_quantize_moments": {"read_moments", "write_moments"},
    "test_stochastic_rounding": {"lift_bfloat16", "round_bfloat16"},
    "test_write_weights": {"expand_foreach", "take_states"},
}
"""Files that test several passes of one feature."""


@pytest.mark.parametrize("folder", sorted(LISTS))
def test_every_pass_has_a_file_of_tests(folder: str) -> None:
    tests = {f.stem for f in (ROOT / "tests").rglob("test_*.py")}
    for p in LISTS[folder]:
        files = {f"test_{p.name}", *(file for file, passes in TOGETHER.items() if p.name in passes)}
        assert files & tests, p.name


def test_folders_and_lists_are_all() -> None:
    folders = {f.parent.name for f in (ROOT / "passes").glob("*/__init__.py")} - {"common"}
    assert folders == set(LISTS)
    every = [p.name for passes in (DYNAMO, UPDATE, UPDATE_LAST, TRACED, JOINT, KERNELS) for p in passes]
    assert len(every) == len(set(every))
    assert [(a, b) for a in every for b in every if a != b and a in b] == [], "torch's disabled_passes has substrings"


def test_torchs_list_of_disabled_passes_is_heeded() -> None:
    """Each pass runs as torch's own do; passes that others depend on run anyway. See `GraphTransformObserver`."""
    x = torch.randn(16, 32)
    for disabled, found in (("", 2), ("SCALED_MM,list_matmuls", 0)):
        torch._dynamo.reset()
        with inductor_config.patch(disabled_passes=disabled), verdicts() as report:
            compiled(make(layer), recipe="dynamic", strict=False)(x).sum().backward()
        assert (len(report.gemms), len(report.rewritten)) == (2, found)


def test_the_cache_key() -> None:
    assert pipeline().uuid() == pipeline().uuid()
    assert pipeline().uuid() == pipeline(dump_dir="/x", filter=["head"]).uuid()  # passes don't depend on these
    assert pipeline().uuid() != pipeline(strict=True).uuid()
    assert pipeline().uuid() != pipeline(target="sm_100").uuid()
    assert pipeline().uuid() != pipeline(recipe=None).uuid()


def test_passes_about_kernels() -> None:
    """Kernel passes run over a graph, in order; a fault names the pass."""

    def function(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x_q = quantize(x, s, torch.float8_e4m3fn)
        return x_q, x_q.t().contiguous(), torch.cat([s.view(1), s.view(1)])

    module, kernels = capture(function, torch.randn(64, 32), torch.tensor(2.0)), KernelPasses(Config())
    kernels(module.graph)
    assert [n.target for n in module.graph.nodes].count(aten.cat.default) == 0
    made_by = {n.meta[MADE_BY] for n in module.graph.nodes if MADE_BY in n.meta}
    assert made_by == {"quantize_tiles", "materialize"}  # no amax is recorded here
    assert kernels.uuid() == KernelPasses(Config(recipe=None)).uuid()  # it depends on the sources alone
    broken = capture(function, torch.randn(64, 32), torch.tensor(2.0))
    for node in broken.graph.nodes:
        node.meta.pop("val", None)
    with pytest.raises(Fp8Error, match=r"a fault of fp8pass in its pass materialize: 'val'\. Please report it"):
        kernels(broken.graph)


class OfTheUser(CustomGraphPass):
    """A pass that users have configured: it counts the graphs that it sees, and those that our passes have changed."""

    def __init__(self) -> None:
        self.seen, self.changed = 0, 0

    def __call__(self, graph: fx.Graph) -> None:
        self.seen += 1
        self.changed += any(n.target is aten._scaled_mm.default for n in graph.nodes)

    def uuid(self) -> str:
        return "of the user"


@pytest.mark.parametrize(
    "several", [True, pytest.param(False, marks=pytest.mark.variant)] if TAKES_LISTS_OF_PASSES else [False]
)
def test_passes_that_users_have_configured_run_before_ours(several: bool) -> None:
    joint, kernels = OfTheUser(), OfTheUser()
    own = {"joint_custom_pre_pass": joint, "post_grad_custom_pre_pass": kernels}
    with inductor_config.patch({k: [v, v] if several else v for k, v in own.items()}), verdicts() as report:
        run = compiled(make(layer), lowering="inductor")
        for _ in range(2):  # the first step is not compiled, and the backward is compiled when it runs
            run(torch.randn(16, 32)).sum().backward()
    assert len(report.rewritten) == 2
    assert (joint.seen, joint.changed) == (1 + several, 0)
    assert (kernels.seen, kernels.changed) == (2 + 2 * several, 2 + 2 * several)


def test_passes_of_users_are_part_of_the_cache_key() -> None:
    """A pass without a key makes graphs that can't be cached."""
    own, ours = OfTheUser(), pipeline()
    assert append_pass(None, ours) is ours
    assert _Both(own, ours).uuid() != _Both(own, pipeline(strict=True)).uuid()
    assert _Both(lambda graph: None, ours).uuid() is None


def test_a_warm_cache_gives_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(inductor_config, "fx_graph_cache", True)
    monkeypatch.setattr(functorch_config, "enable_autograd_cache", True)
    x, results = torch.randn(16, 32), []
    for attempt in range(2):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = make(layer)
        run = compiled(model, lowering="inductor")
        with verdicts() as report:
            run(x).sum().backward()
            y = run(x)
            y.sum().backward()
        assert len(report.rewritten) == (0 if attempt else 2)  # graphs from a cache have no verdicts
        hits = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
        assert hits == (2 if attempt else 0)
        results.append([y.detach(), model.weight.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_verify_finds_a_wrong_dtype() -> None:
    module = capture(lambda a: a + 1, torch.randn(4, 4))
    (add,) = (n for n in module.graph.nodes if n.target is aten.add.Tensor)
    node = Builder(module.graph, "a pass").emit(add, aten.relu.default, add.args[0])
    add.update_arg(0, node)
    verify(module.graph)
    node.meta["val"] = node.meta["val"].to(torch.bfloat16)
    with pytest.raises(AssertionError, match=r"a pass made relu_default = aten\.relu\.default and says it is"):
        verify(module.graph)


def test_verify_computes_no_value_again_that_was_computed_of_the_same() -> None:
    """A value is computed again if it or its inputs have changed since."""
    module = capture(lambda a: a + 1, torch.randn(4, 4))
    (add,) = (n for n in module.graph.nodes if n.target is aten.add.Tensor)
    computed: Computed = {}
    build = Builder(module.graph, "a pass", computed)
    relu = build.emit(add, aten.relu.default, add.args[0])
    (sine,) = build.inline(add, torch.sin, relu)
    add.update_arg(0, sine)
    with mock.patch("fp8pass.graph.verify.compute_val", side_effect=compute_val) as computing:
        verify(module.graph, computed)
        assert not computing.called
        sine.meta["val"] = sine.meta["val"].clone()
        verify(module.graph, computed)
        assert [call.args[0] for call in computing.call_args_list] == [sine]
        relu.args = (sine.args[0].args[0],)
        relu.meta["val"] = relu.meta["val"].to(torch.bfloat16)
        with pytest.raises(AssertionError, match=r"a pass made relu_default"):
            verify(module.graph, computed)


def test_a_graph_is_not_verified_again_after_the_partition() -> None:
    """The partitioner copies the nodes that passes have made, and what they say was checked before."""
    module = capture(lambda a: a + 1, torch.randn(4, 4))
    (add,) = (n for n in module.graph.nodes if n.target is aten.add.Tensor)
    relu = Builder(module.graph, "an earlier pass").emit(add, aten.relu.default, add.args[0])
    add.update_arg(0, relu)
    context = KernelsContext(Config())
    check = verifier(module.graph, context)
    with mock.patch("fp8pass.graph.verify.compute_val", side_effect=compute_val) as computing:
        check("a pass")
        assert not computing.called
        relu.meta["val"] = relu.meta["val"].clone()
        check("a pass")
        assert [call.args[0] for call in computing.call_args_list] == [relu]


def test_erasing_asks_nothing_of_nodes_in_use() -> None:
    """So a pass that erases little costs little, however long the graph is."""
    module = capture(lambda a: a + 1, torch.randn(4, 4))
    (add,) = (n for n in module.graph.nodes if n.target is aten.add.Tensor)
    build = Builder(module.graph, "a pass")
    relu = build.emit(add, aten.relu.default, add.args[0])
    sine = build.emit(add, aten.sin.default, relu)
    with mock.patch.object(fx.Node, "is_impure", autospec=True, side_effect=fx.Node.is_impure) as asked:
        erase_unused(module.graph)
    assert [n.target for n in module.graph.nodes if n.op == "call_function"] == [aten.add.Tensor]
    assert [call.args[0].name for call in asked.call_args_list] == ["output", sine.name, relu.name]


META: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "clone": (aten.clone.default, (), {"memory_format": torch.contiguous_format}),
    "expand": (aten.expand.default, ([3, 4, 6],), {}),
    "permute": (aten.permute.default, ([1, 0],), {}),
    "reshape": (aten.reshape.default, ([6, 4],), {}),
    "select": (aten.select.int, (0, 1), {}),
    "slice": (aten.slice.Tensor, (1, 2, 5), {}),
    "unsqueeze": (aten.unsqueeze.default, (0,), {}),
    "strides": (FORCE_STRIDE_ORDER, ([1, 4],), {}),
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", META)
def test_a_meta_kernel_says_what_the_fake_mode_says(name: str, turned: bool) -> None:
    target, args, kwargs = META[name]
    mode = FakeTensorMode()
    x = mode.from_tensor(torch.empty(6, 4, dtype=torch.float8_e4m3fn).t() if turned else torch.empty(4, 6))
    quick = compute(mode, target, (x, *args), kwargs)
    with mock.patch("fp8pass.graph.builder._BY_META", frozenset()):
        slow = compute(mode, target, (x, *args), kwargs)
    assert type(quick) is type(slow) and quick.fake_mode is mode

    def facts(y: Tensor) -> tuple[Any, ...]:
        shares = y.untyped_storage()._cdata == x.untyped_storage()._cdata
        return y.dtype, y.device, y.shape, y.stride(), y.storage_offset(), shares

    assert facts(quick) == facts(slow)


LIKE_FIRST: dict[str, tuple[Any, ...]] = {
    "abs": (aten.abs.default,),
    "clamp_min": (aten.clamp_min.default, -448.0),
    "cast": (torch.ops.prims.convert_element_type.default, torch.float8_e4m3fn),
    "mul by a number": (aten.mul.Tensor, 2.0),
    "mul by a scalar": (aten.mul.Tensor, torch.ones(())),
    "mul by a double scalar": (aten.mul.Tensor, torch.ones((), dtype=torch.float64)),
    "mul by rows": (aten.mul.Tensor, torch.ones(4, 1)),
    "mul by more dimensions": (aten.mul.Tensor, torch.ones(2, 1, 1)),
    "quantize": (QUANTIZE, torch.ones(4, 1), torch.float8_e5m2),
}


@pytest.mark.parametrize(
    "x", [torch.ones(4, 4), torch.ones(4, 4).t(), torch.ones(1, 4).expand(4, 4)], ids=["rows", "columns", "repeated"]
)
@pytest.mark.parametrize("name", LIKE_FIRST)
def test_a_result_like_the_first_argument_is_what_the_fake_mode_says(name: str, x: Tensor) -> None:
    mode = FakeTensorMode()
    target, *others = LIKE_FIRST[name]
    args = [mode.from_tensor(y) if isinstance(y, Tensor) else y for y in (x, *others)]
    quick = compute(mode, target, args, {})
    with mock.patch("fp8pass.graph.builder._LIKE_FIRST", {}):
        slow = compute(mode, target, args, {})
    assert (quick.dtype, quick.shape, quick.stride()) == (slow.dtype, slow.shape, slow.stride())


def test_inline_traces_a_function_into_the_graph() -> None:
    module = capture(lambda a, b: a * b, torch.randn(4), torch.randn(4))
    (mul,) = (n for n in module.graph.nodes if n.target is aten.mul.Tensor)
    (result,) = Builder(module.graph, "a pass").inline(mul, lambda x: (x + 1).relu(), mul.args[0])
    mul.update_arg(0, result)
    verify(module.graph)
    module.recompile()
    a, b = torch.randn(4), torch.randn(4)
    torch.testing.assert_close(module(a, b), (a + 1).relu() * b)


def test_eager_lowering_and_inductor_agree() -> None:
    x, outs = torch.randn(16, 32), []
    for lowering in ("eager", "inductor"):
        model = make(layer)
        run = compiled(model, lowering=lowering)
        for _ in range(2):
            y = run(x)
            y.sum().backward()
        outs.append(y.detach())
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)


def test_symbolic_sizes_of_what_a_builder_makes_are_nodes() -> None:
    """Code that runs op by op has no names for them: alone, as a stride, in a product, and of another tensor."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return x.sin() + y.sum()

    module = capture(function, torch.randn(5, 4, 8), torch.randn(3), dynamic=True)
    add = next(n for n in module.graph.nodes if n.target is aten.add.Tensor)

    def made(x: Tensor, y: Tensor) -> Tensor:
        flat = x.reshape(x.shape[0] * x.shape[1], x.shape[2]).as_strided(x.shape, x.stride())
        return flat + torch.zeros(y.shape[0] + x.shape[0]).sum()

    (result,) = Builder(module.graph, "a pass").inline(
        add, made, add.args[0], module.graph.find_nodes(op="placeholder")[1]
    )
    add.args = (result, add.args[1])
    module.graph.lint()
    module.recompile()
    for sizes in ((5, 4, 8), (7, 2, 16)):
        x, y = torch.randn(sizes), torch.randn(9)
        assert torch.equal(module(x, y), function(x, y))
