# SPDX-License-Identifier: Apache-2.0
"""What comes back is foreign: its text, its size, its version."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.sidecar.readiness import Readiness
from kimi_k3.sidecar.view import Alive
from kimi_k3.watch import client
from kimi_k3.watch.client import NoAnswer, NotUnderstood, Sidecar, understood
from kimi_k3.words.text import printable
from tests.certificates import signed

from .answering import Answer, answering

READINESS: dict[str, Any] = {"ready": False, "phase": "loading", "reasons": [], "engine": None}


@contextmanager
def sidecar(answer: Answer, token: str | None = None) -> Iterator[Sidecar]:
    """A client of a server that always answers the same."""
    with answering(lambda path, header: answer) as url:
        asking = Sidecar(url, token)
        try:
            yield asking
        finally:
            asking.close()


def test_a_probe_that_says_no_has_answered() -> None:
    """503 with a body is how a probe says why not."""
    with sidecar((503, json.dumps(READINESS).encode())) as asking:
        assert asking.ask("/readyz", Readiness).phase == "loading"


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        ((200, b"<html>"), "did not answer with JSON"),
        ((200, b"[" * 100_000), "did not answer with JSON"),
        ((200, b'{"a":' * 900 + b"1" + b"}" * 900), "nested too deeply|is not as version"),
        ((200, b'"x"'), "is not as version"),
        ((404, b"{}"), "HTTP 404"),
        ((307, b""), "HTTP 307"),
        ((500, b"{}"), "HTTP 500"),
        ((200, b'{"ready": 3, "phase": "x\\u001b[2J"}'), "is not as version"),
    ],
)
def test_no_sidecar(answer: Answer, part: str) -> None:
    """Something else that listens there is told in one printable line; a redirect is not followed."""
    with sidecar(answer) as asking, pytest.raises(NotUnderstood, match=part) as caught:
        asking.ask("/readyz", Readiness)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(("status", "ready"), [(503, True), (200, False)])
def test_readiness_that_contradicts_itself(status: int, ready: bool) -> None:
    """A false ready is the worst that can be shown, so both must say it."""
    answer = status, json.dumps(READINESS | {"ready": ready}).encode()
    with sidecar(answer) as asking, pytest.raises(NotUnderstood, match=f"HTTP {status}"):
        asking.readiness()


def test_headers_drop_by_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each drop comes in time, and the whole never does."""
    monkeypatch.setattr(client, "ANSWER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\n")
                for number in range(200):
                    connection.sendall(f"X-{number}: 1\r\n".encode())
                    time.sleep(0.05)

        thread = threading.Thread(target=drip)
        thread.start()
        asking = Sidecar(f"http://127.0.0.1:{listener.getsockname()[1]}", None)
        with pytest.raises(NoAnswer, match="took longer"):
            asking.ask("/livez", Alive)
        asking.close()
        thread.join()


def test_an_answer_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not fill the memory of the machine that watches."""
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 1000)
    with sidecar((200, b" " * 5000)) as asking, pytest.raises(NotUnderstood, match="more than 1000 bytes"):
        asking.ask("/readyz", Readiness)


def test_nobody() -> None:
    """A refused connection is silence, with its reason."""
    with answering(lambda path, header: (200, b"")) as url:
        pass
    asking = Sidecar(url, None)
    with pytest.raises(NoAnswer, match="refused"):
        asking.ask("/livez", Alive)
    asking.close()


def test_a_certificate_of_a_stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told for what it is: OpenSSL's number, read as the system's, is "Operation not permitted"."""
    certificate = signed(tmp_path, "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certificate, certificate.key)
    # On the loopback address no certificate is checked otherwise.
    monkeypatch.setattr("kimi_k3.words.tls.is_loopback", lambda _: False)

    def greet(listening: socket.socket) -> None:
        with contextlib.suppress(OSError), context.wrap_socket(listening.accept()[0], server_side=True):
            """The client hangs up."""

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = threading.Thread(target=greet, args=(listening,))
        server.start()
        asking = Sidecar(f"https://127.0.0.1:{listening.getsockname()[1]}", None)
        with pytest.raises(NoAnswer, match="TLS: unable to get local issuer certificate"):
            asking.readiness()
        asking.close()
        server.join()


def test_the_token_is_sent_and_never_told() -> None:
    """The sidecar's bearer token; one that it refuses is the operator's to mend."""

    def answer(path: str, header: str | None) -> Answer:
        return (200, b"{}") if header == "Bearer right" else (401, b"{}")

    with answering(answer) as url:
        right, wrong, none = (Sidecar(url, token) for token in ("right", "wrong-one", None))
        assert right.ask("/livez", Alive) == Alive()
        for asking in (wrong, none):
            with pytest.raises(OperatorError) as caught:
                asking.ask("/livez", Alive)
            assert caught.value.exit_code == ExitCode.USAGE
            assert "--token-file" in str(caught.value)
            assert "wrong-one" not in str(caught.value)
        for asking in (right, wrong, none):
            asking.close()


def test_what_a_newer_version_added_is_left_out() -> None:
    """An older terminal must go on showing what it knows."""
    reason = {"code": "starting", "message": "It starts.", "since": 3}
    newer = READINESS | {"reasons": [reason], "region": "north", "more": {"x": [1]}}
    assert understood("/readyz", Readiness, newer).reasons[0].message == "It starts."


def test_what_another_version_lacks_is_told() -> None:
    """In one line that names the place, and not as an empty answer."""
    with pytest.raises(NotUnderstood, match=r"/readyz is not as version .* knows it: ready: ") as caught:
        understood("/readyz", Readiness, {key: READINESS[key] for key in READINESS if key != "ready"})
    assert "\n" not in str(caught.value)


@given(st.text())
def test_no_text_commands_the_terminal(text: str) -> None:
    """Escape sequences, line ends, and marks that turn the direction of writing are written out."""
    told = printable(text)
    assert told.isprintable()
    assert told == text or not text.isprintable()


def test_every_text_of_an_answer_is_cleaned() -> None:
    """Names of files and what an engine's process said come from anywhere."""
    evil = "\x1b]0;owned\x07\u202e\ud800\r\n"
    seen = understood(
        "/readyz", Readiness, READINESS | {"reasons": [{"code": "ended", "message": evil}], evil: 1}
    )
    assert seen.reasons[0].message == "\\x1b]0;owned\\x07\\u202e\\ud800\\r\\n"
