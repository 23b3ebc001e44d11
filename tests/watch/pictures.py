# SPDX-License-Identifier: Apache-2.0
"""Pictures of the replayed start, and what a terminal shows of them."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from typing import Any

from rich.console import Console

from kimi_k3.journal.reader import Journal
from kimi_k3.sidecar.conversion import conversion_view
from kimi_k3.sidecar.examples import MACHINE
from kimi_k3.sidecar.memory import memory_view
from kimi_k3.sidecar.readiness import readiness_view
from kimi_k3.sidecar.startup import startup_view
from kimi_k3.sidecar.status import status_view
from kimi_k3.sidecar.view import EngineHealth
from kimi_k3.sidecar.warning import warnings_view
from kimi_k3.watch.draw import draw
from kimi_k3.watch.picture import Picture
from kimi_k3.words.phases import Phase
from tests.replay.player import shifted
from tests.replay.recording import Recording, journal_at
from tests.sidecar.builders import health

URL = "http://127.0.0.1:8001"
NOW = 1000.0
_START = datetime(2026, 1, 1, 8, 0, tzinfo=UTC)


def picture(journal: Journal, moment: datetime, answer: EngineHealth | None, **changes: Any) -> Picture:
    """The picture of a journal at a moment, just answered."""
    made = Picture(
        url=URL,
        since=NOW - 100,
        answered=NOW,
        readiness=readiness_view(journal, answer, moment),
        startup=startup_view(journal, moment),
        status=status_view(journal, answer, moment),
        warnings=warnings_view(journal, answer, moment),
        memory=memory_view(journal, MACHINE),
        conversion=conversion_view(journal),
        detailed=NOW,
    )
    return replace(made, **changes)


@cache
def replayed(phase: Phase) -> Picture:
    """The replayed start in the middle of a phase, with an engine that answers."""
    recording = Recording.load()
    seconds = recording.middle_of(phase)
    clock = shifted(_START, 0.0, 1.0)
    return picture(journal_at(recording, seconds, clock), clock(seconds), health())


def shown(seen: Picture, now: float = NOW, *, width: int = 80, color: bool = False) -> str:
    """What stands on a terminal of so many columns."""
    stream = io.StringIO()
    console = Console(
        file=stream, width=width, force_terminal=color, highlight=False, markup=False, emoji=False
    )
    console.print(draw(seen, now))
    return stream.getvalue()
