"""Store the zoo's rows: each is a file in build/zoo after it is made, and a line of rows.jsonl if kept."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.zoo.catalogue import Entry
from tests.zoo.row import Row

Made = dict[str, Any]
"""A row as JSON, with package, kind, date, commit and versions."""
TRAINED = ("eager", "inductor", "h100", "sm_120")
"""The lowerings whose rows are kept; rows of "explain" have nothing that those of "eager" lack."""
_DEFAULTS = asdict(Row(""))
_DIGITS = 4
"""Decimal digits of a kept cosine: few, so that a line that is made again differs only if the row does."""


@dataclass(frozen=True)
class Rows:
    """Reads and writes rows. made: the folder with a file for each. kept: the file with a line for each."""

    made: Path
    kept: Path

    def file(self, name: str, lowering: str) -> Path:
        """Return the path of the file of a row."""
        return self.made / lowering / f"{name}.json"

    def all(self, lowering: str) -> dict[str, Made]:
        """Return {name: row} of a lowering: the kept rows, replaced by newer ones from files."""
        found = {row["name"]: row for by, row in self._kept() if by == lowering}
        for file in sorted((self.made / lowering).glob("*.json")):
            row = {**_DEFAULTS, **json.loads(file.read_text())}
            if row["name"] not in found or row["date"] >= found[row["name"]]["date"]:
                found[row["name"]] = row
        return dict(sorted(found.items()))

    def keep(self) -> int:
        """Write all rows into the one file, without fields that have their defaults; return the number of rows."""
        lines = [_line(by, row) for by in sorted(TRAINED) for row in self.all(by).values()]
        self.kept.write_text("".join(lines))
        return len(lines)

    def _kept(self) -> Iterator[tuple[str, Made]]:
        for line in self.kept.read_text().splitlines() if self.kept.exists() else ():
            row = json.loads(line)
            yield row.pop("lowering"), {**_DEFAULTS, **row}


def _line(lowering: str, row: Made) -> str:
    said = {key: value for key, value in row.items() if value != _DEFAULTS.get(key)}
    said["cosine"] = round(row["cosine"], _DIGITS)
    said |= {"off_reference": float(f"{off:.1g}")} if (off := row["off_reference"]) else {}
    first = {"lowering": lowering, "name": said.pop("name")}
    return json.dumps({**first, **said}, separators=(",", ":")) + "\n"


def third(entries: Iterable[Entry], rows: Mapping[str, Made]) -> list[str]:
    """Return the names of a third of each kind: the models whose rows took the least time in eager.

    Loops are left out, because they choose their lowering themselves.
    """
    kinds: dict[tuple[str, str], list[str]] = {}
    for entry in (e for e in entries if e.kind != "loop"):
        kinds.setdefault((entry.package, entry.kind), []).append(entry.name)
    found = []
    for names in kinds.values():
        spent = {n: sum(rows[n]["seconds"].values()) for n in names if n in rows and rows[n]["status"] == "trains"}
        found += sorted(spent, key=spent.__getitem__)[: math.ceil(len(names) / 3)]
    return found
