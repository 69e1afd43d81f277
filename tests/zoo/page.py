"""Write the tables of docs/zoo.md from the zoo's rows, and list the rows' problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
OWNED = 0.95
"""The least share of FLOPs in FP8, among matmuls with a parameter as operand, that each model must reach."""
PACKAGES = {
    "transformers": "Architectures of transformers",
    "diffusers": "Diffusion models",
    "timm": "Vision models of timm",
    "peft": "Adapters on frozen models",
    "megatron-core": "Layers of Megatron-Core",
    "torch": "Torch's own samples",
}


def page(rows: Sequence[Row], names: Iterable[str] = ()) -> str:
    """Return the generated part of the page: a summary, a table for each package, and lists of exceptions.

    names: the names of all models, also of those without a row.
    """
    parts = [_about(rows)]
    for package, title in PACKAGES.items():
        mine = [row for row in rows if row["package"] == package]
        if mine:
            parts.append(f"## {title}\n\n{_table(mine)}")
    parts.append(f"## Models that do not train\n\n{_listed(_failures(rows))}")
    if missing := [f"`{name}`" for name in names if name not in {row["name"] for row in rows}]:
        parts.append(f"## Models without a row\n\n{len(missing)} models: {', '.join(missing)}.")
    parts.append(f"## Gradients whose direction FP8 changes\n\n{_EXCUSED}\n\n{_listed(_excused(rows))}")
    parts.append(f"## Gradients that cancel\n\n{_CANCELLED}\n\n{_listed(_cancelled(rows))}")
    return "\n\n".join(parts)


_EXCUSED = (
    "These gradients have a cosine of less than 0.97 with eager's, at the same weights. The cause is rounding to FP8:\n"
    "eager's gradients change about as much if a few lines without fp8pass round the operands of eager's matmuls to\n"
    "FP8 (this cosine is in brackets). Either the terms of a sum in the gradient cancel out, so that mostly rounding\n"
    "errors are left, or rounding sends a token to another expert. The list has at most three parameters of a model,\n"
    "those with the lowest cosines; tests/zoo/rows.jsonl has all."
)

_CANCELLED = (
    "The exact gradients of these parameters are 0 or nearly 0, so that mostly rounding errors of float32 are left:\n"
    "eager's gradients, too, change their direction if the weights change by a millionth (the cosine between the two\n"
    "is in brackets). For example, a bias of keys adds one number to all elements of a row, which does not change the\n"
    "row's softmax."
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
        + (f"; torch's `aot_eager` does not train {elsewhere} of the others either" if elsewhere else "")
        + f". Of the FLOPs of all matmuls that have a parameter as operand, {fp8 / max(total, 1):.1%} are in FP8. "
        f"The models ran from {dates[0]} to {dates[-1]} with {', '.join(versions)}, on a CPU."
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
    """Return the first three items of a list, and the number of the others."""
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


def _listed(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines) or "None."


BEYOND = {
    "recurrent": "one call computes all time steps, in kernels that have no FP8",
    "outside": "Dynamo does not compile the code that calls it",
    "batches": "each token has its own matrix",
    "vector": "FP8 has no kernel for a product with a vector, and nothing to gain from one",
}
"""{rule: reason} of matmuls with a parameter that cannot run in FP8; `OWNED` does not count them."""


def problems(rows: Iterable[Row]) -> list[str]:
    """Return the problems of rows.

    These are models that fp8pass does not train although torch does, matmuls declined by a rule that must not occur,
    too few FLOPs in FP8, and FLOPs without a verdict.
    """
    found = []
    for row in rows:
        if row["status"] == "fails":
            found.append(f"{row['name']} fails: {row['stage']}: {row['error']}")
        if unknown := {"composite", "internal"} & row["rules"].keys():
            found.append(f"{row['name']} has matmuls declined by {unknown}")
        wanted = row["owned_flops"] - sum(row["owned_flops_by_rule"].get(rule, 0) for rule in BEYOND)
        if row["status"] == "trains" and row["owned_fp8_flops"] < OWNED * wanted:
            found.append(f"{row['name']}: {_share(row['owned_fp8_flops'], wanted)} of the FLOPs of its parameters")
        # outside of graphs, only the backwards of matmuls are seen, not those of other ops
        seen = row["graphs"] and not row["unsized"] and not any("autograd.Function" in b for b in row["breaks"])
        if row["status"] == "trains" and seen and row["flops"] < row["eager_flops"]:
            found.append(f"{row['name']}: {_share(row['flops'], row['eager_flops'])} of eager's FLOPs have a verdict")
    return found
