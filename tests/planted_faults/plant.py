"""Plant each fault of `faults.py` in a copy of this checkout, and run the tests that reach it, to see if one fails.

    measured="-p pytest_cov --cov=fp8pass --cov=passes --cov-branch --cov-context=test"
    bash tests/run.sh $measured --durations=0 -vv > build/log
    python -m tests.planted_faults.plant --contexts .coverage --durations build/log

The coverage file says which tests reach the lines of a fault. They run with `-x`: first those of the file's own test
file, then the fastest, up to `--most` seconds by the log. Then, unless `--reached-only` is given, the whole suite runs
once with all surviving faults planted together, and the tests that failed run again with each of these faults alone.
This is repeated until no more faults are caught. A test that also fails without a fault has not caught it, and is left
out. Each result is a line in `--results`; faults that have a result are not tried again, so that the command can be
interrupted and continued. Prints a table; exits with 1 if a fault survived.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import itertools
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.planted_faults.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
CHUNKS = (40, 200)
"""After so many tests a new pytest process begins: collecting all that reach a fault takes longer than the first."""
LIMIT = 1800
"""Seconds after which a run of the tests that reach a fault counts as a hang. The whole suite has no limit."""
SUITE = ("-p", "xdist", "-n", "auto", "--no-loadscope-reorder", "--ignore=tests/planted_faults")
"""Arguments of pytest for the whole suite, without the tests that look for the texts which faults replace."""
HANGS = f"a hang of more than {LIMIT} s"


@dataclass(frozen=True)
class Result:
    """The result for a fault.

    caught_by: a test, or None. reaching: number of tests that reach its lines. tests: number of tests selected to run.
    """

    fault: str
    file: str
    caught_by: str | None
    reaching: int
    tests: int
    whole_suite: bool
    seconds: float


# ---------------------------------------------------------------------------------------------------------------------
# Find a fault


def product_files(root: Path) -> list[Path]:
    """Return the Python files of the product in the checkout `root`, sorted."""
    return sorted(f for folder in ("fp8pass", "passes") for f in (root / folder).rglob("*.py") if not f.is_symlink())


def place_of(fault: Fault, root: Path) -> Path:
    """Return the file that has the fault's text. Raises ValueError unless exactly one file has it, once."""
    counts = {f: f.read_text().count(fault.before) for f in product_files(root)}
    found = [f for f, n in counts.items() if n]
    if len(found) != 1 or counts[found[0]] != 1:
        raise ValueError(f"{fault.name!r}: its text is in {[str(f) for f in found]}; it must be once in one file")
    return found[0]


def lines_of(fault: Fault, text: str) -> set[int]:
    """Return the numbers of the lines that contain the fault's text, counted from 1."""
    first = text[: text.index(fault.before)].count("\n") + 1
    return set(range(first, first + fault.before.count("\n") + 1))


def lines_around(lines: set[int], text: str) -> set[int]:
    """Return all lines of the innermost function that contains these lines; without one, all lines of the file."""
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    spans = [set(range(f.lineno, (f.end_lineno or f.lineno) + 1)) for f in functions]
    return min((s for s in spans if lines <= s), key=len, default=set(range(1, text.count("\n") + 2)))


# ---------------------------------------------------------------------------------------------------------------------
# Find the tests that reach it


class Tests:
    """All known tests, and the lines that they reach.

    contexts: a coverage file of this checkout's sources, with `--cov-context=test`. log: the output of
    `run.sh --durations=0 -vv`. most: the tests of one fault may take so many seconds, by the log.
    """

    def __init__(self, contexts: Path, log: Path | None, most: float) -> None:
        from coverage import CoverageData  # not in the [dev] extra: only this script needs it

        self._data = CoverageData(str(contexts))
        self._data.read()
        self._most = most
        self._seconds: defaultdict[str, float] = defaultdict(float)
        passed = set()
        for line in log.read_text().splitlines() if log is not None else ():
            if found := re.fullmatch(r"([\d.]+)s (?:call|setup|teardown) +(tests/.*)", line):
                self._seconds[found[2]] += float(found[1])
            elif found := re.search(r" PASSED (tests/.*\S)", line):
                passed.add(found[1])
        # a test that only reads the results of other processes reaches no line and takes no time; the log lists it
        self._all = {t for c in self._data.measured_contexts() if (t := _test_of(c))} | set(self._seconds) | passed

    def reaching(self, fault: Fault, file: Path, root: Path) -> tuple[list[str], int]:
        """Return the tests to run, in order, and the number of tests that are known to reach the fault's lines.

        If there are none, because the lines run in other processes, or when Python imports the file, return the tests
        that reach the function around the fault. The tests of the file's own test file are always included.
        """
        text, own = file.read_text(), f"test_{file.stem}.py"
        lines = lines_of(fault, text)
        reached = self._on(file, lines, root)
        around = reached or self._on(file, lines_around(lines, text), root)
        others = {t for t in self._all if _file_of(t) == own or t.partition("::")[0] == fault.elsewhere}
        ordered = sorted(around | others, key=lambda t: (_file_of(t) != own, self._seconds[t], t))
        ends = itertools.accumulate(self._seconds[t] for t in ordered)
        return [t for t, end in zip(ordered, ends, strict=True) if end <= self._most], len(reached)

    def _on(self, file: Path, lines: set[int], root: Path) -> set[str]:
        name = file.relative_to(root).as_posix()
        (measured,) = (f for f in self._data.measured_files() if f.endswith(f"/{name}"))
        by_line = self._data.contexts_by_lineno(measured)
        return {t for line in lines for c in by_line.get(line, ()) if (t := _test_of(c))}


