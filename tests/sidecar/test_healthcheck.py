# SPDX-License-Identifier: Apache-2.0
"""A container's check says what /readyz would say."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from kimi_k3.cli.application import run
from kimi_k3.journal.models import Ending
from kimi_k3.journal.writer import now
from kimi_k3.sidecar.healthcheck import check
from kimi_k3.sidecar.settings import Settings
from kimi_k3.words.addresses import at_host
from kimi_k3.words.phases import Phase

from .builders import journal, phases, rank, supervisor, write
from .engine import FakeEngine


def test_what_it_says(tmp_path: Path, engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """Docker shows the last lines and acts by the code: 0 only when the engine answers and the canary has."""
    command = ["healthcheck", "--state-dir", str(tmp_path)]
    assert run(command) == 1
    assert "no supervisor's record" in capsys.readouterr().out
    write(
        tmp_path,
        journal(
            supervisor(phases=phases(Phase.CONVERTING), canary=None, engine_url=engine.url, updated_at=now()),
            rank(0),
        ),
    )
    assert run(command) == 1
    assert "The deployment is converting" in capsys.readouterr().out
    write(tmp_path, journal(supervisor(engine_url=engine.url, updated_at=now()), rank(0)))
    assert run(command) == 0
    assert capsys.readouterr().out == "ready\n"
    engine.mood = "dead"
    assert run(command) == 1
    assert "not healthy" in capsys.readouterr().out


def test_an_engine_elsewhere(tmp_path: Path, engine: FakeEngine) -> None:
    """In another container the recorded 127.0.0.1 is oneself."""
    write(
        tmp_path, journal(supervisor(engine_url=at_host(engine.url, "127.0.0.9"), updated_at=now()), rank(0))
    )
    settings = Settings(state_dir=tmp_path, engine_host="127.0.0.1")
    assert check(settings).ready
    assert engine.asked == 1


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("engine", "https://engine:8000/x"),
        ("::1", "https://[::1]:8000/x"),
    ],
)
def test_at_host(host: str, url: str) -> None:
    """Only the host changes."""
    assert at_host("https://127.0.0.1:8000/x", host) == url
    assert at_host("http://a", host).startswith("http://")


def test_alive(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A liveness probe kills: only where the supervisor hangs, never because nothing can be written."""
    command = ["healthcheck", "--alive", "--state-dir", str(tmp_path)]
    assert run(command) == 0, "nothing has been written yet"
    write(tmp_path, journal(supervisor(phases=phases(Phase.LOADING), canary=None, updated_at=now()), rank(0)))
    assert run(command) == 0
    old = now() - timedelta(seconds=20)
    write(tmp_path, journal(supervisor(updated_at=old), rank(0)))
    assert run(command) == 1
    assert "no longer reports" in capsys.readouterr().out
    monkeypatch.setattr("kimi_k3.journal.reader._unwritable", lambda _: "has no room")
    assert run(command) == 0
    monkeypatch.undo()
    ending = Ending(at=old, exit_code=0, reason="asked to")
    write(tmp_path, journal(supervisor(updated_at=old, ending=ending), rank(0)))
    assert run(command) == 0
