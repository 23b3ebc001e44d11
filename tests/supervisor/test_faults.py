# SPDX-License-Identifier: Apache-2.0
"""More than 200 seeded faults: kills, stops, damaged journals and a full disk, in every phase of a start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from kimi_k3.words.phases import Phase
from tests.supervisor.fault_case import KILLS, PHASES, ROUND
from tests.supervisor.faults import cases_of
from tests.surroundings import SURROUNDINGS

CASES = 4 * len(ROUND)
PROCESSES = 10
"""At a time; most of a case is waiting."""


@pytest.fixture(scope="module")
def seed() -> int:
    """The same in every run of the tests; ``FAULT_SEED`` and ``make faults SEED=N`` try others."""
    return int(os.environ.get("FAULT_SEED") or 20261201)


@pytest.fixture(scope="module")
def results(seed: int) -> list[dict[str, Any]]:
    # A process of its own: it forks, and this one has threads.
    command = [sys.executable, "-m", "tests.supervisor.faults", "--seed", str(seed)]
    command += ["--cases", str(CASES), "--processes", str(PROCESSES), "--json"]
    done = subprocess.run(
        command, env=SURROUNDINGS, stdout=subprocess.PIPE, text=True, timeout=900, check=True
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_every_fault_ends_as_it_must(results: list[dict[str, Any]], seed: int) -> None:
    """Never ready over an engine that is not, the phase within 2 s, the exit code, and nobody left."""
    print(f"FAULT_SEED={seed}")
    wrong = [result for result in results if result["wrong"]]
    text = "\n".join(f"{result}\n{result.pop('log')}" for result in wrong)
    assert not wrong, f"FAULT_SEED={seed}: {len(wrong)} of {len(results)}\n{text}"


def test_there_are_as_many_as_promised(results: list[dict[str, Any]]) -> None:
    """A harness that skips is worse than none: 200 faults, and each process killed in each phase."""
    assert len(results) >= 200
    done = Counter((result["fault"], result["phase"]) for result in results)
    assert all(done[kill, phase] >= 4 for kill in KILLS for phase in PHASES)
    assert {Phase(result["phase"]) for result in results} == {*PHASES, Phase.DRAINING}


def test_a_seed_repeats_its_cases() -> None:
    """What was found once must be found again."""
    assert cases_of(7, 100) == cases_of(7, 100) != cases_of(8, 100)
