# SPDX-License-Identifier: Apache-2.0
"""Asking the sidecar, and distrusting what comes back: size, time, text and version."""

from __future__ import annotations

import json
import time
from typing import Any, TypeVar

import httpx
from pydantic import ValidationError

from kimi_k3 import __version__
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.sidecar.view import View
from kimi_k3.watch.address import TOKEN_FILE

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

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url
        headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        # A redirect is not followed, and no proxy is asked: both would be given the token.
        self._client = httpx.Client(headers=headers, timeout=ANSWER_SECONDS, trust_env=False)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def ask(self, path: str, model: type[AnyView]) -> AnyView:
        """The answer at ``path``.

        Raises:
            NoAnswer: nobody answered in time.
            NotUnderstood: the answer is not such a ``model``.
            OperatorError: the sidecar wants a token, or another one.
        """
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
        return understood(path, model, document)

    def _get(self, path: str) -> tuple[int, bytes]:
        end = time.monotonic() + ANSWER_SECONDS
        body = bytearray()
        try:
            with self._client.stream("GET", self.url + path) as response:
                for part in response.iter_bytes():
                    body += part
                    if len(body) > MAX_ANSWER_BYTES:
                        raise NotUnderstood(f"{path} answered with more than {MAX_ANSWER_BYTES} bytes")
                    if time.monotonic() > end:
                        raise NoAnswer(f"{path} took longer than {ANSWER_SECONDS:.0f} s")
                return response.status_code, bytes(body)
        except httpx.TimeoutException:
            raise NoAnswer(f"{path} took longer than {ANSWER_SECONDS:.0f} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise NoAnswer(printable(str(error) or type(error).__name__)) from None


def understood(path: str, model: type[AnyView], document: Any) -> AnyView:
    """The document as a ``model``, with all its text printable; what a newer sidecar added is left out.

    Raises:
        NotUnderstood: something that this version needs is missing or another.
    """
    cleaned = _cleaned(document)
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


def printable(text: str) -> str:
    """One line that no terminal takes for a command: what is not printable is written as an escape."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


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
