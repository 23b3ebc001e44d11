# SPDX-License-Identifier: Apache-2.0
"""The sidecar's HTTP interface.

Everything is read anew for each request: the journal's files are replaced atomically and small.
``/livez`` touches neither files nor the engine, ``/metrics`` not the engine: a hanging engine slows
only those that ask it, and those by no more than its time limit. Nothing asks for a key: probes and
scrapes carry none, and nothing here is secret; the engine's own port keeps its authentication.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool

from kimi_k3 import __version__
from kimi_k3.host import CGROUP, PROC, read_cgroup_memory, read_host_memory
from kimi_k3.journal.reader import Journal, read_journal
from kimi_k3.journal.writer import now as utc_now
from kimi_k3.sidecar.collector import exposition, make_registry
from kimi_k3.sidecar.conversion import Conversion, conversion_view
from kimi_k3.sidecar.description import ALWAYS, METRICS, READINESS, STARTUP, describe
from kimi_k3.sidecar.memory import Memory, memory_view
from kimi_k3.sidecar.probe import EngineProbe
from kimi_k3.sidecar.problems import install_problems
from kimi_k3.sidecar.readiness import RETRY_AFTER_SECONDS, Readiness, readiness_view
from kimi_k3.sidecar.samples import Observation
from kimi_k3.sidecar.settings import Settings
from kimi_k3.sidecar.startup import Startup, startup_view
from kimi_k3.sidecar.status import Status, status_view
from kimi_k3.sidecar.view import Alive, EngineHealth
from kimi_k3.sidecar.warning import Warnings, warnings_view


def create_app(
    settings: Settings,
    *,
    clock: Callable[[], datetime] = utc_now,
    proc: Path = PROC,
    cgroup: Path = CGROUP,
) -> FastAPI:
    """The application; it reads ``settings.state_dir`` and asks the engine that is named there.

    Args:
        settings: where the journal is and how long the engine may take.
        clock: the present moment, UTC.
        proc: where ``/proc`` is mounted.
        cgroup: where the control groups are mounted.
    """
    probe = EngineProbe(
        timeout_seconds=settings.engine_timeout_seconds, tls_verify=settings.engine_tls_verify, clock=clock
    )

    def journal() -> Journal:
        return read_journal(settings.state_dir)

    def observe() -> Observation:
        return Observation(
            journal=journal(),
            health=probe.last,
            host=read_host_memory(proc),
            cgroup=read_cgroup_memory(proc, cgroup),
            now=clock(),
        )

    async def journal_and_health() -> tuple[Journal, EngineHealth | None]:
        seen = await run_in_threadpool(journal)
        supervisor = seen.supervisor
        if supervisor is None or supervisor.ending is not None:
            return seen, None
        return seen, await probe.check(supervisor.engine_url)

    async def poll() -> None:
        while True:
            await journal_and_health()
            await asyncio.sleep(settings.poll_seconds)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        polling = asyncio.create_task(poll())
        yield
        polling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await polling
        await probe.close()

    app = FastAPI(
        title="kimi-k3 sidecar",
        version=__version__,
        summary="Phases, conversion, memory and warnings of one Kimi-K3 deployment.",
        lifespan=lifespan,
        # Their pages load scripts from elsewhere, which a cluster may not reach; /openapi.json stays.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    install_problems(app)
    registry = make_registry(observe, proc=proc)

    @app.get("/livez", responses=ALWAYS)
    async def livez() -> Alive:
        """The sidecar itself is alive. Says nothing about the engine: use it for liveness only."""
        return Alive()

    @app.get("/startupz", responses=STARTUP)
    def startupz(response: Response) -> Startup:
        """200 once the start is over (ready, or draining later), 503 before and after the end.

        For startup probes. The body tells the phase, how long it has lasted and how far it is.
        """
        view = startup_view(journal(), clock())
        _not_yet(response, unless=view.started)
        return view

    @app.get("/readyz", responses=READINESS)
    async def readyz(response: Response) -> Readiness:
        """200 only when traffic may come; else 503, Retry-After, and every condition that fails.

        All must hold: the supervisor reports, the phase is ready, a canary completion succeeded in
        this start, nothing has ended, and the engine's own /health answers 200 just now. Give the
        probe a longer timeout than the sidecar gives the engine (2 s unless set otherwise).
        """
        seen, health = await journal_and_health()
        view = readiness_view(seen, health)
        _not_yet(response, unless=view.ready)
        return view

    @app.get("/status", responses=ALWAYS)
    async def status() -> Status:
        """Everything at a glance: phases, weights, consent, ranks, health, failures, untrusted files."""
        seen, health = await journal_and_health()
        return status_view(seen, health, clock())

    @app.get("/conversion", responses=ALWAYS)
    def conversion() -> Conversion:
        """What the conversion did to the experts, merged over ranks and rank by rank.

        `lossless: true` and no layers when the experts are served as they stand in the checkpoint.
        """
        return conversion_view(journal())

    @app.get("/memory", responses=ALWAYS)
    def memory() -> Memory:
        """Memory of every rank, over the conversion, of the control group and of the machine."""
        return memory_view(journal(), read_host_memory(proc), read_cgroup_memory(proc, cgroup))

    @app.get("/warnings", responses=ALWAYS)
    async def warnings() -> Warnings:
        """What to know or to mend, with a stable code each; empty for a healthy lossless deployment."""
        seen, health = await journal_and_health()
        return warnings_view(seen, health, clock())

    @app.get("/metrics", response_class=Response, responses=METRICS)
    def metrics(request: Request) -> Response:
        """Prometheus metrics, as OpenMetrics when the scraper accepts it. Never waits for the engine."""
        body, content_type = exposition(registry, request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    describe(app)
    return app


def _not_yet(response: Response, *, unless: bool) -> None:
    if not unless:
        response.status_code = 503
        response.headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
