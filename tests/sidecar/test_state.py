# SPDX-License-Identifier: Apache-2.0
"""What is read, when, and how long it counts."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from kimi_k3.journal.reader import JournalReader
from kimi_k3.sidecar.settings import Settings
from kimi_k3.sidecar.state import Observer

from .builders import NOW, journal, rank, supervisor, write
from .engine import FakeEngine


def test_an_old_answer_is_none(tmp_path: Path, engine: FakeEngine) -> None:
    """An engine that answered a while ago may have died since; and one elsewhere is another."""
    moment = [NOW]
    write(tmp_path, journal(supervisor(engine_url=engine.url)))

    async def look() -> None:
        observer = Observer(Settings(state_dir=tmp_path, refresh_seconds=0), clock=lambda: moment[0])
        assert (await observer.state()).health is None
        async with observer.polling():
            while (await observer.state()).health is None:
                await asyncio.sleep(0.01)
            polled = observer.last()
        moment[0] += timedelta(seconds=5)
        assert observer.last() is polled
        moment[0] += timedelta(seconds=2)
        assert observer.last().health is None
        moment[0] = NOW
        assert observer.last().health is not None
        write(tmp_path, journal(supervisor(engine_url="http://127.0.0.1:9")))
        assert (await observer.state()).health is None

    asyncio.run(look())


def test_many_readers_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five hundred requests a second must not read the directory five hundred times."""
    write(tmp_path, journal(supervisor(), rank(0)))
    readings: list[datetime] = []
    read = JournalReader.read

    def counted(reader: JournalReader) -> object:
        readings.append(NOW)
        return read(reader)

    monkeypatch.setattr(JournalReader, "read", counted)

    async def look() -> None:
        observer = Observer(Settings(state_dir=tmp_path, refresh_seconds=10), clock=lambda: NOW)
        states = await asyncio.gather(*(observer.state() for _ in range(100)))
        assert all(state is states[0] for state in states)
        assert len(readings) == 1
        assert (await observer.reread()).journal.ranks is states[0].journal.ranks
        assert len(readings) == 2

    asyncio.run(look())
