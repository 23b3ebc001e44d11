# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from kimi_k3.sidecar.app import create_app
from kimi_k3.sidecar.settings import Settings
from kimi_k3.words.phases import Phase

from .builders import NOW, journal, lossy, phases, rank, supervisor, write
from .engine import FakeEngine
from .serving import serving, wait_until

PATHS = ("/livez", "/startupz", "/readyz", "/status", "/conversion", "/memory", "/warnings", "/metrics")


def settings(directory: Path, *, timeout: float = 5.0) -> Settings:
    """A sidecar that looks at ``directory``."""
    return Settings(state_dir=directory, engine_timeout_seconds=timeout, poll_seconds=0.05)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    """The application over an empty state directory."""
    with TestClient(create_app(settings(tmp_path), clock=lambda: NOW)) as asking:
        yield asking


def test_empty_directory(client: TestClient) -> None:
    """Before anything was written every endpoint answers, and only the probes of the deployment say no."""
    statuses = {path: client.get(path).status_code for path in PATHS}
    assert statuses == dict.fromkeys(PATHS, 200) | {"/startupz": 503, "/readyz": 503}


def test_start_to_end(client: TestClient, tmp_path: Path, engine: FakeEngine) -> None:
    """What the probes say over a whole life: startup stays true in the drain, readiness does not."""
    seen = {}
    for phase in (Phase.LOADING, Phase.WARMING, Phase.READY, Phase.DRAINING, Phase.STOPPED):
        write(tmp_path, journal(supervisor(engine_url=engine.url, phases=phases(phase))))
        seen[phase] = (client.get("/startupz").status_code, client.get("/readyz").status_code)
    assert seen == {
        Phase.LOADING: (503, 503),
        Phase.WARMING: (503, 503),
        Phase.READY: (200, 200),
        Phase.DRAINING: (200, 503),
        Phase.STOPPED: (503, 503),
    }


def test_ready_follows_the_engine(client: TestClient, tmp_path: Path, engine: FakeEngine) -> None:
    """The engine is asked anew each time; an old answer lets traffic run into a dead engine."""
    write(tmp_path, journal(supervisor(engine_url=engine.url)))
    assert client.get("/readyz").status_code == 200
    engine.mood = "dead"
    wait_until(lambda: client.get("/readyz").status_code == 503)
    assert [reason["code"] for reason in client.get("/readyz").json()["reasons"]] == ["engine-unhealthy"]
    codes = [one["code"] for one in client.get("/warnings").json()["warnings"]]
    assert "engine-unhealthy" in codes


def test_engine_is_not_asked_after_the_end(client: TestClient, tmp_path: Path) -> None:
    """Its port may belong to somebody else by then."""
    ending = {"at": NOW, "exit_code": 0, "reason": "asked to"}
    write(tmp_path, journal(supervisor(ending=ending)))
    assert client.get("/readyz").json()["engine"] is None


def test_metrics_show_the_polled_engine(client: TestClient, tmp_path: Path, engine: FakeEngine) -> None:
    """A scrape does not ask the engine; the poll in between does."""
    write(tmp_path, journal(supervisor(engine_url=engine.url), rank(0), rank(1)))
    wait_until(lambda: "kimi_k3_ready 1.0" in client.get("/metrics").text)
    families = {family.name for family in text_string_to_metric_families(client.get("/metrics").text)}
    assert {"kimi_k3_phase", "kimi_k3_lossy", "process_cpu_seconds"} <= families


def test_openmetrics(client: TestClient) -> None:
    """The scraper's Accept header decides the format."""
    answer = client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
    assert client.get("/metrics").headers["content-type"].startswith("text/plain")


def test_null_is_sent(client: TestClient) -> None:
    """Unknown is a value of its own and not a missing key."""
    assert client.get("/conversion").json()["lossless"] is None


def test_real_server_retry_after(tmp_path: Path) -> None:
    """A client that came too early is told when to come again, by a real server too."""
    with serving(create_app(settings(tmp_path))) as url:
        answer = httpx.get(url + "/readyz", trust_env=False)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json()["reasons"][0]["code"] == "supervisor-missing"
        assert httpx.get(url + "/startupz", trust_env=False).headers["retry-after"] == "5"
        assert "retry-after" not in httpx.get(url + "/livez", trust_env=False).headers


def test_hanging_engine_slows_nothing_else(tmp_path: Path, engine: FakeEngine) -> None:
    """Liveness and scrapes answer at once while a crowd waits for an engine that hangs.

    Otherwise a hanging engine would get the sidecar killed and blind the monitoring, just when it
    is needed.
    """
    engine.mood = "hang"
    write(tmp_path, journal(supervisor(engine_url=engine.url)))

    app = create_app(settings(tmp_path, timeout=25), clock=lambda: NOW)
    with serving(app) as url, ThreadPoolExecutor(60) as pool, httpx.Client(trust_env=False) as client:
        waiting = [pool.submit(client.get, url + "/readyz", timeout=60) for _ in range(50)]
        wait_until(lambda: engine.asked > 0)
        for path in ("/livez", "/metrics", "/startupz", "/conversion"):
            begun = time.perf_counter()
            assert (path, client.get(url + path, timeout=30).status_code) == (path, 200)
            assert time.perf_counter() - begun < 10, path
        assert not any(one.done() for one in waiting), "the crowd no longer waits: the test shows nothing"
        engine.let_go.set()
        assert {one.result().status_code for one in waiting} == {503}
    assert engine.asked < 10


def test_scrapes_while_the_journal_changes(tmp_path: Path) -> None:
    """Files are replaced under the reader; no scrape sees half of one."""
    write(tmp_path, lossy())
    with serving(create_app(settings(tmp_path))) as url, ThreadPoolExecutor(4) as pool:
        scrapes = [pool.submit(httpx.get, url + "/metrics", trust_env=False, timeout=60) for _ in range(24)]
        while not all(scrape.done() for scrape in scrapes):
            write(tmp_path, lossy())
        texts = [scrape.result().text for scrape in scrapes]
    assert all("kimi_k3_journal_faults 0.0" in text for text in texts)
