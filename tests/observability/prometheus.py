# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus that scrapes every second, with compose's configuration, and what tests ask it."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from tests.observability.expressions import ROOT
from tests.serving.deployment import free_port
from tests.sidecar.serving import wait_until
from tests.surroundings import SURROUNDINGS

CONFIGURATION = ROOT / "docker" / "prometheus" / "prometheus.yml"
SIDECAR, ENGINE, EXPORTER = "kimi-k3-sidecar", "kimi-k3-engine", "amd-device-metrics-exporter"


@dataclass(frozen=True)
class Prometheus:
    """A Prometheus that answers at ``url``."""

    url: str

    def ask(self, path: str, **parameters: str | float) -> Any:
        """What its API answers; an error of the query fails the test."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, trust_env=False, timeout=30).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def instant(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """The series that an expression evaluates to, now or at a moment; a NaN is no value."""
        moment = {} if at is None else {"time": at}
        found: list[dict[str, Any]] = self.ask("query", query=expression, **moment)["result"]
        return [one for one in found if one["value"][1] != "NaN"]

    def scraped(self, job: str) -> bool:
        """Whether the last scrape of a job succeeded."""
        return any(one["value"][1] == "1" for one in self.instant(f'up{{job="{job}"}}'))


@contextlib.contextmanager
def prometheus(directory: Path, targets: dict[str, str]) -> Iterator[Prometheus]:
    """Run one until the block ends; skips where the program is not installed.

    Args:
        directory: for its data and its configuration.
        targets: URL by job; those of compose's configuration that are not named are not scraped.
    """
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no prometheus on this machine; run scripts/programs")
    settings = directory / "prometheus.yml"
    settings.write_text(yaml.safe_dump(_configured(targets)))
    address = f"127.0.0.1:{free_port()}"
    command = [
        program,
        f"--config.file={settings}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=error",
    ]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, env=SURROUNDINGS, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: _ready(process, address, log=directory / "prometheus.log"), seconds=60)
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def exposing(text: Callable[[], str]) -> Iterator[str]:
    """The URL of a server whose every path answers ``text()``, as an exposition."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _configured(targets: dict[str, str]) -> dict[str, Any]:
    given = yaml.safe_load(CONFIGURATION.read_text())
    jobs = {job["job_name"]: job["static_configs"][0].get("labels", {}) for job in given["scrape_configs"]}
    assert set(jobs) == {SIDECAR, ENGINE}
    return {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [
            {
                "job_name": job,
                "honor_labels": job == EXPORTER,
                "static_configs": [{"targets": [urlsplit(url).netloc], "labels": jobs.get(job, {})}],
            }
            for job, url in targets.items()
        ],
    }


def _ready(process: subprocess.Popen[bytes], address: str, *, log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-2000:]
    try:
        return httpx.get(f"http://{address}/-/ready", trust_env=False).status_code == httpx.codes.OK
    except httpx.TransportError:
        time.sleep(0.05)
        return False
