"""Random programs compute through Inductor what they compute in float64."""

from __future__ import annotations

from hypothesis import given, settings

from tests.helpers.generated import Program, programs
from tests.helpers.generated_cases import EXAMPLES, check_compiled, common


@settings(common, max_examples=max(2, EXAMPLES // 20))
@given(programs())
def test_compiled(program: Program) -> None:
    check_compiled(program)
