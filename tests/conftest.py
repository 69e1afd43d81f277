"""Sorts the tests into tiers, gives each a clean compiler, and says how long each tier took."""

from __future__ import annotations

import functools
import logging
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor.graph import GraphLowering

from fp8pass.compiler.compiled_graph import CompiledGraph
from tests.helpers.harness import without_caches
from tests.helpers.torchrun import VARIANTS

ORDER = ("ranks", "gpu_code", "tools", "inductor", "compiled", "passes")
"""The tiers, which are folders. Long tests run first, so that no worker runs one alone at the end."""
BEYOND: dict[str, tuple[tuple[Any, str], str]] = {
    "passes": ((CompiledGraph, "_run_with_state"), "this test compiles: it belongs to tests/compiled"),
    "compiled": ((GraphLowering, "run"), "this test reaches Inductor: it belongs to tests/inductor"),
}
"""For each tier, the function that its tests must not reach, and the message. This keeps the fast tier fast."""
TESTS = Path(__file__).parent
GROUPS = dict.fromkeys(("choices", "cudagraphs", "inspector", "sm90", "traffic"), "gpu that is not there") | {
    name: name for name in ("demo", "h200", "html_report", "kernel_ops", "stats", "triton_numerics")
}
"""Files whose tests share something slow: a fixture, a process that they ask. One worker runs a whole group."""


def stem(file: Path) -> str:
    """Return the name of a test file without `test_`."""
    return file.stem.removeprefix("test_")


def tier_of(file: Path) -> str:
    """Return the tier of a test file: the folder of tests/ that it is in."""
    return file.parts[len(TESTS.parts)] if file.is_absolute() else file.parts[1]


@functools.cache
def group_of(file: Path) -> str:
    """Return the group of a test file, or "" if its tests may run on several workers."""
    text = file.read_text()
    if "@on_ranks" in text:
        return "ranks"  # whose launch runs the functions of all these files
    return GROUPS.get(stem(file), str(file) if "pytest.mark.shares_code" in text else "")


def shares_code(item: Any) -> bool:
    """Return whether a test may use code compiled for others; one that patches something or reads the log may not."""
    alone = {"caplog", "monkeypatch"} & set(item.fixturenames)
    return bool(item.get_closest_marker("shares_code")) and not alone


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--variants", action="store_true", help="run variants too, each similar to a test that always runs"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU with FP8 (sm_89 or later)")
    config.addinivalue_line(
        "markers", "shares_code: uses code again that Dynamo has compiled for earlier tests of this file"
    )
    config.addinivalue_line("markers", "variant: runs with --variants only; a similar test runs without it")
    os.environ["FP8PASS_ON_FAULT"] = "raise"  # the environment also reaches the processes that tests start
    if config.getoption("variants"):
        os.environ[VARIANTS] = "1"
    for tier in ORDER:
        config.addinivalue_line("markers", f"{tier}: a tier, see tests/conftest.py")
    # pytest listens to each logger that does not propagate, and torch prints every graph where somebody listens to this
    logging.getLogger("torch.__trace").propagate = True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests of a group to one worker."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = lambda test: group_of(config.rootpath / test.partition("::")[0]) or test
    return scheduler


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    has_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    for item in items:
        item.add_marker(tier_of(item.path))
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="no GPU with FP8 here"))
    items.sort(key=lambda item: (ORDER.index(tier_of(item.path)), not group_of(item.path)))
    left_out = [i for i in items if i.get_closest_marker("variant") and not config.getoption("variants")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many tests each tier has, and the sum of their times."""
    tests: dict[str, set[str]] = defaultdict(set)
    seconds: dict[str, float] = defaultdict(float)
    reports = (report for kind in terminalreporter.stats.values() for report in kind)
    for report in (report for report in reports if isinstance(report, pytest.TestReport)):
        tier = tier_of(Path(report.nodeid.partition("::")[0]))
        tests[tier].add(report.nodeid)
        seconds[tier] += report.duration
    for tier in ORDER:
        if tier in tests:
            terminalreporter.write_line(f"{tier:10} {len(tests[tier]):5} tests {seconds[tier]:7.1f} s")


@pytest.fixture(scope="module", autouse=True)
def _forgetful() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _within_its_tier(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that reaches more than its tier allows, except variants and tests for a GPU, which may."""
    reached, advice = BEYOND.get(tier_of(request.path), (None, ""))
    if reached is None or request.node.get_closest_marker("variant") or request.node.get_closest_marker("gpu"):
        yield
        return
    owner, name = reached
    with mock.patch.object(owner, name, autospec=True, side_effect=getattr(owner, name)) as call:
        yield
    assert not call.called, advice


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    with without_caches(share=shares_code(request.node)):
        yield
