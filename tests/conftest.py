"""Sorts the tests into tiers, gives each a clean compiler, and says how long each tier took."""

from __future__ import annotations

import functools
import logging
import os
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers.harness import without_caches
from tests.helpers.torchrun import VARIANTS

ORDER = ("ranks", "gpu_code", "tools", "inductor", "compiled", "passes")
"""The tiers, which are marks: each test has one. Long tests run first, so that no worker runs one alone at the end."""
BEYOND = {
    "passes": (
        "fp8pass.compiler.compiled_graph:CompiledGraph._run_with_state",
        "this test compiles: mark it `compiled`",
    ),
    "compiled": ("torch._inductor.graph:GraphLowering.run", "this test reaches Inductor: mark it `inductor`"),
}
"""For each tier, the function that its tests must not reach, and the message. This keeps the fast tier fast.

Files with tests of the fast tier import Inductor and other libraries within the tests that need them.
"""


def tier_of(item: pytest.Item) -> str:
    """Return the tier of a test: the one that it, or its file, is marked with."""
    tiers = [mark.name for mark in item.iter_markers() if mark.name in ORDER]
    if len(tiers) != 1:
        raise pytest.UsageError(f"{item.nodeid} needs one mark of {', '.join(ORDER)}; it has {tiers or 'none'}")
    return tiers[0]


@functools.cache
def group_of(file: Path) -> str:
    """Return the group of a test file, whose tests one worker runs, or "" if its tests may run on several.

    Tests of a group share something slow: the launch of the ranks, compiled code, or what their `xdist_group` names.
    """
    text = file.read_text()
    if "@on_ranks" in text:
        return "ranks"  # whose launch runs the functions of all these files
    named = re.search(r'pytest\.mark\.xdist_group\("(\w+)"\)', text)
    return named[1] if named else str(file) if "pytest.mark.shares_code" in text else ""


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
    config.addinivalue_line(
        "markers", "gate: takes long, mostly to start processes; runs in .ci/run, which sets CI, and with --variants"
    )
    config.addinivalue_line("markers", "variant: runs with --variants only; a similar test runs without it")
    config.addinivalue_line("markers", "xdist_group(name): one worker runs all tests with this name")
    os.environ["FP8PASS_ON_FAULT"] = "raise"  # the environment also reaches the processes that tests start
    if config.getoption("variants"):
        os.environ[VARIANTS] = "1"
    for tier in ORDER:
        config.addinivalue_line("markers", f"{tier}: a tier, see tests/conftest.py")
    # pytest listens to each logger that does not propagate, and torch prints every graph where somebody listens to this
    logging.getLogger("torch.__trace").propagate = True


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without a test of the tier that `-m` names, so that what only they need is not imported."""
    if config.option.markexpr not in ORDER or not collection_path.name.startswith("test_"):
        return None
    return f"pytest.mark.{config.option.markexpr}" not in collection_path.read_text() or None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests of a group to one worker.

    pytest-xdist 3.8 itself puts the group into the name of a test, which pytest 9.2 does not let it change.
    """
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = lambda test: group_of(config.rootpath / test.partition("::")[0]) or test
    return scheduler


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    has_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    for item in items:
        item.user_properties.append(("tier", tier_of(item)))
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="no GPU with FP8 here"))
    items.sort(key=lambda item: (ORDER.index(tier_of(item)), not group_of(item.path)))
    waiting = {"variant"} if "CI" in os.environ else {"variant", "gate"}
    if config.getoption("variants"):
        waiting.clear()
    left_out = [item for item in items if waiting & {mark.name for mark in item.iter_markers()}]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many tests each tier has, and the sum of their times."""
    tests: dict[str, set[str]] = defaultdict(set)
    seconds: dict[str, float] = defaultdict(float)
    reports = (report for kind in terminalreporter.stats.values() for report in kind)
    for report in (report for report in reports if isinstance(report, pytest.TestReport)):
        tier = str(dict(report.user_properties)["tier"])
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
    reached, advice = BEYOND.get(tier_of(request.node), ("", ""))
    if not reached or request.node.get_closest_marker("variant") or request.node.get_closest_marker("gpu"):
        yield
        return
    owner, _, name = reached.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    with mock.patch.object(owner, name, autospec=True, side_effect=getattr(owner, name)) as call:
        yield
    assert not call.called, advice


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    with without_caches(share=shares_code(request.node)):
        yield
