"""Plant each fault of `faults.py` in a copy of this checkout, and run the tests that reach it: does one notice?

    measured="-p pytest_cov --cov=fp8pass --cov=passes --cov-branch --cov-context=test"
    bash tests/run.sh $measured --durations=0 -vv > build/log
    python bench/planted_faults.py --contexts .coverage --durations build/log

The coverage file says which tests reach the lines of a fault. They run with `-x`, those of the file's own test file
first, then the cheapest, `--most` seconds of them by the log. Then the whole suite runs once with all faults planted
that survived, unless `--reached-only` is given, and each of these meets the tests that failed; and so again, until no
more are caught. A test that fails without any fault has not caught one, and is left out. Each result is a line in
`--results`; faults that have one are not tried again, so that the command can be stopped and started. Prints a table;
exits with 1 if a fault survived.
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

from faults import FAULTS, Fault

ROOT = Path(__file__).parent.parent
CHUNKS = (40, 200)
"""After so many tests a new process of pytest begins: to collect all that reach a fault takes longer than the first."""
LIMIT = 1800
"""Seconds until tests that reach a fault, but for the whole suite, are taken to hang."""
SUITE = ("-p", "xdist", "-n", "auto", "--no-loadscope-reorder", "--ignore=tests/test_planted_faults.py")
"""All tests, but for those that look for the texts which faults replace."""
HANGS = f"a hang of more than {LIMIT} s"


@dataclass(frozen=True)
class Result:
    """What became of a fault. caught_by: a test, or None. reaching: how many tests do; tests: how many were to run."""

    fault: str
    file: str
    caught_by: str | None
    reaching: int
    tests: int
    whole_suite: bool
    seconds: float


# ---------------------------------------------------------------------------------------------------------------------
# Where a fault is


def product_files(root: Path) -> list[Path]:
    """Returns the Python files of the product in the checkout `root`, sorted."""
    return sorted(f for folder in ("fp8pass", "passes") for f in (root / folder).rglob("*.py") if not f.is_symlink())


def place_of(fault: Fault, root: Path) -> Path:
    """Returns the file that has the fault's text. Raises ValueError unless exactly one file has it, once."""
    counts = {f: f.read_text().count(fault.before) for f in product_files(root)}
    found = [f for f, n in counts.items() if n]
    if len(found) != 1 or counts[found[0]] != 1:
        raise ValueError(f"{fault.name!r}: its text is in {[str(f) for f in found]}; it must be once in one file")
    return found[0]


def lines_of(fault: Fault, text: str) -> set[int]:
    """Returns the numbers of the lines that the fault's text is on, counted from 1."""
    first = text[: text.index(fault.before)].count("\n") + 1
    return set(range(first, first + fault.before.count("\n") + 1))


def lines_around(lines: set[int], text: str) -> set[int]:
    """Returns the lines of the innermost function that these are in; of none, all lines of the file."""
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    spans = [set(range(f.lineno, (f.end_lineno or f.lineno) + 1)) for f in functions]
    return min((s for s in spans if lines <= s), key=len, default=set(range(1, text.count("\n") + 2)))


# ---------------------------------------------------------------------------------------------------------------------
# Which tests reach it


class Tests:
    """All tests that are known, and what they reach.

    contexts: a coverage file of this checkout's sources, with `--cov-context=test`. log: of `run.sh --durations=0 -vv`.
    most: seconds of tests, by the log, that are run of those that reach a fault.
    """

    def __init__(self, contexts: Path, log: Path | None, most: float) -> None:
        from coverage import CoverageData  # not in the [dev] extra: only whoever measures needs it

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
        # a test that only looks at what other processes did reaches no line and takes no time: the log knows it
        self._all = {t for c in self._data.measured_contexts() if (t := _test_of(c))} | set(self._seconds) | passed

    def reaching(self, fault: Fault, file: Path, root: Path) -> tuple[list[str], int]:
        """Returns the tests to run, in order, and how many are known to reach the fault's lines.

        Where none is, because processes of its own run them or Python when it imports the file, those that reach the
        function around it. In either case also the tests of the file's own test file.
        """
        text, own = file.read_text(), f"tests/test_{file.stem}.py"
        lines = lines_of(fault, text)
        reached = self._on(file, lines, root)
        around = reached or self._on(file, lines_around(lines, text), root)
        others = {t for t in self._all if t.partition("::")[0] in (own, fault.elsewhere)}
        ordered = sorted(around | others, key=lambda t: (not t.startswith(own), self._seconds[t], t))
        ends = itertools.accumulate(self._seconds[t] for t in ordered)
        return [t for t, end in zip(ordered, ends, strict=True) if end <= self._most], len(reached)

    def _on(self, file: Path, lines: set[int], root: Path) -> set[str]:
        name = file.relative_to(root).as_posix()
        (measured,) = (f for f in self._data.measured_files() if f.endswith(f"/{name}"))
        by_line = self._data.contexts_by_lineno(measured)
        return {t for line in lines for c in by_line.get(line, ()) if (t := _test_of(c))}


def _test_of(context: str) -> str:
    """Returns the test that coverage means by "|tests/test_x.py::test_y[1]|run"; "" if it means none."""
    found = re.search(r"(?:^|\|)(tests/.*)\|(?:setup|run|teardown)$", context)
    return found[1] if found else ""


# ---------------------------------------------------------------------------------------------------------------------
# Running them


