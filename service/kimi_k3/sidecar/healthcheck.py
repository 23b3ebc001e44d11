# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 healthcheck``: what ``/readyz`` says, or whether the supervisor lives; without a sidecar."""

from __future__ import annotations

import asyncio

from kimi_k3.journal.reader import read_journal
from kimi_k3.journal.writer import now
from kimi_k3.sidecar.arithmetic import is_fresh
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


def supervisor_lives(settings: Settings) -> bool:
    """Whether the supervisor still reports, or cannot: for a liveness probe, which kills where it does not.

    Without a record nothing is known of a supervisor that hangs, and one that ended has ended its container.
    """
    journal = read_journal(settings.state_dir)
    supervisor = journal.supervisor
    if supervisor is None or supervisor.ending is not None or journal.unwritable is not None:
        return True
    return is_fresh(supervisor, now())


async def _ask(url: str, settings: Settings) -> EngineHealth:
    probe = EngineProbe(
        timeout_seconds=settings.engine_timeout_seconds, tls_verify=settings.engine_tls_verify, clock=now
    )
    try:
        return await probe.check(url)
    finally:
        await probe.close()
