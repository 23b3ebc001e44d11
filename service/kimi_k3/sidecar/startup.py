# SPDX-License-Identifier: Apache-2.0
"""How far the start has come (``/startupz``)."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from kimi_k3.journal.models import RankRecord, SupervisorRecord
from kimi_k3.journal.reader import Journal
from kimi_k3.sidecar.arithmetic import is_fresh, ratio, seconds_between, total
from kimi_k3.sidecar.view import View, present_phase, rank_phases
from kimi_k3.words.phases import Phase

STARTED = (Phase.READY, Phase.DRAINING)
"""Phases in which the start is over and the deployment is not."""


class RankProgress(View):
    """How far one rank (one GPU's worker) has come."""

    rank: int
    phase: Phase | None
    updated_at: datetime = Field(description="When the rank last reported; it does so on progress only.")
    bytes_done: int | None = Field(description="Bytes of the checkpoint read so far.")
    bytes_total: int | None = Field(description="Bytes of the checkpoint that the rank will read.")
    shards_done: int | None
    shards_total: int | None
    conversions_done: int = Field(description="Layer projections converted so far.")
    conversions_expected: int = Field(description="Layer projections to convert; 0 without conversion.")


class Startup(View):
    """How far the start has come."""

    started: bool = Field(description="Whether the start is over and the deployment lives (status 200).")
    phase: Phase | None = Field(description="Present phase; null without a supervisor's record.")
    description: str = Field(description="What is happening, in one line.")
    elapsed_seconds: float | None = Field(description="Since the start, up to now or to its end.")
    phase_seconds: float | None = Field(description="Since the present phase began.")
    fraction: float | None = Field(
        description="Progress of the present phase over all ranks, 0 to 1: bytes read while loading, layer "
        "projections done while converting, graphs of the present kind while capturing. Null in other "
        "phases and when it cannot be told."
    )
    remaining_seconds: float | None = Field(
        description="Until the end of the present phase, or of its present step where that is counted, if "
        "it goes on as fast as so far. Null without a fraction, and while too little is done to tell."
    )
    ranks: list[RankProgress] = Field(description="Ranks that have reported.")


def startup_view(journal: Journal, now: datetime) -> Startup:
    """What ``/startupz`` answers.

    A stale record counts as not started: it may be what an earlier container left behind, and a
    startup probe that passes on it lets the liveness probe kill the new start.
    """
    supervisor = journal.supervisor
    if supervisor is None:
        return Startup(
            started=False,
            phase=None,
            description="no supervisor has reported in the state directory",
            elapsed_seconds=None,
            phase_seconds=None,
            fraction=None,
            remaining_seconds=None,
            ranks=[],
        )
    fresh = is_fresh(supervisor, now)
    return Startup(
        started=fresh and supervisor.ending is None and supervisor.phase in STARTED,
        phase=supervisor.phase,
        description=describe(supervisor) + ("" if fresh else " (the supervisor no longer reports)"),
        elapsed_seconds=elapsed_seconds(supervisor, now),
        phase_seconds=phase_seconds(supervisor, now),
        fraction=phase_fraction(supervisor, journal.ranks),
        remaining_seconds=remaining_seconds(supervisor, journal.ranks, now),
        ranks=[rank_progress(record, supervisor) for record in journal.ranks],
    )


def elapsed_seconds(supervisor: SupervisorRecord, now: datetime) -> float | None:
    """Seconds from the start until now, or until its end."""
    return seconds_between(supervisor.started_at, supervisor.ending.at if supervisor.ending else now)


def phase_seconds(supervisor: SupervisorRecord, now: datetime) -> float | None:
    """Seconds since the present phase began; ``None`` before the first."""
    return seconds_between(supervisor.phases[-1].at, now) if supervisor.phases else None


def phase_fraction(supervisor: SupervisorRecord, ranks: tuple[RankRecord, ...]) -> float | None:
    """Progress of the present phase, 0 to 1, or ``None`` when it cannot be told.

    While loading, every rank of the world must have reported what it will read; a rank that has not
    converted anything yet has converted none of what is known to be expected.
    """
    share = None
    if supervisor.phase is Phase.LOADING and len(ranks) >= len(supervisor.ranks_known):
        loading = [record.loading for record in ranks]
        done = total([part.bytes_done if part else None for part in loading])
        share = ratio(done, total([part.bytes_total if part else None for part in loading]))
    elif supervisor.phase is Phase.CONVERTING:
        converted = sum(conversions_done(record, supervisor) for record in ranks)
        share = ratio(converted, supervisor.all_expected_conversions())
    elif supervisor.step is not None and supervisor.step.phase is supervisor.phase:
        share = ratio(supervisor.step.done, supervisor.step.total)
    return None if share is None else min(share, 1.0)


def describe(supervisor: SupervisorRecord) -> str:
    """What is happening, in one line."""
    step, text = supervisor.step, supervisor.phase.description
    if step is None or step.phase is not supervisor.phase:
        return text
    count = "" if step.done is None or step.total is None else f", {step.done} of {step.total}"
    return f"{text}: {step.name}{count}"


LEAST_SECONDS, LEAST_FRACTION = 5.0, 0.02
"""Nobody guesses the rest from less: the first shard, layer or graph pays for what comes before it."""


def remaining_seconds(
    supervisor: SupervisorRecord, ranks: tuple[RankRecord, ...], now: datetime
) -> float | None:
    """Seconds left of the present phase at the rate measured in it; ``None`` if that cannot be told."""
    done = phase_fraction(supervisor, ranks)
    step = supervisor.step
    began = [rank.loading.began_at for rank in ranks if rank.loading and rank.loading.began_at]
    if step is not None and step.phase is supervisor.phase and step.total is not None:
        spent = seconds_between(step.since, now)
    elif supervisor.phase is Phase.LOADING and began:
        # The model is built, and its kernels compiled, before the first byte is read.
        spent = seconds_between(min(began), now)
    else:
        spent = phase_seconds(supervisor, now)
    if done is None or spent is None or spent < LEAST_SECONDS or done < LEAST_FRACTION:
        return None
    return spent * (1.0 - done) / done


def conversions_done(record: RankRecord, supervisor: SupervisorRecord) -> int:
    """How many of the expected layer projections the rank has converted."""
    if not supervisor.weights.lossy:
        return 0
    expected = set(supervisor.checkpoint.moe_layers)
    return len({(done.layer, done.projection) for done in record.conversions if done.layer in expected})


def rank_progress(record: RankRecord, supervisor: SupervisorRecord) -> RankProgress:
    """One rank's progress in short."""
    loading = record.loading
    return RankProgress(
        rank=record.rank,
        phase=present_phase(rank_phases(record, supervisor)),
        updated_at=record.updated_at,
        bytes_done=loading.bytes_done if loading else None,
        bytes_total=loading.bytes_total if loading else None,
        shards_done=loading.shards_done if loading else None,
        shards_total=loading.shards_total if loading else None,
        conversions_done=conversions_done(record, supervisor),
        conversions_expected=supervisor.expected_conversions(record.rank),
    )
