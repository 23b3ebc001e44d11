# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 watch`` against a real sidecar: what it shows, how it ends, and what it survives."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response

from kimi_k3.cli import run
from kimi_k3.journal.models import Ending
from kimi_k3.sidecar.app import create_app
from kimi_k3.sidecar.settings import Settings
from kimi_k3.words.phases import Phase
from tests.sidecar.builders import journal, lossy_rank, lossy_supervisor, phases, supervisor, write
from tests.sidecar.engine import FakeEngine, fake_engine
from tests.sidecar.serving import serving, wait_until

from .answering import Answer, answering

READY, NOT_READY, ENDED, UNREACHABLE = 0, 10, 11, 12


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a token nor colours of whoever runs the tests."""
    for name in ("KIMI_K3_SIDECAR_TOKEN", "KIMI_K3_SIDECAR_TOKEN_FILE", "NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """An engine that answers 200 until its mood changes."""
    with fake_engine() as running:
        yield running


def app(directory: Path) -> FastAPI:
    """The sidecar over ``directory``."""
    return create_app(Settings(state_dir=directory, poll_seconds=0.05))


def write_phase(directory: Path, phase: Phase, engine: FakeEngine, **changes: Any) -> None:
    """A deployment of now in ``phase``, int4 on two ranks."""
    moment = datetime.now(tz=UTC)
    given = {"phases": phases(phase), "updated_at": moment, "engine_url": engine.url}
    record = lossy_supervisor(**(given | changes))
    write(directory, journal(record, lossy_rank(0), lossy_rank(1)))


def started(url: str, *arguments: str, **streams: Any) -> subprocess.Popen[str]:
    """``kimi-k3 watch`` as a process, without a terminal unless told."""
    return subprocess.Popen(
        [sys.executable, "-m", "kimi_k3", "watch", url, *arguments],
        **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | streams),
    )


@contextlib.contextmanager
def watching(url: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A watch without a terminal, and the lines that it has printed so far."""
    lines: list[str] = []
    child = started(url, *arguments)
    assert child.stdout is not None
    stdout = child.stdout

    def read() -> None:
        for line in stdout:
            lines.append(line)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield child, lines
    finally:
        child.kill()
        child.wait()
        reader.join()
        stdout.close()
        if child.stderr is not None:
            child.stderr.close()


def test_exit_codes(tmp_path: Path, engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """A script tells the four apart, and an engine that does not answer is not ready."""
    with serving(app(tmp_path)) as url:

        def is_soon(code: int) -> None:
            # The sidecar looks at the journal and asks the engine a few times a second.
            wait_until(lambda: run(["watch", url, "--once"]) == code, seconds=30)

        is_soon(NOT_READY)
        write_phase(tmp_path, Phase.LOADING, engine)
        is_soon(NOT_READY)
        write_phase(tmp_path, Phase.READY, engine)
        is_soon(READY)
        assert capsys.readouterr().out.splitlines()[-1].startswith("Machine: ")
        engine.mood = "dead"
        is_soon(NOT_READY)
        engine.mood = "ok"
        is_soon(READY)
        write_phase(tmp_path, Phase.DRAINING, engine)
        is_soon(NOT_READY)
        ending = Ending(at=datetime.now(tz=UTC), exit_code=7, reason="vLLM failed")
        write_phase(tmp_path, Phase.FAILED, engine, ending=ending)
        is_soon(ENDED)
    assert run(["watch", url, "--once"]) == UNREACHABLE
    assert re.search(r"no answer since \d s: .*refused", capsys.readouterr().out)


def test_json(tmp_path: Path, engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """One document with the exit code in it; nothing old, and nothing made up when nobody answers."""
    write_phase(tmp_path, Phase.READY, engine)
    with serving(app(tmp_path)) as url:
        wait_until(lambda: run(["watch", url, "--once"]) == READY, seconds=30)
        capsys.readouterr()
        assert run(["watch", url, "--json"]) == READY
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["exit_code"], found["error"]) == ("ready", READY, None)
    assert found["status"]["deployment"]["world_size"] == 2
    assert found["conversion"]["progress"]["done"] == 8
    assert "ranks" not in found["conversion"]["layers"][0]
    assert run(["watch", url, "--json"]) == UNREACHABLE
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["status"], found["readiness"]) == ("unreachable", None, None)
    assert "refused" in found["error"]


def test_wait_until_ready(tmp_path: Path, engine: FakeEngine) -> None:
    """A script goes on when it may, and has the whole way in its log."""
    write_phase(tmp_path, Phase.LOADING, engine)
    with serving(app(tmp_path)) as url, watching(url, "--wait", "--timeout", "60") as (child, lines):
        wait_until(lambda: any("loading: " in line for line in lines), seconds=30)
        assert child.poll() is None
        write_phase(tmp_path, Phase.READY, engine)
        assert child.wait(30) == READY
        wait_until(lambda: any(line.rstrip().endswith("Z ready") for line in lines))
    assert all(re.match(r"\d\d:\d\d:\d\dZ ", line) for line in lines)


