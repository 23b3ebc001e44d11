# SPDX-License-Identifier: Apache-2.0
"""What a node makes of the first one's answers; whole exchanges are in test_nodes.py."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import certifi
import httpx
import pytest

from kimi_k3.journal.models import Ending, NodeReport, SupervisorRecord
from kimi_k3.supervisor.leader import Leader, Told, disagreement, told
from kimi_k3.words.weights import Weights
from tests.sidecar.builders import node, rank, supervisor

FIRST = supervisor(nodes=3, world_size=3)
OWN = node(1).supervisor


def leader(*answers: httpx.Response | Exception, asked: list[httpx.Request] | None = None) -> Leader:
    left = list(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        if asked is not None:
            asked.append(request)
        found = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(found, Exception):
            raise found
        return found

    made = Leader("http://first", token="t", transport=httpx.MockTransport(answer))
    made.may_join.set()
    return made


def record(found: SupervisorRecord = FIRST) -> httpx.Response:
    return httpx.Response(200, content=found.model_dump_json())


@pytest.mark.parametrize(
    "answer",
    [httpx.ConnectError("refused"), httpx.Response(503), httpx.Response(409, json={"detail": "no start"})],
)
def test_what_is_waited_for(answer: httpx.Response | Exception) -> None:
    """The first node may be scheduled an hour later."""
    first = leader(answer)
    first.exchange(Told(OWN))
    assert not first.joined
    assert first.refusal is None
    assert first.problem


@pytest.mark.parametrize("status", [401, 403, 404, 422])
def test_what_no_waiting_would_mend(status: int) -> None:
    """A wrong token, another program, another version."""
    first = leader(httpx.Response(status, text="no"))
    first.exchange(Told(OWN))
    assert str(status) in (first.refusal or "")


def test_a_node_joins_when_its_own_checks_have_passed() -> None:
    """What fails there before is no reason to end the first node's start."""
    asked: list[httpx.Request] = []
    first = leader(record(), asked=asked)
    first.may_join.clear()
    first.exchange(Told(OWN))
    assert (first.joined, asked) == (False, [])


def test_an_answer_of_another_version() -> None:
    """A record with fields that are not known here is not half understood."""
    first = leader(httpx.Response(200, json={"what": "is this"}))
    first.exchange(Told(OWN))
    assert "does not understand" in (first.refusal or "")


def test_once_joined_another_start_is_the_end() -> None:
    """The ranks of this node wait for the others of a start that is over."""
    first = leader(record(), record(), httpx.Response(410, json={"detail": "another start"}))
    first.exchange(Told(OWN))
    assert first.joined
    first.exchange(Told(OWN))
    assert first.refusal == "the first node (http://first): HTTP 410: another start"


@pytest.mark.parametrize("status", [307, 401, 403, 404, 408, 409, 413, 429, 500, 503])
def test_once_joined_nothing_else_is(status: int) -> None:
    """A proxy, a token that was changed, a sidecar that cannot read: what serves goes on without it."""
    first = leader(record(), record(), httpx.Response(status))
    first.exchange(Told(OWN))
    assert first.joined
    first.exchange(Told(OWN))
    assert first.refusal is None


def test_an_old_record_is_no_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sidecar outlives its supervisor and answers with what that wrote last."""
    moment = 100.0
    monkeypatch.setattr("kimi_k3.supervisor.leader.time.monotonic", lambda: moment)
    later = FIRST.model_copy(update={"updated_at": FIRST.updated_at + timedelta(seconds=1)})
    first = leader(record(), record(), record(), record(later))
    first.exchange(Told(OWN))
    assert first.joined
    moment = 110.0
    first.exchange(Told(OWN))
    assert first.silence() == 10
    first.exchange(Told(OWN))
    assert first.silence() == 0


@pytest.mark.parametrize(("status", "silence"), [(507, 0), (503, 10), (502, 10)])
def test_a_full_directory_of_the_first_node(
    monkeypatch: pytest.MonkeyPatch, status: int, silence: float
) -> None:
    """Only its sidecar's word that its engine serves is a sign of life; a proxy's error is none."""
    moment = 100.0
    monkeypatch.setattr("kimi_k3.supervisor.leader.time.monotonic", lambda: moment)
    first = leader(record(), record(), httpx.Response(status))
    first.exchange(Told(OWN))
    moment = 110.0
    first.exchange(Told(OWN))
    assert first.silence() == silence


def test_ranks_that_could_not_write_their_records() -> None:
    """What they said in the log is told instead, as of the first node's start."""
    asked: list[httpx.Request] = []
    first = leader(record(), asked=asked)
    first.exchange(Told(OWN))
    whole, absent, old = (rank(number, start_id="node1") for number in (1, 2, 3))
    said = whole.summary(), absent.summary(), old.summary().model_copy(update={"signs_refused": True})
    first.exchange(Told(OWN, (whole, old), said))
    report = NodeReport.model_validate_json(asked[2].content)
    assert [(each.rank, each.start_id) for each in report.summaries] == [
        (2, FIRST.start_id),
        (3, FIRST.start_id),
    ]


