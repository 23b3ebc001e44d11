# SPDX-License-Identifier: Apache-2.0
"""A start at real scale, replayed: what is looked at must be what the product would show."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.journal.models import SUPERVISOR_FILE
from kimi_k3.journal.reader import Fault, Journal, read_journal
from kimi_k3.sidecar.conversion import conversion_view
from kimi_k3.sidecar.startup import startup_view
from kimi_k3.sidecar.warning import warnings_view
from kimi_k3.words.phases import Phase
from tests.sidecar.builders import journal, supervisor, write
from tests.sidecar.serving import wait_until

from .make import ABOUT, BAD_LAYER, BAD_PROJECTION, MOE_LAYERS, RANKS, make
from .player import Then, play, require_ours, shifted
from .recording import DEFAULT, Recording, journal_at

PASSED = [
    Phase.PREFLIGHT,
    Phase.LOADING,
    Phase.CONVERTING,
    Phase.COMPILING,
    Phase.CAPTURING,
    Phase.WARMING,
    Phase.READY,
]


@pytest.fixture(scope="module")
def recording() -> Recording:
    """The recording that is kept with the tests."""
    return Recording.load()


def at(recording: Recording, phase: Phase) -> tuple[Journal, datetime]:
    """The journal in the middle of a phase, and that moment."""
    seconds = recording.middle_of(phase)
    clock = shifted(datetime(2026, 1, 1, tzinfo=UTC), 0.0, 1.0)
    return journal_at(recording, seconds, clock), clock(seconds)


def test_the_recording_is_what_the_generator_makes(recording: Recording) -> None:
    """Nobody edits it by hand, it stays small, and it says that it is made and not measured."""
    assert recording.about == ABOUT
    assert "Nothing in it was measured on a GPU." in ABOUT
    assert DEFAULT.stat().st_size <= 300_000
    made = make()
    assert len(made.writes) == len(recording.writes), "run `python -m tests.replay.make`"
    assert journal_at(made, made.seconds, _utc) == journal_at(recording, made.seconds, _utc)


def _utc(seconds: float) -> datetime:
    return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)


def test_the_real_scale(recording: Recording) -> None:
    """96 layers, two projections, eight ranks; the one bad layer projection stands out."""
    seen, _ = at(recording, Phase.READY)
    view = conversion_view(seen)
    assert {layer.layer for layer in view.layers} == set(MOE_LAYERS)
    assert (len(MOE_LAYERS), RANKS) == (96, 8)
    assert [len(layer.ranks) for layer in view.layers] == [RANKS] * 2 * len(MOE_LAYERS)
    assert view.missing == []
    assert view.total is not None
    assert view.total.relative_mse == pytest.approx(0.0042, rel=0.1)
    worst = max(view.layers, key=lambda layer: layer.relative_mse or 0)
    assert (worst.layer, worst.projection) == (BAD_LAYER, BAD_PROJECTION)


@pytest.mark.parametrize("phase", PASSED)
def test_each_phase_can_be_looked_at(recording: Recording, phase: Phase) -> None:
    """In the middle of each phase the views show it, with a fraction where something is counted."""
    seen, moment = at(recording, phase)
    view = startup_view(seen, moment)
    assert view.phase is phase
    counted = phase in (Phase.LOADING, Phase.CONVERTING, Phase.CAPTURING)
    assert (view.fraction is not None and 0 < view.fraction < 1) is counted
    assert (view.remaining_seconds is not None) is counted
    assert view.started is (phase is Phase.READY)


def test_warnings(recording: Recording) -> None:
    """int4, a build of AITER that gets signs wrong, and a notice of the preflight; nothing else is wrong."""
    seen, moment = at(recording, Phase.READY)
    assert {one.code for one in warnings_view(seen, None, moment).warnings} == {
        "lossy-weights",
        "signs-refused",
        "preflight-notice",
    }


def test_replay_into_a_state_directory(recording: Recording, tmp_path: Path) -> None:
    """Every phase is passed in order, the journal never has a fault, and the heartbeat stays fresh."""
    entered: list[Phase] = []
    stop = threading.Event()
    thread = threading.Thread(
        target=play,
        args=(recording, tmp_path, stop),
        kwargs={"speed": 400.0, "entered": entered.append, "engine_url": "http://127.0.0.1:1"},
    )
    thread.start()
    faults: list[Fault] = []

    def over() -> bool:
        seen = read_journal(tmp_path)
        faults.extend(seen.faults)
        return seen.supervisor is not None and seen.supervisor.phase is Phase.READY

    try:
        wait_until(over, seconds=60)
        before = read_journal(tmp_path).supervisor
        assert before is not None

        def beats() -> bool:
            record = read_journal(tmp_path).supervisor
            return record is not None and record.updated_at > before.updated_at

        wait_until(beats)
    finally:
        stop.set()
        thread.join()
    assert (entered, faults) == (PASSED, [])
    assert len(conversion_view(read_journal(tmp_path)).layers) == 2 * len(MOE_LAYERS)
    assert before.engine_url == "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("then", "codes"),
    [
        (Then.FAIL, {"deployment-failed", "engine-failure"}),
        (Then.STALE, {"supervisor-stale"}),
        (Then.STOP, set()),
    ],
)
def test_bad_ends(recording: Recording, tmp_path: Path, then: Then, codes: set[str]) -> None:
    """A failure and a dead supervisor can be looked at, too; so can an end on request."""
    stop = threading.Event()
    middle = recording.middle_of(Phase.CONVERTING)
    thread = threading.Thread(
        target=play,
        args=(recording, tmp_path, stop),
        kwargs={"begin": middle, "end": middle, "then": then},
    )
    thread.start()
    try:
        wait_until(lambda: (tmp_path / SUPERVISOR_FILE).exists())
    finally:
        stop.set()
        thread.join()
    seen = read_journal(tmp_path)
    found = {one.code for one in warnings_view(seen, None, datetime.now(tz=UTC)).warnings}
    assert found - {"lossy-weights", "signs-refused", "preflight-notice"} == codes
    assert seen.faults == ()


def test_the_middle_of_a_phase_is_there_at_once(recording: Recording, tmp_path: Path) -> None:
    """What has passed keeps its real durations, however fast the rest is played."""
    stop = threading.Event()
    middle = recording.middle_of(Phase.CONVERTING)
    thread = threading.Thread(
        target=play,
        args=(recording, tmp_path, stop),
        kwargs={"begin": middle, "end": middle, "speed": 50.0},
    )
    thread.start()
    try:
        wait_until(lambda: (tmp_path / SUPERVISOR_FILE).exists())
    finally:
        stop.set()
        thread.join()
    view = startup_view(read_journal(tmp_path), datetime.now(tz=UTC))
    assert view.phase is Phase.CONVERTING
    assert view.elapsed_seconds == pytest.approx(middle, abs=30)


def test_a_real_journal_is_not_written_over(recording: Recording, tmp_path: Path) -> None:
    """A replay given a deployment's own directory would lie to its probes."""
    require_ours(tmp_path, recording)
    write(tmp_path, journal(supervisor()))
    with pytest.raises(OperatorError) as caught:
        require_ours(tmp_path, recording)
    assert caught.value.exit_code == ExitCode.IN_USE
    (tmp_path / SUPERVISOR_FILE).write_text("not a record")
    with pytest.raises(OperatorError):
        require_ours(tmp_path, recording)


def test_speed_must_be_above_zero() -> None:
    """Time that stands still or goes back replays nothing."""
    with pytest.raises(ValueError, match="above 0"):
        shifted(datetime(2026, 1, 1, tzinfo=UTC), 0.0, 0.0)
