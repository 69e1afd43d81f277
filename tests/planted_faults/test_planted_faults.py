"""Test that the list of faults that tests/planted_faults/plant.py plants keeps up with the code."""

from __future__ import annotations

import ast

import pytest

from tests.planted_faults import faults, plant

pytestmark = pytest.mark.tools


def test_each_fault_has_its_place_in_another_file() -> None:
    places = [plant.place_of(fault, plant.ROOT) for fault in faults.FAULTS]
    assert len(set(places)) == len({fault.name for fault in faults.FAULTS}) == len(faults.FAULTS) == 48


def test_each_fault_is_python_that_does_something_else() -> None:
    for fault in faults.FAULTS:
        text = plant.place_of(fault, plant.ROOT).read_text()
        planted = ast.parse(text.replace(fault.before, fault.after))
        assert ast.dump(planted) != ast.dump(ast.parse(text)), fault.name


def test_a_fault_without_a_place_is_refused() -> None:
    for text in ("no such text", "from __future__ import annotations"):
        with pytest.raises(ValueError, match=r"'lost': its text is in .*; it must be once in one file"):
            plant.place_of(faults.Fault("lost", text, "", ""), plant.ROOT)


def test_lines_of_a_fault_and_around_it() -> None:
    text = "A = 1\n\ndef f(x):\n    y = x\n    return (y +\n        1)\n"
    fault = faults.Fault("", "(y +\n        1)", "y", "")
    assert plant.lines_of(fault, text) == {5, 6}
    assert plant.lines_around({5, 6}, text) == {3, 4, 5, 6}
    assert plant.lines_around({1}, text) >= {1, 2, 3, 4, 5, 6}
