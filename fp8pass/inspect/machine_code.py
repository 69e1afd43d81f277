"""Count what a compiled kernel executes, from its machine code for NVIDIA GPUs, as `nvdisasm` prints it.

One warp's work is counted apart for the loops and for the rest: `kernel_time.py` predicts from it. Both sides of a
branch count, since a warp takes both if its threads differ; but of a branch on which all threads of a program agree,
as on the tile that it computes, the longer one alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fp8pass.inspect.kernel_time import Work

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?(U?P\w+)\s+)?(.*?)\s*;")
_LABEL = re.compile(r"^\s*\.(L_\w+):")
_BRANCH = re.compile(r"\bBRA\b.*\(\.(L_\w+)\)")
_COPIES = re.compile(r"^DEPBAR\.LE SB\d+, 0x([0-9a-f]+)")
_REGISTER = re.compile(r"\bR(\d+)(\.64)?\b")
_VALUE = re.compile(r"\bU?(?:R|P)\d+\b")
_OF_THREADS = {"LD", "LDG", "LDS", "LDSM", "LDL", "SHFL", "ATOM", "ATOMG", "ATOMS", "VOTE", "MATCH"}
"""Instructions whose results differ from thread to thread, whatever they are given."""
_THREAD = re.compile(r"\bSR_(?:TID|LANEID|\w\wMASK)")
_WRITE_NOTHING = "ST", "RED", "BAR", "BRA", "EXIT", "DEPBAR"

# Cycles for which an instruction of a warp keeps a unit of its scheduler busy: 32 threads over the results per cycle
# and scheduler, from the table of arithmetic throughput in the CUDA C++ Programming Guide, compute capability 9.0.
_FLOATS = {"FADD", "FMUL", "FFMA", "HADD2", "HFMA2", "HMUL2"}
_PRODUCTS = {"IMAD", "IMUL"}
_LOGIC = {
    "F2FP", "FCHK", "FMNMX", "FSEL", "FSETP", "HMNMX2", "HSETP2", "I2FP", "IABS", "IADD3", "ISETP", "LEA", "LOP3",
    "MOV", "P2R", "PLOP3", "PRMT", "R2P", "SEL", "SGXT", "SHF", "VABSDIFF", "VIADD", "VIADDMNMX", "VIMNMX", "CS2R",
}  # fmt: skip
_SPECIAL = {"F2F", "F2I", "FLO", "FRND", "I2F", "MUFU", "POPC"}
_GLOBAL, _SHARED = {"LDG", "STG", "LDGSTS", "ATOMG", "RED"}, {"LDS", "LDSM", "STS", "STSM", "SHFL"}


HIDDEN = 85
"""Instructions that a warp issues, one after the other, while a load is under way: 500 cycles over 5.9 for each."""


def work(listing: str, step: int = 0) -> tuple[Work, Work]:
    """Return (once, in loops) from a listing of `nvdisasm -c`: all loops together, in one iteration of each.

    step: what an iteration adds to a loop's counter, so that a loop which the compiler has unrolled counts as several.
    """
    instructions, loops, shorter = _read(listing)
    inside = {i for first, last in loops for i in range(first, last + 1)} | shorter
    of_loops = (range(first, last + 1) for first, last in _outermost(loops))
    stretches = [[instructions[i] for i in of_loop if i not in shorter] for of_loop in of_loops]
    end = next((i for i in reversed(range(len(instructions))) if instructions[i].startswith("EXIT")), -1)
    rest = [instructions[i] for i in range(end + 1) if i not in inside]
    parts = [(_of_stretch(stretch, True), unrolled(stretch, step)) for stretch in stretches]
    return _of_stretch(rest, False), _sum(parts)


_COUNT = re.compile(r"U?(?:IADD3|VIADD|IADD)\S* (U?R\d+),.*?\b(U?R\d+)\S*, 0x([0-9a-f]+)\b")
_TEST = re.compile(r"U?ISETP\.GE\S* .*?\b(U?R\d+)\S*, 0x[0-9a-f]+")


def unrolled(loop: Sequence[str], step: int) -> int:
    """Return how many iterations one pass of a loop does: what it adds to the counter that it compares, over `step`."""
    tested = {test[1] for i in loop if (test := _TEST.match(i))}
    added = [int(count[3], 16) for i in loop if (count := _COUNT.match(i)) and tested & {count[1], count[2]}]
    factors = [n // step for n in added if step and n % step == 0 and n < 1 << 30]
    return min(factors, default=1)


def _read(listing: str) -> tuple[list[str], list[tuple[int, int]], set[int]]:
    """Return the instructions without their predicates, (first, last) of each loop, and those that no warp executes.

    A branch back ends a loop.
    """
    predicates: list[str] = []
    instructions: list[str] = []
    labels: dict[str, int] = {}
    branches: dict[int, str] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif instruction := _INSTRUCTION.match(line):
            if branch := _BRANCH.search(instruction[2]):
                branches[len(instructions)] = branch[1]
            predicates.append(instruction[1] or "")
            instructions.append(instruction[2])
    to = {i: labels[label] for i, label in branches.items() if label in labels}
    loops = [(first, last) for last, first in to.items() if first < last]
    return instructions, loops, _shorter_sides(instructions, predicates, to)


def _shorter_sides(instructions: Sequence[str], predicates: Sequence[str], to: Mapping[int, int]) -> set[int]:
    """Return the instructions of the shorter side of each if-else on which all threads of a program agree.

    predicates: of each instruction. to: where each branch leads.
    """
    skipped, uniform = set[int](), _uniform(instructions, predicates)
    for i, other in to.items():
        end = to.get(other - 1, 0)  # the first side ends with a jump over the other one
        if i < other < end and not predicates[other - 1] and i in uniform:
            skipped |= set(range(i + 1, other) if other - i - 1 < end - other else range(other, end))
    return skipped


def _uniform(instructions: Sequence[str], predicates: Sequence[str]) -> set[int]:
    """Return the branches whose predicate depends neither on the thread nor on memory."""
    differs, uniform = set[str](), set[int]()
    for i, instruction in enumerate(instructions):
        name, _, operands = instruction.partition(" ")
        first = name.partition(".")[0]
        if first == "BRA" and predicates[i] and predicates[i] not in differs:
            uniform.add(i)
        if first.startswith(_WRITE_NOTHING):
            continue
        target, second, *_ = *operands.split(", "), "", ""
        made = set(_VALUE.findall(target)) | {n for n in _VALUE.findall(second) if "P" in n}
        made |= {f"R{n}" for n in _registers(target) for n in range(n, n + 4)} if first in _OF_THREADS else set()
        read = {*_VALUE.findall(operands.partition(",")[2]), predicates[i]}
        if first in _OF_THREADS or _THREAD.search(operands) or not differs.isdisjoint(read):
            differs |= made
        elif not predicates[i]:
            differs -= set(_VALUE.findall(target))
    return uniform


def _outermost(loops: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [a for a in loops if not any(b != a and b[0] <= a[0] and a[1] <= b[1] for b in loops)]


def _sum(parts: Sequence[tuple[Work, int]]) -> Work:
    """Add up the work of loops, each divided by the number of iterations that a pass does."""
    each = [[value / n for value in vars(part).values()] for part, n in parts]
    return Work(*(round(sum(values), 2) for values in zip(*each, strict=True)))


def _of_stretch(instructions: Sequence[str], loops: bool) -> Work:
    names = [i.split()[0] for i in instructions]
    first = [name.partition(".")[0] for name in names]
    count = {kind: sum(f in prefixes for f in first) for kind, prefixes in _UNITS.items()}
    moved = {f: sum(_bytes(name) for name, g in zip(names, first, strict=True) if g == f) for f in _GLOBAL | _SHARED}
    of_shared = sum(moved[f] for f in _SHARED)
    busy = (
        len(names), 2 * count["products"], count["floats"] + count["products"], 2 * count["logic"],
        8 * count["special"], of_shared,
    )  # fmt: skip
    waits, barriers, stored = _waits(instructions, loops), first.count("BAR"), moved["STG"] + moved["RED"]
    return Work(len(names), max(busy), waits, barriers, moved["LDG"], stored, moved["LDGSTS"], of_shared)


_UNITS = {"floats": _FLOATS, "products": _PRODUCTS, "logic": _LOGIC, "special": _SPECIAL}


def _bytes(name: str) -> int:
    """Return the bytes that an instruction such as LDG.E.EF.128 moves per thread; four 8 x 8 matrices are 128 bits."""
    parts = name.split(".")
    if parts[0] in ("LDSM", "STSM"):
        return 4 * int(parts[-1]) if parts[-1].isdigit() else 4
    sizes = {"128": 16, "64": 8, "U16": 2, "S16": 2, "16": 2, "U8": 1, "S8": 1}
    return next((sizes[part] for part in reversed(parts) if part in sizes), 4)


def _waits(instructions: Sequence[str], loops: bool) -> float:
    """Return how often a warp waits for the full latency of loads from global memory.

    It waits at the first instruction that reads a register which a load is still to fill; what it has issued since the
    load shortens the wait. At DEPBAR it waits for copies to shared memory: if it leaves n under way, n + 1 iterations
    share the latency.
    """
    ready: dict[int, float] = {}  # when a register will hold its value, counted in instructions
    now = waits = 0.0
    for _ in range(2 if loops else 1):  # the second time, with what the iteration before has loaded
        waits = 0.0
        for instruction in instructions:
            now += 1
            name, _, operands = instruction.partition(" ")
            target, _, rest = operands.partition(",") if name[0] not in "SB" else ("", "", operands)
            wait = max((ready.pop(r) for r in _registers(rest) if r in ready), default=now) - now
            if copies := _COPIES.search(instruction):
                wait = HIDDEN / (1 + int(copies[1], 16))
            waits += max(wait, 0.0) / HIDDEN
            now += max(wait, 0.0)
            if name.startswith("LDG."):
                first = _registers(target)[0] if _registers(target) else 0
                ready |= dict.fromkeys(range(first, first + max(1, _bytes(name) // 4)), now + HIDDEN)
    return round(waits, 2)


def _registers(operands: str) -> list[int]:
    """Return the numbers of the registers that are named; of a pair for an address, both."""
    return [int(n) + i for n, pair in _REGISTER.findall(operands) for i in range(2 if pair else 1)]
