# SPDX-License-Identifier: Apache-2.0
"""What has changed from one picture to the next, in plain lines: for a log, a pipe, a dumb terminal."""

from __future__ import annotations

from collections.abc import Iterator

from kimi_k3.watch.draw import duration, told_reasons
from kimi_k3.watch.picture import Picture, State

PERCENT_STEP = 10


def changes(before: Picture | None, now: Picture, clock: float) -> Iterator[str]:
    """A line for each change that a reader wants to hear of.

    Args:
        before: what was told last; ``None`` at first.
        clock: now, on the watcher's own clock, in seconds.
    """
    was_silent = before is not None and before.error is not None
    if now.error is not None:
        if not was_silent:
            yield f"no answer since {duration(now.silent_seconds(clock))}: {now.error}"
        return
    if was_silent:
        yield f"{now.url} answers again"
    known = None if before is None or before.error is not None else before
    yield from (f"! {note}" for note in now.notes if known is None or note not in known.notes)
    if known is None or _step(known) != _step(now):
        yield _progress(now)
    if known is None or known.state is not now.state or _reasons(known) != _reasons(now):
        yield _readiness(now)
    # By id: the figures in a text go on changing.
    told, stand = {} if known is None else _warnings(known), _warnings(now)
    yield from (f"! {line}" for key, line in stand.items() if key not in told)
    yield from (f"over: {line}" for key, line in told.items() if key not in stand)


def _step(picture: Picture) -> tuple[object, ...]:
    startup = picture.startup
    if startup is None:
        return ()
    percent = None if startup.fraction is None else int(startup.fraction * 100) // PERCENT_STEP
    return (startup.phase, startup.description.partition(",")[0], percent)


def _progress(picture: Picture) -> str:
    startup = picture.startup
    if startup is None:
        return "phase unknown"
    line = f"{startup.phase or 'no phase'}: {startup.description}"
    if startup.fraction is not None:
        line += f" {int(startup.fraction * 100)} %"
    if startup.remaining_seconds is not None:
        line += f", {duration(startup.remaining_seconds)} left"
    return line


def _reasons(picture: Picture) -> list[str]:
    return [reason.code for reason in told_reasons(picture)]


def _readiness(picture: Picture) -> str:
    if picture.state is State.READY:
        return str(picture.state)
    return f"{picture.state}: " + " ".join(reason.message for reason in told_reasons(picture))


def _warnings(picture: Picture) -> dict[str, str]:
    """A line for each warning, by its id."""
    if picture.warnings is None:
        return {}
    return {
        one.id: f"{one.severity} {one.code}: {one.message} To do: {one.remedy}"
        for one in picture.warnings.warnings
    }
