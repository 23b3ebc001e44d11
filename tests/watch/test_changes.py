# SPDX-License-Identifier: Apache-2.0
"""What a log or a pipe reads."""

from __future__ import annotations

from dataclasses import replace

from kimi_k3.watch.changes import changes
from kimi_k3.watch.picture import Picture
from kimi_k3.words.phases import Phase
from tests.replay.test_replay import PASSED
from tests.sidecar.builders import NOW as MOMENT
from tests.sidecar.builders import journal, lossless, lossy

from .pictures import NOW, picture, replayed


def lines(before: Picture | None, now: Picture) -> list[str]:
    """The changes as a list."""
    return list(changes(before, now, NOW))


def test_a_whole_start() -> None:
    """One line for a phase, one for readiness; nothing is said twice, and nothing while nothing changes."""
    told, before = [], None
    for phase in PASSED:
        now = replayed(phase)
        told += lines(before, now)
        assert lines(now, now) == []
        before = now
    names = [str(phase) for phase in Phase]
    phases = [line.partition(": ")[0] for line in told if ": " in line and line.split(":")[0] in names]
    assert phases == [str(phase) for phase in PASSED]
    assert "ready" in told
    assert len([line for line in told if "lossy-weights" in line]) == 1


def test_percent_in_steps() -> None:
    """A line for each percent of each phase would be a thousand lines."""
    seen = replayed(Phase.CONVERTING)
    assert seen.startup is not None
    at = {
        share: replace(seen, startup=seen.startup.model_copy(update={"fraction": share}))
        for share in (0.41, 0.49, 0.5)
    }
    assert lines(at[0.41], at[0.49]) == []
    [line] = lines(at[0.49], at[0.5])
    assert " 50 %" in line


def test_silence_is_told_once_and_so_is_its_end() -> None:
    """A sidecar that is restarted makes two lines; what has changed meanwhile comes after them."""
    live = replayed(Phase.LOADING)
    silent = replace(live, error="Connection refused", answered=NOW - 12)
    assert lines(live, silent) == ["no answer since 12 s: Connection refused"]
    assert lines(silent, replace(silent, error="timed out")) == []
    first, *rest = lines(silent, replayed(Phase.CONVERTING))
    assert first == "http://127.0.0.1:8001 answers again"
    assert rest[0].startswith("converting: ")


def test_a_warning_that_is_over() -> None:
    """Whoever read that it came must read that it went."""
    told = lines(picture(lossy(), MOMENT, None), picture(lossless(), MOMENT, None))
    assert [line for line in told if line.startswith("over: warning lossy-weights: ")]


def test_an_end() -> None:
    """Nobody there is not ready, and says why."""
    [progress, readiness, warning] = lines(None, picture(journal(None), MOMENT, None))
    assert progress.startswith("no phase: no supervisor has reported")
    assert readiness.startswith("not-ready: The state directory holds no supervisor's record")
    assert warning.startswith("! critical supervisor-missing: ")
