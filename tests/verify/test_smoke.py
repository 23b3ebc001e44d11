# SPDX-License-Identifier: Apache-2.0
"""A deployment that is as it should be, and each way in which it is not."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kimi_k3.cli.application import run
from kimi_k3.engine.loss_header import HEADER
from kimi_k3.journal.models import Canary
from kimi_k3.journal.reader import Journal
from kimi_k3.journal.writer import now
from kimi_k3.sidecar.app import create_app
from kimi_k3.sidecar.settings import Settings
from kimi_k3.verify.smoke import run_smoke
from kimi_k3.verify.target import Target
from kimi_k3.words.weights import Weights
from tests.sidecar.builders import journal, lossless, lossy, write
from tests.sidecar.serving import serving, wait_until

NAMES = ("readiness", "completion", "consent", "sidecar's metrics", "engine's metrics")
ANSWER = {"usage": {"completion_tokens": 5}}


@dataclass
class Engine:
    """What an engine answers."""

    url: str = ""
    status: int = 200
    answer: Any = field(default_factory=lambda: dict(ANSWER))
    headers: dict[str, str] = field(default_factory=dict)
    metrics: str = 'vllm:num_requests_running{engine="0"} 0.0\n'
    asked: list[tuple[str, Any]] = field(default_factory=list)


@contextlib.contextmanager
def running(engine: Engine) -> Iterator[Engine]:
    """An HTTP server that answers so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, engine.metrics.encode() if self.path == "/metrics" else b"")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            engine.asked.append((self.headers.get("Authorization", ""), body))
            self._send(engine.status, json.dumps(engine.answer).encode())

        def _send(self, status: int, data: bytes) -> None:
            self.send_response(status)
            for name, value in {**engine.headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        engine.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield engine
        finally:
            server.shutdown()
            thread.join()


def present(seen: Journal, url: str) -> Journal:
    """The same start, but of now."""
    supervisor = seen.supervisor
    assert supervisor is not None
    moment = now()
    changes = {"updated_at": moment, "engine_url": url}
    changes["canary"] = Canary(at=moment, seconds=1, completion_tokens=4)
    return journal(supervisor.model_copy(update=changes), *seen.ranks)


@contextlib.contextmanager
def deployed(tmp_path: Path, seen: Journal, engine: Engine, **changes: Any) -> Iterator[Target]:
    """An engine and a sidecar over a journal."""
    with running(engine):
        write(tmp_path, present(seen, engine.url))
        settings = Settings(state_dir=tmp_path, refresh_seconds=0, poll_seconds=0.05)
        with serving(create_app(settings)) as url:
            target = Target(
                engine=engine.url,
                sidecar=url,
                metrics=f"{engine.url}/metrics",
                weights=None,
                api_key=None,
                token=None,
            )
            wait_until(lambda: looked(target)[1][0].startswith("ok") or not seen.ranks)
            engine.asked.clear()
            yield replace(target, **changes)


def looked(target: Target) -> tuple[int, list[str]]:
    """The exit code and the lines."""
    told: list[str] = []
    return run_smoke(target, report=told.append), told


LOSSY_HEADERS = {HEADER: "int4_per_group_32; relative-mse=0.00481"}


def test_lossless(tmp_path: Path) -> None:
    """Every check is told, with what it found."""
    engine = Engine()
    with deployed(tmp_path, lossless(), engine, weights=Weights.MXFP4, api_key="secret") as target:
        code, told = looked(target)
    assert (code, [line.split(": ")[0] for line in told]) == (0, [f"ok    {name}" for name in NAMES])
    assert "mxfp4, lossless" in told[2]
    ((authorization, body),) = engine.asked
    assert authorization == "Bearer secret"
    assert body["model"] == "kimi-k3"


def test_lossy(tmp_path: Path) -> None:
    """int4 is as it should be where it is told, in the answer's header and as a warning, and consented to."""
    with deployed(tmp_path, lossy(), Engine(headers=LOSSY_HEADERS), weights=Weights.INT4) as target:
        code, told = looked(target)
    assert code == 0, told
    assert "int4, lossy, by consent (--accept-lossy)" in told[2]


WRONG: dict[str, tuple[bool, dict[str, Any], Weights | None, str, str]] = {
    "other weights than asked for": (False, {}, Weights.INT4, "consent", "mxfp4 is served, and int4"),
    "lossy without a word": (True, {}, None, "completion", "int4 is served, and the answer's"),
    "a word without a loss": (False, {"headers": LOSSY_HEADERS}, None, "completion", "mxfp4 is served"),
    "an error": (
        False,
        {"status": 500, "answer": {"error": "out of\nmemory"}},
        None,
        "completion",
        "HTTP 500",
    ),
    "an answer without a token": (
        False,
        {"answer": {"usage": {"completion_tokens": 0}}},
        None,
        "completion",
        "without a single token",
    ),
    "something else": (False, {"answer": ["hello"]}, None, "completion", "no chat completion"),
    "no metrics": (
        False,
        {"metrics": "up 1\n"},
        None,
        "engine's metrics",
        "not one series begins with vllm:",
    ),
    "metrics that are none": (
        False,
        {"metrics": "{{{\n"},
        None,
        "engine's metrics",
        "not what Prometheus reads",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong(tmp_path: Path, case: str) -> None:
    """Only the check that does not hold says so, in one line."""
    is_lossy, answers, weights, name, said = WRONG[case]
    with deployed(
        tmp_path, lossy() if is_lossy else lossless(), Engine(**answers), weights=weights
    ) as target:
        code, told = looked(target)
    assert code == 1
    (line,) = [line for line in told if line.startswith("wrong")]
    assert line.startswith(f"wrong {name}: ")
    assert said in line
    assert "\n" not in line


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    """As a command: five lines, and exit code 1."""
    nowhere = "http://127.0.0.1:9"
    assert run(["verify", "smoke", "--engine", nowhere, "--sidecar", nowhere]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"wrong {name}" for name in NAMES]


def test_not_ready(tmp_path: Path) -> None:
    """The sidecar's reasons are told."""
    with deployed(tmp_path, lossless(), Engine()) as target:
        (tmp_path / "supervisor.json").unlink()
        wait_until(lambda: looked(target)[0] == 1)
        told = looked(target)[1]
    assert "no supervisor's record" in told[0]
