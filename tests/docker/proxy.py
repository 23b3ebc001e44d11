# SPDX-License-Identifier: Apache-2.0
"""A proxy as companies have one: it passes TLS through and knows only whom it was asked for."""

from __future__ import annotations

import contextlib
import selectors
import socket
import socketserver
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def tunnel(host: str) -> Iterator[tuple[int, list[str]]]:
    """A proxy on ``host``: its port, and the hosts that it has been asked for."""
    asked: list[str] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            method, target, _ = self.rfile.readline(4096).decode().split()
            assert method == "CONNECT"
            while self.rfile.readline(65536).strip():
                pass
            asked.append(target)
            name, _, port = target.rpartition(":")
            with socket.create_connection((name, int(port)), timeout=30) as there:
                self.wfile.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                _pass_on(self.connection, there)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server((host, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1], asked
        finally:
            server.shutdown()
            thread.join()


def _pass_on(here: socket.socket, there: socket.socket) -> None:
    """Bytes in both directions, until one side has no more."""
    with selectors.DefaultSelector() as ready:
        ready.register(here, selectors.EVENT_READ, there)
        ready.register(there, selectors.EVENT_READ, here)
        while True:
            for key, _ in ready.select():
                assert isinstance(key.fileobj, socket.socket)
                data = key.fileobj.recv(1 << 16)
                if not data:
                    return
                key.data.sendall(data)
