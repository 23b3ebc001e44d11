# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

from kimi_k3.journal.models import Ending, FailureRecord
from kimi_k3.journal.reader import Fault
from kimi_k3.sidecar.status import status_view
from kimi_k3.words.phases import Phase
from kimi_k3.words.weights import ConsentSource, Weights

from .builders import (
    NOW,
    START_ID,
    at,
    health,
    journal,
    lossless,
    lossy,
    node,
    phases,
    rank,
    supervisor,
)


def test_history_with_durations() -> None:
    """Where the minutes of a start went is the first question about a slow one."""
    view = status_view(journal(supervisor(phases=phases(Phase.LOADING))), None, NOW)
    assert [(span.phase, span.seconds) for span in view.history] == [
        (Phase.PREFLIGHT, 60.0),
        (Phase.DOWNLOADING, 60.0),
        (Phase.LOADING, 18 * 60.0),
    ]


def test_before_the_first_phase() -> None:
    """A supervisor or a rank that has only just started has no history yet, and that is no error."""
    view = status_view(journal(supervisor(phases=()), rank(0, phases=())), None, NOW)
    assert (view.phase, view.history, view.ranks[0].history) == (Phase.PENDING, [], [])


def test_consent_is_told() -> None:
    """Who reads that the weights are lossy must see who agreed to it."""
    weights = status_view(lossy(), health(), NOW).weights
    assert weights is not None
    assert (weights.weights, weights.lossy, weights.consent) == (Weights.INT4, True, ConsentSource.FLAG)


def test_lossless_has_no_consent() -> None:
    """Nothing was agreed to, and no scale rule applies."""
    weights = status_view(lossless(), health(), NOW).weights
    assert weights is not None
    assert (weights.lossy, weights.consent, weights.scale_rule) == (False, None, None)


def test_empty_directory() -> None:
    """Before anything has been written there are versions, and nulls instead of guesses."""
    view = status_view(journal(None), None, NOW)
    assert view.model_dump(exclude={"versions"}) == {
        "phase": None,
        "description": None,
        "fraction": None,
        "history": [],
        "deployment": None,
        "weights": None,
        "engine": None,
        "ranks": [],
        "nodes": [],
        "failures": [],
        "faults": [],
    }


def test_other_nodes() -> None:
    """Each that has joined, how it was when last heard of, and whether that is long ago."""
    seen = replace(journal(supervisor(nodes=3)), nodes=(node(1), node(2, heard_at=at(19))))
    view = status_view(seen, None, NOW)
    assert [(one.node, one.phase, one.fresh) for one in view.nodes] == [
        (1, Phase.READY, True),
        (2, Phase.READY, False),
    ]


def test_ending_failures_and_faults() -> None:
    """After a death the whole story stands in one answer."""
    seen = journal(
        supervisor(ending=Ending(at=at(10), exit_code=7, reason="engine died")),
        rank(0),
        failures=(FailureRecord(start_id=START_ID, pid=21, at=at(9), what="no kernel", remedy="mend it"),),
        faults=(Fault("rank-0001.json", "is empty"),),
    )
    view = status_view(seen, None, NOW)
    assert view.deployment is not None
    assert view.deployment.ending is not None
    assert (view.deployment.ending.exit_code, view.deployment.elapsed_seconds) == (7, 600.0)
    assert [failure.what for failure in view.failures] == ["no kernel"]
    assert [fault.file for fault in view.faults] == ["rank-0001.json"]
    assert [one.rank for one in view.ranks] == [0]


def test_the_start_before() -> None:
    """Between two starts of a crash loop the only reason there is; without a start before there is none."""
    ended = supervisor(
        phases=phases(Phase.LOADING), ending=Ending(at=at(3), exit_code=7, reason="engine died")
    )
    view = status_view(journal(supervisor(previous=ended.as_earlier())), None, NOW)
    assert view.deployment is not None
    assert view.deployment.previous is not None
    assert view.deployment.previous.reached is Phase.LOADING
    assert view.deployment.previous.ending == ended.ending
    first = status_view(journal(supervisor()), None, NOW)
    assert first.deployment is not None
    assert first.deployment.previous is None


def test_engine() -> None:
    """Where the engine is, who it is and what it answered."""
    view = status_view(lossless(), health(), NOW)
    assert view.engine is not None
    assert (view.engine.url, view.engine.pid) == ("http://127.0.0.1:1", 11)
    assert view.engine.health is not None
    assert view.engine.health.healthy


def test_a_rank_goes_on_with_the_deployment_once_its_weights_are_in_place() -> None:
    """A rank that served would otherwise be shown as compiling for ever."""
    seen = journal(supervisor(), rank(0, phases=phases(Phase.COMPILING)[2:]))
    [shown] = status_view(seen, health(), NOW).ranks
    assert shown.phase is Phase.READY
    assert [span.phase for span in shown.history][-2:] == [Phase.WARMING, Phase.READY]