def test_the_end_is_told_again_until_it_is_heard() -> None:
    """A sidecar that restarts just then would otherwise leave the first node to find out by silence."""
    ending = Ending(at=OWN.updated_at, exit_code=1, reason="it broke")
    own = [OWN]
    asked: list[httpx.Request] = []
    answers = record(), record(), httpx.ConnectError("refused"), httpx.ConnectError("refused"), record()
    first = leader(*answers, asked=asked)
    with told(first, lambda: Told(own[0])):
        while not first.joined:
            first.ask_now.set()
        own[0] = OWN.model_copy(update={"ending": ending})
    heard = [NodeReport.model_validate_json(request.content).supervisor.ending for request in asked[4:]]
    assert ending in heard


def test_a_checkpoints_directory_may_be_called_otherwise() -> None:
    """Machines have their own places for the same files."""
    elsewhere = FIRST.checkpoint.model_copy(update={"name": "models-k3"})
    assert disagreement(OWN.model_copy(update={"checkpoint": elsewhere}), FIRST) is None


def test_authorities_that_cannot_be_read(tmp_path: Path) -> None:
    """A file that is just being renewed stops nobody from asking again."""
    authority = tmp_path / "ca.crt"
    authority.write_text(certifi.contents())
    first = Leader("https://first.invalid:1", token="t", authorities=authority)
    first.may_join.set()
    authority.write_text("")
    for _ in range(2):
        first.exchange(Told(OWN))
        assert not first.joined
    assert first.refusal is None


def test_each_change_of_a_rank_is_told_once() -> None:
    """As a record of the first node's start; what did not arrive is told again."""
    asked: list[httpx.Request] = []
    ok = httpx.Response(204)
    first = leader(record(), record(), record(), httpx.Response(503), record(), ok, record(), asked=asked)
    first.exchange(Told(OWN))
    assert first.joined
    own = rank(1, start_id="node1")
    for _ in range(3):
        first.exchange(Told(OWN, (own,)))
    of_ranks = [request for request in asked if "ranks" in request.url.path]
    assert len(of_ranks) == 2
    assert b'"start_id":"this-start"' in of_ranks[-1].content
    assert of_ranks[-1].headers["authorization"] == "Bearer t"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"profile": "ep8"}, "profile"),
        ({"nodes": 2}, "number of nodes"),
        ({"world_size": 6}, "number of ranks"),
        ({"weights": Weights.INT4}, "weights"),
        ({"served_model_name": "other"}, "model name"),
        ({"stages": ((1,), (2,))}, "pipeline stages"),
        ({"checkpoint": FIRST.checkpoint.model_copy(update={"total_bytes": 1})}, "checkpoint"),
        ({"versions": {"vllm": "0.33.0"}}, "0.33.0"),
        ({"options": {"--max-model-len": "0123"}}, "--max-model-len"),
    ],
)
def test_what_all_nodes_must_have_in_common(changes: dict[str, Any], named: str) -> None:
    """Half a model of one kind and half of another would answer, too."""
    assert disagreement(OWN, FIRST) is None
    found = disagreement(OWN.model_copy(update=changes), FIRST)
    assert found is not None
    assert named in found