def test_wait_ends_with_the_deployment(tmp_path: Path, engine: FakeEngine) -> None:
    """Waiting on for what has failed would end by the timeout only, if there is one."""
    ending = Ending(at=datetime.now(tz=UTC), exit_code=7, reason="vLLM failed")
    write_phase(tmp_path, Phase.FAILED, engine, ending=ending)
    with serving(app(tmp_path)) as url:
        assert run(["watch", url, "--wait"]) == ENDED


def test_timeout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The code is that of what it is by then, and standard error says what it waited for."""
    with serving(app(tmp_path)) as url:
        assert run(["watch", url, "--wait", "--timeout", "0.3", "--json"]) == NOT_READY
    streams = capsys.readouterr()
    assert "after 0.3 s it is not-ready: The state directory holds no supervisor's record" in streams.err
    assert json.loads(streams.out)["exit_code"] == NOT_READY
    assert run(["watch", url, "--wait", "--timeout", "0.3"]) == UNREACHABLE
    assert "it is unreachable: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--timeout", "3"], "--timeout 3: only with --wait"),
        (["--wait", "--timeout", "-1"], "--timeout -1"),
        (["--wait", "--timeout", "nan"], "--timeout nan"),
        (["ftp://x"], "is not http://HOST:PORT"),
        (["--token-file", ""], "--token-file: is empty"),
        (["--onec"], "did you mean '--once'?"),
    ],
)
def test_usage(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake is one line and exit code 2, before anybody is asked."""
    assert run(["watch", *arguments]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert error.count("\n") == 1


def test_a_sidecar_that_goes_and_comes(tmp_path: Path, engine: FakeEngine) -> None:
    """It is restarted on its own; the watch says so, and goes on when it is back."""
    write_phase(tmp_path, Phase.LOADING, engine)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sidecars = ["first", "second"]

    def sidecar() -> subprocess.Popen[bytes]:
        sidecars.pop()
        return subprocess.Popen(
            [sys.executable, "-m", "kimi_k3", "sidecar", "--state-dir", str(tmp_path), "--port", str(port)],
            stderr=subprocess.DEVNULL,
        )

    with watching(f"http://127.0.0.1:{port}", "--wait", "--timeout", "90") as (child, lines):
        wait_until(lambda: any("no answer since" in line for line in lines), seconds=30)
        for _ in range(2):
            running = sidecar()
            try:
                wait_until(lambda: bool(lines) and "no answer" not in lines[-1], seconds=30)
                if sidecars:
                    running.terminate()
                    running.wait()
                    wait_until(lambda: "no answer since" in lines[-1], seconds=30)
                else:
                    write_phase(tmp_path, Phase.READY, engine)
                    assert child.wait(30) == READY
            finally:
                running.kill()
                running.wait()
    assert len([line for line in lines if line.rstrip().endswith("answers again")]) == 2


def test_ctrl_c(tmp_path: Path) -> None:
    """The usual end: no traceback, at once, with the code that every interrupted command has."""
    with serving(app(tmp_path)) as url, watching(url) as (child, lines):
        wait_until(lambda: bool(lines), seconds=30)
        child.send_signal(signal.SIGINT)
        assert child.wait(10) == 130
        assert child.stderr is not None
        assert child.stderr.read() in ("", "kimi-k3: interrupted\n")


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal(tmp_path: Path, engine: FakeEngine, no_color: bool) -> None:
    """Live in 80 columns, without colours where the operator wants none; Ctrl-C leaves the cursor visible."""
    write_phase(tmp_path, Phase.READY, engine)
    surroundings = os.environ | {"TERM": "xterm-256color"} | ({"NO_COLOR": "1"} if no_color else {})
    # The size is the terminal's own; a parallel test run sets these for its workers.
    for name in ("COLUMNS", "LINES"):
        surroundings.pop(name, None)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 80, 0, 0))
    with serving(app(tmp_path)) as url:
        child = started(
            url, stdin=slave, stdout=slave, stderr=subprocess.PIPE, env=surroundings, start_new_session=True
        )
        os.close(slave)
        seen = bytearray()

        def read() -> None:
            with contextlib.suppress(OSError):
                while part := os.read(master, 65536):
                    seen.extend(part)

        reading = threading.Thread(target=read)
        reading.start()
        try:
            wait_until(lambda: seen.count(b"Machine: ") > 2, seconds=30)
            child.send_signal(signal.SIGINT)
            assert child.wait(10) == 130
        finally:
            child.kill()
            child.wait()
            reading.join()
            os.close(master)
            assert child.stderr is not None
            child.stderr.close()
    text = seen.decode()
    assert "READY" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert bool(re.search(r"\x1b\[[\d;]*3[1-7]m", text)) is not no_color
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", text)
    assert max(len(line.rpartition("\r")[2]) for line in plain.splitlines()) <= 80


