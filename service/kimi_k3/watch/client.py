# SPDX-License-Identifier: Apache-2.0
"""Asking the sidecar, and distrusting what comes back: size, time, text and version."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import ValidationError

from kimi_k3 import __version__
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.sidecar.readiness import Readiness
from kimi_k3.sidecar.view import View
from kimi_k3.words.sidecar import TOKEN_FILE
from kimi_k3.words.text import printable
from kimi_k3.words.tls import trust

ANSWER_SECONDS = 10.0
"""The longest that one answer may take, drop by drop or not; /readyz waits for the engine."""

MAX_ANSWER_BYTES = 32 * 1024 * 1024
"""At 96 layers on 8 ranks the largest answer is below 1 MB."""

AnyView = TypeVar("AnyView", bound=View)


class NoAnswer(Exception):
    """Nobody answered, or not in time; the text is printable and one line."""


class NotUnderstood(Exception):
    """What answered is no sidecar, or one of another version; the text is printable and one line."""


class Sidecar:
    """One sidecar, asked again and again over one connection."""

    def __init__(self, url: str, token: str | None, authorities: Path | None = None) -> None:
        self.url = url
        headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        # A redirect is not followed, and no proxy is asked: both would be given the token.
        verify = trust(url, authorities) if url.startswith("https:") else True
        self._client = httpx.AsyncClient(
            headers=headers, timeout=ANSWER_SECONDS, trust_env=False, verify=verify
        )
        # httpx limits each wait for the next bytes; only a task can be given a limit as a whole.
        self._loop = asyncio.new_event_loop()

    def close(self) -> None:
        """Close the connection."""
        self._loop.run_until_complete(self._client.aclose())
        self._loop.close()

    def readiness(self) -> Readiness:
        """What ``/readyz`` answers; raises as :meth:`ask` does."""
        status, answer = self._ask("/readyz", Readiness)
        if answer.ready is not (status == 200):
            said = "ready" if answer.ready else "not ready"
            raise NotUnderstood(f"/readyz contradicts itself: HTTP {status}, and {said}")
        return answer

    def ask(self, path: str, model: type[AnyView]) -> AnyView:
        """The answer at ``path``.

        Raises:
            NoAnswer: nobody answered in time.
            NotUnderstood: the answer is not such a ``model``.
            OperatorError: the sidecar wants a token, or another one.
        """
        return self._ask(path, model)[1]

    def _ask(self, path: str, model: type[AnyView]) -> tuple[int, AnyView]:
        status, body = self._get(path)
        if status in (401, 403):
            raise OperatorError(
                f"the sidecar at {self.url} refuses this without the right token (HTTP {status})",
                remedy=f"give --token-file or {TOKEN_FILE}",
                exit_code=ExitCode.USAGE,
            )
        # The probes say 503 with the same body; anything else is not an answer of a sidecar.
        if status not in (200, 503):
            raise NotUnderstood(f"{path} answered with HTTP {status}")
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            raise NotUnderstood(f"{path} did not answer with JSON") from None
        return status, understood(path, model, document)

    def _get(self, path: str) -> tuple[int, bytes]:
        try:
            return self._loop.run_until_complete(asyncio.wait_for(self._fetch(path), ANSWER_SECONDS))
        except (httpx.TimeoutException, TimeoutError):
            raise NoAnswer(f"{path} took longer than {ANSWER_SECONDS:.0f} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise NoAnswer(printable(_reason(error))) from None

    async def _fetch(self, path: str) -> tuple[int, bytes]:
        body = bytearray()
        async with self._client.stream("GET", self.url + path) as response:
            async for part in response.aiter_bytes():
                body += part
                if len(body) > MAX_ANSWER_BYTES:
                    raise NotUnderstood(f"{path} answered with more than {MAX_ANSWER_BYTES} bytes")
            return response.status_code, bytes(body)


def _reason(error: BaseException) -> str:
    """What the system said, which httpx's transport wraps in words of its own."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        if isinstance(found, ssl.SSLError):
            # Its number is OpenSSL's, and the system's of that value says "Operation not permitted".
            return f"TLS: {getattr(found, 'verify_message', None) or found.reason or found}"
        if isinstance(found, OSError) and found.errno:
            return os.strerror(found.errno)
        found = found.__cause__ or found.__context__
    return str(error) or type(error).__name__


def understood(path: str, model: type[AnyView], document: Any) -> AnyView:
    """The document as a ``model``, with all its text printable; what a newer sidecar added is left out.

    Raises:
        NotUnderstood: something that this version needs is missing or another.
    """
    try:
        cleaned = _cleaned(document)
    except RecursionError:
        raise NotUnderstood(f"{path} is nested too deeply") from None
    try:
        return model.model_validate(cleaned)
    except ValidationError as error:
        added = [one["loc"] for one in error.errors(include_url=False) if one["type"] == "extra_forbidden"]
    for place in added:
        _remove(cleaned, place)
    try:
        return model.model_validate(cleaned)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the answer"
        raise NotUnderstood(
            printable(f"{path} is not as version {__version__} knows it: {where}: {first['msg']}")
        ) from None


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): _cleaned(inner) for key, inner in value.items()}
    return [_cleaned(inner) for inner in value] if isinstance(value, list) else value


def _remove(document: Any, place: tuple[int | str, ...]) -> None:
    *path, last = place
    for key in path:
        try:
            document = document[key]
        except (KeyError, IndexError, TypeError):
            return
    if isinstance(document, dict):
        document.pop(last, None)
