# SPDX-License-Identifier: Apache-2.0
"""Each resource's answer, computed once for all who ask for the same state."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from fastapi import Response
from fastapi.concurrency import run_in_threadpool

from kimi_k3.journal.reader import Journal
from kimi_k3.sidecar import views
from kimi_k3.sidecar.readiness import RETRY_AFTER_SECONDS
from kimi_k3.sidecar.state import State
from kimi_k3.sidecar.view import View


@dataclass(frozen=True)
class Answer:
    """A status and a body."""

    status: int
    body: bytes
    content_type: str = "application/json"

    def response(self) -> Response:
        """As it goes out."""
        headers = {"Cache-Control": "no-store"}
        if self.status == 503:
            headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
        headers["Content-Type"] = self.content_type
        return Response(self.body, status_code=self.status, headers=headers)


class Answers:
    """Answers by name; those of one state are computed at most once, outside of the event loop.

    Args:
        state: the present state; the same object while nothing was read anew.
        others: answers that are not JSON, by name.
    """

    def __init__(
        self, state: Callable[[], Awaitable[State]], others: Mapping[str, Callable[[State], Answer]]
    ) -> None:
        self._state = state
        self._known: dict[str, tuple[State, Answer]] = {}
        self._computes = {name: partial(_computed, view) for name, view in VIEWS.items()} | dict(others)
        self._computes["conversion"] = self._of_conversion
        self._locks: dict[str, asyncio.Lock] = {name: asyncio.Lock() for name in self._computes}
        self._conversion: tuple[Journal, Answer] | None = None

    async def get(self, name: str) -> Response:
        """The answer of a resource."""
        state = await self._state()
        known = self._known.get(name)
        if known is None or known[0] is not state:
            if name in QUICK:
                # A probe waits for nobody who computes something larger.
                known = state, QUICK[name](state)
                self._known[name] = known
            else:
                known = await self._computed(name, state)
        return known[1].response()

    async def _computed(self, name: str, state: State) -> tuple[State, Answer]:
        """A large answer, computed in a thread by the first who asks for it."""
        async with self._locks[name]:
            known = self._known.get(name)
            if known is None or known[0] is not state:
                known = state, await run_in_threadpool(self._computes[name], state)
                self._known[name] = known
        return known

    def _of_conversion(self, state: State) -> Answer:
        """Computed anew only when a rank has reported or another start is there: it is the largest."""
        known, journal = self._conversion, state.journal
        if known is None or known[0].ranks is not journal.ranks or _start(known[0]) != _start(journal):
            known = self._conversion = journal, _computed(views.conversion, state)
        return known[1]


def _start(journal: Journal) -> str | None:
    return journal.supervisor.start_id if journal.supervisor else None


def _computed(view: Callable[[State], View], state: State) -> Answer:
    return _json(view(state))


def _json(view: View, status: int = 200) -> Answer:
    return Answer(status, view.model_dump_json().encode())


def _startup(state: State) -> Answer:
    view = views.startup(state)
    return _json(view, 200 if view.started else 503)


def _readiness(state: State) -> Answer:
    view = views.readiness(state)
    return _json(view, 200 if view.ready else 503)


QUICK: dict[str, Callable[[State], Answer]] = {"startupz": _startup, "readyz": _readiness}
"""Probes: small."""

VIEWS: dict[str, Callable[[State], View]] = {
    "status": views.status,
    "conversion": views.conversion,
    "memory": views.memory,
    "warnings": views.warnings,
}
"""The others."""
