# SPDX-License-Identifier: Apache-2.0
"""A server that speaks enough of OpenAI's API to be verified, and answers as it is told to."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kimi_k3.verify.target import Target

CARD = {"id": "kimi-k3", "root": "/nowhere", "max_model_len": 1024}


PATIENCE_SECONDS = 240.0
"""Less than a verification waits for an answer."""


@dataclass
class Server:
    """What it answers.

    Attributes:
        answer: status and text for the body of a request; ``None`` ends the server instead.
        listing: status and text of the models, ``None`` for those of the ``card``.
        headers: of each answer.
        asked: what it was asked.
    """

    answer: Callable[[dict[str, Any]], tuple[int, str] | None]
    card: Any = field(default_factory=lambda: dict(CARD))
    listing: tuple[int, str] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)
    gone: bool = False
    url: str = ""

    @property
    def target(self) -> Target:
        """As it is reached, without a sidecar."""
        return Target(
            engine=self.url,
            sidecar=None,
            metrics=f"{self.url}/metrics",
            weights=None,
            api_key=None,
            token=None,
        )


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    """It runs until the block ends, or until it is told to be gone: then it answers nobody."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if server.gone:
                self.close_connection = True
                return
            self._send(*(server.listing or (200, json.dumps({"data": [server.card]}))))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.asked.append(body)
            answer = None if server.gone else server.answer(body)
            if answer is None:
                server.gone = True
                self.close_connection = True
                return
            self._send(*answer)

        def _send(self, status: int, text: str) -> None:
            data = text.encode()
            self.send_response(status)
            headers = {"Content-Type": "application/json", "Content-Length": str(len(data))}
            for name, value in (headers | server.headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        server.url = f"http://127.0.0.1:{listening.server_port}"
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            listening.shutdown()
            thread.join()


@contextlib.contextmanager
def silent() -> Iterator[Server]:
    """A server that makes tokens of a text, and is silent on every question until the block ends."""
    ended = threading.Event()

    def answer(body: dict[str, Any]) -> tuple[int, str] | None:
        if "add_special_tokens" in body:
            return 200, json.dumps({"tokens": [1, 2, 3]})
        ended.wait()
        return None

    with running(Server(answer)) as server:
        try:
            yield server
        finally:
            ended.set()


def until(done: Callable[[], bool]) -> None:
    """Wait for it."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)
