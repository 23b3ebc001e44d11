# SPDX-License-Identifier: Apache-2.0
"""What an operator reads in a terminal."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3.journal.models import EarlierStart, Ending, PlannedMemory
from kimi_k3.sidecar.acknowledgement import Acknowledgement
from kimi_k3.sidecar.warning import Advice, Severity, Warnings
from kimi_k3.watch.draw import bar, duration, figure, gib
from kimi_k3.words.phases import Phase
from tests.replay.test_replay import PASSED
from tests.sidecar.builders import NOW as MOMENT
from tests.sidecar.builders import START, health, journal, lossless, phases, rank, supervisor

from .pictures import NOW, picture, replayed, shown


@pytest.mark.parametrize("phase", PASSED)
@pytest.mark.parametrize("width", [80, 120])
def test_it_fits_the_terminal(phase: Phase, width: int) -> None:
    """A line that the terminal wraps itself breaks every column below it."""
    text = shown(replayed(phase), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert phase.description.split(",")[0].split("'")[0][:20] in text
    assert "\x1b" not in text


def test_converting() -> None:
    """How far each rank is, what it costs, which layer is bad, and what is left."""
    text = shown(replayed(Phase.CONVERTING))
    assert text.startswith("NOT READY  putting the experts' weights into place")
    assert re.search(r"> converting +[\d min]+ s +#+\.+ +\d+ %  [\d min]+ s left", text)
    assert re.search(r"  loading +\d+ min \d+ s  done", text)
    ranks = re.findall(r"^ +(\d)  #{10} 100 %  [#.]{10} +\d+ %  2\d\d\.\d, ", text, re.MULTILINE)
    assert ranks == [str(number) for number in range(8)]
    assert "scale rule mse, no negative" in text
    assert "signs-refused" in text


def test_ready() -> None:
    """The one word that matters comes first; the worst layer is told."""
    text = shown(replayed(Phase.READY))
    assert text.startswith("READY  serving")
    assert re.search(r"worst layers:\n.*\n +61 w2 +0\.01", text)
    assert "1536 of 1536" in text


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        (Ending(at=MOMENT, exit_code=7, reason="engine died"), "exit code 7: engine died"),
        (None, "was killed"),
    ],
)
def test_the_start_before(ending: Ending | None, told: str) -> None:
    """Who comes between two starts of a crash loop sees why the last one failed; once it serves, no more."""
    earlier = EarlierStart(
        start_id="before",
        started_at=START,
        updated_at=START,
        phase=Phase.CONVERTING if ending is None else Phase.FAILED,
        reached=Phase.CONVERTING,
        ending=ending,
    )

    def text(phase: Phase, previous: EarlierStart) -> str:
        seen = journal(supervisor(phases=phases(phase), previous=previous))
        return " ".join(shown(picture(seen, MOMENT, health()), width=120).split())

    line = "The start before, before, ended in converting:"
    assert f"{line} " in text(Phase.LOADING, earlier)
    assert told in text(Phase.LOADING, earlier)
    assert line not in text(Phase.READY, earlier)
    asked = earlier.model_copy(update={"phase": Phase.STOPPED})
    assert line not in text(Phase.LOADING, asked)


def test_lossless() -> None:
    """No column and no figure of a conversion that did not happen."""
    text = shown(picture(lossless(), MOMENT, health()))
    assert "MXFP4" in text
    assert not re.search(r"rank +loaded +converted", text)
    assert "relative error" not in text


def test_unknown_is_not_zero() -> None:
    """A rank that has measured nothing is told as such."""
    text = shown(picture(journal(supervisor(), rank(0, loading=None)), MOMENT, health()))
    assert re.search(r"^ +0  \? +\?, \?, \?, \?", text, re.MULTILINE)


def test_nobody_has_reported() -> None:
    """An empty state directory is not ready, and the way out is told."""
    text = shown(picture(journal(None), MOMENT, None))
    assert text.startswith("NOT READY  no supervisor has reported")
    assert "supervisor-missing" in text


def test_old_is_never_shown_as_live() -> None:
    """Whoever looks away and back must see at once that nobody answers."""
    silent = replace(replayed(Phase.READY), error="Connection refused")
    text = shown(silent, NOW + 12)
    assert text.startswith("http://127.0.0.1:8001: no answer since 12 s: Connection refused\n")
    assert "What follows is 12 s old." in text
    assert not re.search(r"^READY", text, re.MULTILINE)
    never = replace(silent, answered=None, startup=None, status=None, readiness=None)
    assert shown(never, NOW).startswith("http://127.0.0.1:8001: no answer since 1 min 40 s: ")


def test_a_slow_answer_grows_old() -> None:
    """A sidecar that hangs in the middle of an answer has not said anything new either."""
    seen = replayed(Phase.READY)
    assert seen.seen_at(NOW + 4).error is None
    assert shown(seen.seen_at(NOW + 6), NOW + 6).startswith("http://127.0.0.1:8001: no answer since 6 s")


def test_figures_that_are_asked_for_less_often_tell_their_age() -> None:
    """Memory and conversion are half a megabyte each, so they are not asked for each second."""
    assert "planned (4 s ago)" in shown(replace(replayed(Phase.READY), answered=NOW + 4), NOW + 4)


def test_the_worst_comes_first() -> None:
    """A critical warning below the edge of the screen would not be seen."""
    advice = [_advice("mild", Severity.WARNING), _advice("grave", Severity.CRITICAL)]
    seen = replace(replayed(Phase.READY), warnings=Warnings(warnings=advice))
    text = shown(seen)
    assert text.index("critical grave") < text.index("warning mild") < text.index("preflight")


def _advice(code: str, severity: Severity, by: str | None = None) -> Advice:
    """A warning."""
    return Advice(
        id=code,
        code=code,
        severity=severity,
        message="It is so.",
        remedy="Mend it.",
        since=None,
        acknowledgeable=True,
        acknowledged=None if by is None else Acknowledgement(by=by, at=START),
    )


def test_remedies_acknowledgements_and_plan() -> None:
    """They stand beside what they belong to."""
    seen = replayed(Phase.READY)
    assert seen.memory is not None
    planned = PlannedMemory(
        weights_bytes=200 * 2**30,
        transient_bytes=2**30,
        step_bytes=None,
        kv_cache_bytes=8 * 2**30,
        limit_bytes=256 * 2**30,
    )
    ranks = [one.model_copy(update={"planned": planned}) for one in seen.memory.ranks]
    text = shown(
        replace(
            seen,
            warnings=Warnings(warnings=[_advice("x", Severity.WARNING, by="Ada")]),
            memory=seen.memory.model_copy(update={"ranks": ranks}),
        )
    )
    assert "warning x: It is so. To do: Mend it. Acknowledged by Ada." in text
    assert "256.0, 208.0" in text


def test_many_ranks() -> None:
    """Of more ranks than fit those that are behind are told."""
    ranks = [rank(number, loading=None) for number in range(64)]
    text = shown(picture(journal(supervisor(world_size=64), *ranks), MOMENT, health()))
    assert "and 48 more ranks, which are further" in text


@given(st.one_of(st.none(), st.floats(allow_nan=False, min_value=-1, max_value=2)))
def test_a_bar_has_one_width(fraction: float | None) -> None:
    """Columns stay where they are, unknown is no bar, and 100 % means all of it."""
    text = bar(fraction)
    assert len(text) in (1, 16)
    assert (text == "?") is (fraction is None)
    assert ("100 %" in text) is (fraction is not None and fraction >= 1)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "?"),
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (3600, "1 h 0 min"),
        (90061, "25 h 1 min"),
    ],
)
def test_duration(seconds: float | None, words: str) -> None:
    """In words that are short enough for a column."""
    assert duration(seconds) == words


def test_numbers() -> None:
    """Unknown is a question mark in every column."""
    assert (gib(None), gib(2**30), figure(None), figure(0.0042)) == ("?", "1.0", "?", "0.0042")
