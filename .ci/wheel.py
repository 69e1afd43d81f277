"""Build sdist and wheel, compare them with the files that git tracks, and train with the wheel outside of the checkout.

Run it with a Python that has torch and the extra "dev". It installs the wheel in a new environment, which has links to
the wheel's declared requirements only, so that an undeclared dependency is missing there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
ALSO_IN_SDIST = {"LICENSE", "README.md", "pyproject.toml"}
GENERATED = r"PKG-INFO$|setup\.cfg$|fp8pass\.egg-info/|fp8pass-[^/]*\.dist-info/"
WORKS = """
import math, sys
assert fp8pass.__file__.startswith(sys.prefix), f"{fp8pass.__file__} is not the installed file in {sys.prefix}"
assert loss < math.log(10), "the example does not learn"
"""


def main() -> None:
    """Run all checks; exit with a message if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        sdist, wheel = build(work)
        check_files(sdist, wheel)
        install(wheel, work)
        train(work)


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command without environment variables of Python, and return its output; exit if it fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def tracked(*folders: str) -> list[str]:
    """Return the files that git tracks, in these folders or in all, relative to the checkout."""
    return run("git", "ls-files", *folders).splitlines()


def build(work: Path) -> tuple[Path, Path]:
    """Build an sdist of only the tracked files, and a wheel from the sdist; return both."""
    source, archives = work / "source", work / "archives"
    for file in tracked():
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, source / file)
    run(sys.executable, "-m", "build", "--outdir", archives, source)
    return next(archives.glob("*.tar.gz")), next(archives.glob("*.whl"))


def check_files(sdist: Path, wheel: Path) -> None:
    """Exit if an archive lacks a file of the two packages, or has a file that neither they nor setuptools have made."""
    files = set(tracked("fp8pass", "passes"))
    with tarfile.open(sdist) as archive:
        inside = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    compare(sdist, files | ALSO_IN_SDIST, {f for f in inside if not re.match(GENERATED, f)})
    with zipfile.ZipFile(wheel) as archive:
        inside = {re.sub(r"^fp8pass-[^/]*\.dist-info/licenses/", "", f) for f in archive.namelist()}
    wanted = {re.sub("^passes/", "fp8pass/passes/", f) for f in files}
    compare(wheel, wanted | {"LICENSE"}, {f for f in inside if not re.match(GENERATED, f)})


def compare(archive: Path, wanted: set[str], found: set[str]) -> None:
    """Print the number of an archive's files; exit if these are not the wanted files."""
    print(f"{archive.name}: {len(found)} files")
    if wanted != found:
        sys.exit(f"{archive.name} lacks {sorted(wanted - found)} and should not have {sorted(found - wanted)}")


def install(wheel: Path, work: Path) -> None:
    """Install the wheel in a new environment, and link the packages that it and its extra "demo" require."""
    venv.create(work / "venv", with_pip=True)
    python = work / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel, cwd=work)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=work).strip())
    (installed,) = metadata.distributions(name="fp8pass", path=[str(site)])
    required = requirements(installed.requires or (), {"demo"}, {})
    for distribution in required.values():
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(Path(str(distribution.locate_file(name))))
    print(f"linked: {' '.join(sorted(required))}")


def requirements(
    texts: Iterable[str], extras: set[str], found: dict[str, metadata.Distribution]
) -> dict[str, metadata.Distribution]:
    """Add the installed distributions of requirements to `found`, and recursively those of theirs; return it."""
    for requirement in map(Requirement, texts):
        marker = requirement.marker
        wanted = marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras})
        if wanted and requirement.name not in found:
            found[requirement.name] = metadata.distribution(requirement.name)
            requirements(found[requirement.name].requires or (), requirement.extras, found)
    return found


def train(work: Path) -> None:
    """Run the command `fp8pass` and README's example as a user would."""
    command = work / "venv" / "bin" / "fp8pass"
    print(run(command, "env", cwd=work).rstrip())
    print(run(command, "demo", "--steps", "3", cwd=work).rstrip())
    example = re.search(r"<!-- example -->\s*```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    if example is None:
        sys.exit("README.md has no example")
    (work / "example.py").write_text(example[1] + WORKS)
    print(run(work / "venv" / "bin" / "python", "example.py", cwd=work).rstrip())


if __name__ == "__main__":
    main()