def _file_of(test: str) -> str:
    """Return the name of a test's file: tests of one module have the same in each folder."""
    return test.partition("::")[0].rpartition("/")[2]


def _test_of(context: str) -> str:
    """Return the test that a context of coverage names, as "|tests/test_x.py::test_y[1]|run"; "" if there is none."""
    found = re.search(r"(?:^|\|)(tests/.*)\|(?:setup|run|teardown)$", context)
    return found[1] if found else ""


# ---------------------------------------------------------------------------------------------------------------------
# Run them


class Tree:
    """A copy of the checkout that faults are planted in."""

    def __init__(self, root: Path) -> None:
        """Copy the files that git tracks or would add. Raises RuntimeError if Python would import another copy."""
        self.root = root.resolve()
        shutil.rmtree(self.root, ignore_errors=True)
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        if (self.root / "passes").is_dir():  # as in .ci/types, so that fp8pass.passes is imported from this copy
            (self.root / "fp8pass" / "passes").symlink_to("../passes")
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(self.root),  # takes precedence over the editable install of the checkout
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.root / "build" / "cache"),
        }
        code = "import fp8pass, fp8pass.passes as p; print(fp8pass.__path__[0], p.__path__[0], sep='\\n')"
        imported = [Path(line).resolve() for line in self._run(["-c", code]).stdout.split()]
        if imported != [(self.root / name).resolve() for name in ("fp8pass", "fp8pass/passes")]:
            raise RuntimeError(f"Python imports {imported}, not the copy in {self.root}")

    def _run(self, arguments: Sequence[str], limit: float | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root, env=self._environment, timeout=limit, capture_output=True, text=True, check=False,
        )  # fmt: skip

    @contextlib.contextmanager
    def planted(self, *faults: Fault) -> Iterator[None]:
        """Within it, the copy has these faults, each in a different file."""
        texts = {place_of(fault, self.root): fault for fault in faults}
        before = {file: file.read_text() for file in texts}
        try:
            for file, fault in texts.items():
                _write(file, before[file].replace(fault.before, fault.after))
            yield
        finally:
            for file, text in before.items():
                _write(file, text)

    def first_failure(self, *arguments: str, limit: float | None = None) -> str | None:
        """Run pytest with `-x`; return the test that fails, or the file that can't be imported; None if all pass.

        arguments: tests and options. limit: seconds after which it returns `HANGS`. Raises RuntimeError if pytest
        itself fails.
        """
        try:
            return next(iter(self.failures("-x", *arguments, limit=limit)), None)
        except subprocess.TimeoutExpired:
            return HANGS

    def failures(self, *arguments: str, limit: float | None = None) -> list[str]:
        """Run pytest; return the tests that fail, and the files that can't be imported.

        arguments: tests and options. Raises TimeoutExpired after `limit` seconds; RuntimeError if pytest itself fails.
        """
        done = self._run(["-m", "pytest", "-q", "-rfE", "--tb=no", *arguments], limit)
        said = re.findall(r"^(?:FAILED|ERROR) (tests/.*)$", done.stdout, re.MULTILINE)
        if not said and done.returncode != 0:
            raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return [_named(line, arguments) for line in said]


def _named(said: str, arguments: Sequence[str]) -> str:
    """Return the test that a line of pytest names: one of the arguments if possible, since names may contain " - "."""
    named = [t for t in arguments if f"{said} - ".startswith(f"{t} - ")]
    return max(named, key=len, default=said.partition(" - ")[0])


def _write(file: Path, text: str) -> None:
    """Write a source file, and delete its bytecode, which Python would use if size and time in seconds are the same."""
    file.write_text(text)
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


