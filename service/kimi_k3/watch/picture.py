# SPDX-License-Identifier: Apache-2.0
"""What is known of a deployment at one moment, and for how long that has been so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from kimi_k3 import __version__
from kimi_k3.sidecar.conversion import Conversion
from kimi_k3.sidecar.memory import Memory
from kimi_k3.sidecar.readiness import Readiness, ReasonCode
from kimi_k3.sidecar.startup import Startup
from kimi_k3.sidecar.status import Status
from kimi_k3.sidecar.warning import Warnings
from kimi_k3.watch.client import AnyView, NoAnswer, NotUnderstood, Sidecar
from kimi_k3.words.phases import ENDED

DETAIL_SECONDS = 5.0
"""How old the answers of /memory and /conversion may be: at real scale each is half a megabyte."""

OLD_SECONDS = 5.0
"""An answer older than this is no longer shown as the present state."""


class State(StrEnum):
    """In one word; a script reads it from the exit code."""

    READY = "ready"
    NOT_READY = "not-ready"
    ENDED = "ended"
    UNREACHABLE = "unreachable"

    @property
    def exit_code(self) -> int:
        """Exit code of ``kimi-k3 watch``; apart from 1 and 2, which every command has."""
        return {State.READY: 0, State.NOT_READY: 10, State.ENDED: 11, State.UNREACHABLE: 12}[self]


@dataclass(frozen=True)
class Picture:
    """The last answers; ``error`` says why there is none now.

    Moments are seconds of the watcher's own clock, which nobody sets. What was not understood is ``None``,
    and ``notes`` say so.
    """

    url: str
    since: float
    answered: float | None = None
    error: str | None = None
    readiness: Readiness | None = None
    startup: Startup | None = None
    status: Status | None = None
    warnings: Warnings | None = None
    memory: Memory | None = None
    conversion: Conversion | None = None
    detailed: float | None = None
    converted: tuple[str | None, int] | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def state(self) -> State:
        """What can be said now; an old answer says nothing."""
        if self.error is not None or self.readiness is None:
            return State.UNREACHABLE
        if self.readiness.ready:
            return State.READY
        codes = {reason.code for reason in self.readiness.reasons}
        return State.ENDED if ReasonCode.ENDED in codes or self.readiness.phase in ENDED else State.NOT_READY

    def seen_at(self, now: float) -> Picture:
        """The picture as it may be shown ``now``: while an answer is waited for, the last one grows old."""
        if self.error is None and self.answered is not None and now - self.answered > OLD_SECONDS:
            return replace(self, error="it is slow to answer")
        return self

    def silent_seconds(self, now: float) -> float:
        """Since the last answer, or since the first question."""
        return now - (self.since if self.answered is None else self.answered)


def look(sidecar: Sidecar, before: Picture, clock: Callable[[], float]) -> Picture:
    """Ask the sidecar; what it answers replaces what was known, and its silence is told.

    Raises:
        OperatorError: it wants a token.
    """
    try:
        readiness = sidecar.readiness()
    except NoAnswer as silence:
        return replace(before, error=str(silence))
    except NotUnderstood as riddle:
        return replace(before, error=f"what answers is not this version's sidecar: {riddle}")
    notes: list[str] = []

    def part(path: str, model: type[AnyView]) -> AnyView | None:
        try:
            return sidecar.ask(path, model)
        except NotUnderstood as riddle:
            notes.append(str(riddle))
            return None

    try:
        startup = part("/startupz", Startup)
        status = part("/status", Status)
        warnings = part("/warnings", Warnings)
        now = clock()
        converted = _converted(status, startup)
        memory, conversion, detailed = before.memory, before.conversion, before.detailed
        if detailed is None or now - detailed >= DETAIL_SECONDS or before.error is not None:
            memory = part("/memory", Memory)
            if conversion is None or converted is None or converted != before.converted:
                conversion = part("/conversion", Conversion)
            detailed = now
        else:
            converted = before.converted
    except NoAnswer as silence:
        return replace(before, error=str(silence))
    if notes and status is not None and status.versions.kimi_k3 != __version__:
        notes.append(f"the sidecar is version {status.versions.kimi_k3}, this is {__version__}")
    return Picture(
        url=before.url,
        since=before.since,
        answered=clock(),
        readiness=readiness,
        startup=startup,
        status=status,
        warnings=warnings,
        memory=memory,
        conversion=conversion,
        detailed=detailed,
        converted=converted,
        notes=tuple(dict.fromkeys(notes)),
    )


def _converted(status: Status | None, startup: Startup | None) -> tuple[str | None, int] | None:
    """Of which start how much has been converted: while that stays, so does /conversion."""
    start = status.deployment.start_id if status is not None and status.deployment is not None else None
    return None if startup is None else (start, sum(rank.conversions_done for rank in startup.ranks))


def document(picture: Picture, now: datetime) -> dict[str, Any]:
    """The picture for scripts. Without an answer there is no more in it than that."""
    live = picture.error is None
    return {
        "url": picture.url,
        "at": now.isoformat(),
        "state": picture.state,
        "exit_code": picture.state.exit_code,
        "error": picture.error,
        "notes": list(picture.notes) if live else [],
        "readiness": _dumped(picture.readiness, live),
        "startup": _dumped(picture.startup, live),
        "status": _dumped(picture.status, live),
        "warnings": _dumped(picture.warnings, live),
        "memory": _dumped(picture.memory, live, {"ranks": {"__all__": {"conversions"}}}),
        "conversion": _dumped(picture.conversion, live, {"layers": {"__all__": {"ranks"}}}),
    }


def _dumped(view: Any, live: bool, exclude: Any = None) -> Any:
    return view.model_dump(mode="json", exclude=exclude) if live and view is not None else None
