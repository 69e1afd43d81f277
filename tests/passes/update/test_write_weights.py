"""The write_weights pass: the graphs that are updates, the tensors that they write, and the FP8 copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fp8pass.passes.update.take_states import TakeStates
from fp8pass.passes.update.write_weights import WriteWeights
from fp8pass.passes.update.written import written
from fp8pass.quant import ops
from fp8pass.recipes import DelayedScaling, DynamicScaling, RowwiseScaling, StaticScaling
from fp8pass.weights.update_key import UpdateKey, WeightSlots, WeightWrite, attribute
from tests.helpers.harness import E4M3, expect_graph, on_update
from tests.helpers.optimizers import Lion

pytestmark = pytest.mark.passes


def graphs(function: Callable[..., Any], *inputs: Any) -> list[tuple[set[int], set[int]]]:
    """Return, for each graph of `function`, the ids of tensors that `written` finds, and of those that it writes into.

    The latter are found by running the graph unchanged, which increments the versions of tensors that it writes.
    """
    found: list[tuple[set[int], set[int]]] = []

    def backend(module: fx.GraphModule, _: Any) -> Any:
        places = written(module)
        assert len(places) == len(set(places))

        def run(*args: Any) -> Any:
            attributes = [str(n.target) for n in module.graph.nodes if n.op == "get_attr"]
            inputs = [*enumerate(args), *((name, attribute(module, name)) for name in attributes)]
            tensors = {p: x for p, x in inputs if isinstance(x, Tensor)}
            before = {p: x._version for p, x in tensors.items()}
            result = module.forward(*args)
            changed = {id(x) for p, x in tensors.items() if x._version != before[p]}
            found.append(({id(tensors[p]) for p in places}, changed))
            return result

        return run

    torch.compile(function, backend=backend)(*inputs)
    return found


def model() -> nn.Sequential:
    """Return a model with gradients."""
    made = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4, bias=False))
    made(torch.randn(5, 8)).square().sum().backward()
    return made


OPTIMIZERS: dict[str, tuple[Callable[..., Any], int]] = {  # with the number of tensors written for each parameter
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1, foreach=False), 1),
    "SGD foreach": (lambda p: torch.optim.SGD(p, lr=0.1, foreach=True), 1),
    "SGD momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False), 2),
    "SGD momentum foreach": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True), 2),
    "Adam": (lambda p: torch.optim.Adam(p, lr=0.1, foreach=False), 4),
    "Adam foreach": (lambda p: torch.optim.Adam(p, lr=0.1, foreach=True), 4),
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False), 4),
    "AdamW foreach": (lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True), 4),
    "AdamW, lr in a tensor": (lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False), 4),
    "RMSprop foreach": (lambda p: torch.optim.RMSprop(p, lr=0.1, foreach=True), 3),
    "Lion": (Lion, 2),
}  # fmt: skip


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_tensors_that_an_optimizer_writes(case: str) -> None:
    """An optimizer writes parameters, moments and counts of steps, in the second step as in all later ones."""
    of = model()
    make, each = OPTIMIZERS[case]
    optimizer = make(of.parameters())
    optimizer.step()
    (found,) = [g for g in graphs(optimizer.step) if g != (set(), set())]
    places, changed = found
    state = [x for values in optimizer.state.values() for x in values.values() if isinstance(x, Tensor)]
    state = [x for x in state if id(x) in changed]
    assert {id(x) for x in (*of.parameters(), *state)} == places == changed
    assert len(places) == each * 3


def test_updates_by_hand() -> None:
    """Graphs under no_grad that write parameters, or only gradients, in place are updates, in any spelling."""
    of = model()
    w = of[0].weight
    assert isinstance(w, nn.Parameter)
    other = torch.randn(6, 8)
    ema = copy.deepcopy(of)

    @torch.no_grad()
    def average() -> None:
        for a, p in zip(ema.parameters(), of.parameters(), strict=True):
            a.lerp_(p, 0.1)

    @torch.no_grad()
    def averaged_in_one() -> None:
        torch._foreach_lerp_(list(ema.parameters()), list(of.parameters()), 0.1)

    @torch.no_grad()
    def through_views() -> None:
        w.view(-1)[:8].mul_(2)

    @torch.no_grad()
    def by_assignment() -> None:
        w[2:4] = 0

    @torch.no_grad()
    def by_out() -> None:
        torch.add(w, 1, out=w)

    @torch.no_grad()
    def clipped() -> Tensor:
        return nn.utils.clip_grad_norm_(of.parameters(), 1.0)

    def scaled() -> None:
        torch._foreach_mul_([other, *(p.grad for p in of.parameters() if p.grad is not None)], 0.5)

    all_of_ema = set(map(id, ema.parameters()))
    for function, wanted in (
        (average, all_of_ema),
        (averaged_in_one, all_of_ema),
        (through_views, {id(w)}),
        (by_assignment, {id(w)}),
        (by_out, {id(w)}),
    ):
        torch._dynamo.reset()
        assert graphs(function) == [(wanted, wanted)], function.__name__

    torch._dynamo.reset()
    all_gradients = {id(p.grad) for p in of.parameters()}
    assert graphs(clipped)[0] == (all_gradients, all_gradients)
    torch._dynamo.reset()
    assert graphs(scaled) == [(set(), {*all_gradients, id(other)})], "another tensor counts as a gradient"

    def copied(into: Tensor) -> None:
        into.copy_(other)

    torch._dynamo.reset()
    with torch.no_grad():
        assert graphs(copied, w) == [({id(w)}, {id(w)})]
    torch._dynamo.reset()
    assert graphs(copied, torch.zeros(6, 8))[0][0] == set(), "a plain tensor counts as a parameter"


class WithStatistics(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        y: Tensor = self.norm(self.fc(x))
        return F.relu(y, inplace=True)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_forwards_are_not_updates(training: bool, grad: bool) -> None:
    """Forwards write statistics and intermediate results, but no parameters."""
    of = WithStatistics().train(training)
    with torch.set_grad_enabled(grad):
        (found,) = graphs(of, torch.randn(4, 8))
    places, changed = found
    assert places == set()
    assert id(of.count) in changed


def test_a_forward_that_writes_a_parameter_is_not_an_update() -> None:
    """Spectral norm writes one. A graph with gradients needs AOTAutograd's partition, so it can't be an update."""
    w, x = nn.Parameter(torch.randn(4, 8)), torch.randn(2, 8)

    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            w.div_(w.norm())
        return x @ w.t()

    assert graphs(function, x) == [(set(), {id(w)})]
    torch._dynamo.reset()
    with torch.no_grad():
        assert graphs(function, x) == [({id(w)}, {id(w)})]


def test_updates_may_have_branches() -> None:
    w = nn.Parameter(torch.randn(4, 8))

    def function(p: Tensor) -> None:
        w.mul_(torch.cond(p, lambda x: x.sin(), lambda x: x.cos(), (w,)))

    with torch.no_grad():
        assert graphs(function, torch.tensor(True)) == [({id(w)}, {id(w)})]


def test_sizes_may_be_symbolic() -> None:
    """Also ops that have no symbolic sizes in C++ may be in the graph."""
    layer, places = nn.Linear(8, 8), []

    def backend(module: fx.GraphModule, _: Any) -> Any:
        places.append(written(module))
        return module.forward

    def function(x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        return layer(x).masked_scatter(mask, y).add_(1)

    with torch.no_grad():
        x = torch.randn(3, 8)
        torch.compile(function, backend=backend, dynamic=True)(x, x[:, :1] > 0, x)
    assert places == [[]]


def test_the_grad_mode_does_not_change() -> None:
    of = model()
    optimizer = torch.optim.SGD(of.parameters(), lr=0.1)
    seen: list[bool] = []

    def backend(module: fx.GraphModule, _: Any) -> Any:
        before = torch.is_grad_enabled()
        written(module)
        seen.append(torch.is_grad_enabled() == before)
        return module.forward

    torch.compile(optimizer.step, backend=backend)()
    assert seen and all(seen)


def captured(function: Callable[..., Any], *inputs: Any) -> fx.GraphModule:
    """Return Dynamo's graph."""
    found: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, _: Any) -> Any:
        found.append(copy.deepcopy(module))
        return module.forward

    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    (only,) = found
    return only