def test_old_is_not_live_on_a_terminal(tmp_path: Path, engine: FakeEngine) -> None:
    """While an answer hangs, the terminal counts the seconds instead of showing the last state."""
    hang = threading.Event()
    inner = app(tmp_path)

    @inner.middleware("http")
    async def held(request: Request, answer: Any) -> Response:
        while hang.is_set():
            await asyncio.sleep(0.05)
        response: Response = await answer(request)
        return response

    write_phase(tmp_path, Phase.READY, engine)
    with serving(inner) as url, watching(url) as (_, lines):
        wait_until(lambda: any(line.endswith("Z ready\n") for line in lines), seconds=30)
        hang.set()
        try:
            wait_until(lambda: "no answer since" in lines[-1], seconds=30)
        finally:
            hang.clear()
        wait_until(lambda: any("answers again" in line for line in lines), seconds=30)


def test_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With the token's file it is let in; without, it says in one line what to give."""
    token = "s3cret-t0ken"
    inner = app(tmp_path)

    @inner.middleware("http")
    async def guarded(request: Request, answer: Any) -> Response:
        if request.headers.get("authorization") != f"Bearer {token}":
            return Response(status_code=401)
        response: Response = await answer(request)
        return response

    file = tmp_path / "token"
    file.write_text(token + "\n")
    with serving(inner) as url:
        assert run(["watch", url, "--once"]) == 2
        assert "--token-file" in capsys.readouterr().err
        assert run(["watch", url, "--once", "--token-file", str(file)]) == NOT_READY
        monkeypatch.setenv("KIMI_K3_SIDECAR_TOKEN_FILE", str(file))
        assert run(["watch", url, "--once"]) == NOT_READY
    streams = capsys.readouterr()
    assert token not in streams.out + streams.err


def test_a_sidecar_of_another_version(
    tmp_path: Path, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is not understood is left out and told in a line; the rest and the exit code stand."""
    write_phase(tmp_path, Phase.READY, engine)
    inner = app(tmp_path)

    @inner.middleware("http")
    async def other(request: Request, answer: Any) -> Response:
        if request.url.path == "/memory":
            return Response('{"nodes": []}', media_type="application/json")
        response: Response = await answer(request)
        return response

    with serving(inner) as url:
        wait_until(lambda: run(["watch", url, "--once"]) == READY, seconds=30)
    out = capsys.readouterr().out
    assert re.search(r"! /memory is not as version \S+ knows it: ranks: ", out)
    assert "READY" in out


def test_something_else_is_never_ready(capsys: pytest.CaptureFixture[str]) -> None:
    """Any web server answers 200; that must not let a script go on."""

    def page(path: str, header: str | None) -> Answer:
        return 200, b"<html>welcome</html>"

    with answering(page) as url:
        assert run(["watch", url, "--once"]) == UNREACHABLE
        assert "what answers is not this version's" in capsys.readouterr().out


def test_text_of_the_server_is_escaped(
    tmp_path: Path, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """A profile's name, a reason, a message of the engine: none of them commands the terminal."""
    evil = "\x1b[2J\x1b]0;owned\x07[red]\u202e"
    write_phase(tmp_path, Phase.LOADING, engine, profile=evil)
    with serving(app(tmp_path)) as url:
        assert run(["watch", url, "--once"]) == NOT_READY
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "\\x1b[2J\\x1b]0;owned\\x07[red]\\u202e" in out.replace("\n", "")


def test_a_sidecar_without_a_supervisor_waits(tmp_path: Path, engine: FakeEngine) -> None:
    """A script may start to wait before the deployment does."""
    with serving(app(tmp_path)) as url, watching(url, "--wait") as (child, lines):
        wait_until(lambda: any("supervisor-missing" in line for line in lines), seconds=30)
        write(tmp_path, journal(supervisor(updated_at=datetime.now(tz=UTC), engine_url=engine.url)))
        assert child.wait(30) == READY


def test_reader_gone(tmp_path: Path) -> None:
    """``kimi-k3 watch | head -1`` ends, and not with a traceback."""
    with serving(app(tmp_path)) as url:
        child = started(url)
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.readline()
        child.stdout.close()
        end = time.monotonic() + 20
        write(tmp_path, journal(supervisor(updated_at=datetime.now(tz=UTC))))
        while child.poll() is None and time.monotonic() < end:
            write(tmp_path, journal(supervisor(phases=phases(Phase.LOADING))))
            time.sleep(0.5)
            write(tmp_path, journal(supervisor(phases=phases(Phase.CONVERTING))))
        child.kill()
        assert child.wait() == 141
        assert "Traceback" not in child.stderr.read()
        child.stderr.close()
