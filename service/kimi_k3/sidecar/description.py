# SPDX-License-Identifier: Apache-2.0
"""The API's description: the declared answers of each route, and an example of each."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from kimi_k3.sidecar.conversion import Conversion, conversion_view
from kimi_k3.sidecar.examples import HEALTHY, MACHINE, NOW, REFUSED, example_journal
from kimi_k3.sidecar.memory import Memory, memory_view
from kimi_k3.sidecar.problems import MEDIA_TYPE, Problem
from kimi_k3.sidecar.readiness import Readiness, readiness_view
from kimi_k3.sidecar.startup import Startup, startup_view
from kimi_k3.sidecar.status import Status, status_view
from kimi_k3.sidecar.view import Alive
from kimi_k3.sidecar.warning import Warnings, warnings_view
from kimi_k3.words.phases import Phase

Answers = dict[int | str, dict[str, Any]]


def _problem(description: str) -> dict[str, Any]:
    return {"description": description, "content": {MEDIA_TYPE: {"schema": _PROBLEM}}}


_PROBLEM = {"$ref": "#/components/schemas/Problem"}
_DEFECT: Answers = {500: _problem("The sidecar has a defect; its log tells which.")}
_UNKNOWN: Answers = {401: _problem("A token is asked for."), **_DEFECT}
ALWAYS: Answers = {200: {"description": "What is known now; null is unknown."}, **_DEFECT}


def _now(model: type[BaseModel]) -> Answers:
    """The answer of a resource that always has one."""
    return {200: {"model": model, "description": "What is known now; null is unknown."}, **_UNKNOWN}


def now_or_later(model: type[BaseModel]) -> Answers:
    """The answers of a probe that says 200 or 503, with the same body."""
    return {
        200: {"model": model, "description": "Yes."},
        503: {
            "model": model,
            "description": "Not now; the body tells why.",
            "headers": {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}},
        },
        **_DEFECT,
    }


STARTUP = now_or_later(Startup)
READINESS = now_or_later(Readiness)
STATUS, CONVERSION, MEMORY, WARNINGS = _now(Status), _now(Conversion), _now(Memory), _now(Warnings)
_CHANGES: Answers = {
    400: _problem("The body is no JSON."),
    404: _problem("No such warning stands now."),
    408: _problem("The body came too slowly."),
    413: _problem("The body is too large."),
    422: _problem("The body is not understood."),
    503: _problem("It cannot be kept: the state directory is full or read-only."),
    **_UNKNOWN,
}
ACKNOWLEDGED: Answers = {
    200: {"description": "The warning, acknowledged."},
    409: _problem("It cannot be acknowledged, only mended."),
    **_CHANGES,
}
HEARD: Answers = {
    403: _problem("The sidecar asks for no token, so it hears nobody."),
    408: _problem("The body came too slowly."),
    409: _problem("There is no start to be part of, or that node is there already."),
    410: _problem("The start that the node is part of is over."),
    413: _problem("The body is too large."),
    422: _problem(
        "The body is not understood: the node runs another version, or is none of this deployment."
    ),
    503: _problem("It cannot be kept: the state directory is full or read-only."),
    507: _problem("The same, while the engine serves: the node goes on."),
    **_UNKNOWN,
}
FORGOTTEN: Answers = {204: {"description": "Nobody has acknowledged it now."}, **_CHANGES}
EVENTS: Answers = {
    200: {
        "description": "A stream that does not end by itself.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    },
    422: _problem("The header is not understood."),
    503: _problem("Too many listen already."),
    **_UNKNOWN,
}
METRICS: Answers = {
    200: {
        "description": "The series; those whose value is unknown are absent.",
        "content": {"text/plain": {"example": "kimi_k3_ready 1.0\n"}},
    },
    **_UNKNOWN,
}


def examples() -> dict[tuple[str, int], BaseModel]:
    """An example for each path and status, as the views compute it."""
    serving, loading = example_journal(), example_journal(Phase.LOADING)
    return {
        ("/livez", 200): Alive(),
        ("/startupz", 200): startup_view(serving, NOW),
        ("/startupz", 503): startup_view(loading, NOW),
        ("/readyz", 200): readiness_view(serving, HEALTHY, NOW),
        ("/readyz", 503): readiness_view(loading, REFUSED, NOW),
        ("/status", 200): status_view(serving, HEALTHY, NOW),
        ("/conversion", 200): conversion_view(serving),
        ("/memory", 200): memory_view(serving, MACHINE),
        ("/warnings", 200): warnings_view(serving, HEALTHY, NOW),
    }


def describe(app: FastAPI) -> None:
    """Put the examples into ``/openapi.json``.

    FastAPI drops every null from the description, examples included; here null is an answer.
    """
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = plain()
            schema["components"]["schemas"]["Problem"] = Problem.model_json_schema()
            for (path, status), example in examples().items():
                content = schema["paths"][path]["get"]["responses"][str(status)]["content"]
                content["application/json"]["example"] = example.model_dump(mode="json")
        return plain()

    app.openapi = openapi  # type: ignore[method-assign]
