"""Choices for Inductor: fp8pass answers for kernels that its passes made, and Inductor decides about all others."""

from __future__ import annotations

import contextlib
import inspect
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fp8pass.base._torch import InductorChoices, TritonOverrides, Virtualized, inductor_config
from fp8pass.base.node_meta import MADE_BY, ONE_STAGE, TILED
from fp8pass.compiler.heuristics import MAX_PARTIALS, Fp8InductorChoices, choices
from tests.helpers.harness import capture, compiled
from tests.helpers.pretend_gpu import pretend

pytestmark = [pytest.mark.gpu_code, pytest.mark.xdist_group("pretended_gpu")]


def ours() -> bool:
    return isinstance(Virtualized.choices, Fp8InductorChoices)


def _unnumbered(code: str) -> str:
    """Return the code without its first line, which has the number of the compilation."""
    return code.partition("\n")[2]


def test_code_without_fp8_is_inductors_own() -> None:
    """The code that quantizes is timed in tiles of 64 columns; the last stage of its amax has none."""
    found = pretend("plain")
    assert len(found["inductor"]) == 5
    for theirs, code in zip(found["inductor"], found["fp8pass"], strict=True):
        assert _unnumbered(code) == _unnumbered(theirs)
    (both,) = found["both"]
    assert both.count("@triton.jit") == 2
    assert both.count("'XBLOCK': 64") == both.count("triton.Config(") == 2
    assert both.count("@triton_heuristics.cached_autotune(") == 1
    assert not any("cached_autotune(" in code for code in found["inductor"])


def test_our_answers_end_with_the_compilation() -> None:
    """The choices are removed after a compilation that succeeds, and after one that fails."""
    seen: list[bool] = []

    def look(graph: fx.Graph) -> None:
        seen.append(ours())

    def fail(graph: fx.Graph) -> None:
        raise ZeroDivisionError("on purpose")

    def function(x: Tensor) -> Tensor:
        return x @ x  # Inductor calls ATen's mm, so it has no kernel to compile

    with inductor_config.patch(post_grad_custom_post_pass=look):
        compiled(function, recipe=None, lowering="inductor")(torch.randn(8, 8))
    assert seen == [True]
    assert not ours()
    torch._dynamo.reset()
    run = compiled(function, recipe=None, lowering="inductor")
    with (
        inductor_config.patch(post_grad_custom_post_pass=fail),
        pytest.raises(RuntimeError, match="on purpose"),
    ):
        run(torch.randn(8, 8))
    assert not ours()


def test_the_context_ends_with_an_exception() -> None:
    before = type(Virtualized.choices)
    with pytest.raises(ZeroDivisionError), choices():
        ours() / 0  # type: ignore[operator]
    assert type(Virtualized.choices) is before is not Fp8InductorChoices


def test_choices_of_the_user_decide_where_ours_do_not() -> None:
    """Both what we override, and ask again, and what we do not override; on torch 2.15, registered ones too."""
    asked: list[str] = []

    class Users(InductorChoices):
        def can_fuse(self, *args: Any) -> bool:  # type: ignore[override]  # there, it is a static method
            asked.append("can_fuse")
            return True

        def can_fuse_vertical(self, *args: Any) -> bool:  # type: ignore[override]
            asked.append("can_fuse_vertical")
            return False

        def uuid(self) -> str:
            return "users"

    def asked_by(users: AbstractContextManager[Any]) -> set[str]:
        asked.clear()
        torch._dynamo.reset()
        with users:
            compiled(lambda x: x.sum(1, keepdim=True) + x, recipe=None, lowering="inductor")(torch.randn(8, 8))
        return {*asked}

    both = {"can_fuse", "can_fuse_vertical"}
    assert asked_by(Virtualized.set_choices_handler(Users())) == both
    module = inspect.getmodule(InductorChoices)
    if hasattr(module, "register_inductor_choices"):
        assert asked_by(contextlib.nullcontext()) == set()
        module.register_inductor_choices("users", Users)
        try:
            assert asked_by(contextlib.nullcontext()) == both
        finally:
            module.unregister_inductor_choices("users")


class _Graph:
    """Stands in for the graph that Inductor lowers; it has the current node only."""

    def __init__(self, **meta: Any) -> None:
        module = capture(lambda x: x.amax(), torch.randn(8, 8))
        (self.current_node,) = (n for n in module.graph.nodes if n.op == "call_function")
        self.current_node.meta.update(meta)


def test_reductions_of_ours_are_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = object()
    monkeypatch.setattr(InductorChoices, "reduction_split_factor", lambda *_, **__: theirs)

    def split(size: int, **meta: Any) -> Any:
        with Virtualized.set_graph_handler(_Graph(**meta)):
            return Fp8InductorChoices(InductorChoices()).reduction_split_factor(torch.device("cpu"), size, 1, True)

    assert split(64) is split(MAX_PARTIALS) is theirs
    assert split(64, **{MADE_BY: "canonicalize"}) is theirs
    for ours in ({ONE_STAGE: True}, {TILED: "columns"}):
        assert split(MAX_PARTIALS, **ours) == 1
        assert split(MAX_PARTIALS + 1, **ours) is theirs


def test_minimum_and_maximum_are_compared_within_only() -> None:
    """Outside of `choices`, other compilations in this process get torch's own Triton code."""
    with choices():
        within = TritonOverrides.minimum("a", "b"), TritonOverrides.maximum("a", "b")
    outside = TritonOverrides.minimum("a", "b"), TritonOverrides.maximum("a", "b")
    assert not any("PropagateNan" in code for code in within)
    if any("PropagateNan" in code for code in outside):
        assert within == ("tl.where((a < b) | (a != a), a, b)", "tl.where((a > b) | (a != a), a, b)")
    else:
        assert within == outside