@torch.no_grad()
def sgd(p: Tensor, q: Tensor, grad: Tensor) -> None:
    p.sub_(grad, alpha=0.1)
    q.sub_(grad, alpha=0.1)


def test_graph() -> None:
    """Two weights share a state; the second has parts, one of which is not in the graph, and a transposed copy."""
    p, q = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16, 16))
    module = captured(sgd, p, q, torch.randn(16, 16))
    places = written(module)
    assert places == [0, 2]
    writes = [WeightWrite((0,), ("x_q",), slots=0, index=0), WeightWrite((2, None), ("x_q", "x_t"), slots=0, index=2)]
    weight_slots = (WeightSlots(DelayedScaling(), first=3, count=4),)
    on_update(module, UpdateKey(weight_slots, tuple(writes), (), ()), TakeStates(), WriteWeights())
    expect_graph(
        module,
        """\
L_args_0_: "f32[16, 16]",
L_args_2_: "f32[16, 16]",
L_args_1_: "f32[16, 16]",
fp8pass_scale_0,
fp8pass_amax_history_0,
fp8pass_amax_weights_0,
fp8pass_weight_copy_scales_0,
fp8pass_weight_0_x_q_0,
fp8pass_weight_1_x_q_0,
fp8pass_weight_1_x_q_1,
fp8pass_weight_1_x_t_0,
fp8pass_weight_1_x_t_1,
fp8pass_weight_1_part_0,
l_args_0_ = L_args_0_
l_args_2_ = L_args_2_
l_args_1_ = L_args_1_
_set_grad_enabled = torch._C._set_grad_enabled(False)
sub_: "f32[16, 16]" = l_args_0_.sub_(l_args_2_, alpha = 0.1)
sub__1: "f32[16, 16]" = l_args_1_.sub_(l_args_2_, alpha = 0.1)
_set_grad_enabled_1 = torch._C._set_grad_enabled(True)
next_scales = fp8pass_quant_ops_next_scales(DelayedScaling(), 3, fp8pass_scale_0, fp8pass_amax_history_0, fp8pass_amax_weights_0)
scales_or_one = fp8pass_quant_ops_scales_or_one(next_scales)
write_weight = fp8pass_quant_ops_write_weight(scales_or_one, 0, [l_args_0_], [fp8pass_weight_0_x_q_0], [])
write_weight_1 = fp8pass_quant_ops_write_weight(scales_or_one, 2, [l_args_1_, fp8pass_weight_1_part_0], [fp8pass_weight_1_x_q_0, fp8pass_weight_1_x_q_1], [fp8pass_weight_1_x_t_0, fp8pass_weight_1_x_t_1])
write_weight_copy_scales = fp8pass_quant_ops_write_weight_copy_scales(fp8pass_weight_copy_scales_0, scales_or_one, [write_weight, None, write_weight_1, None])
return ()
""",
    )


