"""The drawing of the rooms in docs/architecture.md, and the tables below it, made of the imports and the docstrings.

python bench/rooms_drawing.py        prints the SVG; `python docs/generate.py` puts it into docs/images/
"""

from __future__ import annotations

import ast
from html import escape
from typing import NamedTuple

import rooms
from diagram import CHARACTER, MARGIN, PILL, WIDTH, document

LEFT = MARGIN + 36  # of the boxes; the numbers of the floors are left of it
BOX, PADDING, GAP = 36, 5, 18  # height of a box, space above and below it in its floor, space between two floors
BETWEEN = 12  # two boxes
PORT = 16  # between the ends of two arrows at one box
LEGEND = (("pass", "folder of fp8pass/"), ("update", "folder of passes/"), ("panel", "single file"))


class Box(NamedTuple):
    """A room of the drawing. x, y: its upper left corner."""

    room: str
    x: float
    y: float
    width: float

    @property
    def middle(self) -> float:
        """The x of the middle."""
        return self.x + self.width / 2


def path_of(room: str) -> str:
    """Return where a room is: "fp8pass/graph/", "fp8pass/backend.py", "fp8pass/__init__.py"."""
    if room in ("fp8pass", "passes"):
        return f"{room}/__init__.py"
    path = rooms.folder(room)
    return f"{path}/" if (rooms.ROOT / path).is_dir() else f"{path}.py"


def lines_of(room: str) -> tuple[str, str]:
    """Return what a box says: the path within its tree, and of a folder how many files it has beside `__init__`.

    The colour of a box tells the tree.
    """
    path = path_of(room)
    name = path if room in ("fp8pass", "passes") else path.removeprefix("fp8pass/").removeprefix("passes/")
    inside = sum(rooms.room_of(module) == room for module in rooms.modules())
    return name, f"{inside - 1} files" if path.endswith("/") else ""


def arrows_drawn() -> list[tuple[str, str]]:
    """Return the imports that are drawn: those from the floor right below."""
    found = rooms.between_rooms()
    level = {room: number for number, floor in enumerate(rooms.floors(found)) for room in floor}
    return sorted((a, b) for a, others in found.items() for b in others if level[b] == level[a] - 1)


def ordered() -> list[list[str]]:
    """Return the rooms by floor, from the ground, each floor in an order in which few arrows cross."""
    arrows, floors = arrows_drawn(), [list(floor) for floor in rooms.floors(rooms.between_rooms())]
    for _ in range(4):
        for here, beside in (*zip(floors[1:], floors, strict=False), *zip(floors[-2::-1], floors[::-1], strict=False)):
            place = {room: (i + 0.5) / len(beside) for i, room in enumerate(beside)}
            centers = {}
            for i, room in enumerate(here):
                linked = [place[b] for a, b in (*arrows, *((b, a) for a, b in arrows)) if a == room and b in place]
                centers[room] = sum(linked) / len(linked) if linked else (i + 0.5) / len(here)
            here.sort(key=lambda room: (centers[room], room))
    return floors


def boxes(top: float) -> list[list[Box]]:
    """Return the boxes by floor, from the ground; the highest floor begins at `top`."""
    floors, found = ordered(), []
    for number, floor in enumerate(floors):
        widths = [max(len(line) for line in lines_of(room)) * CHARACTER + 2 * PILL for room in floor]
        x = (LEFT + WIDTH - MARGIN - sum(widths) - BETWEEN * (len(floor) - 1)) / 2
        y = top + (len(floors) - 1 - number) * (BOX + 2 * PADDING + GAP) + PADDING
        row = []
        for room, width in zip(floor, widths, strict=True):
            row.append(Box(room, x, y, width))
            x += width + BETWEEN
        found.append(row)
    return found


def svg() -> str:
    """Return the drawing."""
    floors = boxes(MARGIN + 40.0)
    left, width, height = LEFT - 8, WIDTH - MARGIN - LEFT + 8, BOX + 2 * PADDING
    parts = _legend()
    for number, floor in enumerate(floors):
        y = floor[0].y - PADDING
        parts += [
            _rect("stage", left, y, width, height),
            _text("note", left - 10, y + height / 2 + 4, str(number), "end"),
        ]
    parts += _arrows({box.room: box for floor in floors for box in floor})
    parts += [part for floor in floors for box in floor for part in _box(box)]
    return document("The rooms of the code by floor", parts, floors[0][0].y + BOX + PADDING + MARGIN)


def _rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>'


def _text(kind: str, x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def _legend() -> list[str]:
    parts, x = list[str](), float(LEFT - 8)
    for kind, text in LEGEND:
        parts += [_rect(kind, x, MARGIN, 26, 20), _text("note", x + 34, MARGIN + 15, text, "start")]
        x += 34 + len(text) * CHARACTER + 12
    return parts


def _box(box: Box) -> list[str]:
    kind = "panel" if path_of(box.room).endswith(".py") else "update" if box.room.startswith("passes.") else "pass"
    name, count = lines_of(box.room)
    parts = [_rect(kind, box.x, box.y, box.width, BOX)]
    parts.append(_text("name", box.middle, box.y + (16 if count else 23), name, "middle"))
    if count:
        parts.append(_text("note", box.middle, box.y + 30, count, "middle"))
    return parts


def _arrows(at: dict[str, Box]) -> list[str]:
    drawn, parts = arrows_drawn(), []
    for importer, imported in drawn:
        above, below = at[importer], at[imported]
        x = _port(above, sorted(at[b].middle for a, b in drawn if a == importer), below.middle)
        to = _port(below, sorted(at[a].middle for a, b in drawn if b == imported), above.middle)
        begin, end = above.y + BOX, below.y - 7
        half = (begin + end) / 2
        parts.append(f'<path class="arrow" d="M{x:g} {begin:g} C{x:g} {half:g} {to:g} {half:g} {to:g} {end:g}"/>')
        parts.append(f'<path class="head" d="M{to - 4:g} {end - 1:g} h8 l-4 8 z"/>')
    return parts


def _port(box: Box, others: list[float], other: float) -> float:
    """Return the x where an arrow meets a box. others: the middles of all boxes that arrows link it with, sorted."""
    step = min(PORT, (box.width - 20) / len(others))
    return box.middle + (others.index(other) - (len(others) - 1) / 2) * step


def tables() -> str:
    """Return what lives in each room, and what does not: of folders what `__init__` says, of files the first line."""
    arrows = rooms.between_rooms()
    found = sorted((room for room in arrows if room not in ("fp8pass", "passes")), key=lambda r: (r.count("."), r))
    folders = [room for room in found if path_of(room).endswith("/")]
    rows = ["| folder | what lives there | what does not |", "|---|---|---|"]
    for room in folders:
        first, _, *_, last = _docstring(path_of(room) + "__init__.py").splitlines()
        does_not = last.removeprefix("Does not live here: ")
        rows.append(f"| [`{path_of(room)}`](../{path_of(room)}__init__.py) | {first} | {does_not} |")
    rows += ["", "| file | what it does |", "|---|---|"]
    for room in found:
        if room not in folders:
            rows.append(f"| [`{path_of(room)}`](../{path_of(room)}) | {_docstring(path_of(room)).splitlines()[0]} |")
    return "\n".join(rows)


def _docstring(path: str) -> str:
    return ast.get_docstring(ast.parse((rooms.ROOT / path).read_text())) or ""


if __name__ == "__main__":
    print(svg(), end="")
