# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from kimi_k3.journal.models import Notice, SupervisorRecord
from kimi_k3.journal.reader import JournalReader
from kimi_k3.sidecar.acknowledgement import read_acknowledgements
from kimi_k3.sidecar.app import create_app
from kimi_k3.sidecar.guard import PROBES
from kimi_k3.sidecar.settings import Settings
from kimi_k3.words.phases import Phase
from kimi_k3.words.weights import ScaleRule

from .builders import NOW, REQUANTISATION, journal, lossy, phases, rank, supervisor, write
from .engine import FakeEngine
from .serving import serving, wait_until

PATHS = ("/livez", "/startupz", "/readyz", "/status", "/conversion", "/memory", "/warnings", "/metrics")


def settings(directory: Path, *, timeout: float = 5.0) -> Settings:
    """A sidecar that looks at ``directory``."""
    return Settings(state_dir=directory, engine_timeout_seconds=timeout, poll_seconds=0.05, refresh_seconds=0)


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
        wait_until(lambda: client.get("/readyz").json()["engine"] is not None)
        seen[phase] = (client.get("/startupz").status_code, client.get("/readyz").status_code)
    assert seen == {
        Phase.LOADING: (503, 503),
        Phase.WARMING: (503, 503),
        Phase.READY: (200, 200),
        Phase.DRAINING: (200, 503),
        Phase.STOPPED: (503, 503),
    }


def test_ready_follows_the_engine(client: TestClient, tmp_path: Path, engine: FakeEngine) -> None:
    """The engine is asked again and again; an old answer lets traffic run into a dead engine."""
    write(tmp_path, journal(supervisor(engine_url=engine.url)))
    wait_until(lambda: client.get("/readyz").status_code == 200)
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


def test_hanging_engine_slows_nothing(tmp_path: Path, engine: FakeEngine) -> None:
    """Every answer comes at once while the engine hangs, and readiness says no without waiting for it.

    Otherwise a hanging engine would get the sidecar killed and blind the monitoring, just when it is needed.
    """
    engine.mood = "hang"
    write(tmp_path, journal(supervisor(engine_url=engine.url)))
    app = create_app(settings(tmp_path, timeout=25), clock=lambda: NOW)
    with serving(app) as url, httpx.Client(trust_env=False, timeout=10) as client:
        wait_until(lambda: engine.asked > 0)
        for path in PATHS:
            answer = client.get(url + path)
            assert (path, answer.status_code) == (path, 503 if path == "/readyz" else 200)
        assert [one["code"] for one in client.get(url + "/readyz").json()["reasons"]] == ["engine-unknown"]
        engine.let_go.set()
    assert engine.asked < 10


