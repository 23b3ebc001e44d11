# SPDX-License-Identifier: Apache-2.0
"""An engine that has nothing but a /health, which behaves as it is told."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Mood = Literal["ok", "dead", "hang", "drip", "redirect", "garbage"]


class FakeEngine:
    """``mood`` may be changed at any time; ``asked`` counts the questions."""

    def __init__(self) -> None:
        self.mood: Mood = "ok"
        self.asked = 0
        self.url = ""
        self.let_go = threading.Event()


@contextlib.contextmanager
def fake_engine() -> Iterator[FakeEngine]:
    """A running :class:`FakeEngine` on a free port."""
    engine = FakeEngine()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            engine.asked += 1
            with contextlib.suppress(OSError):
                _answer(self, engine)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        engine.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield engine
        finally:
            engine.let_go.set()
            server.shutdown()
            thread.join()


def _answer(handler: BaseHTTPRequestHandler, engine: FakeEngine) -> None:
    if engine.mood == "hang":
        engine.let_go.wait(30)
    elif engine.mood == "drip":
        for _ in range(200):
            handler.wfile.write(b"H")
            if engine.let_go.wait(0.05):
                break
    elif engine.mood == "garbage":
        handler.wfile.write(b"\x00\x01 not HTTP\r\n\r\n")
    elif handler.path == "/health" and engine.mood == "redirect":
        handler.send_response(307)
        handler.send_header("Location", "/elsewhere")
        handler.end_headers()
    else:
        handler.send_response(503 if engine.mood == "dead" else 200)
        handler.end_headers()
