# SPDX-License-Identifier: Apache-2.0
"""What changes, as events (``/events``): each a resource's answer again, or one layer's loss.

Changes are looked for while somebody listens. All listeners read one list of the last events by their own
mark, so that one who reads slowly costs nothing, and one who comes back with ``Last-Event-ID`` gets what was
missed; if too much was, the present state as a whole.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from dataclasses import dataclass, field

from fastapi.concurrency import run_in_threadpool
from fastapi.sse import format_sse_event

from kimi_k3.journal.models import RankRecord
from kimi_k3.sidecar import views
from kimi_k3.sidecar.conversion import conversions_by_key, merged_loss
from kimi_k3.sidecar.state import State
from kimi_k3.sidecar.view import View

KEPT_EVENTS = 1024
"""More than a start of the real model has conversions (92 layers, two projections)."""

LOOK_SECONDS = 0.5
"""Records are not written more often."""

UNCHANGED_SECONDS = 5.0
"""How long a kind is not looked for again while no record has changed: time alone changes little."""

KEEP_ALIVE_SECONDS = 15.0
"""A comment at least so often, or proxies take the stream for dead."""

ADMIT_SECONDS = 0.005
"""Between two new listeners: a hundred that come back at once would hold up the probes otherwise."""

RETRY_MILLISECONDS = 2000
MEMORY_STEP_BYTES = 64 << 20
"""A change of memory that is worth an event."""

CONVERTED = "converted"


class Converted(View):
    """What one projection of one layer has lost so far, over all ranks."""

    layer: int
    projection: str
    relative_mse: float | None
    max_error: float | None
    lossless_ratio: float | None
    ranks_done: int
    ranks_expected: int


@dataclass(frozen=True)
class Kind:
    """A kind of event that repeats a resource's answer.

    Attributes:
        name: of the event.
        view: the answer.
        mark: what of it has to change for an event; times that go on by themselves are not in it.
        seconds: how long it is not looked for again, whatever changes.
    """

    name: str
    view: Callable[[State], View]
    mark: Callable[[View], Hashable]
    seconds: float


@dataclass(frozen=True)
class Event:
    """An event as it goes out; ``number`` counts from 1."""

    number: int
    kind: str
    data: str


@dataclass(frozen=True)
class Told:
    """What was last told of a kind, when it was last looked for, and what was there then."""

    mark: Hashable
    looked_at: float
    state: State


@dataclass
class Log:
    """The last events, and what they are changes from. Pure but for its own memory."""

    events: deque[Event] = field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    count: int = 0
    told: dict[str, Told] = field(default_factory=dict)
    ranks: tuple[RankRecord, ...] = ()
    converted: dict[Hashable, str] = field(default_factory=dict)

    def due(self, state: State, moment: float) -> bool:
        """Whether :meth:`look` would look at anything."""
        return state.journal.ranks is not self.ranks or any(self._due(kind, state, moment) for kind in KINDS)

    def look(self, state: State, moment: float) -> None:
        """Add what has changed; ``moment`` is of a clock that only goes forward."""
        for kind in KINDS:
            if not self._due(kind, state, moment):
                continue
            view = kind.view(state)
            mark = kind.mark(view)
            if (told := self.told.get(kind.name)) is None or mark != told.mark:
                self._add(kind.name, view.model_dump_json())
            self.told[kind.name] = Told(mark, moment, state)
        if state.journal.ranks is not self.ranks:
            self.ranks = state.journal.ranks
            found = _converted(state)
            for key, data in found.items():
                if self.converted.get(key) != data:
                    self._add(CONVERTED, data)
            self.converted = found

    def _due(self, kind: Kind, state: State, moment: float) -> bool:
        told = self.told.get(kind.name)
        if told is None:
            return True
        pause = UNCHANGED_SECONDS if same_records(told.state, state) else kind.seconds
        return moment - told.looked_at >= pause

    def snapshot(self, state: State) -> list[Event]:
        """One event of each kind as things stand, all with the number of the last one."""
        views = [Event(self.count, kind.name, kind.view(state).model_dump_json()) for kind in KINDS]
        return [*views, *(Event(self.count, CONVERTED, data) for data in self.converted.values())]

    def after(self, number: int) -> list[Event] | None:
        """The events that came later; ``None`` if some of them are no longer known."""
        oldest = self.events[0].number if self.events else self.count + 1
        if not oldest - 1 <= number <= self.count:
            return None
        return [event for event in self.events if event.number > number]

    def _add(self, kind: str, data: str) -> None:
        self.count += 1
        self.events.append(Event(self.count, kind, data))


class Events:
    """The events of a sidecar.

    Args:
        state: the present state.
        stopping: whether the server is about to end.
    """

    def __init__(self, state: Callable[[], Awaitable[State]], *, stopping: Callable[[], bool]) -> None:
        self._state = state
        self._stopping = stopping
        self._boot = secrets.token_hex(4)
        self._log = Log()
        self._admitting = asyncio.Lock()
        self._looking = asyncio.Lock()
        self._looked_at = float("-inf")
        self._snapshot: tuple[State, list[Event]] | None = None
        self._bytes: dict[Event, bytes] = {}
        self.listeners = 0

    async def stream(self, last_event_id: str | None) -> AsyncIterator[bytes]:
        """What a listener gets, until it goes or the server ends."""
        self.listeners += 1
        try:
            async with self._admitting:
                await asyncio.sleep(ADMIT_SECONDS)
            yield format_sse_event(retry=RETRY_MILLISECONDS)
            number = self._number(last_event_id)
            loop = asyncio.get_running_loop()
            sent_at = loop.time()
            while not self._stopping():
                if news := await self._news(number):
                    number = news[-1].number
                    sent_at = loop.time()
                    yield b"".join(self._encoded(event) for event in news)
                if loop.time() - sent_at >= KEEP_ALIVE_SECONDS:
                    sent_at = loop.time()
                    yield format_sse_event(comment="keep-alive")
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            self.listeners -= 1

    async def _news(self, number: int | None) -> list[Event]:
        """What came after ``number``; everything as it stands if that is not known."""
        # One at a time: a snapshot is of the state whose changes were noted last.
        async with self._looking:
            state = await self._state()
            moment = asyncio.get_running_loop().time()
            if moment - self._looked_at >= LOOK_SECONDS / 2 and self._log.due(state, moment):
                await run_in_threadpool(self._log.look, state, moment)
                self._looked_at = moment
            events = None if number is None else self._log.after(number)
            if events is not None:
                return events
            # Listeners that come at the same time, as after a restart, share it.
            if self._snapshot is None or self._snapshot[0] is not state:
                self._snapshot = state, await run_in_threadpool(self._log.snapshot, state)
            return self._snapshot[1]

    def _encoded(self, event: Event) -> bytes:
        """The event as it goes out; the same for all listeners."""
        known = self._bytes.get(event)
        if known is None:
            if len(self._bytes) > 2 * KEPT_EVENTS:
                self._bytes.clear()
            identity = f"{self._boot}-{event.number}"
            known = format_sse_event(data_str=event.data, event=event.kind, id=identity)
            self._bytes[event] = known
        return known

    def _number(self, last_event_id: str | None) -> int | None:
        boot, _, number = (last_event_id or "").rpartition("-")
        known = boot == self._boot and re.fullmatch(r"[0-9]{1,18}", number)
        return int(number) if known else None


def same_records(one: State, other: State) -> bool:
    """Whether two states differ only by what passing time and the kernel's files say."""
    return (
        one.journal is other.journal
        and one.acknowledgements == other.acknowledgements
        and _engine(one) == _engine(other)
    )


