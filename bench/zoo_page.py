"""The page of the zoo, docs/zoo.md, made of its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
OWNED = 0.95
"""The share that is reached in each model, of the FLOPs of matmuls with a parameter as operand."""
PACKAGES = {
    "transformers": "Architectures of transformers",
    "diffusers": "Diffusion models",
    "timm": "Vision models of timm",
    "peft": "Adapters on frozen models",
    "torch": "Torch's own samples",
}


def page(rows: Sequence[Row], names: Iterable[str] = ()) -> str:
    """Return the generated part of the page: what was run, a table by package, and what is not as it should be.

    names: of all models, also those without a row yet.
    """
    parts = [_about(rows)]
    for package, title in PACKAGES.items():
        mine = [row for row in rows if row["package"] == package]
        if mine:
            parts.append(f"## {title}\n\n{_table(mine)}")
    parts.append(f"## What does not train\n\n{_listed(_failures(rows), 'Nothing.')}")
    if missing := [f"`{name}`" for name in names if name not in {row["name"] for row in rows}]:
        parts.append(f"## Not run yet\n\n{len(missing)} models: {', '.join(missing)}.")
    parts.append(f"## Gradients that FP8 turns\n\n{_EXCUSED}\n\n{_listed(_excused(rows), 'None.')}")
    parts.append(f"## Gradients that cancel\n\n{_CANCELLED}\n\n{_listed(_cancelled(rows), 'None.')}")
    return "\n\n".join(parts)


_EXCUSED = (
    "A parameter's gradient has a cosine of at least 0.97 with that of eager, at the same weights. These have less,\n"
    "and they have less in eager too if the operands of its matmuls are rounded to FP8, by a few lines that know\n"
    "nothing of fp8pass (in brackets): what the gradient is the sum of cancels out, and the rounding is left; or it\n"
    "sends a token to another expert. The least of each model; all are in bench/zoo_rows.jsonl."
)

_CANCELLED = (
    "These parameters have no gradient, but for what float32's rounding leaves of a sum: in eager too it turns if\n"
    "weights are changed by a millionth (its cosine then is in brackets). A softmax does not change if all of a row\n"
    "grows by the same, say, which is what a bias of keys does."
)


def _about(rows: Sequence[Row]) -> str:
    run = [row for row in rows if row["status"] != "does not run"]
    trained = sum(row["status"] == "trains" for row in run)
    elsewhere = sum(row["status"] == "torch fails too" for row in run)
    counts = Counter(row["package"] for row in rows)
    listed = ", ".join(f"{counts[p]} of {p}" for p in PACKAGES if counts[p])
    dates = sorted({row["date"][:10] for row in rows})
    versions = sorted({f"{name} {version}" for row in rows for name, version in row["versions"].items()})
    total, fp8 = (sum(row[key] for row in rows) for key in ("owned_flops", "owned_fp8_flops"))
    return (
        f"{len(rows)} models: {listed}. {trained} of {len(run)} train"
        + (f", and {elsewhere} not with `aot_eager` either" if elsewhere else "")
        + f". Of all FLOPs of matmuls that have a parameter as operand {fp8 / max(total, 1):.1%} are in FP8. "
        f"Run from {dates[0]} to {dates[-1]} with {', '.join(versions)}, on a CPU."
    )


_HEAD = (
    "| model | kind | trains | matmuls in FP8 | of FLOPs | of FLOPs with a parameter | declined, by rule | breaks | "
    "least cosine | off the reference | lowered by |\n|---|---|---|---:|---:|---:|---|---:|---:|---|---|"
)


def _table(rows: Iterable[Row]) -> str:
    return "\n".join([_HEAD, *map(_line, sorted(rows, key=lambda row: (row["kind"], row["name"])))])


def _line(row: Row) -> str:
    rules = ", ".join(f"{n} `{rule}`" for rule, n in sorted(row["rules"].items()))
    cells = (
        row["name"], row["kind"], "yes" if row["status"] == "trains" else row["status"],
        f"{row['rewritten']} of {row['matmuls']}", _share(row["fp8_flops"], row["flops"]),
        _share(row["owned_fp8_flops"], row["owned_flops"]), rules, str(len(row["breaks"]) or ""),
        f"{row['cosine']:.3f}" if row["parameters"] else "",
        f"{row['off_reference']:.0e}" if row["off_reference"] else "", ", ".join(row["lowerings"]),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else ""


def _failures(rows: Iterable[Row]) -> list[str]:
    return [f"`{row['name']}`, {row['stage']}: {_short(row['error'])}" for row in rows if row["status"] != "trains"]


def _excused(rows: Iterable[Row]) -> list[str]:
    lines = []
    for row in rows:
        found = sorted(row["excused"].items(), key=lambda of: of[1][0])
        named = [f"`{name}` {ours} ({eager})" for name, (ours, eager) in found]
        if named:
            lines.append(f"`{row['name']}`, {len(named)} of {row['parameters']}: {_first(named)}")
    return lines


def _first(named: Sequence[str]) -> str:
    """Return the first three of a list; the rows have them all."""
    rest = f" and {len(named) - 3} more" if len(named) > 3 else ""
    return ", ".join(named[:3]) + rest


def _cancelled(rows: Iterable[Row]) -> list[str]:
    found = ((row, [f"`{name}` ({cosine})" for name, cosine in row["cancelled"].items()]) for row in rows)
    return [
        f"`{row['name']}`, {len(named)} of {row['parameters'] + len(named)}: {', '.join(named)}"
        for row, named in found
        if named
    ]


def _short(text: str) -> str:
    return text.replace("|", "/").replace("<", "(").replace(">", ")")[:160]


def _listed(lines: list[str], nothing: str) -> str:
    return "\n".join(f"- {line}" for line in lines) or nothing


BEYOND = {
    "outside": "it runs where Dynamo compiles nothing",
    "batches": "each token has a matrix of its own",
    "vector": "a product with a vector has no kernel in FP8, and nothing to gain",
}
"""Rules of matmuls with a parameter that no model can be asked to have less of, with the reason."""


def problems(rows: Iterable[Row]) -> list[str]:
    """Return what is not as it has to be: a model that only we can't train, a rule that is none, too little in FP8."""
    found = []
    for row in rows:
        if row["status"] == "fails":
            found.append(f"{row['name']} fails: {row['stage']}: {row['error']}")
        if unknown := {"composite", "internal"} & row["rules"].keys():
            found.append(f"{row['name']} has matmuls declined by {unknown}")
        wanted = row["owned_flops"] - sum(row["owned_flops_by_rule"].get(rule, 0) for rule in BEYOND)
        if row["status"] == "trains" and row["owned_fp8_flops"] < OWNED * wanted:
            found.append(f"{row['name']}: {_share(row['owned_fp8_flops'], wanted)} of the FLOPs of its parameters")
        # of what runs outside of graphs no backward is seen but that of matmuls
        seen = row["graphs"] and not row["unsized"] and not any("autograd.Function" in b for b in row["breaks"])
        if row["status"] == "trains" and seen and row["flops"] < row["eager_flops"]:
            found.append(f"{row['name']}: of FLOPs in eager {_share(row['flops'], row['eager_flops'])} have a verdict")
    return found
