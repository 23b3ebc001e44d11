# SPDX-License-Identifier: Apache-2.0
"""Who may ask, and how much a request may hold: around the whole application."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kimi_k3.journal.reader import MAX_RECORD_BYTES
from kimi_k3.sidecar.connection import MAX_HEAD_BYTES
from kimi_k3.sidecar.problems import problem
from kimi_k3.sidecar.readiness import RETRY_AFTER_SECONDS

PROBES = ("/livez", "/startupz", "/readyz")
"""What orchestrators ask, which send no token."""

OPEN = (*PROBES, "/")
"""The page holds nothing of the deployment; what it shows it asks for with the token."""

NODES = "/nodes/"
"""Below it other nodes tell what their ranks report, in records."""

MAX_BODY_BYTES = 16 * 1024
"""An acknowledgement is a name and a note, each character perhaps escaped in twelve bytes."""

BODY_SECONDS = 5.0
"""How long a client may take for the body."""


class Guard:
    """Refuses what has no token, or too large or too slow a body, or comes with too many others.

    Args:
        app: what is guarded.
        token: that clients must send; ``None`` lets everybody ask.
        crowded: whether there is room for nobody but the probes.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, crowded: Callable[[], bool]) -> None:
        self._app = app
        self._crowded = crowded
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # The server refuses a head that goes on coming, but not one that came at once.
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEAD_BYTES:
            await problem(431, f"the headers are larger than {MAX_HEAD_BYTES} bytes")(scope, receive, send)
            return
        # Whoever floods the sidecar must not get it restarted for not being alive.
        if scope["path"] not in PROBES and self._crowded():
            await problem(
                503, "too many clients; ask again later", {"Retry-After": str(RETRY_AFTER_SECONDS)}
            )(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._expected is not None and scope["path"] not in OPEN:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                refusal = problem(
                    401,
                    "a token is asked for; send it as 'Authorization: Bearer TOKEN'",
                    {"WWW-Authenticate": "Bearer"},
                )
                await refusal(scope, receive, send)
                return
        if scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        try:
            most = MAX_RECORD_BYTES if scope["path"].startswith(NODES) else MAX_BODY_BYTES
            async with asyncio.timeout(BODY_SECONDS):
                body = await _body(receive, most)
        except TimeoutError:
            await problem(408, f"the body did not come within {BODY_SECONDS:g} s")(scope, receive, send)
            return
        if body is None:
            await problem(413, f"the body is larger than {most} bytes")(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)


async def _body(receive: Receive, most: int) -> bytes | None:
    """The whole body; ``None`` if it is too large."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return bytes(body)
        body += message.get("body", b"")
        if len(body) > most:
            return None
        if not message.get("more_body", False):
            return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """What the application receives: the body, then whatever comes."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