def _engine(state: State) -> Hashable:
    health = state.health
    return None if health is None else (health.outcome, health.status_code, health.detail)


def _converted(state: State) -> dict[Hashable, str]:
    supervisor = state.journal.supervisor
    if supervisor is None or not supervisor.weights.lossy:
        return {}
    found: dict[Hashable, str] = {}
    for (layer, projection), by_rank in sorted(conversions_by_key(state.journal.ranks).items()):
        loss = merged_loss(list(by_rank.values()))
        found[layer, projection] = Converted(
            layer=layer,
            projection=projection,
            relative_mse=loss.relative_mse,
            max_error=loss.max_error,
            lossless_ratio=loss.lossless_ratio,
            ranks_done=len(by_rank),
            ranks_expected=supervisor.world_size,
        ).model_dump_json()
    return found


def _without(*names: str) -> Callable[[View], Hashable]:
    """A mark of everything but what is named, at any depth."""

    def strip(value: object) -> object:
        if isinstance(value, dict):
            return {key: strip(inner) for key, inner in value.items() if key not in names}
        if isinstance(value, list):
            return [strip(inner) for inner in value]
        return value

    return lambda view: json.dumps(strip(view.model_dump(mode="json")))


def _memory_mark(view: View) -> Hashable:
    """Sizes in steps: the machine's free memory changes with every breath."""

    def coarse(value: object) -> object:
        if isinstance(value, dict):
            return {key: coarse(inner) for key, inner in value.items() if key not in ("updated_at", "host")}
        if isinstance(value, list):
            return [coarse(inner) for inner in value]
        return value // MEMORY_STEP_BYTES if isinstance(value, int) and value > MEMORY_STEP_BYTES else value

    return json.dumps(coarse(view.model_dump(mode="json")))


KINDS = (
    Kind(
        "startup",
        views.startup,
        _without("elapsed_seconds", "phase_seconds", "remaining_seconds", "updated_at"),
        seconds=0.5,
    ),
    Kind("readiness", views.readiness, _without("engine"), seconds=0.0),
    Kind("warnings", views.warnings, lambda view: view.model_dump_json(), seconds=1.0),
    Kind("memory", views.memory_now, _memory_mark, seconds=1.0),
)
"""The kinds, in the order in which a new listener gets them."""
