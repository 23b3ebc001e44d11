# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from kimi_k3.journal.models import Ending, FailureRecord, KernelProof, Notice
from kimi_k3.journal.reader import Fault, Journal
from kimi_k3.sidecar.view import EngineHealth, EngineOutcome
from kimi_k3.sidecar.warning import KINDS, warnings_view
from kimi_k3.words.phases import Phase
from kimi_k3.words.weights import Weights

from .builders import (
    NOW,
    START,
    START_ID,
    all_conversions,
    at,
    health,
    journal,
    lossless,
    lossy,
    lossy_rank,
    lossy_supervisor,
    node,
    phases,
    rank,
    supervisor,
)

LOADING = phases(Phase.LOADING)
FAILURE = FailureRecord(start_id=START_ID, pid=21, at=at(3), what="no kernel", remedy="use another image")
WRONG_SIGNS = KernelProof(relative_error=0.004, relative_error_with_signs=2.0, signs_right=False)
CASES: dict[str, tuple[Journal, EngineHealth | None, list[str]]] = {
    "healthy and lossless": (lossless(), health(), []),
    "engine not asked": (lossless(), None, []),
    "int4": (lossy(), health(), ["lossy-weights"]),
    "int4 without consent": (
        journal(lossy_supervisor(consent=None), lossy_rank(0), lossy_rank(1)),
        health(),
        ["lossy-weights", "consent-missing"],
    ),
    "a kernel that gets signs wrong": (
        journal(lossy_supervisor(), *(lossy_rank(number, proof=WRONG_SIGNS) for number in (0, 1))),
        health(),
        ["lossy-weights", "signs-refused"],
    ),
    "a rank serves something else": (
        journal(supervisor(), rank(0), rank(1, weights=Weights.INT4)),
        health(),
        ["weights-mismatch"],
    ),
    "nobody reports": (journal(None), None, ["supervisor-missing"]),
    "stale": (
        journal(supervisor(updated_at=at(1)), rank(0), rank(1)),
        health(),
        ["supervisor-stale"],
    ),
    "old because the directory is full": (
        replace(journal(supervisor(updated_at=at(1)), rank(0), rank(1)), unwritable="has no room"),
        health(),
        ["state-unwritable"],
    ),
    "ended on request, long ago": (
        journal(
            supervisor(updated_at=at(1), ending=Ending(at=at(1), exit_code=0, reason="asked to")),
            rank(0),
            rank(1),
        ),
        None,
        [],
    ),
    "failed": (
        journal(supervisor(ending=Ending(at=at(1), exit_code=7, reason="engine died."))),
        None,
        ["deployment-failed"],
    ),
    "engine unhealthy when ready": (lossless(), health(EngineOutcome.TIMEOUT), ["engine-unhealthy"]),
    "engine silent while loading": (
        journal(supervisor(phases=LOADING), rank(0), rank(1)),
        health(EngineOutcome.UNREACHABLE),
        [],
    ),
    "engine gone in the drain": (
        journal(supervisor(phases=phases(Phase.DRAINING)), rank(0), rank(1)),
        health(EngineOutcome.UNREACHABLE),
        [],
    ),
    "a rank is missing": (journal(supervisor(phases=LOADING), rank(0)), health(), ["rank-missing"]),
    "a rank too many": (journal(supervisor(), rank(0), rank(1), rank(2)), health(), ["rank-unexpected"]),
    "a node has not joined": (
        journal(supervisor(phases=LOADING, nodes=2), rank(0), rank(1)),
        health(),
        ["node-missing"],
    ),
    "a node is silent": (
        replace(journal(supervisor(nodes=2), rank(0), rank(1)), nodes=(node(1, heard_at=at(19)),)),
        health(),
        ["node-silent"],
    ),
    "another node's own": (
        journal(supervisor(nodes=2, node=1, engine_url=None, canary=None), rank(1)),
        None,
        [],
    ),
    "ready but not converted": (
        journal(lossy_supervisor(), lossy_rank(0), lossy_rank(1, conversions=all_conversions()[:3])),
        health(),
        ["lossy-weights", "conversion-incomplete"],
    ),
    "still converting": (
        journal(
            lossy_supervisor(phases=phases(Phase.CONVERTING)), lossy_rank(0), lossy_rank(1, conversions=())
        ),
        health(EngineOutcome.UNREACHABLE),
        ["lossy-weights"],
    ),
    "the engine reported a failure": (
        journal(supervisor(), rank(0), rank(1), failures=(FAILURE,)),
        health(),
        ["engine-failure"],
    ),
    "requests make no progress": (
        journal(supervisor(stalled_since=at(19)), rank(0), rank(1)),
        health(),
        ["engine-stalled"],
    ),
    "the checks found something odd": (
        journal(
            supervisor(notices=(Notice(check="cores", what="few cores", remedy="give more"),)),
            rank(0),
            rank(1),
        ),
        health(),
        ["preflight-notice"],
    ),
    "a file is not trusted": (
        journal(supervisor(), rank(0), rank(1), faults=(Fault("rank-0007.json", "is a pipe"),)),
        health(),
        ["journal-fault"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_warnings(case: str) -> None:
    """Each thing to know or mend has one stable code; a healthy lossless deployment has none."""
    seen, answer, expected = CASES[case]
    assert expected == [one.code for one in warnings_view(seen, answer, NOW).warnings]


def test_every_kind_occurs() -> None:
    """A kind that no case brings about is either dead or untested."""
    assert {kind.code for kind in KINDS} == {code for _, _, codes in CASES.values() for code in codes}
    assert len({kind.code for kind in KINDS}) == len(KINDS)


def test_way_back_is_named() -> None:
    """Whoever reads that weights are lossy must read how to go back."""
    [warning] = warnings_view(lossy(), health(), NOW).warnings
    assert "--weights mxfp4" in warning.remedy
    assert warning.since == START


def test_ranks_have_time_to_come_up() -> None:
    """vLLM's workers import for a while before they can report; that is no cause for alarm."""
    seen = journal(supervisor(phases=LOADING))
    began = LOADING[-1].at
    early = warnings_view(seen, None, began + timedelta(seconds=119)).warnings
    assert "rank-missing" not in [one.code for one in early]
    late = warnings_view(seen, None, NOW).warnings
    assert [one for one in late if one.code == "rank-missing" and "0, 1" in one.message]


def test_texts_are_filled_in() -> None:
    """No message may show a brace, nor text of a record be taken for one."""
    braces = FAILURE.model_copy(update={"what": "{pid} {0} {nothing}"})
    for seen, answer, _ in CASES.values():
        for one in warnings_view(seen, answer, NOW).warnings:
            assert "{" not in one.message
    [one] = warnings_view(journal(supervisor(), rank(0), rank(1), failures=(braces,)), None, NOW).warnings
    assert "{pid} {0} {nothing}" in one.message