class Tree:
    """A copy of the checkout that faults are planted in."""

    def __init__(self, root: Path) -> None:
        """Copy what git knows, or would take. Raises RuntimeError if Python would import another copy."""
        self.root = root.resolve()
        shutil.rmtree(self.root, ignore_errors=True)
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        if (self.root / "passes").is_dir():  # as in .ci/types: what is imported from here is complete
            (self.root / "fp8pass" / "passes").symlink_to("../passes")
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(self.root),  # ahead of the editable install of another copy
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
        """Have faults, each in another file, in the copy within this context."""
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
        """Run pytest with `-x`; returns the test that fails, or the file that can't be imported; None if all pass.

        arguments: tests and options. limit: seconds until it is `HANGS`. Raises RuntimeError where pytest itself fails.
        """
        try:
            return next(iter(self.failures("-x", *arguments, limit=limit)), None)
        except subprocess.TimeoutExpired:
            return HANGS

    def failures(self, *arguments: str, limit: float | None = None) -> list[str]:
        """Run pytest; returns the tests that fail, and the files that can't be imported.

        arguments: tests and options. Raises TimeoutExpired after `limit` seconds; RuntimeError where pytest fails.
        """
        done = self._run(["-m", "pytest", "-q", "-rfE", "--tb=no", *arguments], limit)
        said = re.findall(r"^(?:FAILED|ERROR) (tests/.*)$", done.stdout, re.MULTILINE)
        if not said and done.returncode != 0:
            raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return [_named(line, arguments) for line in said]


def _named(said: str, arguments: Sequence[str]) -> str:
    """Returns the test that a line of pytest's is about: one of those given, if any, for names may have " - "."""
    named = [t for t in arguments if f"{said} - ".startswith(f"{t} - ")]
    return max(named, key=len, default=said.partition(" - ")[0])


def _write(file: Path, text: str) -> None:
    """Write a source. Its bytecode goes away: Python would take it for current if size and second are the same."""
    file.write_text(text)
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


class Hunt:
    """Runs tests against faults."""

    def __init__(self, tests: Tests) -> None:
        self._tests = tests
        self._sound: dict[str, bool] = {HANGS: True}
        """Of tests that have failed: whether they pass without any fault."""

    def by_those_that_reach(self, fault: Fault, tree: Tree) -> Result:
        """Returns what becomes of a fault that is planted in `tree`, by the tests that reach it."""
        started = time.monotonic()
        file = place_of(fault, tree.root)
        tests, reaching = self._tests.reaching(fault, file, tree.root)
        edges = [0, *(e for e in CHUNKS if e < len(tests)), len(tests)]
        chunks = (tests[a:b] for a, b in itertools.pairwise(edges) if a < b)
        caught = next(filter(None, (self._caught(fault, tree, chunk) for chunk in chunks)), None)
        name, seconds = file.relative_to(tree.root).as_posix(), round(time.monotonic() - started, 1)
        return Result(fault.name, name, caught, reaching, len(tests), False, seconds)

    def by_the_whole_suite(self, survivors: dict[Fault, Result], tree: Tree) -> Iterator[Result]:
        """Yields what becomes of faults that have survived, planted in `tree` together and then one by one."""
        while survivors:
            started = time.monotonic()
            with tree.planted(*survivors):
                failed = tree.failures(*SUITE)
            together = (time.monotonic() - started) / len(survivors)
            found = {f: self._of_suite(f, result, tree, failed, together) for f, result in survivors.items()}
            caught = [fault for fault, result in found.items() if result.caught_by]
            yield from (found[fault] for fault in caught or found)  # one that ends many tests early may hide others
            survivors = {fault: survivors[fault] for fault in found if fault not in caught} if caught else {}

    def _of_suite(self, fault: Fault, result: Result, tree: Tree, failed: Sequence[str], together: float) -> Result:
        started = time.monotonic()
        caught = self._caught(fault, tree, failed) if failed else None
        seconds = result.seconds + together + time.monotonic() - started
        return replace(result, caught_by=caught, whole_suite=True, seconds=round(seconds, 1))

    def _caught(self, fault: Fault, tree: Tree, tests: Sequence[str]) -> str | None:
        """Returns the first of the tests that fails because of the fault; None if none does."""
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
    """Returns the results so far by fault; of several the last."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {r.fault: r for r in (Result(**json.loads(line)) for line in lines)}


def table(results: Sequence[Result]) -> str:
    """Returns the results as a table in Markdown."""
    rows = [
        f"| {r.fault} | {r.file} | {f'`{r.caught_by}`' if r.caught_by else '**SURVIVED**'} | {r.seconds:.0f} |"
        for r in results
    ]
    caught = sum(r.caught_by is not None for r in results)
    head = "| fault | file | caught by | seconds |\n|---|---|---|---:|"
    return "\n".join([head, *rows, f"\n{caught} of {len(results)} faults are caught"])


def main() -> int:
    """Try all faults that have no result yet; print the table, and return whether any survived."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=Path, required=True, help="coverage file with a context for each test")
    parser.add_argument("--durations", type=Path, help="output of pytest --durations=0: the cheapest tests come first")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "faults.jsonl", help="default: %(default)s")
    parser.add_argument("--tree", type=Path, default=ROOT / "build" / "faults", help="of copies; default: %(default)s")
    parser.add_argument("--most", type=float, default=600, help="see above (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time, each in its copy (default: 1)")
    parser.add_argument("--reached-only", action="store_true", help="never run the whole suite")
    parser.add_argument("--only", nargs="*", help="words: only faults whose name has one of them")
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
    """Write results as they come."""
    for result in results:
        with file.open("a") as lines:
            lines.write(json.dumps(asdict(result)) + "\n")
        how = "by the whole suite" if result.whole_suite else "by those that reach it"
        print(f"{result.fault}: {result.caught_by or 'SURVIVED'}, {how}, {result.seconds} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