@pytest.mark.parametrize("over", ["", "0"])
def test_amaxes_of_ranks_give_the_scales_of_divided_weights(over: str) -> None:
    module = captured(sgd, *(nn.Parameter(torch.randn(16, 16)) for _ in range(2)), torch.randn(16, 16))
    slots = WeightSlots(DelayedScaling(), first=1, count=1, over=over)
    key = UpdateKey((slots,), (WeightWrite((written(module)[0],), ("x_q",), slots=0, index=0),), (), ())
    on_update(module, key, TakeStates(), WriteWeights())
    (scales,) = module.graph.find_nodes(op="call_function", target=ops.next_scales)
    amaxes: Any = scales.args[-1]
    if not over:
        assert amaxes.target == "fp8pass_amax_weights_0"
        return
    assert amaxes.target is ops.amaxes_of_ranks and amaxes.args[1] == "0"
    assert amaxes.args[0].target == "fp8pass_amax_weights_0"


def test_written_copies() -> None:
    """The update writes copies of each part with the next scale, their amax and scale_inv; another weight's stay."""
    p, q, other = (nn.Parameter(torch.randn(16, 16) * r) for r in (1, 2, 5))
    grad = torch.randn(16, 16)
    module = captured(sgd, *(x.detach().clone().requires_grad_() for x in (p, q)), grad)
    first, second = written(module)
    writes = [
        WeightWrite((first,), ("x_q",), slots=0, index=0),
        WeightWrite((second, None), ("x_q", "x_t"), slots=0, index=2),
    ]
    weight_slots = (WeightSlots(DelayedScaling(), first=1, count=3),)
    on_update(module, UpdateKey(weight_slots, tuple(writes), (), ()), TakeStates(), WriteWeights())
    scale = torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0])
    history = torch.zeros(4, 5)
    history[1] = torch.tensor([9.0, 1.0, 2.0, 14.0, 9.0])
    amax_weights, made = torch.tensor([3.5, 3.0, 7.0]), torch.full((2, 3), 0.5)
    x_q, a_q, b_q = (torch.zeros(16, 16).to(E4M3) for _ in range(3))
    x_t = torch.zeros(16, 32).to(E4M3)
    a_t, b_t = x_t.narrow(1, 0, 16), x_t.narrow(1, 16, 16)
    before = [x.clone() for x in (scale, history, amax_weights)]
    with torch.no_grad():
        p_, q_ = p.sub(grad, alpha=0.1), q.sub(grad, alpha=0.1)
        state = scale, history, amax_weights, made
        fx.Interpreter(module).run(p, grad, q, *state, x_q, a_q, b_q, a_t, b_t, other)
    assert torch.equal(p, p_) and torch.equal(q, q_)
    assert all(torch.equal(a, b) for a, b in zip(before, (scale, history, amax_weights), strict=True)), (
        "the update writes into the state, which it should only read"
    )
    scales = 448 / 3.5, None, 448 / 14.0  # of the history's maximum; amax_weights now begins the history
    for source, copy_, s in ((p, x_q, scales[0]), (q, a_q, scales[2]), (other, b_q, scales[2])):
        assert torch.equal(copy_.float(), (source.detach() * s).clamp(-448, 448).to(E4M3).float())
    assert torch.equal(x_t.float(), torch.cat([a_q, b_q]).float().t())
    amaxes = p.detach().abs().max(), torch.tensor(0.5), torch.stack([q.detach(), other.detach()]).abs().max()
    assert torch.equal(made[1], torch.stack(amaxes))
    torch.testing.assert_close(made[0], torch.tensor([3.5 / 448, 0.5, 14 / 448]), rtol=1e-6, atol=0)


