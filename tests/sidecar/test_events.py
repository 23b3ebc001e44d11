# SPDX-License-Identifier: Apache-2.0
"""Server-sent events: what changes is told, nothing is told twice, and nothing is lost by a reconnection."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from kimi_k3.host import HostMemory, MachineMemory
from kimi_k3.journal.models import Loading
from kimi_k3.journal.reader import Journal
from kimi_k3.sidecar import app as application
from kimi_k3.sidecar.acknowledgement import Acknowledgements
from kimi_k3.sidecar.app import create_app
from kimi_k3.sidecar.events import KEPT_EVENTS, KINDS, Log
from kimi_k3.sidecar.settings import Settings
from kimi_k3.sidecar.state import State
from kimi_k3.words.phases import Phase

from .builders import NOW, health, journal, lossy, phases, rank, supervisor, write
from .serving import serving

NAMES = [kind.name for kind in KINDS]


def state(found: Journal, *, seconds: float = 0, available: int = 1 << 30) -> State:
    """The state some seconds later."""
    host = HostMemory(total_bytes=1 << 40, available_bytes=available, shmem_bytes=0)
    return State(
        journal=found,
        health=health(),
        acknowledgements=Acknowledgements(),
        machine=lambda: MachineMemory(host, None, None, ()),
        now=NOW + timedelta(seconds=seconds),
    )


def told(log: Log, after: int = 0) -> list[str]:
    """The kinds of what was noted."""
    events = log.after(after)
    assert events is not None
    return [event.kind for event in events]


def test_time_alone_is_no_event() -> None:
    """Clocks go on and memory breathes; a page computes the one and does not care for the other."""
    log, same = Log(), journal(supervisor(), rank(0))
    for second in range(20):
        log.look(state(same, seconds=second, available=(1 << 30) + second), second)
    assert told(log) == NAMES


def test_what_changed_is_told() -> None:
    """One event of each kind that is concerned, and no other."""
    log = Log()
    log.look(state(journal(supervisor(phases=phases(Phase.WARMING)), rank(0))), 0)
    before = log.count
    log.look(state(journal(supervisor(), rank(0))), 10)
    assert told(log, before) == ["startup", "readiness"]


def test_fast_changes_are_thinned_and_the_last_is_told() -> None:
    """Bytes read change with every look; the last state must come all the same."""
    log = Log()
    for step in range(100):
        loading = Loading(bytes_done=step, bytes_total=99, shards_done=0, shards_total=1)
        log.look(state(journal(supervisor(), rank(0, loading=loading))), step / 100)
    log.look(state(journal(supervisor(), rank(0, loading=loading))), 5)
    bodies = [json.loads(event.data) for event in log.events if event.kind == "startup"]
    assert len(bodies) <= 4
    assert bodies[-1]["ranks"][0]["bytes_done"] == 99


def test_the_unchanged_is_not_looked_at() -> None:
    """A deployment that serves for weeks with an open page does not compute what it said before."""
    log, found = Log(), journal(supervisor(), rank(0))
    assert log.due(state(found), 0)
    log.look(state(found), 0)
    assert not log.due(state(found, seconds=4), 4)
    assert log.due(state(found, seconds=6), 6)
    assert log.due(state(journal(supervisor(), rank(0)), seconds=4), 4)
    assert log.due(replace(state(found, seconds=4), health=None), 4)


def test_each_conversion_is_told_once() -> None:
    """A layer's loss comes when it is there, and again only if it changed."""
    log, found = Log(), lossy()
    log.look(state(found), 0)
    layers = [json.loads(event.data) for event in log.events if event.kind == "converted"]
    assert [(one["layer"], one["projection"]) for one in layers] == [
        (1, "w13"), (1, "w2"), (2, "w13"), (2, "w2")
    ]  # fmt: skip
    assert layers[0]["relative_mse"] == pytest.approx(0.01)
    before = log.count
    log.look(state(replace(found, ranks=tuple(found.ranks))), 10)
    assert told(log, before) == []


def test_what_is_no_longer_known() -> None:
    """A listener that was away too long, or comes from another sidecar, gets everything."""
    log = Log()
    log.look(state(journal(supervisor())), 0)
    assert log.after(log.count) == []
    assert log.after(log.count + 1) is None
    for number in range(KEPT_EVENTS + 1):
        phase = Phase.LOADING if number % 2 else Phase.WARMING
        log.look(state(journal(supervisor(phases=phases(phase)))), number + 1.0)
    assert log.after(0) is None
    assert [event.kind for event in log.snapshot(state(journal(supervisor())))] == NAMES


@dataclass
class Received:
    """An event as a client sees it."""

    id: str
    kind: str
    data: Any


@contextmanager
def listening(url: str, last: str | None = None) -> Iterator[Iterator[Received]]:
    """The events of a stream."""
    headers = {} if last is None else {b"Last-Event-ID": last.encode("latin-1")}
    with httpx.stream("GET", url + "/events", headers=headers, trust_env=False, timeout=10) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield _events(answer.iter_lines())


def _events(lines: Iterator[str]) -> Iterator[Received]:
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield Received(fields["id"], fields["event"], json.loads(fields["data"]))
            fields = {}


def test_resume(tmp_path: Path) -> None:
    """Over a real connection: everything first, then changes; after a break only what was missed."""
    write(tmp_path, journal(supervisor(phases=phases(Phase.WARMING)), rank(0), rank(1)))
    app = create_app(Settings(state_dir=tmp_path, refresh_seconds=0), clock=lambda: NOW)
    with serving(app) as url:
        with listening(url) as events:
            first = [next(events) for _ in NAMES]
            assert [event.kind for event in first] == NAMES
            assert first[0].data["phase"] == "warming"
        write(tmp_path, journal(supervisor(), rank(0), rank(1)))
        with listening(url, last=first[-1].id) as events:
            change = next(event for event in events if event.kind == "startup")
            assert change.data["phase"] == "ready"
        boot = first[-1].id.partition("-")[0]
        for last in ("another-1", f"{boot}-{'1' * 5000}", f"{boot}-", f"{boot}-²"):
            with listening(url, last=last) as events:
                assert [next(events).kind for _ in NAMES] == NAMES
        assert json.loads(httpx.get(url + "/startupz", trust_env=False).text)["ranks"] == change.data["ranks"]


def test_too_many_listeners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is told to poll; the others and the probes go on."""
    monkeypatch.setattr(application, "MAX_LISTENERS", 1)
    with serving(create_app(Settings(state_dir=tmp_path))) as url, listening(url) as events:
        next(events)
        answer = httpx.get(url + "/events", trust_env=False)
        assert (answer.status_code, "poll /status" in answer.json()["detail"]) == (503, True)
        assert httpx.get(url + "/livez", trust_env=False).status_code == 200
