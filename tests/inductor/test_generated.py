"""Random programs: what must be found is found, nothing is declined without a word, and all of it is right."""

from __future__ import annotations

from hypothesis import given, settings

from tests.helpers.generated import Program, programs
from tests.helpers.generated_cases import EXAMPLES, check_compiled, common


@settings(common, max_examples=max(2, EXAMPLES // 20))
@given(programs())
def test_compiled(program: Program) -> None:
    check_compiled(program)
