# SPDX-License-Identifier: Apache-2.0
"""What a client reads when a request cannot be answered; always JSON, never a traceback."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import Field
from starlette.exceptions import HTTPException

from kimi_k3.errors import nearest
from kimi_k3.sidecar.view import View

_LONGEST_PATH = 200


class Problem(View):
    """Why a request was not answered."""

    detail: str = Field(description="One line, with what to do instead.")


def install_problems(app: FastAPI) -> None:
    """Let every error of ``app`` answer with a :class:`Problem`."""

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        path = request.url.path[:_LONGEST_PATH]
        detail = str(error.detail)
        if error.status_code == 404:
            known = [route.path for route in app.routes if isinstance(route, APIRoute)]
            detail = f"there is nothing at {path}; {nearest(path, known)}"
        elif error.status_code == 405:
            detail = (
                f"{path} does not answer {request.method}; use {(error.headers or {}).get('Allow', 'GET')}"
            )
        return _answer(error.status_code, detail, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def broke(request: Request, error: Exception) -> JSONResponse:
        return _answer(500, "the sidecar could not answer this; its log tells why", {})


def _answer(status: int, detail: str, headers: dict[str, str]) -> JSONResponse:
    return JSONResponse(Problem(detail=detail).model_dump(), status_code=status, headers=headers)
