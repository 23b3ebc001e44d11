# SPDX-License-Identifier: Apache-2.0
"""A server that answers what it is told to, for what no sidecar would."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = tuple[int, bytes]


@contextlib.contextmanager
def answering(answer: Callable[[str, str | None], Answer], port: int = 0) -> Iterator[str]:
    """The URL of a server whose answers come from the path and the Authorization header of a request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.path, self.headers.get("Authorization"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
