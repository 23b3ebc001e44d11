# SPDX-License-Identifier: Apache-2.0
"""Which requests reach vLLM when there is a key."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kimi_k3.engine.key_guard import KeyGuard


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "the key")


def _ask(path: str, *authorization: bytes, kind: str = "http", method: str = "POST") -> list[dict[str, Any]]:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "passed"})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    headers = [(b"authorization", value) for value in authorization]
    scope = {"type": kind, "method": method, "path": path, "headers": headers}
    asyncio.run(KeyGuard(app)(scope, receive, send))
    return sent


@pytest.mark.parametrize(
    "path", ["/v1/models", "/invocations", "/tokenize", "/anything/new", "/health/../v1"]
)
@pytest.mark.parametrize(
    "authorization", [(), (b"",), (b"Bearer ",), (b"Bearer wrong",), (b"the key",), (b"Bearer the key",) * 2]
)
def test_everything_is_guarded_that_is_not_named(path: str, authorization: tuple[bytes, ...]) -> None:
    """vLLM guards a list of prefixes, so a new path is open until somebody thinks of it (#58144)."""
    assert _ask(path, *authorization)[0]["status"] == 401


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_probes_need_no_key(path: str) -> None:
    """A probe with a key would put the key into every manifest."""
    assert _ask(path, method="GET") == [{"type": "passed"}]


def test_the_key_opens() -> None:
    """The one thing it must let through."""
    assert _ask("/v1/chat/completions", b"Bearer the key") == [{"type": "passed"}]
    assert _ask("/v1/chat/completions", method="OPTIONS") == [{"type": "passed"}]


def test_websockets_are_guarded_too() -> None:
    """vLLM's realtime endpoint runs the model as well."""
    assert _ask("/v1/realtime", kind="websocket")[0]["type"] == "websocket.close"


def test_without_a_key_there_is_nothing_to_guard_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty expected key would let `Bearer ` in."""
    monkeypatch.setenv("VLLM_API_KEY", "")
    with pytest.raises(RuntimeError, match="needs VLLM_API_KEY"):
        _ask("/health")
