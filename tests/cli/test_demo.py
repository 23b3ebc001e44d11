# SPDX-License-Identifier: Apache-2.0
"""The demo's parts that need no engine."""

from __future__ import annotations

import io
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from kimi_k3 import demo
from kimi_k3.words.addresses import HOST
from tests.ports import free_port


def test_one_port_is_not_announced_twice() -> None:
    """``--port`` and ``--sidecar-port`` may be the same by mistake, when nobody listens there yet."""
    port = free_port()
    assert demo._free(port) == port
    assert demo._free(port, taken=port) != port
    other = free_port()
    assert demo._free(other, taken=port) == other


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: pytest shows what a test prints."""


def test_a_proxy_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a company's proxy the demo would wait for ever for its own sidecar."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://{HOST}:{free_port()}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with HTTPServer((HOST, 0), _Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert demo._get(f"http://{HOST}:{server.server_port}/readyz") == {}
        finally:
            server.shutdown()
            thread.join()


def test_what_is_set_for_a_real_deployment_is_not_for_the_toy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the operator's API key the demo's own question would be refused."""
    monkeypatch.setenv("KIMI_K3_API_KEY", "secret")
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nenv\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with (tmp_path / "log").open("wb") as log, demo._child("serve", log=log) as child:
        child.wait(10)
    printed = (tmp_path / "log").read_text()
    assert "PATH=" in printed
    assert "KIMI_K3_" not in printed


def test_a_sidecar_that_is_there_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a fresh checkout the supervisor is the slower one; until it writes, no phase is known."""
    told = [
        None,
        {"phase": None, "fraction": None},
        {"phase": "loading", "fraction": None},
        {"phase": "ready", "fraction": None},
        {},
    ]
    monkeypatch.setattr(demo, "_get", lambda _: told.pop(0))
    monkeypatch.setattr(demo, "POLL_SECONDS", 0.0)
    demo._follow(Console(file=io.StringIO()), "http://sidecar", (), tmp_path / "serve.log")
    assert told == []
