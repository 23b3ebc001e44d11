# SPDX-License-Identifier: Apache-2.0
"""Asking the engine for its health: bounded in time, one question at a time, never raising."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from datetime import datetime

import httpx

from kimi_k3.sidecar.view import EngineHealth, EngineOutcome
from kimi_k3.words.tls import is_loopback

_LONGEST_DETAIL = 500


class EngineProbe:
    """Asks ``GET {engine_url}/health`` and remembers the last answer.

    Callers that come while a question is under way share its answer, so that probes do not pile up
    on an engine that hangs.

    Args:
        timeout_seconds: limit of the whole exchange, in seconds.
        tls_verify: whether the certificate of an https engine on another machine is checked.
        clock: the present moment, UTC.
    """

    def __init__(self, *, timeout_seconds: float, tls_verify: bool, clock: Callable[[], datetime]) -> None:
        self._timeout = timeout_seconds
        self._tls_verify = tls_verify
        self._clock = clock
        self._question: asyncio.Task[EngineHealth] | None = None
        self._url: str | None = None
        self._clients: dict[bool, httpx.AsyncClient] = {}
        self.last: EngineHealth | None = None

    def last_of(self, engine_url: str) -> EngineHealth | None:
        """The last answer, if it came from there."""
        return self.last if engine_url == self._url else None

    async def check(self, engine_url: str) -> EngineHealth:
        """The engine's health, at most ``timeout_seconds`` later."""
        if self._question is None or self._question.done():
            if engine_url != self._url:
                self._url, self.last = engine_url, None
            self._question = asyncio.create_task(self._ask(engine_url))
        return await asyncio.shield(self._question)

    async def close(self) -> None:
        """Give up a question that is still under way."""
        if self._question is not None:
            self._question.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._question
        for client in self._clients.values():
            await client.aclose()

    async def _ask(self, engine_url: str) -> EngineHealth:
        checked_at = self._clock()
        begun = time.perf_counter()
        outcome, status_code, detail = await self._outcome(engine_url.rstrip("/") + "/health")
        healthy = outcome is EngineOutcome.HEALTHY
        unchanged = self.last is not None and self.last.healthy is healthy
        self.last = EngineHealth(
            outcome=outcome,
            status_code=status_code,
            detail=" ".join(detail.split())[:_LONGEST_DETAIL],
            checked_at=checked_at,
            seconds=time.perf_counter() - begun,
            since=self.last.since if self.last is not None and unchanged else checked_at,
        )
        return self.last

    async def _outcome(self, url: str) -> tuple[EngineOutcome, int | None, str]:
        try:
            # httpx limits each read, not the sum of them; the body is of no interest.
            async with asyncio.timeout(self._timeout), self._client_of(url).stream("GET", url) as response:
                status = response.status_code
        except (TimeoutError, httpx.TimeoutException):
            return EngineOutcome.TIMEOUT, None, f"{url} did not answer within {self._timeout:g} s"
        except httpx.ConnectError as error:
            return EngineOutcome.UNREACHABLE, None, f"{url} cannot be reached: {error}"
        # The URL is whatever stands in the record, and httpx leaks the errors of what lies below it,
        # e.g. an ExceptionGroup for a port above 65535.
        except Exception as error:
            return EngineOutcome.FAILED, None, f"{url} cannot be asked: {error}"
        if status == httpx.codes.OK:
            return EngineOutcome.HEALTHY, status, f"{url} answered 200"
        return EngineOutcome.UNHEALTHY, status, f"{url} answered {status}"

    def _client_of(self, url: str) -> httpx.AsyncClient:
        """A client that checks certificates, or one that does not: on this machine nobody else answers."""
        checks = self._tls_verify and not is_loopback(url)
        if checks not in self._clients:
            # A connection of its own each time: a kept one says nothing about whether the engine accepts.
            # Proxies of the environment are for the internet, not for the engine next door.
            self._clients[checks] = httpx.AsyncClient(
                verify=httpx.create_ssl_context(verify=checks, trust_env=False),
                timeout=self._timeout,
                limits=httpx.Limits(max_keepalive_connections=0),
                follow_redirects=False,
                trust_env=False,
            )
        return self._clients[checks]
