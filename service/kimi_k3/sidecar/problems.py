# SPDX-License-Identifier: Apache-2.0
"""What a client reads when a request cannot be answered (RFC 9457); always JSON, never a traceback."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from kimi_k3.errors import nearest
from kimi_k3.sidecar.view import View

MEDIA_TYPE = "application/problem+json"
_LONGEST_PATH = 200


class Problem(View):
    """Why a request was not answered."""

    type: str = Field(default="about:blank", description="The kind of problem; always that of its status.")
    title: str = Field(description="The HTTP status in words.")
    status: int = Field(description="The HTTP status.")
    detail: str = Field(description="One line, with what to do instead.")


def problem(status: int, detail: str, headers: dict[str, str] | None = None) -> Response:
    """The answer that tells a problem."""
    body = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail)
    return Response(body.model_dump_json(), status_code=status, headers=headers or {}, media_type=MEDIA_TYPE)


def install_problems(app: FastAPI) -> None:
    """Let every error of ``app`` answer with a :class:`Problem`."""

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        path = request.url.path[:_LONGEST_PATH]
        detail = str(error.detail)
        if error.status_code == 404 and error.detail == HTTPStatus.NOT_FOUND.phrase:
            known = {route.path for route in app.routes if isinstance(route, Route)}
            detail = f"there is nothing at {path}; {nearest(path, known)}"
        elif error.status_code == 405:
            allowed = _allowed(app, request)
            detail = f"{path} does not answer {request.method}; use {allowed}"
            return problem(405, detail, {"Allow": allowed})
        return problem(error.status_code, detail, dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def misunderstood(request: Request, error: RequestValidationError) -> Response:
        if "json" not in request.headers.get("content-type", "") and error.errors()[0]["loc"][0] == "body":
            return problem(422, "the body is not told to be JSON; send 'Content-Type: application/json'")
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body") or "the body"
        return problem(422, f"{where}: {first['msg']}; /openapi.json tells what is asked for")

    @app.exception_handler(Exception)
    async def broke(_: Request, error: Exception) -> Response:
        return problem(500, "the sidecar could not answer this; its log tells why")


def _allowed(app: FastAPI, request: Request) -> str:
    """The methods of a path. Starlette names only those of its first route."""
    methods = {
        method
        for route in app.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    }
    return ", ".join(sorted(methods))
