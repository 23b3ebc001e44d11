# SPDX-License-Identifier: Apache-2.0
"""What other nodes may tell the first one's sidecar; whole exchanges are in tests/supervisor."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from kimi_k3.journal.models import NodeReport, Record, SupervisorRecord, node_file
from kimi_k3.journal.reader import MAX_RECORD_BYTES, read_journal
from kimi_k3.journal.writer import write_record
from kimi_k3.sidecar.app import create_app
from kimi_k3.sidecar.settings import Settings

from .builders import NOW, START_ID, journal, node, rank, supervisor, write
from .engine import FakeEngine

TOKEN = "of-both-nodes"
JSON = {"Content-Type": "application/json"}


def put(directory: Path, path: str, body: Record | bytes, token: str | None = TOKEN) -> Any:
    settings = Settings(
        state_dir=directory, refresh_seconds=0, token=None if token is None else SecretStr(token)
    )
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    content = body if isinstance(body, bytes) else body.model_dump_json().encode()
    with TestClient(create_app(settings, clock=lambda: NOW)) as client:
        return client.put(path, content=content, headers=headers)


def report(number: int = 1, start_id: str | None = START_ID) -> NodeReport:
    return NodeReport(start_id=start_id, supervisor=node(number).supervisor)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write(tmp_path, journal(supervisor(nodes=3, world_size=3)))
    return tmp_path


def test_a_node_is_heard(directory: Path) -> None:
    """It gets the first node's record in return, and is in the journal with the moment it was heard."""
    answer = put(directory, "/nodes/1", report())
    assert SupervisorRecord.model_validate_json(answer.content).start_id == START_ID
    assert put(directory, "/nodes/1/ranks/1", rank(1)).status_code == 204
    seen = read_journal(directory)
    assert [(one.node, one.heard_at) for one in seen.nodes] == [(1, NOW)]
    assert [one.rank for one in seen.ranks] == [1]
    assert seen.faults == ()


def test_asking_leaves_nothing(directory: Path) -> None:
    """A node that only asks for the start is no part of it."""
    assert put(directory, "/nodes/1", report(start_id=None)).status_code == 200
    assert read_journal(directory).nodes == ()


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/nodes/1", report(start_id="another"), 410, "begun another start"),
        ("/nodes/1", report(2), 422, "the record of node 2"),
        ("/nodes/0", report(), 422, "nothing to hear from node 0"),
        ("/nodes/3", report(), 422, "nothing to hear from node 3"),
        ("/nodes/1/ranks/2", rank(2), 422, "rank 2 is none of node 1"),
        ("/nodes/1/ranks/0", rank(0), 422, "rank 0 is none of node 1"),
        ("/nodes/1/ranks/1", rank(0), 422, "rank 0 is none of node 1"),
        ("/nodes/1/ranks/1", rank(1, start_id="another"), 410, "begun another start"),
        ("/nodes/1", b"{}", 422, "start_id"),
        ("/nodes/one", report(), 422, "node"),
        ("/nodes/1/ranks/1", b" " * (MAX_RECORD_BYTES + 1), 413, "larger than"),
    ],
)
def test_what_is_refused(directory: Path, path: str, body: Record | bytes, status: int, said: str) -> None:
    """Nothing of another start, of another node or of nobody gets into the journal."""
    answer = put(directory, path, body)
    assert (answer.status_code, said in answer.text) == (status, True), answer.text
    seen = read_journal(directory)
    assert (seen.nodes, seen.ranks) == ((), ())


def test_a_node_that_begins_anew(directory: Path) -> None:
    """Its part of this start is gone: it is not heard any more, and the first node learns why."""
    write_record(directory, node_file(1), node(1, heard_at=NOW - timedelta(seconds=6)))
    again = report(start_id=None).supervisor.model_copy(update={"start_id": "anew"})
    assert put(directory, "/nodes/1", NodeReport(start_id=None, supervisor=again)).status_code == 200
    [record] = read_journal(directory).nodes
    assert not record.superseded, "who only asks may be of another deployment"
    answer = put(directory, "/nodes/1", NodeReport(start_id=START_ID, supervisor=again))
    assert answer.status_code == 409
    [record] = read_journal(directory).nodes
    assert record.superseded
    assert put(directory, "/nodes/1", NodeReport(start_id=None, supervisor=again)).status_code == 409
    assert record.supervisor.start_id == "node1"
    assert put(directory, "/nodes/1", report()).status_code == 410


