# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 healthcheck``: what ``/readyz`` says, without a sidecar, for a container's own check."""

from __future__ import annotations

import asyncio

from kimi_k3.journal.reader import read_journal
from kimi_k3.journal.writer import now
from kimi_k3.sidecar.probe import EngineProbe
from kimi_k3.sidecar.readiness import Readiness, readiness_view
from kimi_k3.sidecar.settings import Settings
from kimi_k3.sidecar.state import engine_url
from kimi_k3.sidecar.view import EngineHealth


def check(settings: Settings) -> Readiness:
    """Whether traffic may come, by the journal and the engine's answer just now."""
    journal = read_journal(settings.state_dir)
    url = engine_url(journal, settings)
    return readiness_view(journal, None if url is None else asyncio.run(_ask(url, settings)), now())


async def _ask(url: str, settings: Settings) -> EngineHealth:
    probe = EngineProbe(
        timeout_seconds=settings.engine_timeout_seconds, tls_verify=settings.engine_tls_verify, clock=now
    )
    try:
        return await probe.check(url)
    finally:
        await probe.close()