def test_hanging_directory_holds_up_no_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system whose server is gone must not get the sidecar killed; what was read last is told."""
    held = threading.Event()
    write(tmp_path, journal(supervisor()))
    monkeypatch.setattr("kimi_k3.sidecar.state.READ_PATIENCE_SECONDS", 0.05)
    with TestClient(create_app(settings(tmp_path), clock=lambda: NOW)) as asking:
        assert asking.get("/startupz").status_code == 200
        monkeypatch.setattr(JournalReader, "read", lambda _: held.wait(30))
        try:
            assert asking.get("/startupz").status_code == 200
            assert asking.get("/livez").status_code == 200
        finally:
            held.set()


def test_hanging_directory_takes_no_traffic_away(tmp_path: Path, engine: FakeEngine) -> None:
    """What cannot be read is no sign of a supervisor that is gone; the engine itself still answers."""
    held = threading.Event()
    moment = [NOW]
    write(tmp_path, journal(supervisor(engine_url=engine.url)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kimi_k3.sidecar.state.READ_PATIENCE_SECONDS", 0.05)
        with TestClient(create_app(settings(tmp_path), clock=lambda: moment[0])) as asking:
            wait_until(lambda: asking.get("/readyz").status_code == 200)
            read = JournalReader.read
            patch.setattr(JournalReader, "read", lambda reader: held.wait(30) and read(reader))
            try:
                moment[0] += timedelta(seconds=60)
                wait_until(lambda: "state-unwritable" in codes(asking))
                wait_until(lambda: asking.get("/readyz").status_code == 200)
            finally:
                held.set()
            wait_until(lambda: "supervisor-stale" in codes(asking))
            assert [one["code"] for one in asking.get("/readyz").json()["reasons"]] == ["supervisor-stale"]


def codes(asking: TestClient) -> list[str]:
    """What stands in ``/warnings``."""
    return [one["code"] for one in asking.get("/warnings").json()["warnings"]]


def test_directory_that_hangs_from_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was ever read, so nothing is known, and why is said."""
    held = threading.Event()
    monkeypatch.setattr("kimi_k3.sidecar.state.READ_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(JournalReader, "read", lambda _: held.wait(30))
    with TestClient(create_app(settings(tmp_path), clock=lambda: NOW)) as asking:
        try:
            assert asking.get("/readyz").status_code == 503
            assert "has not been read" in asking.get("/status").json()["faults"][0]["why"]
        finally:
            held.set()


def test_probes_answer_head(client: TestClient) -> None:
    """Some load balancers probe with HEAD."""
    assert {path: client.head(path).status_code for path in PROBES} == {
        "/livez": 200,
        "/startupz": 503,
        "/readyz": 503,
    }


def test_acknowledgement_is_kept(tmp_path: Path) -> None:
    """Who and when survive a restart of the sidecar, and another start with the same weights."""
    path = "/warnings/lossy-weights/acknowledgement"
    write(tmp_path, lossy())
    with TestClient(create_app(settings(tmp_path), clock=lambda: NOW)) as client:
        given = client.post(path, json={"by": " Ada ", "note": "agreed in the review"})
        assert given.status_code == 200
        assert given.json()["acknowledged"]["by"] == "Ada"
        # At once, not with the next reading.
        assert client.get("/warnings").json()["warnings"][0] == given.json()
    for other in (lossy(), journal(*_another_start())):
        write(tmp_path, other)
        with TestClient(create_app(settings(tmp_path), clock=lambda: NOW)) as client:
            [one] = [w for w in client.get("/warnings").json()["warnings"] if w["id"] == "lossy-weights"]
            assert one["acknowledged"] == {
                "by": "Ada",
                "at": "2026-05-01T12:20:00Z",
                "note": "agreed in the review",
            }
    with TestClient(create_app(settings(tmp_path), clock=lambda: NOW)) as client:
        assert client.delete(path).status_code == 204
        assert client.get("/warnings").json()["warnings"][0]["acknowledged"] is None


def test_another_conversion_is_acknowledged_anew(tmp_path: Path) -> None:
    """Who agreed to one loss has not agreed to another."""
    write(tmp_path, lossy())
    with TestClient(create_app(settings(tmp_path), clock=lambda: NOW)) as client:
        client.post("/warnings/lossy-weights/acknowledgement", json={"by": "Ada"})
        before = lossy().supervisor
        assert before is not None
        way = REQUANTISATION.model_copy(update={"rule": ScaleRule.AMAX})
        write(tmp_path, journal(before.model_copy(update={"requantisation": way})))
        found = {one["id"]: one for one in client.get("/warnings").json()["warnings"]}
        assert found["lossy-weights"]["acknowledged"] is None


def _another_start() -> tuple[SupervisorRecord]:
    before = lossy().supervisor
    assert before is not None
    return (before.model_copy(update={"start_id": "next-start"}),)


@pytest.mark.parametrize(
    ("warning", "body", "status", "said"),
    [
        ("supervisor-missing", {"by": "Ada"}, 409, "Start the deployment"),
        ("supervisor-mising", {"by": "Ada"}, 404, "did you mean 'supervisor-missing'?"),
        ("supervisor-missing", {"by": "  "}, 422, "by: "),
        ("supervisor-missing", {"by": "\u200b"}, 422, "by: "),
        ("supervisor-missing", {"by": "Ada", "who": 1}, 422, "who: Extra inputs"),
        ("supervisor-missing", {"by": "x" * 101}, 422, "by: "),
        ("supervisor-missing", "no object", 422, "the body"),
    ],
)
def test_acknowledgement_refused(
    client: TestClient, warning: str, body: object, status: int, said: str
) -> None:
    """What keeps traffic away is mended, not waved away; a mistake is named."""
    answer = client.post(f"/warnings/{warning}/acknowledgement", json=body)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert said in answer.json()["detail"]


def test_acknowledgement_that_is_no_json(client: TestClient) -> None:
    """curl without a header sends a form, and whoever types it wants to know what to add."""
    answer = client.post("/warnings/supervisor-missing/acknowledgement", data={"by": "Ada"})
    assert answer.status_code == 422
    assert "'Content-Type: application/json'" in answer.json()["detail"]


def test_acknowledgement_that_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk loses nothing silently."""
    write(tmp_path, lossy())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("kimi_k3.sidecar.app.write_acknowledgements", full)
    with TestClient(create_app(settings(tmp_path), clock=lambda: NOW)) as client:
        answer = client.post("/warnings/lossy-weights/acknowledgement", json={"by": "Ada"})
        assert (answer.status_code, "No space left" in answer.json()["detail"]) == (503, True)
        assert client.get("/warnings").json()["warnings"][0]["acknowledged"] is None


def test_broken_file_of_acknowledgements(tmp_path: Path) -> None:
    """It is told like any other file that cannot be trusted, and kept: what it holds somebody gave."""
    write(tmp_path, lossy())
    (tmp_path / "acknowledgements.json").write_text("{")
    with TestClient(create_app(settings(tmp_path), clock=lambda: NOW)) as client:
        assert client.get("/status").json()["faults"] == [
            {"file": "acknowledgements.json", "why": "is not a file of this version"}
        ]
        path = "/warnings/lossy-weights/acknowledgement"
        refused = client.post(path, json={"by": "Ada"})
        assert (refused.status_code, "move it away" in refused.json()["detail"]) == (503, True)
        assert client.delete(path).status_code == 503
        assert (tmp_path / "acknowledgements.json").read_text() == "{"
        (tmp_path / "acknowledgements.json").rename(tmp_path / "aside")
        assert client.post(path, json={"by": "Ada"}).status_code == 200
        assert client.get("/status").json()["faults"] == []


def test_acknowledgements_at_once(tmp_path: Path) -> None:
    """Each one that was answered with 200 is kept: they are read, changed and written one at a time."""
    notices = tuple(Notice(check=f"check-{n}", what=f"what {n}", remedy="look") for n in range(20))
    write(tmp_path, journal(supervisor(notices=notices)))
    with serving(create_app(settings(tmp_path), clock=lambda: NOW)) as url, ThreadPoolExecutor(10) as pool:
        names = [
            one["id"]
            for one in httpx.get(url + "/warnings", trust_env=False).json()["warnings"]
            if one["acknowledgeable"]
        ]
        assert len(names) == 20

        def acknowledge(name: str) -> int:
            path = f"{url}/warnings/{name}/acknowledgement"
            return httpx.post(path, json={"by": "Ada"}, trust_env=False, timeout=60).status_code

        assert set(pool.map(acknowledge, names)) == {200}
        assert len(read_acknowledgements(tmp_path)[0].kept) == 20


def test_scrapes_while_the_journal_changes(tmp_path: Path) -> None:
    """Files are replaced under the reader; no scrape sees half of one."""
    write(tmp_path, lossy())
    with serving(create_app(settings(tmp_path))) as url, ThreadPoolExecutor(4) as pool:
        scrapes = [pool.submit(httpx.get, url + "/metrics", trust_env=False, timeout=60) for _ in range(24)]
        while not all(scrape.done() for scrape in scrapes):
            write(tmp_path, lossy())
        texts = [scrape.result().text for scrape in scrapes]
    assert all("kimi_k3_journal_faults 0.0" in text for text in texts)
