# SPDX-License-Identifier: Apache-2.0
"""A few kills of a real vLLM; ``make faults`` does all of them in all phases."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_k3.words.phases import Phase
from tests.serving.faults import QUICK, ROUND, run_case

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(("fault", "phase"), QUICK, ids=lambda value: str(value))
def test_a_real_engine_dies_as_a_whole(tiny: Path, fault: str, phase: Phase) -> None:
    """The journal tells within 2 s, nobody is left after 5 s, the exit code says that vLLM failed."""
    found = run_case(tiny, fault, phase, "tests")
    assert found["wrong"] is None, found
    assert found["code"] == 7


def test_there_are_as_many_kinds_as_promised() -> None:
    """`make faults` runs each once: twenty."""
    assert len(set(ROUND)) == 20
    assert set(QUICK) <= set(ROUND)
