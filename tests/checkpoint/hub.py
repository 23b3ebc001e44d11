# SPDX-License-Identifier: Apache-2.0
"""A hub to download from: as much of the Hugging Face hub's HTTP as its client asks for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

REPOSITORY = "someone/tiny-k3"
COMMIT = 40 * "a"


@dataclass
class Hub:
    """Where it is, what it gave, and how many bytes of a file it gives before it hangs."""

    url: str = ""
    given_bytes: dict[str, int] = field(default_factory=dict)
    hangs_after: dict[str, int] = field(default_factory=dict)
    hanging: threading.Event = field(default_factory=threading.Event)
    let_go: threading.Event = field(default_factory=threading.Event)


@contextlib.contextmanager
def running_hub(directory: Path) -> Iterator[Hub]:
    """A hub with one repository, the files of ``directory``, at one commit."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = unquote(self.path.split("?")[0])
            model, resolve = f"/api/models/{REPOSITORY}", f"/{REPOSITORY}/resolve/{COMMIT}/"
            if path == f"{model}/revision/{COMMIT}":
                names = [{"rfilename": one.name} for one in sorted(directory.iterdir())]
                self._send(200, json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": names}).encode(), {})
            elif path == f"{model}/tree/{COMMIT}":
                files = [
                    {"type": "file", "path": one.name, "size": one.stat().st_size, "oid": "0"}
                    for one in sorted(directory.iterdir())
                ]
                self._send(200, json.dumps(files).encode(), {"Content-Type": "application/json"})
            elif path.startswith(resolve) and (directory / path.removeprefix(resolve)).is_file():
                self._file(directory / path.removeprefix(resolve), body=body)
            else:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "not here"})

        def _file(self, path: Path, *, body: bool) -> None:
            data = path.read_bytes()
            tag = hashlib.sha256(data).hexdigest()
            headers = {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            first = 0
            if (wanted := self.headers.get("Range")) is not None:
                first = int(wanted.removeprefix("bytes=").split("-")[0])
                headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
            rest = data[first:]
            self.send_response(206 if first else 200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(rest)))
            self.end_headers()
            if body:
                part = hub.hangs_after.pop(path.name, len(rest))
                hub.given_bytes[path.name] = hub.given_bytes.get(path.name, 0) + min(part, len(rest))
                self.wfile.write(rest[:part])
                if part < len(rest):
                    hub.hanging.set()
                    hub.let_go.wait(60)
                    self.close_connection = True

        def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.let_go.set()
            server.shutdown()
            thread.join()
