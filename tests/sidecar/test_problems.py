# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from kimi_k3.sidecar.app import create_app
from kimi_k3.sidecar.settings import Settings


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/metric", "did you mean '/metrics'?"),
        ("/healthz", "use one of /, /conversion, /events, /livez, /memory"),
        ("/ready", "did you mean '/readyz'?"),
        ("/status/", "did you mean '/status'?"),
        ("/zzzzzz", "use one of /, /conversion, /events, /livez, /memory"),
        ("/openapi", "did you mean '/openapi.json'?"),
        ("/%ff%00%0a", "use one of"),
        ("/" + "x" * 5000, "use one of"),
    ],
)
def test_unknown_path(tmp_path: Path, path: str, hint: str) -> None:
    """A probe on a misspelt path should be mended by reading its answer."""
    with TestClient(create_app(Settings(state_dir=tmp_path)), follow_redirects=False) as client:
        answer = client.get(path)
    assert answer.status_code == 404
    assert hint in answer.json()["detail"]
    assert len(answer.content) < 1000


def test_method_not_allowed(tmp_path: Path) -> None:
    """Everything here is read only, and says so in JSON."""
    with TestClient(create_app(Settings(state_dir=tmp_path))) as client:
        answer = client.post("/status")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
    assert "use GET" in answer.json()["detail"]


def test_defect_shows_no_traceback(tmp_path: Path) -> None:
    """The traceback belongs into the log; a client learns only that there is one."""
    app = create_app(Settings(state_dir=tmp_path))

    @app.get("/broken")
    def broken() -> None:
        raise RuntimeError("secret detail")

    with TestClient(app, raise_server_exceptions=False) as client:
        answer = client.get("/broken")
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json() == {
        "type": "about:blank",
        "title": "Internal Server Error",
        "status": 500,
        "detail": "the sidecar could not answer this; its log tells why",
    }


def test_every_method_of_a_path_is_allowed(tmp_path: Path) -> None:
    """A path with several methods names them all, whichever route comes first."""
    with TestClient(create_app(Settings(state_dir=tmp_path))) as client:
        assert client.put("/warnings/one/acknowledgement").headers["allow"] == "DELETE, POST"
        assert client.put("/readyz").headers["allow"] == "GET, HEAD"