def test_a_rank_that_is_taken(directory: Path) -> None:
    """A machine that was started with another one's rank must not end what that one serves."""
    put(directory, "/nodes/1", report())
    stray = report(start_id=None).supervisor.model_copy(update={"start_id": "stray"})
    answer = put(directory, "/nodes/1", NodeReport(start_id=None, supervisor=stray))
    assert (answer.status_code, "is there already" in answer.text) == (409, True)
    [record] = read_journal(directory).nodes
    assert not record.superseded


def test_without_a_start(tmp_path: Path) -> None:
    """Nothing lives that a node could be part of: it asks again."""
    dead = NOW - timedelta(seconds=6)
    for seen in (journal(None), journal(supervisor(nodes=3, world_size=3, updated_at=dead))):
        write(tmp_path, seen)
        assert put(tmp_path, "/nodes/1", report(start_id=None)).status_code == 409


def test_on_another_node(tmp_path: Path) -> None:
    """A node that was told the wrong address says so instead of taking reports."""
    write(tmp_path, journal(supervisor(nodes=3, world_size=3, node=1, engine_url=None)))
    assert put(tmp_path, "/nodes/2", report(2)).status_code == 422


def test_only_with_a_token(directory: Path) -> None:
    """A sidecar that asks nobody who they are hears nobody, and one that asks refuses a wrong answer."""
    assert put(directory, "/nodes/1", report(), token=None).status_code == 403
    settings = Settings(state_dir=directory, token=SecretStr("another"))
    with TestClient(create_app(settings, clock=lambda: NOW)) as client:
        assert client.put("/nodes/1", content=report().model_dump_json()).status_code == 401


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_directory_that_cannot_be_written(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node tells it again, and serving goes on meanwhile."""
    monkeypatch.setattr("kimi_k3.sidecar.nodes.write_record", full)
    answer = put(directory, "/nodes/1", report())
    assert (answer.status_code, "No space left" in answer.text) == (503, True)


def test_a_full_directory_while_the_engine_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: FakeEngine
) -> None:
    """The first node cannot write that it lives, so the engine's answer tells the others.

    Which nodes are there is kept in memory meanwhile: one that falls silent takes the readiness as ever.
    """
    moment = NOW
    write(tmp_path, journal(supervisor(nodes=2, world_size=2, engine_url=engine.url)))
    settings = Settings(state_dir=tmp_path, refresh_seconds=0, poll_seconds=0.05, token=SecretStr(TOKEN))
    monkeypatch.setattr("kimi_k3.sidecar.nodes.write_record", full)
    with TestClient(create_app(settings, clock=lambda: moment)) as client:
        client.headers["Authorization"] = f"Bearer {TOKEN}"

        def told() -> int:
            body = report().model_dump_json()
            return client.put("/nodes/1", content=body, headers=JSON).status_code

        def codes() -> set[str]:
            return {reason["code"] for reason in client.get("/readyz").json()["reasons"]}

        assert "node-missing" in codes()
        deadline = time.monotonic() + 10
        while told() != 507:
            assert time.monotonic() < deadline
        assert not codes() & {"node-missing", "node-silent"}
        engine.mood = "dead"
        while told() != 503:
            assert time.monotonic() < deadline
        moment = NOW + timedelta(seconds=6)
        assert "node-silent" in codes()


def test_half_a_surrogate_pair(directory: Path) -> None:
    """JSON can say it, no file can hold it."""
    name = report().model_dump_json().replace('"profile":"', '"profile":"\\ud800', 1).encode()
    answer = put(directory, "/nodes/1", name)
    assert answer.status_code == 422
    assert read_journal(directory).nodes == ()
