# SPDX-License-Identifier: Apache-2.0
"""What the answers are made of: read when somebody asks, and not again within a quarter of a second.

With nobody asking, only the engine's health is polled. A directory that hangs (a network file system whose
server is gone) holds up no probe: whoever waited long enough gets what was last read, and the engine is asked
by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial

from fastapi.concurrency import run_in_threadpool

from kimi_k3.host import MachineMemory, Places, read_machine_memory
from kimi_k3.journal.models import NodeRecord
from kimi_k3.journal.reader import Fault, Journal, JournalReader
from kimi_k3.journal.writer import now as utc_now
from kimi_k3.sidecar.acknowledgement import ACKNOWLEDGEMENTS_FILE, Acknowledgements, read_acknowledgements
from kimi_k3.sidecar.arithmetic import seconds_between
from kimi_k3.sidecar.nodes import with_remembered
from kimi_k3.sidecar.probe import EngineProbe
from kimi_k3.sidecar.settings import Settings
from kimi_k3.sidecar.view import EngineHealth
from kimi_k3.words.addresses import at_host

HEALTH_MARGIN_SECONDS = 3.0
"""Beyond its time limit and the poll's interval: an older answer says nothing about the present."""

READ_PATIENCE_SECONDS = 1.0
"""How long a request waits for the state directory."""


@dataclass(frozen=True)
class State:
    """Everything that the answers are made of, at one moment.

    ``health`` is the engine's last answer; ``None`` when it has not been asked lately or the start has ended.
    ``machine`` reads the kernel's files when it is first called, of which few answers are made.
    """

    journal: Journal
    health: EngineHealth | None
    acknowledgements: Acknowledgements
    machine: Callable[[], MachineMemory]
    now: datetime


@dataclass(frozen=True)
class _Files:
    """What was read from files."""

    journal: Journal
    acknowledgements: Acknowledgements
    machine: Callable[[], MachineMemory]


class Observer:
    """Reads the state directory on demand and polls the engine's health.

    Args:
        settings: where the directory is, and how often what is looked at.
        clock: the present moment, UTC.
        places: where the kernel's files are.
    """

    def __init__(
        self, settings: Settings, *, clock: Callable[[], datetime] = utc_now, places: Places | None = None
    ) -> None:
        self._settings = settings
        self._clock = clock
        self.places = places or Places()
        self._reader = JournalReader(settings.state_dir)
        self._probe = EngineProbe(
            timeout_seconds=settings.engine_timeout_seconds,
            tls_verify=settings.engine_tls_verify,
            clock=clock,
        )
        self._files: _Files | None = None
        self._state: tuple[_Files, State] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._read_at = float("-inf")
        self._remembered: dict[int, NodeRecord] = {}

    async def state(self) -> State:
        """The present state, at most ``refresh_seconds`` old unless the directory hangs.

        The same object while nothing was read anew and the engine has not been asked again.
        """
        refresh = self._settings.refresh_seconds
        age = asyncio.get_running_loop().time() - self._read_at
        if age >= refresh:
            reading = self._begin_reading()
            # Where many ask, none of them waits: the next ones get what is being read now.
            if age >= 2 * refresh:
                await self._patiently(reading)
        return self.last()

    def remember(self, record: NodeRecord) -> None:
        """Keep what a node told, whether or not its file can be written."""
        self._remembered[record.node] = record

    async def reread(self) -> State:
        """The state after a change of one's own."""
        if self._reading is not None:
            # It may have begun before the change.
            await self._patiently(self._reading)
        await self._patiently(self._begin_reading())
        return self.last()

    def last(self) -> State:
        """The state by what was last read; of a directory that nobody has read yet, an empty one."""
        return self._with_health(self._files or self._unread())

    @contextlib.asynccontextmanager
    async def polling(self) -> AsyncIterator[None]:
        """Polls the engine's health until the block ends."""
        poll = asyncio.create_task(self._poll())
        try:
            yield
        finally:
            poll.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await poll
            await self._probe.close()

    async def _poll(self) -> None:
        while True:
            url = self._engine_url((await self.state()).journal)
            if url is not None:
                await self._probe.check(url)
            await asyncio.sleep(self._settings.poll_seconds)

    def _begin_reading(self) -> asyncio.Task[None]:
        """The reading that is under way, or a new one."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_once())
        return self._reading

    async def _patiently(self, reading: asyncio.Task[None]) -> None:
        """Wait for a reading, but not for ever."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READ_PATIENCE_SECONDS):
                await asyncio.shield(reading)
        known = self._files
        if not reading.done() and known is not None and known.journal.unwritable is None:
            journal = dataclasses.replace(known.journal, unwritable="does not answer")
            self._files = dataclasses.replace(known, journal=journal)

    async def _read_once(self) -> None:
        self._files = await run_in_threadpool(self._read)
        self._read_at = asyncio.get_running_loop().time()

    def _read(self) -> _Files:
        journal = with_remembered(self._reader.read(), dict(self._remembered))
        acknowledgements, why = read_acknowledgements(self._settings.state_dir)
        if why is not None:
            fault = Fault(ACKNOWLEDGEMENTS_FILE, why)
            journal = dataclasses.replace(journal, faults=(*journal.faults, fault))
        return self._of(journal, acknowledgements)

    def _unread(self) -> _Files:
        fault = Fault(".", f"has not been read within {READ_PATIENCE_SECONDS:g} s")
        journal = Journal(supervisor=None, ranks=(), failures=(), faults=(fault,))
        return self._of(journal, Acknowledgements())

    def _of(self, journal: Journal, acknowledgements: Acknowledgements) -> _Files:
        return _Files(journal, acknowledgements, cache(partial(read_machine_memory, self.places)))

    def _with_health(self, files: _Files) -> State:
        now = self._clock()
        health = self._health(files.journal, now)
        known = self._state
        if known is None or known[0] is not files or known[1].health is not health:
            parts = {field.name: getattr(files, field.name) for field in dataclasses.fields(files)}
            known = self._state = files, State(**parts, health=health, now=now)
        return known[1]

    def _health(self, journal: Journal, now: datetime) -> EngineHealth | None:
        url = self._engine_url(journal)
        health = None if url is None else self._probe.last_of(url)
        age = None if health is None else seconds_between(health.checked_at, now)
        settings = self._settings
        valid = settings.poll_seconds + settings.engine_timeout_seconds + HEALTH_MARGIN_SECONDS
        return health if age is not None and age <= valid else None

    def _engine_url(self, journal: Journal) -> str | None:
        return engine_url(journal, self._settings)


def engine_url(journal: Journal, settings: Settings) -> str | None:
    """Whom to ask; nobody after the end, when the port may belong to somebody else, or without an API."""
    supervisor = journal.supervisor
    if supervisor is None or supervisor.ending is not None or supervisor.engine_url is None:
        return None
    host = settings.engine_host
    return supervisor.engine_url if host is None else at_host(supervisor.engine_url, host)
