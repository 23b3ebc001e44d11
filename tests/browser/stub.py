# SPDX-License-Identifier: Apache-2.0
"""A server that says what it is told to, for what a real sidecar does not do on command.

It has the page, the event stream, acknowledgements and a token; what it answers starts as the real views
of a journal.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kimi_k3.journal.reader import Journal
from kimi_k3.sidecar.conversion import conversion_view
from kimi_k3.sidecar.examples import HEALTHY, MACHINE
from kimi_k3.sidecar.memory import memory_view
from kimi_k3.sidecar.page import page
from kimi_k3.sidecar.readiness import readiness_view
from kimi_k3.sidecar.startup import startup_view
from kimi_k3.sidecar.status import status_view
from tests.sidecar.builders import NOW

GIB = 2**30
OPEN = ("/startupz", "/readyz")


def warning(identity: str, **changes: Any) -> dict[str, Any]:
    """A warning as the API gives it."""
    return {
        "id": identity,
        "code": identity,
        "severity": "warning",
        "message": f"This is {identity}.",
        "remedy": "Look at it.",
        "since": NOW.isoformat(),
        "acknowledgeable": True,
        "acknowledged": None,
    } | changes


class Stub:
    """``answers`` by path, and ``events`` as (kind, data), may be changed at any time.

    ``streams`` turns the event stream on; ``token`` is asked for when it is set; ``asked`` are the requests
    so far, as (method, path, headers). What is asked of a path in ``held`` is answered, as it was when it was
    asked, once the path is no longer there.
    """

    def __init__(self, seen: Journal, *, streams: bool = True) -> None:
        self.answers = answers(seen)
        self.events: list[tuple[str, Any]] = []
        self.streams = streams
        self.token: str | None = None
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.refuses: str | None = None
        self.held: set[str] = set()
        self._cut = 0

    def tell(self, kind: str, data: Any) -> None:
        """Send an event to whoever listens."""
        self.events.append((kind, data))

    def snapshot(self) -> None:
        """Tell the present state, as a stream does first."""
        for kind, path in (
            ("startup", "/startupz"),
            ("readiness", "/readyz"),
            ("memory", "/memory"),
            ("warnings", "/warnings"),
        ):
            self.tell(kind, self.answers[path])

    def cut(self) -> None:
        """End every stream."""
        self._cut += 1

    def followers(self) -> list[dict[str, str]]:
        """The headers of those who asked for the stream."""
        return [headers for _, path, headers in self.asked if path == "/events"]

    def app(self) -> Starlette:
        """The server."""
        return Starlette(
            routes=[
                Route("/", page),
                Route("/events", self._events),
                Route("/warnings/{identity}/acknowledgement", self._acknowledge, methods=["POST", "DELETE"]),
                Route("/{name}", self._answer),
            ]
        )

    def _note(self, request: Request) -> Response | None:
        self.asked.append((request.method, request.url.path, dict(request.headers)))
        if self.token is None or request.url.path in OPEN:
            return None
        if request.headers.get("authorization") == f"Bearer {self.token}":
            return None
        return _problem(401, "a token is needed")

    async def _answer(self, request: Request) -> Response:
        refused = self._note(request)
        if refused is not None:
            return refused
        body = self.answers.get(request.url.path)
        answer = _problem(404, "there is nothing here") if body is None else JSONResponse(body)
        while request.url.path in self.held:
            await asyncio.sleep(0.02)
        return answer

    async def _acknowledge(self, request: Request) -> Response:
        refused = self._note(request)
        if refused is not None:
            return refused
        if self.refuses is not None:
            return _problem(409, self.refuses)
        found = [
            one
            for one in self.answers["/warnings"]["warnings"]
            if one["id"] == request.path_params["identity"]
        ]
        if not found:
            return _problem(404, "there is no such warning")
        if request.method == "DELETE":
            found[0]["acknowledged"] = None
            return Response(status_code=204)
        body = await request.json()
        found[0]["acknowledged"] = {"by": body["by"], "at": NOW.isoformat(), "note": body.get("note")}
        return JSONResponse(found[0])

    async def _events(self, request: Request) -> Response:
        refused = self._note(request)
        if refused is not None:
            return refused
        if not self.streams:
            return _problem(404, "there is nothing here")
        last = request.headers.get("last-event-id")
        return StreamingResponse(
            self._stream(0 if last is None else int(last.removeprefix("boot-"))),
            media_type="text/event-stream",
        )

    async def _stream(self, number: int) -> AsyncIterator[str]:
        cut = self._cut
        yield "retry: 50\n\n"
        while self._cut == cut:
            for kind, data in self.events[number:]:
                number += 1
                yield f"id: boot-{number}\nevent: {kind}\ndata: {json.dumps(data)}\n\n"
            yield ": keep-alive\n\n"
            await asyncio.sleep(0.02)


def answers(seen: Journal) -> dict[str, Any]:
    """What a sidecar answers about ``seen``, by path; memory with its plan."""
    memory = memory_view(seen, MACHINE).model_dump(mode="json")
    for rank in memory["ranks"]:
        rank["planned"] = {
            "weights_bytes": 190 * GIB,
            "transient_bytes": 25 * GIB,
            "step_bytes": 8 * GIB,
            "kv_cache_bytes": 30 * GIB,
            "limit_bytes": 243 * GIB,
        }
        rank["actual"] = {
            "weights_bytes": 188 * GIB,
            "kv_cache_bytes": None,
            "peak_bytes": 214 * GIB,
            "used_bytes": 201 * GIB,
            "free_bytes": 55 * GIB,
        }
    memory["devices"] = [{"name": "card1", "vram_used_bytes": 202 * GIB, "vram_total_bytes": 256 * GIB}]
    views = {
        "/startupz": startup_view(seen, NOW),
        "/readyz": readiness_view(seen, HEALTHY, NOW),
        "/status": status_view(seen, HEALTHY, NOW),
        "/conversion": conversion_view(seen),
    }
    found: dict[str, Any] = {path: view.model_dump(mode="json") for path, view in views.items()}
    return found | {"/memory": memory, "/warnings": {"warnings": []}}


def _problem(status: int, detail: str) -> JSONResponse:
    body = {"type": "about:blank", "title": "refused", "status": status, "detail": detail}
    return JSONResponse(body, status_code=status, media_type="application/problem+json")
