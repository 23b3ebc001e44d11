# SPDX-License-Identifier: Apache-2.0
"""What ``/health`` of the engine last said, asked from a thread of its own.

The loop that writes the heartbeat must not wait for a busy engine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from kimi_k3.supervisor.engine_client import engine_client

INTERVAL_SECONDS = 0.5
SERVING_INTERVAL_SECONDS = 2.0
TIMEOUT_SECONDS = 5.0


@dataclass
class Health:
    """``status`` is the last answer's HTTP status, ``None`` when there was no answer."""

    status: int | None = None
    _stop: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def ok(self) -> bool:
        """Whether the engine last said that it works."""
        return self.status == 200


@contextmanager
def watched_health(engine_url: str | None) -> Iterator[Health]:
    """A :class:`Health` kept up to date until the block ends; of an engine without an API, unknown."""
    health = Health()
    if engine_url is None:
        yield health
        return
    thread = threading.Thread(target=_poll, args=(engine_url, health), name="engine-health", daemon=True)
    thread.start()
    try:
        yield health
    finally:
        health._stop.set()
        # A request under way ends by its own timeout; nobody has to wait for it.
        thread.join(2 * INTERVAL_SECONDS)


def _poll(engine_url: str, health: Health) -> None:
    with engine_client(engine_url, timeout=TIMEOUT_SECONDS) as client:
        while not health._stop.wait(SERVING_INTERVAL_SECONDS if health.ok else INTERVAL_SECONDS):
            try:
                health.status = client.get("/health").status_code
            except httpx.HTTPError:
                health.status = None
