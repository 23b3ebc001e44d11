# SPDX-License-Identifier: Apache-2.0
"""Every answer of the API says when it comes from lossy weights, and how lossy they are.

vLLM's official hook ``--middleware``; the plan adds it whenever the experts are int4.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kimi_k3.journal.models import relative_mse
from kimi_k3.journal.reader import Journal, read_journal
from kimi_k3.words.environment import EngineEnvironment
from kimi_k3.words.weights import INT4_NAME

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

HEADER = "x-kimi-k3-weights"
PREFIX = "/v1"


class LossHeader:
    """Pure ASGI: adds one header to the start of each response below ``/v1``; bodies pass untouched.

    What it says is made once, when the server starts: the engine, and so every conversion, is ready by then.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._header = (HEADER.encode(), header_value().encode())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass the request on, with a way to answer that adds the header."""
        if scope["type"] != "http" or not _of_the_api(scope):
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, self._header)
        try:
            await self._app(scope, receive, answer)
        except Exception:
            # Answered outside of all middleware otherwise, and without the header.
            if not answer.begun:
                await _internal_error(answer)
            raise


def _of_the_api(scope: Message) -> bool:
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path.startswith(PREFIX)


async def _internal_error(send: Send) -> None:
    error = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})


class _Answer:
    """Hands messages on. Not a coroutine: a chunk of a stream costs a call and a comparison."""

    __slots__ = ("_header", "_send", "begun")

    def __init__(self, send: Send, header: tuple[bytes, bytes]) -> None:
        self._send = send
        self._header = header
        self.begun = False

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.begun = True
            message["headers"] = [*message.get("headers", ()), self._header]
        return self._send(message)


def header_value() -> str:
    """What is said of this process's start: without a figure where the journal does not tell a whole one."""
    environment = EngineEnvironment.read()
    said = f"{INT4_NAME}; lossy"
    if environment.state_dir is None or environment.start_id is None:
        return said
    error = served_error(read_journal(environment.state_dir), environment.start_id)
    return said if error is None else f"{said}; rel_mse={error:.3g}"


def served_error(journal: Journal, start_id: str) -> float | None:
    """Squared error over energy of all experts of all ranks; ``None`` unless every conversion is there."""
    supervisor = journal.supervisor
    if supervisor is None or supervisor.start_id != start_id:
        return None
    done = [conversion for rank in journal.ranks for conversion in rank.conversions]
    if len(done) != supervisor.all_expected_conversions():
        return None
    return relative_mse(done)
