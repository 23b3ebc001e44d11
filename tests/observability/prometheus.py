# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus that scrapes and judges every second, and what it has said since it was started."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.observability.alerting import Group
from tests.ports import free_port
from tests.sidecar.serving import wait_until

PROGRAM = shutil.which("prometheus")
NAMESPACE = "models"
LOOK_SECONDS = 0.3


@dataclass(frozen=True)
class Target:
    """Somebody to scrape, named as in the cluster: the sidecar's Service ends in ``-sidecar``."""

    release: str
    url: str
    part: str = ""
    token: str | None = None

    def scraped(self) -> dict[str, Any]:
        """As a job of the configuration."""
        job = f"{self.release}-kimi-k3-gfx942{self.part}"
        labels = {"namespace": NAMESPACE, "release": self.release}
        return {
            "job_name": job,
            "static_configs": [{"targets": [self.url.removeprefix("http://")], "labels": labels}],
            **({"authorization": {"credentials": self.token}} if self.token else {}),
        }


@dataclass(frozen=True)
class Exporter:
    """AMD's exporter, whose own labels say who uses a GPU."""

    url: str

    def scraped(self) -> dict[str, Any]:
        """As a job of the configuration."""
        targets = [{"targets": [self.url.removeprefix("http://")]}]
        return {"job_name": "gpus", "honor_labels": True, "static_configs": targets}


@dataclass(frozen=True)
class Fired:
    """An alert that was seen to fire."""

    labels: dict[str, str]
    annotations: dict[str, str]


@dataclass
class Prometheus:
    """A running one; ``fired`` is whatever has been firing at any look."""

    url: str
    directory: Path
    process: subprocess.Popen[bytes]
    fired: dict[frozenset[tuple[str, str]], Fired] = field(default_factory=dict)

    def get(self, path: str, **query: str) -> Any:
        """The data of an answer of its API."""
        answer = httpx.get(self.url + path, params=query, timeout=30, trust_env=False)
        answer.raise_for_status()
        return answer.json()["data"]

    def values(self, query: str) -> list[Any]:
        """What a query gives now."""
        found: list[Any] = self.get("/api/v1/query", query=query)["result"]
        return found

    def judge(self, rules: dict[str, list[Group]]) -> None:
        """From now on by these rules, groups by the name of their file.

        Not from the beginning: before the first scrape everything is absent.
        """
        for name, groups in rules.items():
            text = yaml.safe_dump({"groups": groups}, width=10000)
            (self.directory / f"{name}.rules.yaml").write_text(text)
        self.process.send_signal(signal.SIGHUP)
        wait_until(lambda: len(self.get("/api/v1/rules")["groups"]) == sum(map(len, rules.values())))

    def look(self) -> None:
        """Note what fires now."""
        for one in self.get("/api/v1/alerts")["alerts"]:
            if one["state"] == "firing":
                known = frozenset(one["labels"].items())
                self.fired.setdefault(known, Fired(one["labels"], one["annotations"]))

    def of(self, alert: str, **labels: str) -> list[Fired]:
        """What has fired of an alert with these labels among its own."""
        return [
            one
            for one in list(self.fired.values())
            if one.labels["alertname"] == alert and labels.items() <= one.labels.items()
        ]


@contextlib.contextmanager
def prometheus(directory: Path, targets: Sequence[Target | Exporter]) -> Iterator[Prometheus]:
    """Prometheus over these targets, with its files in a directory that is there."""
    assert PROGRAM is not None
    (directory / "prometheus.yaml").write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(directory / "*.rules.yaml")],
                "scrape_configs": [target.scraped() for target in targets],
            }
        )
    )
    port = free_port()
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                PROGRAM,
                f"--config.file={directory / 'prometheus.yaml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    running = Prometheus(f"http://127.0.0.1:{port}", directory, process)
    stop = threading.Event()
    looking = threading.Thread(target=_look, args=(running, stop))
    try:
        wait_until(lambda: _ready(running, process, directory / "prometheus.log"), seconds=60)
        looking.start()
        yield running
    finally:
        stop.set()
        if looking.is_alive():
            looking.join()
        process.terminate()
        process.wait()


def _ready(running: Prometheus, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-2000:]
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(running.url + "/-/ready", trust_env=False).status_code == 200
    return False


def _look(running: Prometheus, stop: threading.Event) -> None:
    while not stop.wait(LOOK_SECONDS):
        # A machine that is busy may keep an answer back; what fired meanwhile still does at the next look.
        with contextlib.suppress(httpx.TransportError):
            running.look()
