# SPDX-License-Identifier: Apache-2.0
"""The sidecar's HTTP interface.

What is answered is read on demand, at most four times a second (:mod:`state`), and computed once for all who
ask for it (:mod:`answers`). The engine's health is polled beside that, so a hanging engine holds up nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime
from functools import partial
from typing import Annotated

from fastapi import FastAPI, Header, HTTPException, Path, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticSerializationError

from kimi_k3 import __version__
from kimi_k3.errors import nearest
from kimi_k3.host import Places
from kimi_k3.journal.models import NodeReport, RankRecord, SupervisorRecord
from kimi_k3.journal.writer import now as utc_now
from kimi_k3.sidecar.acknowledgement import (
    ACKNOWLEDGEMENTS_FILE,
    Acknowledgements,
    Name,
    Note,
    write_acknowledgements,
)
from kimi_k3.sidecar.answers import Answer, Answers
from kimi_k3.sidecar.collector import (
    OPEN_METRICS,
    PLAIN,
    Format,
    SidecarRegistry,
    exposition,
    make_registry,
    negotiated,
)
from kimi_k3.sidecar.description import (
    ACKNOWLEDGED,
    ALWAYS,
    CONVERSION,
    EVENTS,
    FORGOTTEN,
    HEARD,
    MEMORY,
    METRICS,
    READINESS,
    STARTUP,
    STATUS,
    WARNINGS,
    describe,
)
from kimi_k3.sidecar.events import Events
from kimi_k3.sidecar.guard import Guard
from kimi_k3.sidecar.nodes import heard, heard_of_rank, require_token
from kimi_k3.sidecar.page import page
from kimi_k3.sidecar.problems import install_problems
from kimi_k3.sidecar.samples import Observation
from kimi_k3.sidecar.settings import Settings
from kimi_k3.sidecar.state import Observer, State
from kimi_k3.sidecar.view import Alive
from kimi_k3.sidecar.warning import Advice, Matter, matters

MAX_LISTENERS = 200
"""Of /events at a time; each costs a connection and a few wake-ups a second."""


NodeNumber = Annotated[int, Path(description="Of the deployment, from 1 on; 0 is this one.", examples=[1])]
RankNumber = Annotated[int, Path(description="Of the deployment.", examples=[8])]
WarningId = Annotated[str, Path(description="As /warnings tells it.", examples=["lossy-weights"])]


class Seen(BaseModel):
    """Who acknowledges a warning."""

    model_config = ConfigDict(extra="forbid")

    by: Name = Field(description="Who you are.", examples=["Ada"])
    note: Note | None = Field(default=None, description="What the next one should know.")


def create_app(
    settings: Settings,
    *,
    clock: Callable[[], datetime] = utc_now,
    places: Places | None = None,
    stopping: Callable[[], bool] = lambda: False,
    crowded: Callable[[], bool] = lambda: False,
) -> FastAPI:
    """The application; it reads ``settings.state_dir`` and asks the engine that is named there.

    Args:
        settings: where the journal is, who may ask, and how long the engine may take.
        clock: the present moment, UTC.
        places: where the kernel's files are.
        stopping: whether the server is about to end, so that streams end as well.
        crowded: whether it has so many connections that only probes are answered.
    """
    observer = Observer(settings, clock=clock, places=places)
    registry = make_registry(lambda: _observation(observer.last()), proc=observer.places.proc)
    answers = Answers(observer.state, {form.name: _scrape(registry, form) for form in (PLAIN, OPEN_METRICS)})
    events = Events(observer.state, stopping=stopping)
    # An acknowledgement is read, changed and written again, so one at a time.
    changing = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with observer.polling():
            yield

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
    token = settings.token.get_secret_value() if settings.token else None
    app.add_middleware(Guard, token=token, crowded=crowded)
    install_problems(app)

    @app.head("/livez", include_in_schema=False)
    @app.get("/livez", responses=ALWAYS)
    async def livez() -> Alive:
        """The sidecar itself is alive. Says nothing about the engine: use it for liveness only."""
        return Alive()

    @app.head("/startupz", include_in_schema=False)
    @app.get("/startupz", response_class=Response, responses=STARTUP)
    async def startupz() -> Response:
        """200 once the start is over (ready, or draining later), 503 before and after the end.

        For startup probes. The body tells the phase, how long it has lasted and how far it is.
        """
        return await answers.get("startupz")

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", response_class=Response, responses=READINESS)
    async def readyz() -> Response:
        """200 only when traffic may come; else 503, Retry-After, and every condition that fails.

        All must hold: there is a supervisor's record, its phase is ready, a canary completion succeeded
        in this start, nothing has ended, and the engine's own /health answered 200 when it was last
        asked, which is once a second. The answer never waits for the engine.
        """
        return await answers.get("readyz")

    @app.get("/status", response_class=Response, responses=STATUS)
    async def status() -> Response:
        """Everything at a glance: phases, weights, consent, ranks, health, failures, untrusted files."""
        return await answers.get("status")

    @app.get("/conversion", response_class=Response, responses=CONVERSION)
    async def conversion() -> Response:
        """What the conversion did to the experts, merged over ranks and rank by rank.

        `lossless: true` and no layers when the experts are served as they stand in the checkpoint.
        """
        return await answers.get("conversion")

    @app.get("/memory", response_class=Response, responses=MEMORY)
    async def memory() -> Response:
        """Memory of every rank, planned and actual, of the GPUs, the control group and the machine."""
        return await answers.get("memory")

    @app.get("/warnings", response_class=Response, responses=WARNINGS)
    async def warnings() -> Response:
        """What to know or to mend, with a stable id each; empty for a healthy lossless deployment."""
        return await answers.get("warnings")

    @app.put("/nodes/{node}", responses=HEARD)
    async def node(node: NodeNumber, report: NodeReport) -> SupervisorRecord:
        """What another node of the deployment tells of itself; answers with the first node's record.

        Told by `kimi-k3 serve` on each other node, once a second. Needs a token.
        """
        require_token(token)
        async with changing:
            state = await observer.state()
            keep = partial(heard, settings.state_dir, state.journal, node, report, clock())
            with _kept(state):
                return await run_in_threadpool(keep, remember=observer.remember)

    @app.put("/nodes/{node}/ranks/{rank}", status_code=204, responses=HEARD)
    async def rank_of_node(node: NodeNumber, rank: RankNumber, record: RankRecord) -> None:
        """What a rank on another node reports. Needs a token."""
        require_token(token)
        state = await observer.state()
        with _kept(state):
            await run_in_threadpool(
                heard_of_rank, settings.state_dir, state.journal, node, rank, record, clock()
            )

    @app.post("/warnings/{warning_id}/acknowledgement", responses=ACKNOWLEDGED)
    async def acknowledge(warning_id: WarningId, seen: Seen) -> Advice:
        """Say that you know of a warning. It is kept with your name, and survives restarts.

        It holds as long as the warning is about the same: another conversion is acknowledged anew.
        """
        async with changing:
            state, found = await _standing(observer, warning_id)
            if not found.advice.acknowledgeable:
                raise HTTPException(409, f"{warning_id} cannot be acknowledged; {found.advice.remedy}")
            kept = state.acknowledgements.with_one(
                warning_id, found.about, by=seen.by, note=seen.note or None, at=clock()
            )
            await _keep(settings, state, kept)
            await observer.reread()
        acknowledged = kept.of(warning_id, found.about)
        return found.advice.model_copy(update={"acknowledged": acknowledged})

    @app.delete("/warnings/{warning_id}/acknowledgement", status_code=204, responses=FORGOTTEN)
    async def forget(warning_id: WarningId) -> None:
        """Take an acknowledgement back."""
        async with changing:
            state, found = await _standing(observer, warning_id)
            await _keep(settings, state, state.acknowledgements.without(warning_id, found.about))
            await observer.reread()

    @app.get("/events", response_class=Response, responses=EVENTS)
    async def listen(last_event_id: Annotated[str | None, Header()] = None) -> Response:
        """Changes as server-sent events; resumes after `Last-Event-ID`.

        Kinds: `startup`, `readiness`, `warnings` and `memory` repeat that resource (memory without its
        conversions), `converted` tells one layer's loss. A new listener gets everything as it stands first.
        """
        if events.listeners >= MAX_LISTENERS:
            raise HTTPException(503, f"{MAX_LISTENERS} listen already; poll /status instead")
        return StreamingResponse(
            events.stream(last_event_id),
            media_type="text/event-stream",
            # Proxies that collect an answer before they pass it on would collect for ever.
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    @app.get("/metrics", response_class=Response, responses=METRICS)
    async def metrics(request: Request) -> Response:
        """Prometheus metrics, as OpenMetrics when the scraper accepts it. Never waits for the engine."""
        return await answers.get(negotiated(request.headers.get("accept", "")).name)

    app.add_route("/", page)
    describe(app)
    return app


@contextlib.contextmanager
def _kept(state: State) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or type(error).__name__
        # The supervisor cannot write how it does, either; that its engine answers tells the other nodes.
        status = 507 if state.health is not None and state.health.healthy else 503
        raise HTTPException(
            status, f"what a node tells cannot be kept: {why}; give the sidecar a writable state directory"
        ) from None
    except (UnicodeError, PydanticSerializationError):
        raise HTTPException(422, "half of a surrogate pair is no text that can be kept") from None


def _scrape(registry: SidecarRegistry, form: Format) -> Callable[[State], Answer]:
    return lambda _: Answer(200, exposition(registry, form), form.content_type)


def _observation(state: State) -> Observation:
    return Observation(
        journal=state.journal,
        health=state.health,
        machine=state.machine(),
        now=state.now,
        acknowledgements=state.acknowledgements,
    )


async def _standing(observer: Observer, warning_id: str) -> tuple[State, Matter]:
    """The state as it is on disk now, and a warning that stands in it."""
    state = await observer.reread()
    found = {one.advice.id: one for one in matters(state.journal, state.health, state.now)}
    if warning_id not in found:
        hint = nearest(warning_id, found) if found else "there is none at all"
        raise HTTPException(404, f"no warning {warning_id[:100]!r} stands now; {hint}")
    return state, found[warning_id]


async def _keep(settings: Settings, state: State, acknowledgements: Acknowledgements) -> None:
    for fault in state.journal.faults:
        if fault.file == ACKNOWLEDGEMENTS_FILE:
            raise HTTPException(
                503, f"{fault.file} {fault.why}; move it away, or what it holds would be lost"
            )
    try:
        await run_in_threadpool(write_acknowledgements, settings.state_dir, acknowledgements)
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise HTTPException(
            503, f"the acknowledgement cannot be kept: {why}; give the sidecar a writable state directory"
        ) from None
