# SPDX-License-Identifier: Apache-2.0
"""Who may ask, and what a request may hold, on a real server."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from kimi_k3.sidecar import connection, guard
from kimi_k3.sidecar.app import create_app
from kimi_k3.sidecar.settings import Settings

from .builders import lossy, write
from .serving import serving
from .test_app import PATHS

TOKEN = "correct-horse"
ACKNOWLEDGE = "/warnings/lossy-weights/acknowledgement"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A sidecar that asks for a token."""
    write(tmp_path, lossy())
    with serving(create_app(Settings(state_dir=tmp_path, token=SecretStr(TOKEN)))) as address:
        yield address


def test_token(url: str) -> None:
    """Without it only probes answer, so that orchestrators, which send none, can ask them."""
    with httpx.Client(base_url=url, trust_env=False) as client:
        for path in (*PATHS, "/events", "/openapi.json", "/nothing-there"):
            refused = client.get(path).status_code == 401
            assert (path, refused) == (path, path not in guard.PROBES)
        assert client.post(ACKNOWLEDGE, json={"by": "Ada"}).status_code == 401
        given = {"Authorization": f"Bearer {TOKEN}"}
        assert client.get("/status", headers=given).status_code == 200
        assert client.post(ACKNOWLEDGE, json={"by": "Ada"}, headers=given).status_code == 200


@pytest.mark.parametrize("given", ["", "Bearer", f"bearer {TOKEN}", f"Bearer {TOKEN}x", TOKEN, "é"])
def test_nearly_a_token(url: str, given: str) -> None:
    """Only the very token counts, and the answer does not tell it."""
    answer = httpx.get(
        url + "/status", headers=[(b"Authorization", given.encode("latin-1"))], trust_env=False
    )
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert TOKEN not in answer.text


def test_token_is_not_told(url: str, tmp_path: Path) -> None:
    """Neither an answer nor a file of the state directory holds it."""
    given = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=url, trust_env=False, headers=given) as client:
        client.post(ACKNOWLEDGE, json={"by": "Ada"})
        texts = [client.get(path).text for path in (*PATHS, "/openapi.json")]
    files = [path.read_text() for path in tmp_path.iterdir()]
    assert not [text for text in (*texts, *files) if TOKEN in text]


def test_large_body(url: str) -> None:
    """An acknowledgement is short; a body without end must not fill the memory."""
    given = {"Authorization": f"Bearer {TOKEN}"}
    most = guard.MAX_BODY_BYTES
    for content in (b"x" * (most + 1), iter([b"x" * most, b"x"])):
        answer = httpx.post(url + ACKNOWLEDGE, content=content, headers=given, trust_env=False)
        assert (answer.status_code, answer.json()["status"]) == (413, 413)


def test_slow_body(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who promises a body and does not send it is told so and let go."""
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.1)
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(
            f"POST {ACKNOWLEDGE} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
            "Content-Length: 20\r\n\r\n{".encode()
        )
        assert client.recv(65536).startswith(b"HTTP/1.1 408")


def test_large_head_at_once(url: str) -> None:
    """The server limits a head that goes on coming; one that came whole is refused all the same."""
    answer = httpx.get(url + "/livez", headers={"X-Large": "x" * 40_000}, trust_env=False)
    assert answer.status_code in (400, 431)


def test_crowd(tmp_path: Path) -> None:
    """A flood of clients is told to wait, but must not get the sidecar restarted for not being alive."""
    with serving(create_app(Settings(state_dir=tmp_path), crowded=lambda: True)) as address:
        answer = httpx.get(address + "/status", trust_env=False)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
        assert "too many clients" in answer.json()["detail"]
        assert httpx.get(address + "/livez", trust_env=False).status_code == 200


def test_other_protocols(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """A wish for WebSocket is ignored, without advice about what to install."""
    wish = {"Connection": "upgrade", "Upgrade": "websocket"}
    assert httpx.get(url + "/livez", headers=wish, trust_env=False).status_code == 200
    assert "pip" not in caplog.text


@pytest.fixture
def patient_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A sidecar whose connections wait a tenth of a second."""
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.1)
    with serving(create_app(Settings(state_dir=tmp_path))) as address:
        yield address


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.1\r\nHost:"])
def test_slow_head(patient_url: str, sent: bytes) -> None:
    """Half a request that never ends must not hold a connection for ever."""
    host, port = patient_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(sent)
        assert client.recv(100) == b""


def test_slow_second_request(patient_url: str) -> None:
    """A first good request buys no more time for half of a second one."""
    host, port = patient_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        received = client.recv(65536)
        while b"true" not in received:
            received += client.recv(65536)
        client.sendall(b"GET /livez HTTP/1.1\r\n")
        assert client.recv(100) == b""


def test_large_head(patient_url: str) -> None:
    """Headers without end are refused; uvicorn looks at what it has got after each 64 KiB."""
    with httpx.Client(trust_env=False) as client:
        # The refusal may be lost with what of the headers nobody reads any more.
        with contextlib.suppress(httpx.ReadError, httpx.WriteError):
            large = {"x": "y" * (20 * connection.MAX_HEAD_BYTES)}
            assert client.get(patient_url + "/livez", headers=large).status_code == 400
        assert client.get(patient_url + "/livez").status_code == 200


def test_long_answer_is_not_cut(patient_url: str) -> None:
    """The limit is for the request: a stream goes on."""
    with httpx.stream("GET", patient_url + "/events", trust_env=False, timeout=10) as answer:
        kinds = set()
        for line in answer.iter_lines():
            kinds.add(line.partition(":")[0])
            if "memory" in line:
                break
    assert {"retry", "id", "event", "data"} <= kinds