def test_a_weight_that_is_not_finite() -> None:
    """Its copy dequantizes to NaN throughout."""
    made = torch.zeros(2, 2)
    ops.write_weight_copy_scales(made, torch.tensor([4.0, 4.0]), [torch.tensor(float("inf")), torch.tensor(2.0)])
    assert made[0].isnan().tolist() == [True, False] and float(made[0, 1]) == 0.25


BY_ITSELF: dict[str, tuple[ops.ByItself, tuple[int, ...]]] = {
    "dynamic": (ops.Dynamic(DynamicScaling(), E4M3), ()),
    "by rows": (ops.Rowwise(RowwiseScaling(), E4M3, (1,)), (16, 1)),
    "by columns": (ops.Rowwise(RowwiseScaling(), E4M3, (0,)), (1, 16)),
    "static": (ops.Static(StaticScaling(8.0), E4M3, slot=0), (2, 1)),
}


@pytest.mark.parametrize("how", BY_ITSELF)
def test_written_copies_of_weights_by_themselves(how: str) -> None:
    """The update writes what quantizing the new weight gives, and its scale_inv."""
    quantizer, shape = BY_ITSELF[how]
    stored = ("x_t",) if how == "by columns" else ("x_q", "x_t")
    p, q, grad = (nn.Parameter(torch.randn(16, 16) * r) for r in (1, 2, 5))
    module = captured(sgd, *(x.detach().clone().requires_grad_() for x in (p, q)), grad.detach())
    write = WeightWrite((written(module)[0],), stored, by_itself=quantizer)
    on_update(module, UpdateKey((), (write,), (), ()), TakeStates(), WriteWeights())
    scales = torch.tensor([[8.0], [0.125]]) if how == "static" else torch.zeros(shape)
    copies = {name: torch.zeros(16, 16).to(E4M3) for name in stored}
    with torch.no_grad():
        new = p.sub(grad, alpha=0.1)
        fx.Interpreter(module).run(p, grad.detach(), q, scales, *copies.values())
        state = (scales,) if isinstance(quantizer, ops.Static) else ()
        assert torch.equal(p, new)
        x_q = copies["x_t"].t() if how == "by columns" else copies["x_q"]
        assert torch.equal(x_q.float() * ops.scale_inv_of_copy(quantizer, scales), quantizer(new, *state))
        assert torch.equal(copies["x_t"].float(), x_q.float().t())


def test_parts_of_one_weight_have_one_scale() -> None:
    """Dynamic scaling takes the amax of all parts, also of one that is not in the update's graph."""
    parts, grad = [nn.Parameter(torch.randn(16, 16) * r) for r in (1, 3)], torch.randn(16, 16)
    module = captured(sgd, *(x.detach().clone().requires_grad_() for x in (parts[0], grad)), grad)
    write = WeightWrite((written(module)[0], None), ("x_q",), by_itself=BY_ITSELF["dynamic"][0])
    on_update(module, UpdateKey((), (write,), (), ()), TakeStates(), WriteWeights())
    scale_inv, x_q = torch.zeros(()), torch.zeros(32, 16).to(E4M3)
    with torch.no_grad():
        unused = torch.zeros(16, 16)
        fx.Interpreter(module).run(parts[0], grad, unused, scale_inv, x_q[:16], x_q[16:], parts[1])
        whole = torch.cat([p.detach() for p in parts])
    scale = 448 / whole.abs().max()
    assert torch.equal(scale_inv, scale.reciprocal())
    assert torch.equal(x_q.float(), (whole * scale).clamp(-448, 448).to(E4M3).float())
