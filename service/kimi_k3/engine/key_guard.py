# SPDX-License-Identifier: Apache-2.0
"""Every path of the API server asks for the key, but for the probes.

vLLM guards prefixes (``/v1``, ``/v2``, ``/inference``, ``/cohere``) and leaves others that run the model
open, ``/invocations`` and ``/tokenize`` among them (vllm-project/vllm#58144). This is vLLM's official hook
``--middleware``; the supervisor adds it whenever there is a key.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/version"})
"""What probes and Prometheus ask without a key; none of them runs the model."""


class KeyGuard:
    """Pure ASGI: 401 for a request without the key in ``Authorization: Bearer``.

    Raises:
        RuntimeError: there is no ``VLLM_API_KEY`` to compare with.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        key = os.environ.get("VLLM_API_KEY")
        if not key:
            raise RuntimeError("KeyGuard needs VLLM_API_KEY")
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "unauthorized"})
        else:
            body = json.dumps({"error": "Unauthorized"}).encode()
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _may_pass(self, scope: Scope) -> bool:
        # A browser's preflight request carries no credentials.
        if (
            scope.get("method") == "OPTIONS"
            or scope["path"].removeprefix(scope.get("root_path", "")) in OPEN_PATHS
        ):
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and secrets.compare_digest(given[0], self._expected)