class Hunt:
    """Plants faults, and runs tests against them."""

    def __init__(self, tests: Tests) -> None:
        self._tests = tests
        self._sound: dict[str, bool] = {HANGS: True}
        """{test that has failed: it passes without a fault}."""

    def by_those_that_reach(self, fault: Fault, tree: Tree) -> Result:
        """Plant a fault in `tree`, run the tests that reach it, and return the result."""
        started = time.monotonic()
        file = place_of(fault, tree.root)
        tests, reaching = self._tests.reaching(fault, file, tree.root)
        edges = [0, *(e for e in CHUNKS if e < len(tests)), len(tests)]
        chunks = (tests[a:b] for a, b in itertools.pairwise(edges) if a < b)
        caught = next(filter(None, (self._caught(fault, tree, chunk) for chunk in chunks)), None)
        name, seconds = file.relative_to(tree.root).as_posix(), round(time.monotonic() - started, 1)
        return Result(fault.name, name, caught, reaching, len(tests), False, seconds)

    def by_the_whole_suite(self, survivors: dict[Fault, Result], tree: Tree) -> Iterator[Result]:
        """Run the whole suite with all survivors in `tree`, then its failed tests with each; yield the results."""
        while survivors:
            started = time.monotonic()
            with tree.planted(*survivors):
                failed = tree.failures(*SUITE)
            together = (time.monotonic() - started) / len(survivors)
            found = {f: self._of_suite(f, result, tree, failed, together) for f, result in survivors.items()}
            caught = [fault for fault, result in found.items() if result.caught_by]
            yield from (found[fault] for fault in caught or found)  # a fault that ends many tests early may hide others
            survivors = {fault: survivors[fault] for fault in found if fault not in caught} if caught else {}

    def _of_suite(self, fault: Fault, result: Result, tree: Tree, failed: Sequence[str], together: float) -> Result:
        started = time.monotonic()
        caught = self._caught(fault, tree, failed) if failed else None
        seconds = result.seconds + together + time.monotonic() - started
        return replace(result, caught_by=caught, whole_suite=True, seconds=round(seconds, 1))

    def _caught(self, fault: Fault, tree: Tree, tests: Sequence[str]) -> str | None:
        """Return the first test that fails because of the fault; None if all pass."""
        while left := [t for t in tests if self._sound.get(t, True)]:
            with tree.planted(fault):
                test = tree.first_failure(*left, limit=LIMIT)
            if test is None or self._is_sound(test, tree):
                return test
        return None

    def _is_sound(self, test: str, tree: Tree) -> bool:
        if test not in self._sound:
            self._sound[test] = tree.first_failure(test) is None
        return self._sound[test]


# ---------------------------------------------------------------------------------------------------------------------


def read(results: Path) -> dict[str, Result]:
    """Return {name of a fault: its last result so far}."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {r.fault: r for r in (Result(**json.loads(line)) for line in lines)}


def table(results: Sequence[Result]) -> str:
    """Return the results as a table in Markdown."""
    rows = [
        f"| {r.fault} | {r.file} | {f'`{r.caught_by}`' if r.caught_by else '**SURVIVED**'} | {r.seconds:.0f} |"
        for r in results
    ]
    caught = sum(r.caught_by is not None for r in results)
    head = "| fault | file | caught by | seconds |\n|---|---|---|---:|"
    return "\n".join([head, *rows, f"\n{caught} of {len(results)} faults are caught"])


def main() -> int:
    """Try all faults that have no result yet, and print the table; return 1 if a fault survived, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=Path, required=True, help="coverage file with a context for each test")
    parser.add_argument("--durations", type=Path, help="output of pytest --durations=0: the fastest tests run first")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "build" / "faults.jsonl", help="file of results (default: %(default)s)"
    )
    parser.add_argument(
        "--tree", type=Path, default=ROOT / "build" / "faults", help="folder for the copies (default: %(default)s)"
    )
    parser.add_argument(
        "--most", type=float, default=600, help="seconds of tests per fault, by --durations (default: %(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time, each in its own copy (default: 1)")
    parser.add_argument("--reached-only", action="store_true", help="do not run the whole suite")
    parser.add_argument("--only", nargs="*", help="words: try only faults whose name contains one of them")
    args = parser.parse_args()
    known = read(args.results)
    wanted = [f for f in FAULTS if args.only is None or any(word in f.name for word in args.only)]
    args.results.parent.mkdir(parents=True, exist_ok=True)
    hunt = Hunt(Tests(args.contexts, args.durations, args.most))
    trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    for i in range(args.jobs):
        trees.put(Tree(args.tree / str(i)))

    def run(fault: Fault) -> Result:
        tree = trees.get()
        try:
            return hunt.by_those_that_reach(fault, tree)
        finally:
            trees.put(tree)

    with ThreadPoolExecutor(args.jobs) as pool:
        _keep(pool.map(run, [f for f in wanted if f.name not in known]), args.results)
    known = read(args.results)
    survivors = {f: r for f in wanted if (r := known[f.name]).caught_by is None and not r.whole_suite}
    if not args.reached_only:
        _keep(hunt.by_the_whole_suite(survivors, trees.get()), args.results)
    found = read(args.results)
    results = [found[f.name] for f in wanted]
    print(table(results))
    return int(any(r.caught_by is None for r in results))


def _keep(results: Iterable[Result], file: Path) -> None:
    """Append results to a file, and print them, as they come."""
    for result in results:
        with file.open("a") as lines:
            lines.write(json.dumps(asdict(result)) + "\n")
        how = "by the whole suite" if result.whole_suite else "by those that reach it"
        print(f"{result.fault}: {result.caught_by or 'SURVIVED'}, {how}, {result.seconds} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
