# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from datetime import timedelta

import pytest

from kimi_k3.journal.models import Ending, Loading, RankRecord, Step
from kimi_k3.sidecar.startup import startup_view
from kimi_k3.words.phases import Phase

from .builders import (
    NOW,
    all_conversions,
    at,
    journal,
    lossless,
    lossy_rank,
    lossy_supervisor,
    phases,
    rank,
    supervisor,
)


def loading(number: int, done: int, total: int | None) -> RankRecord:
    """A rank that reads."""
    part = Loading(bytes_done=done, bytes_total=total, shards_done=1, shards_total=None)
    return rank(number, phases=phases(Phase.LOADING), loading=part)


@pytest.mark.parametrize("phase", Phase)
def test_started_only_when_ready_or_draining(phase: Phase) -> None:
    """A drain must not look like a start that failed, and an end must not look like a success."""
    view = startup_view(journal(supervisor(phases=phases(phase))), NOW)
    assert view.started is (phase in (Phase.READY, Phase.DRAINING))
    assert view.phase is phase


def test_nobody_has_reported() -> None:
    """Without a record nothing is known, not even that the phase is pending."""
    view = startup_view(journal(None), NOW)
    assert (view.started, view.phase, view.elapsed_seconds, view.fraction) == (False, None, None, None)


def test_leftover_record_is_no_start() -> None:
    """It would pass the startup probe of the next container, whose load liveness then kills."""
    stale = supervisor(updated_at=NOW - timedelta(minutes=1))
    assert startup_view(journal(stale), NOW).started is False


def test_times() -> None:
    """Seconds since the start and since the phase began; an ended start no longer grows."""
    view = startup_view(journal(supervisor(phases=phases(Phase.LOADING))), NOW)
    assert (view.elapsed_seconds, view.phase_seconds) == (20 * 60, 18 * 60)
    ended = supervisor(ending=Ending(at=at(5), exit_code=1, reason="no"))
    assert startup_view(journal(ended), NOW).elapsed_seconds == 5 * 60


@pytest.mark.parametrize(
    ("ranks", "fraction"),
    [
        ((loading(0, 100, 400), loading(1, 300, 400)), 0.5),
        ((loading(0, 100, 400),), None),
        ((loading(0, 100, None), loading(1, 100, 400)), None),
        ((rank(0), loading(1, 100, 400)), None),
        ((loading(0, 0, 0), loading(1, 0, 0)), None),
        ((loading(0, 900, 400), loading(1, 400, 400)), 1.0),
    ],
)
def test_loading_fraction(ranks: tuple[RankRecord, ...], fraction: float | None) -> None:
    """Bytes over all ranks; as long as one rank's share is unknown, so is the whole."""
    seen = journal(supervisor(phases=phases(Phase.LOADING)), *ranks)
    assert startup_view(seen, NOW).fraction == fraction


def test_converting_fraction_counts_silent_ranks() -> None:
    """How much is to be converted is known from the checkpoint, so a silent rank has done none of it."""
    converting = lossy_supervisor(phases=phases(Phase.CONVERTING))
    half = lossy_rank(0, conversions=all_conversions()[:2])
    assert startup_view(journal(converting, half), NOW).fraction == 2 / 8
    repeated = lossy_rank(0, conversions=all_conversions()[:1] * 3)
    assert startup_view(journal(converting, repeated), NOW).fraction == 1 / 8


def test_fraction_is_unknown_without_a_measure() -> None:
    """Lossless weights are not converted to int4, and no other phase can be measured."""
    assert startup_view(journal(supervisor(phases=phases(Phase.CONVERTING))), NOW).fraction is None
    assert startup_view(lossless(), NOW).fraction is None


def test_rank_progress() -> None:
    """Each rank in short, with unknown where it has not said."""
    [silent] = startup_view(journal(lossy_supervisor(), lossy_rank(0)), NOW).ranks
    assert (silent.bytes_done, silent.conversions_done, silent.conversions_expected) == (None, 4, 4)


def step(name: str, since_minute: int, done: int | None = None, total: int | None = None) -> Step:
    """A step of the graph capture."""
    return Step(phase=Phase.CAPTURING, name=name, since=at(since_minute), done=done, total=total)


def test_a_step_is_described_and_counted() -> None:
    """Graphs are counted per kind: the bar of the next kind begins anew."""
    capturing = phases(Phase.CAPTURING)
    view = startup_view(
        journal(supervisor(phases=capturing, step=step("capturing graphs (decode, FULL)", 16, 20, 50))), NOW
    )
    assert view.description == "capturing graphs: capturing graphs (decode, FULL), 20 of 50"
    assert view.fraction == 0.4
    assert view.remaining_seconds == pytest.approx(4 * 60 * 0.6 / 0.4)
    view = startup_view(journal(supervisor(phases=capturing, step=step("warming up kernels", 16))), NOW)
    assert (view.description, view.fraction) == ("capturing graphs: warming up kernels", None)
    over = supervisor(step=step("warming up kernels", 16))
    assert startup_view(journal(over), NOW).description == Phase.READY.description


def test_the_rest_of_a_phase() -> None:
    """At the measured rate; too little is no rate, and a phase that nobody counts has none."""
    reading = supervisor(phases=phases(Phase.LOADING))
    half = startup_view(journal(reading, loading(0, 50, 100), loading(1, 50, 100)), NOW)
    assert half.remaining_seconds == half.phase_seconds
    begun = startup_view(journal(reading, loading(0, 1, 100), loading(1, 1, 100)), NOW)
    assert (begun.fraction, begun.remaining_seconds) == (0.01, None)
    assert startup_view(journal(supervisor(phases=phases(Phase.COMPILING))), NOW).remaining_seconds is None
