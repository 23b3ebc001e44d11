# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from kimi_k3.journal.models import Canary, Ending
from kimi_k3.journal.reader import Fault, Journal
from kimi_k3.sidecar.readiness import readiness_view
from kimi_k3.sidecar.view import EngineHealth, EngineOutcome
from kimi_k3.words.phases import Phase

from .builders import NOW, START, at, health, journal, lossless, lossy, node, phases, supervisor

OLD = START - timedelta(hours=1)
STALE = journal(supervisor(updated_at=NOW - timedelta(seconds=16)))
CASES: dict[str, tuple[Journal, EngineHealth | None, list[str]]] = {
    "all holds": (lossless(), health(), []),
    "lossy is no reason": (lossy(), health(), []),
    "requests make no progress": (
        journal(supervisor(stalled_since=at(19))),
        health(),
        ["engine-stalled"],
    ),
    "a node has not joined": (journal(supervisor(nodes=2)), health(), ["node-missing"]),
    "both nodes": (replace(journal(supervisor(nodes=2)), nodes=(node(1),)), health(), []),
    "a node is silent": (
        replace(journal(supervisor(nodes=2)), nodes=(node(1, heard_at=at(19)),)),
        health(),
        ["node-silent"],
    ),
    "a node is silent, whether or not the directory is full": (
        replace(journal(supervisor(nodes=2)), nodes=(node(1, heard_at=at(19)),), unwritable="has no room"),
        health(),
        ["node-silent"],
    ),
    "a node drains": (
        replace(journal(supervisor(nodes=2)), nodes=(node(1, phases=phases(Phase.DRAINING)),)),
        health(),
        ["node-stops"],
    ),
    "a node began anew": (
        replace(journal(supervisor(nodes=2)), nodes=(node(1, superseded=True),)),
        health(),
        ["node-stops"],
    ),
    "a node's worker is stopped": (
        replace(journal(supervisor(nodes=2)), nodes=(node(1, stalled_since=at(19)),)),
        health(),
        ["node-stalled"],
    ),
    "a node without an API": (
        journal(supervisor(nodes=2, node=1, engine_url=None, canary=None)),
        None,
        [],
    ),
    "the first node is silent": (
        journal(supervisor(nodes=2, node=1, engine_url=None, canary=None, leader_silent_since=at(19))),
        None,
        ["first-node-silent"],
    ),
    "nobody reports": (journal(None), None, ["supervisor-missing"]),
    "supervisor no longer reports": (STALE, health(), ["supervisor-stale"]),
    "a clock far ahead": (
        journal(supervisor(updated_at=NOW + timedelta(seconds=16))),
        health(),
        ["supervisor-stale"],
    ),
    "state directory full since it serves": (replace(STALE, unwritable="has no room"), health(), []),
    "ended long ago": (
        journal(supervisor(updated_at=at(1), ending=Ending(at=at(1), exit_code=0, reason="asked to"))),
        None,
        ["ended", "engine-unknown"],
    ),
    "loading": (
        journal(supervisor(phases=phases(Phase.LOADING), canary=None)),
        health(EngineOutcome.UNREACHABLE),
        ["starting", "canary-missing", "engine-unhealthy"],
    ),
    "warming, engine already healthy": (
        journal(supervisor(phases=phases(Phase.WARMING), canary=None)),
        health(),
        ["starting", "canary-missing"],
    ),
    "before the first phase": (journal(supervisor(phases=())), health(), ["starting"]),
    "ready without a canary": (journal(supervisor(canary=None)), health(), ["canary-missing"]),
    "canary of an earlier start": (
        journal(supervisor(canary=Canary(at=OLD, seconds=1, completion_tokens=1))),
        health(),
        ["canary-missing"],
    ),
    "draining, engine still healthy": (
        journal(supervisor(phases=phases(Phase.DRAINING))),
        health(),
        ["draining"],
    ),
    "stopped": (journal(supervisor(phases=phases(Phase.STOPPED))), health(), ["ended"]),
    "failed": (journal(supervisor(phases=phases(Phase.FAILED))), None, ["ended", "engine-unknown"]),
    "ended by a hang": (
        journal(supervisor(stalled_since=at(9), phases=phases(Phase.FAILED))),
        None,
        ["ended", "engine-unknown"],
    ),
    "ending while the phase says ready": (
        journal(supervisor(ending=Ending(at=at(10), exit_code=7, reason="engine died"))),
        health(),
        ["ended"],
    ),
    "engine not asked": (lossless(), None, ["engine-unknown"]),
    "engine 503": (lossless(), health(EngineOutcome.UNHEALTHY), ["engine-unhealthy"]),
    "engine hangs": (lossless(), health(EngineOutcome.TIMEOUT), ["engine-unhealthy"]),
    "engine refuses": (lossless(), health(EngineOutcome.UNREACHABLE), ["engine-unhealthy"]),
    "engine talks nonsense": (lossless(), health(EngineOutcome.FAILED), ["engine-unhealthy"]),
}


@pytest.mark.parametrize("case", CASES)
def test_readiness(case: str) -> None:
    """Traffic comes only when every condition holds, and each that fails is named."""
    seen, answer, expected = CASES[case]
    view = readiness_view(seen, answer, NOW)
    assert expected == [reason.code for reason in view.reasons]
    assert view.ready is (expected == [])


def test_untrusted_supervisor_record_is_named() -> None:
    """ "No record" sends the operator to the wrong place when there is one that cannot be read."""
    seen = replace(journal(None), faults=(Fault("supervisor.json", "is larger than 8 bytes"),))
    [reason] = readiness_view(seen, None, NOW).reasons
    assert "supervisor.json is larger than 8 bytes" in reason.message


def test_reason_of_an_ending_is_told() -> None:
    """The operator should not have to look elsewhere for why it ended."""
    seen = journal(supervisor(ending=Ending(at=at(10), exit_code=7, reason="out of memory")))
    assert "out of memory" in readiness_view(seen, health(), NOW).reasons[0].message
